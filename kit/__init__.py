"""Fine-tune language models on Slurm clusters from JupyterLab. `import kit` is light: parts load when first used."""

import importlib
from typing import Any

_HOME = {
    "Cluster": "config.cluster",
    "Recipe": "config.recipe",
    "Run": "slurm.run",
    "prepare": "data.dataset",
    "predict": "forecast.timing",
    "launch": "slurm.launch",
    "watch": "watch.board",
    "KitError": "errors",
    "InputError": "errors",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
