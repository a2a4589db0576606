"""Rooms that are called like functions: `kit.watch(run)` while `kit.watch` is also the package with that name."""

import importlib
import sys
from types import ModuleType
from typing import Any


class CallableRoom(ModuleType):
    """A package whose call is handed to a function inside it, which is imported at the first call."""

    _target: tuple[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that `make_callable` named."""
        module, function = self._target
        return getattr(importlib.import_module(module), function)(*args, **kwargs)


def make_callable(room: str, module: str, function: str) -> None:
    """Make the package `room` callable. Python documents this: assign a module's __class__ to customise it."""
    package = sys.modules[room]
    package.__class__ = CallableRoom
    package._target = (module, function)  # type: ignore[attr-defined]
