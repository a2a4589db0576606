"""Rooms that are called like functions: `kit.watch(run)` while `kit.watch` is also the package with that name.

Python documents the mechanism: a module's `__class__` may be assigned to customise it. The face, kit/__init__.py, says
which function each room calls.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

TARGETS: dict[str, tuple[str, str]] = {}  # room -> module and function


class CallableRoom(ModuleType):
    """A package whose call is handed to its function in TARGETS, which is imported at the first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the room's function."""
        module, function = TARGETS[self.__name__]
        return getattr(importlib.import_module(module), function)(*args, **kwargs)


def make_callable(room: str) -> None:
    """Make the package `room` callable."""
    sys.modules[room].__class__ = CallableRoom
