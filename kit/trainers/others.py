"""What the renderers of trainers with packages of other versions share: checks, paths, torchrun and YAML."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.trainers.base import HEAD_ADDRESS, HEAD_PORT, NODE_RANK

ATTENTION = {"auto": "sdpa", "sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash_attention_2"}


def require(trainer: str, recipe: Recipe, accepted: Mapping[str, Sequence[object]], pretrained: bool = True) -> None:
    """Raises InputError where a key of the recipe has a value that the trainer cannot express.

    pretrained: whether the trainer starts from weights, and so not from a config.json alone.
    """
    if pretrained and recipe.model.name.endswith(".json"):
        raise InputError(f"model.name {recipe.model.name} has no weights: {trainer} needs a model with weights.")
    unsplit = {"parallel.tensor": (1,), "parallel.expert": (1,)}
    for key, values in {**unsplit, **accepted}.items():
        section, name = key.split(".")
        value = getattr(getattr(recipe, section), name)
        if value not in values:
            listed = " or ".join(json.dumps(one) for one in values)
            raise InputError(
                f"{trainer} cannot express {key} = {json.dumps(value)}: set it to {listed}, or take another trainer."
            )


def require_gpus(trainer: str, cluster: Cluster, why: str) -> None:
    """Raises InputError on a cluster without GPUs."""
    if cluster.nodes.gpus == 0:
        raise InputError(f"{trainer} {why} only on GPUs, and {cluster.name} has no GPUs.")


def model_folder(recipe: Recipe, cluster: Cluster) -> str:
    """The absolute path of the model's folder, since jobs have no access to a hub. Raises InputError."""
    return str(Path(models.source(recipe.model.name, cluster.paths.hf_home)).absolute())


def torchrun(recipe: Recipe, *words: str) -> tuple[str, ...]:
    """The launcher of a node: torchrun's module, which starts a rank for each GPU of `words`, a module or script."""
    return (
        "torch.distributed.run", "--nnodes", str(recipe.parallel.nodes),
        "--nproc_per_node", str(recipe.parallel.gpus_per_node), "--node_rank", NODE_RANK,
        "--master_addr", HEAD_ADDRESS, "--master_port", HEAD_PORT, *words,
    )  # fmt: skip


def as_yaml(values: Mapping[str, Any]) -> str:
    """The values as YAML, in their order; keys whose value is None are left out."""
    kept = {key: value for key, value in values.items() if value is not None}
    return str(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=1000))


def notes_of(recipe: Recipe, cluster: Cluster) -> tuple[str, ...]:
    """Sentences about keys that no other trainer takes from the recipe."""
    notes = []
    if recipe.parallel.compile == "on":
        notes.append("parallel.compile is not carried over: the trainer's own default holds.")
    if not recipe.trainer.python:
        notes.append("trainer.python is empty: the job takes the python that slurm.setup of the profile activates.")
    if cluster.slurm.container.kind != "none":
        notes.append("slurm.container of the profile is not used: the trainer runs on the nodes themselves.")
    return tuple(notes)
