"""What transformers can split over ranks (parallel.tensor, parallel.expert), and what is known of it; no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast.layout import GIB, Layout
from kit.forecast.shape import Shape

# Families whose losses and gradients were equal to those of one rank with transformers 5.24 (largest difference of a
# gradient 1e-6 of its length), and which saved what they had loaded, bit by bit.
TENSOR_FAMILIES = (
    "deepseek_v3", "gemma3_text", "glm4", "glm4_moe", "granite", "llama", "mistral", "mixtral", "olmo2", "olmoe",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "smollm3",
)  # fmt: skip
EXPERT_FAMILIES = (
    "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next",
)  # fmt: skip
# What each rank has an equal part of; the vocabulary may be uneven.
SPLIT_BY_TENSOR = (
    "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def problems(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[str]:
    """Why a recipe cannot split its layers, each with what to change; nothing where it splits none.

    config: the content of config.json; empty where it is not known.
    """
    if recipe.parallel.split:
        yield from _recipe_problems(recipe)
        yield from _model_problems(recipe, config)


def _recipe_problems(recipe: Recipe) -> Iterator[str]:
    parallel, both = recipe.parallel, "parallel.tensor and parallel.expert"
    if recipe.tuning.method != "full":
        yield (
            f"{both} are for full fine-tunes: over split layers transformers takes PEFT's adapters, of which each rank "
            "has another part, as copies of one, and averages them. Set tuning.method to full, or both to 1."
        )
    if parallel.strategy != "fsdp2" or parallel.sharding != "full":
        yield (
            f"{both} go with transformers' own FSDP2: set parallel.strategy to fsdp2 and parallel.sharding to full, "
            "or both to 1."
        )
    if parallel.offloads:
        yield f"{both} keep everything on the GPU: set parallel.offload to none, or both to 1."
    if parallel.compile == "on":
        yield f"{both} run layers that are not compiled: set parallel.compile to off, or both to 1."
    if recipe.schedule.save == "async":
        yield f"{both} go with schedule.save sync, which waits for the save: set it, or both to 1."
    if recipe.model.name.endswith(".json"):
        yield f"{both} read weights from safetensors, and {recipe.model.name} has none: set model.name to a folder."


def _model_problems(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[str]:
    kind, parallel = config.get("model_type"), recipe.parallel
    if not config:
        return
    for key, size, families in (
        ("tensor", parallel.tensor, TENSOR_FAMILIES),
        ("expert", parallel.expert, EXPERT_FAMILIES),
    ):
        if size > 1 and kind not in families:
            yield (
                f"parallel.{key} was not checked against one rank for models of type {kind}: set it to 1. It was for "
                f"{', '.join(families)}."
            )
    for key in SPLIT_BY_TENSOR:
        if (count := config.get(key)) and count % parallel.tensor:
            yield f"parallel.tensor is {parallel.tensor}, which does not divide {key} {count} of {recipe.model.name}."
    for key in EXPERTS:
        if (count := config.get(key)) and count % parallel.expert:
            yield f"parallel.expert is {parallel.expert}, which does not divide the {count} experts ({key})."


def least_gib(recipe: Recipe, cluster: Cluster, shape: Shape) -> float:
    """GiB of weights, gradients and optimizer state of a rank, if every tensor were spread evenly over all ranks."""
    layout = Layout.of(recipe, cluster)
    return shape.total * (2 * layout.trained_bytes + layout.optimizer_bytes) / recipe.world_size / GIB


def check_formulas(recipe: Recipe, cluster: Cluster, shape: Shape) -> None:
    """Raises InputError for a recipe that splits its layers, of which memory and time are not known yet."""
    if recipe.parallel.split:
        raise InputError(
            "The forecast has no formulas yet for parallel.tensor and parallel.expert: memory and time of this recipe "
            "are unknown. Weights, gradients and optimizer state take at least "
            f"{least_gib(recipe, cluster, shape):.1f} GiB a rank; with both keys set to 1 there is a forecast."
        )


def check_room(recipe: Recipe, cluster: Cluster, shape: Shape) -> None:
    """Raises InputError where a recipe that splits its layers cannot fit, whatever its activations take."""
    nodes, parallel = cluster.nodes, recipe.parallel
    capacity = nodes.gpu_memory_gib if nodes.gpus else nodes.ram_gib / parallel.gpus_per_node
    if parallel.split and capacity and (least := least_gib(recipe, cluster, shape)) > capacity:
        raise InputError(
            f"{recipe.name} does not fit {cluster.name}: weights, gradients and optimizer state take at least "
            f"{least:.1f} GiB a rank, of {capacity:.1f}. Raise parallel.nodes, or set tuning.method to lora and "
            "parallel.tensor and parallel.expert to 1."
        )
