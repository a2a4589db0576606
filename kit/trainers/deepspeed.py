"""kit.train under DeepSpeed's ZeRO: DeepSpeed's config, and accelerate's, whose plugin hands it over.

Only keys that differ from DeepSpeed's defaults are written, since DeepSpeed 0.19 refuses keys that it does not know.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast.shape import load_config
from kit.trainers import trl
from kit.trainers.base import Rendering, has_own_packages

CONFIG = "deepspeed.json"
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
MAX_GRAD_NORM = 1.0  # transformers' default, which the Trainer compares with this config
BUFFER_ELEMENTS = 100_000_000  # DeepSpeed's default of offload_param.buffer_size
INSTALL = (
    "DS_BUILD_OPS=0 pip install deepspeed. There is no wheel on PyPI: pip builds one in less than a minute, without a "
    "GPU. For machines without network run DS_BUILD_OPS=0 pip wheel --wheel-dir FOLDER deepspeed on one with network, "
    "then pip install --no-index --find-links FOLDER deepspeed"
)


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for what DeepSpeed does not run in kit.train, or not on this cluster."""
    parallel, strategy = recipe.parallel, recipe.parallel.strategy
    if parallel.sharding != "full":
        raise InputError(f"parallel.sharding {parallel.sharding} is for FSDP: set it to full with {strategy}.")
    if recipe.model.base != "bf16":
        raise InputError(
            f"model.base {recipe.model.base} is not partitioned by {strategy}: set parallel.strategy to ddp, or "
            "tuning.method to lora with model.base bf16."
        )
    if parallel.compile == "on":
        raise InputError(
            f"parallel.compile is on, and the hooks of {strategy} run between the layers' operations: set "
            "parallel.compile to auto or off."
        )
    if cluster.nodes.gpus == 0 and recipe.world_size == 1:
        raise InputError(f"parallel.strategy {strategy} needs several processes where there are no GPUs: use ddp.")
    _check_offload(recipe, cluster)
    if has_own_packages(cluster) and importlib.util.find_spec("deepspeed") is None:
        raise InputError(f"parallel.strategy {strategy} needs DeepSpeed, which is not installed: {INSTALL}.")


def _check_offload(recipe: Recipe, cluster: Cluster) -> None:
    if recipe.parallel.offload != "nvme":
        return
    if recipe.parallel.strategy != "zero3":
        raise InputError("parallel.offload nvme runs with parallel.strategy zero3 only; use cpu, or zero3.")
    if recipe.tuning.method == "full":
        raise InputError(
            "parallel.offload nvme is for frozen weights, and a full fine-tune has none. DeepSpeed 0.19.8 writes its "
            "checkpoints without the optimizer's values that are on NVMe. Set parallel.offload to cpu."
        )
    if not cluster.paths.nvme:
        raise InputError(
            f"parallel.offload nvme needs a folder on each node's own drive: set paths.nvme in the profile "
            f"{cluster.name}, or parallel.offload to cpu."
        )


def render(recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
    """accelerate.yaml and deepspeed.json, and `accelerate launch` of `python -m kit.train FOLDER`."""
    on_gpus = cluster.nodes.gpus > 0
    plugin: dict[str, object] = {
        "deepspeed_config_file": folder / CONFIG,
        "deepspeed_multinode_launcher": "standard",  # as without DeepSpeed; the default starts nodes by pdsh
        "zero3_init_flag": recipe.parallel.strategy == "zero3",
    }
    lines = [
        *trl.yaml_lines(trl.common_values(recipe, on_gpus) | {"distributed_type": "DEEPSPEED"}),
        "deepspeed_config:",
        *(f"  {line}" for line in trl.yaml_lines(plugin)),
    ]
    files = {trl.CONFIG: "\n".join(lines) + "\n", CONFIG: render_deepspeed(recipe, cluster, folder)}
    return Rendering(files, trl.launcher(folder))


def render_deepspeed(recipe: Recipe, cluster: Cluster, folder: Path) -> str:
    """DeepSpeed's config as JSON, for a run in `folder`, whose name is that of its swap folder on the nodes' drives."""
    schedule = recipe.schedule
    values: dict[str, Any] = {
        "train_batch_size": recipe.batch,
        "train_micro_batch_size_per_gpu": schedule.micro_batch,
        "gradient_accumulation_steps": schedule.grad_accum,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": cluster.nodes.gpus > 0},
        "zero_optimization": {"stage": STAGES[recipe.parallel.strategy]} | _offload(recipe, cluster, folder),
    }
    if recipe.parallel.offloads:
        # torch's own AdamW on the CPU; DeepSpeed's would be compiled on the node, which needs nvcc where GPUs are.
        values["zero_force_ds_cpu_optimizer"] = False
    return json.dumps(values, indent=1) + "\n"


def _offload(recipe: Recipe, cluster: Cluster, folder: Path) -> dict[str, Any]:
    """The keys of zero_optimization for offload: of the optimizer, and in stage 3 of the parameters as well.

    The optimizer stays on the CPU: on NVMe its state would not be in checkpoints, and adapters have little of it.
    """
    parallel = recipe.parallel
    if not parallel.offloads:
        return {}
    device: dict[str, Any] = {"device": "cpu", "pin_memory": cluster.nodes.gpus > 0}
    if parallel.strategy != "zero3":
        return {"offload_optimizer": device}
    parameters = device | {"device": parallel.offload}
    if parallel.offload == "nvme":
        parameters["nvme_path"] = str(Path(cluster.paths.nvme) / folder.name)
        parameters["buffer_size"] = max(BUFFER_ELEMENTS, _largest_part(recipe, cluster))
    return {"offload_optimizer": device, "offload_param": parameters}


def _largest_part(recipe: Recipe, cluster: Cluster) -> int:
    """Elements of a rank's part of the embedding, which must fit into a buffer for parameters on their way to NVMe."""
    config = load_config(recipe.model.name, cluster.paths.hf_home)
    config = config.get("text_config", config)
    return -(-int(config["vocab_size"]) * int(config["hidden_size"]) // recipe.world_size)
