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


def loaders_for(format_name: str, names: Sequence[str] | None = None) -> list[Loader]:
    """The loaders that read a format and whose packages are installed, or those named.

    Raises InputError for a name that does not exist for the format, or whose package is not installed.
    """
    reading = {loader.name: loader for loader in all_loaders() if format_name in loader.formats}
    installed = {name: loader for name, loader in reading.items() if not loader.unavailable()}
    for name in names or ():
        if name not in reading:
            raise InputError(f"No method {name} for {format_name}; there are {', '.join(installed)}.")
        if name not in installed:
            raise InputError(f"The method {name} is not available here: {reading[name].unavailable()}.")
    return [installed[name] for name in names] if names else list(installed.values())
