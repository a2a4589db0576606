"""What a cluster or a model cannot run of what a recipe asks for by name: refused before the queue."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit.config.cluster import NO_COMPILER, Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast import split
from kit.forecast.attention import varlen_gap
from kit.forecast.gpus import capability
from kit.forecast.shape import load_config

FP8_CAPABILITY = (8, 9)  # Ada, the first generation with fp8 matmuls


def find_compiler() -> str:
    """The C compiler of this machine, as torch's inductor and Triton look for it; empty if none is found.

    Also empty without Python.h, which Triton's launchers include.
    """
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return ""
    names = (os.environ.get("CC", ""), "gcc", "cc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), "")


def check(recipe: Recipe, cluster: Cluster, compiler: bool | None = None) -> None:
    """Raises InputError for values that a person wrote and that this cluster or model cannot run."""
    for problem in problems(recipe, cluster, compiler):
        raise InputError(problem)


def problems(recipe: Recipe, cluster: Cluster, compiler: bool | None = None) -> Iterator[str]:
    """What of a recipe this cluster cannot run, each with what to change; compiler as for `kit.forecast.choices`."""
    compiler = known_compiler(cluster, compiler)
    model, nodes, sharded = recipe.model, cluster.nodes, is_sharded(recipe)
    yield from split.problems(recipe, known_config(recipe, cluster))
    if problem := attention_problem(recipe, cluster):
        yield problem
    if recipe.parallel.compile == "on" and compiler is False:
        yield (
            f"parallel.compile is on, and {compiler_place(cluster)} no C compiler, which torch.compile needs: install "
            "gcc, load its module in slurm.setup, or set parallel.compile to auto or off."
        )
    if model.base == "fp8":
        known = capability(nodes.gpu)
        if not nodes.gpus:
            yield f"model.base fp8 needs GPUs, and {cluster.name} has none: set model.base to bf16."
        elif known and known < FP8_CAPABILITY:
            yield (
                f"model.base fp8 needs GPUs of the Ada or Hopper generation or newer; {nodes.gpu} has compute "
                f"capability {known[0]}.{known[1]}, and fp8 begins with 8.9. Set model.base to bf16."
            )
        elif sharded:
            yield (
                f"model.base fp8 is not sharded by {recipe.parallel.strategy}: set parallel.strategy to ddp, or "
                "model.base to bf16."
            )


def is_sharded(recipe: Recipe) -> bool:
    """Whether FSDP spreads the weights over ranks."""
    return recipe.parallel.strategy.startswith("fsdp") and recipe.world_size > 1


def known_compiler(cluster: Cluster, compiler: bool | None) -> bool | None:
    """Whether the nodes have a C compiler: as given, else as the profile says; None: it is not known."""
    if compiler is not None or not cluster.nodes.compiler:
        return compiler
    return cluster.nodes.compiler != NO_COMPILER


def compiler_place(cluster: Cluster) -> str:
    """Where no compiler is, to be followed by "no C compiler"."""
    return f"the profile {cluster.name} says that its nodes have" if cluster.nodes.compiler else "this machine has"


def known_config(recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    """The content of the model's config.json; empty where it is not on this machine."""
    with suppress(InputError):
        return load_config(recipe.model.name, cluster.paths.hf_home)
    return {}


def attention_problem(recipe: Recipe, cluster: Cluster) -> str:
    """What is wrong with variable-length attention where the recipe names it; empty where nothing is."""
    model = recipe.model
    if model.attention != "varlen":
        return ""
    config = known_config(recipe, cluster)
    if config and (gap := varlen_gap(config, model.dtype, cluster.nodes.gpu, cluster.nodes.gpus > 0)):
        return f"model.attention varlen is not possible for {model.name}: {gap}. Set model.attention to auto."
    return ""
