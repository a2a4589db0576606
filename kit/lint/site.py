"""Site: what the linter may know of the cluster that a script is for."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Site:
    """The cluster that a script is for. By default nothing is known, and rules that need to know it find nothing.

    options: long names of sbatch options that plug-ins of this cluster add. nodes, gpus_per_node: its size; None:
    unknown. environment: variables that belong to this cluster, so that a script may set them.
    release: the Slurm release, such as "22.05.8"; empty: unknown.
    """

    options: frozenset[str] = frozenset()
    nodes: int | None = None
    gpus_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    release: str = ""
