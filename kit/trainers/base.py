"""The contract of a trainer: each module of this folder is one trainer and has these functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.handover import Rows

# Words of a launcher that kit.slurm.rendezvous replaces on each node: the node's number, and where the ranks meet.
NODE_RANK, HEAD_ADDRESS, HEAD_PORT = "@NODE_RANK@", "@HEAD_ADDRESS@", "@HEAD_PORT@"
PYTHON = "@PYTHON@"  # in commands of `Rendering`: the trainer's interpreter


@dataclass(frozen=True)
class Rendering:
    """What a trainer needs to run a recipe.

    files: the text of its config files, by name in the run folder.
    launcher: on each node, the Python module that starts the ranks there, and its arguments. Arguments that are
    NODE_RANK, HEAD_ADDRESS or HEAD_PORT stand for values that only the node knows.
    before, after: commands, as words, that the first node runs, one after the other, before and after the training.
    notes: sentences about what the trainer does otherwise than the recipe says.
    """

    files: Mapping[str, str]
    launcher: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    after: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def has_own_packages(cluster: Cluster) -> bool:
    """Whether the ranks run with this process's interpreter, and so have its packages."""
    return cluster.slurm.container.kind == "none" and not cluster.slurm.python


class Trainer(Protocol):
    """A module of this folder."""

    def check(self, recipe: Recipe, cluster: Cluster) -> None:
        """Raises InputError for what this trainer cannot run."""

    def render(self, recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
        """The config files and the launcher of a run in `folder`, which need not exist yet."""


class OtherTrainer(Trainer, Protocol):
    """A module of this folder for a trainer whose packages have other versions: the kit never imports them.

    KNOWN: the version of each package for which the renderer was checked, the trainer's own first.
    """

    KNOWN: Mapping[str, str]

    def rows(self, recipe: Recipe) -> Rows:
        """The form of its data, in the folder `data` of the run."""
