"""What every way to load has: the contract `Loader` and the request that it gets."""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.checkpoints.formats.base import Weights

SAFETENSORS = frozenset({"safetensors", "peft adapter"})
TORCH = frozenset({"torch"})
DCP = frozenset({"dcp"})
EVERY = SAFETENSORS | TORCH | DCP


@dataclass(frozen=True)
class LoadRequest:
    """One rank's part of a load. `device` is "cpu" or "cuda"; the rank's GPU is torch's current one."""

    weights: Weights
    path: Path
    rank: int = 0
    world: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class Loader:
    """One way to load.

    name: as `kit checkpoint time --method` takes it. formats: those that it reads. package: what must be importable;
    install: its name for pip, where that is another one. load: returns or yields the tensors; a loader that reads a
    part on each rank yields the rank's own. It may return before the bytes are in memory: the caller touches them.
    devices: where it can put them. hindered: why this machine cannot use the installed package; empty if it can.
    """

    name: str
    formats: frozenset[str]
    load: Callable[[LoadRequest], Iterable[Any]]
    package: str = "torch"
    install: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    hindered: Callable[[], str] = str

    def unavailable(self, device: str = "cpu") -> str:
        """Why the loader cannot load to the device on this machine; empty if it can."""
        if not _is_installed(self.package):
            return f"not installed: run `pip install {self.install or self.package.replace('_', '-')}`"
        if device not in self.devices:
            return f"it loads to {' or '.join(self.devices)} only: add --device {self.devices[0]}"
        return self.hindered()


def _is_installed(package: str) -> bool:
    """Whether a package, or a module in one, can be imported."""
    above, _, _ = package.rpartition(".")
    return (not above or _is_installed(above)) and importlib.util.find_spec(package) is not None
