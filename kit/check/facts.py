"""Finding: one fact about a machine or the cluster, as `kit check` shows it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One fact about a machine or the cluster, and how it was found.

    `problem` says what to do about it. `facts` has the same for programs; a name with a dot is a key of the profile,
    such as nodes.gpus.
    """

    name: str
    value: str
    how: str
    problem: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
