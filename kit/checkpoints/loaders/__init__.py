"""Ways to load weights, one module for each library. Every module but `base` defines LOADERS."""

import importlib
import pkgutil
from collections.abc import Sequence

from kit.checkpoints.loaders.base import Loader
from kit.errors import InputError


def all_loaders() -> list[Loader]:
    """The loaders of this folder, by name."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"]
    found: list[Loader] = [loader for name in names for loader in importlib.import_module(f"{__name__}.{name}").LOADERS]
    return sorted(found, key=lambda loader: loader.name)


def loaders_for(format_name: str, names: Sequence[str] | None = None, device: str = "cpu") -> list[Loader]:
    """The loaders that read a format and that this machine can use, or those named.

    Raises InputError for a name that does not exist for the format, or that this machine cannot use.
    """
    reasons = left_out(format_name, device)
    reading = {loader.name: loader for loader in all_loaders() if format_name in loader.formats}
    usable = {name: loader for name, loader in reading.items() if name not in reasons}
    for name in names or ():
        if name not in reading:
            raise InputError(f"No method {name} for {format_name}; there are {', '.join(usable)}.")
        if name in reasons:
            raise InputError(f"The method {name} is not available here: {reasons[name]}.")
    return [usable[name] for name in names] if names else list(usable.values())


def left_out(format_name: str, device: str = "cpu") -> dict[str, str]:
    """The loaders that read a format and that this machine cannot use, by name, with the reason."""
    reasons = {each.name: each.unavailable(device) for each in all_loaders() if format_name in each.formats}
    return {name: reason for name, reason in reasons.items() if reason}
