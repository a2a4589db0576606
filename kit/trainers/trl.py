"""The kit's own trainer, kit.train on TRL: accelerate's config, and accelerate as the launcher of each node."""

import importlib.util
from pathlib import Path

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.trainers.base import HEAD_ADDRESS, HEAD_PORT, NODE_RANK, Rendering, has_own_packages

CONFIG = "accelerate.yaml"
FSDP1_SHARDING = {"full": "FULL_SHARD", "grad_op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD"}


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for a strategy or method that kit.train does not run, or not on this cluster."""
    parallel = recipe.parallel
    if parallel.offload == "nvme":
        raise InputError("parallel.offload nvme runs with parallel.strategy zero3 only; use cpu, or zero3.")
    if recipe.tuning.method == "qlora":
        _check_qlora(recipe, cluster)
    if parallel.strategy == "fsdp1" and cluster.nodes.gpus == 0:
        raise InputError("parallel.strategy fsdp1 needs GPUs; on a CPU cluster use fsdp2 or ddp.")
    if recipe.schedule.save == "async" and not (parallel.strategy == "fsdp2" and recipe.world_size > 1):
        raise InputError(
            "schedule.save async writes the shards of fsdp2 on several ranks; here the weights are not sharded so: set "
            "schedule.save to sync."
        )
    if replicas(recipe) > 1 and parallel.gpus_per_node == 1:
        raise InputError(
            "parallel.sharding hybrid shards the model over the ranks of a node, and each node has one: set "
            "parallel.sharding to full, or parallel.strategy to ddp."
        )


def _check_qlora(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError where QLoRA cannot run: under FSDP1, or without bitsandbytes."""
    if recipe.parallel.strategy == "fsdp1" and shards(recipe, cluster.nodes.gpus > 0):
        raise InputError(
            "tuning.method qlora is not sharded by fsdp1 here: set parallel.strategy to ddp where each GPU holds the "
            "4-bit model, else to fsdp2."
        )
    if has_own_packages(cluster) and importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            "tuning.method qlora needs bitsandbytes: pip install bitsandbytes, or set tuning.method to lora."
        )


def shards(recipe: Recipe, on_gpus: bool) -> bool:
    """Whether accelerate's FSDP shards the weights; where layers are split over ranks, transformers' own does.

    accelerate does not use it for a single CPU process. A single GPU has nothing to share: FSDP is used there for full
    fine-tunes only, of which it keeps the weights in fp32.
    """
    several = recipe.world_size > 1
    if recipe.parallel.split:
        return False
    return recipe.parallel.strategy in ("fsdp1", "fsdp2") and (several or (on_gpus and recipe.tuning.method == "full"))


def replicas(recipe: Recipe) -> int:
    """How many copies of the sharded model FSDP2 keeps: with hybrid sharding, one on each node."""
    parallel = recipe.parallel
    return parallel.nodes if parallel.strategy == "fsdp2" and parallel.sharding == "hybrid" else 1


def render(recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
    """accelerate.yaml, and `accelerate launch` of `python -m kit.train FOLDER`."""
    return Rendering({CONFIG: render_accelerate(recipe, cluster)}, launcher(folder))


def launcher(folder: Path) -> tuple[str, ...]:
    """The module and arguments that start the ranks of a node, for the run in `folder`."""
    return (
        "accelerate.commands.launch", "--config_file", str(folder / CONFIG),
        "--machine_rank", NODE_RANK, "--main_process_ip", HEAD_ADDRESS, "--main_process_port", HEAD_PORT,
        "-m", "kit.train", str(folder),
    )  # fmt: skip


def render_accelerate(recipe: Recipe, cluster: Cluster) -> str:
    """accelerate's config as YAML. On CPUs accelerate ignores the part for FSDP; kit.train.patches makes it count."""
    on_gpus = cluster.nodes.gpus > 0
    sharded = shards(recipe, on_gpus)
    own: dict[str, object] = {
        "distributed_type": _distributed_type(sharded, recipe.world_size),
        "mixed_precision": "bf16" if on_gpus else "'no'",  # a bare no is false in YAML
    }
    lines = yaml_lines(common_values(recipe, on_gpus) | own)
    if sharded:
        lines += ["fsdp_config:", *(f"  {line}" for line in yaml_lines(_fsdp(recipe, on_gpus)))]
    if replicas(recipe) > 1:
        lines += ["parallelism_config:", *(f"  {line}" for line in yaml_lines(_mesh(recipe)))]
    return "\n".join(lines) + "\n"


def common_values(recipe: Recipe, on_gpus: bool) -> dict[str, object]:
    """Keys of accelerate's config that every strategy has."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": recipe.parallel.nodes,
        "num_processes": recipe.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not on_gpus,
    }


def _distributed_type(sharded: bool, world_size: int) -> str:
    if sharded:
        return "FSDP"
    return "MULTI_GPU" if world_size > 1 else "'NO'"


def _fsdp(recipe: Recipe, on_gpus: bool) -> dict[str, object]:
    parallel = recipe.parallel
    one_reads = on_gpus and recipe.model.base != "nf4"  # each rank makes its own 4-bit weights: none are sent
    values: dict[str, object] = {
        "fsdp_version": 2 if parallel.strategy == "fsdp2" else 1,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": parallel.recomputes,
        "fsdp_offload_params": parallel.offloads,
        "fsdp_cpu_ram_efficient_loading": one_reads,  # only rank 0 reads the weights
        "fsdp_sync_module_states": one_reads,
    }
    if parallel.strategy == "fsdp2":
        return values | {"fsdp_reshard_after_forward": parallel.sharding != "grad_op"}
    return values | {
        "fsdp_sharding_strategy": FSDP1_SHARDING[parallel.sharding],
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True,
    }


def _mesh(recipe: Recipe) -> dict[str, object]:
    """The mesh of hybrid sharding: gradients are averaged between nodes, and weights are gathered within a node."""
    sizes = {"dp_replicate": replicas(recipe), "dp_shard": recipe.parallel.gpus_per_node, "tp": 1, "cp": 1}
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


def yaml_lines(values: dict[str, object]) -> list[str]:
    """Lines of YAML, one for each key."""
    return [f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
