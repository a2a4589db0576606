"""The kit's own trainer, kit.train on TRL: accelerate's config, and accelerate as the launcher of each node."""

from pathlib import Path

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.trainers.base import HEAD_ADDRESS, HEAD_PORT, NODE_RANK, Rendering

CONFIG = "accelerate.yaml"
FSDP1_SHARDING = {"full": "FULL_SHARD", "grad_op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD"}


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for a strategy or method that kit.train does not run, or not on this cluster."""
    parallel = recipe.parallel
    unsupported = ""
    if recipe.tuning.method == "qlora":
        unsupported = "tuning.method qlora"
    elif parallel.strategy.startswith("zero"):
        unsupported = f"parallel.strategy {parallel.strategy}"
    if unsupported:
        raise InputError(
            f"{unsupported} can be forecast but not launched: kit.train runs ddp, fsdp1 and fsdp2, full or lora."
        )
    if parallel.strategy == "fsdp1" and cluster.nodes.gpus == 0:
        raise InputError("parallel.strategy fsdp1 needs GPUs; on a CPU cluster use fsdp2 or ddp.")
    if parallel.strategy == "fsdp2" and parallel.sharding == "hybrid":
        raise InputError("parallel.sharding hybrid runs with fsdp1 only; use full or grad_op with fsdp2.")


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
    parallel, on_gpus = recipe.parallel, cluster.nodes.gpus > 0
    sharded = parallel.strategy in ("fsdp1", "fsdp2") and (on_gpus or recipe.world_size > 1)
    values: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(sharded, recipe.world_size),
        "mixed_precision": "bf16" if on_gpus else "'no'",  # a bare no is false in YAML
        "num_machines": parallel.nodes,
        "num_processes": recipe.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not on_gpus,
    }
    lines = _yaml(values)
    if sharded:
        lines += ["fsdp_config:", *(f"  {line}" for line in _yaml(_fsdp(recipe, on_gpus)))]
    return "\n".join(lines) + "\n"


def _distributed_type(sharded: bool, world_size: int) -> str:
    if sharded:
        return "FSDP"
    return "MULTI_GPU" if world_size > 1 else "'NO'"


def _fsdp(recipe: Recipe, on_gpus: bool) -> dict[str, object]:
    parallel = recipe.parallel
    values: dict[str, object] = {
        "fsdp_version": 2 if parallel.strategy == "fsdp2" else 1,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": parallel.activation_checkpointing,
        "fsdp_offload_params": parallel.offload,
        "fsdp_cpu_ram_efficient_loading": on_gpus,  # only rank 0 reads the weights
        "fsdp_sync_module_states": on_gpus,
    }
    if parallel.strategy == "fsdp2":
        return values | {"fsdp_reshard_after_forward": parallel.sharding == "full"}
    return values | {
        "fsdp_sharding_strategy": FSDP1_SHARDING[parallel.sharding],
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True,
    }


def _yaml(values: dict[str, object]) -> list[str]:
    return [f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
