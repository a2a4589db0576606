"""The contract of a trainer: each module of this folder is one trainer and has these functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe

# Words of a launcher that kit.slurm.rendezvous replaces on each node: the node's number, and where the ranks meet.
NODE_RANK, HEAD_ADDRESS, HEAD_PORT = "@NODE_RANK@", "@HEAD_ADDRESS@", "@HEAD_PORT@"


@dataclass(frozen=True)
class Rendering:
    """What a trainer needs to run a recipe.

    files: the text of its config files, by name in the run folder.
    launcher: on each node, the Python module that starts the ranks there, and its arguments. Arguments that are
    NODE_RANK, HEAD_ADDRESS or HEAD_PORT stand for values that only the node knows.
    """

    files: Mapping[str, str]
    launcher: tuple[str, ...]


class Trainer(Protocol):
    """A module of this folder."""

    def check(self, recipe: Recipe, cluster: Cluster) -> None:
        """Raises InputError for what this trainer cannot run."""

    def render(self, recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
        """The config files and the launcher of a run in `folder`, which need not exist yet."""
