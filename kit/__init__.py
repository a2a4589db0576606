"""Fine-tune language models on Slurm clusters from JupyterLab.

`import kit` is light: each name is imported when it is first used. `kit.check`, `kit.watch` and `kit.checkpoints` are
packages that can be called like the functions of the same name.
"""

import importlib
from typing import Any

_HOME = {
    "Cluster": "kit.config.cluster",
    "Recipe": "kit.config.recipe",
    "Run": "kit.slurm.run",
    "KitError": "kit.errors",
    "InputError": "kit.errors",
    "prepare": "kit.data.dataset",
    "predict": "kit.forecast.predict",
    "explore": "kit.notebook.explorer",
    "tune": "kit.forecast.tune",
    "plan": "kit.slurm.plan",
    "launch": "kit.slurm.launch",
    "runs": "kit.slurm.run",
    "compare": "kit.notebook.compare",
    "load_ipython_extension": "kit.notebook.magic",
}
_ROOMS = ("check", "watch", "checkpoints")  # packages that can be called
__all__ = ["check", "checkpoints", "watch", *_HOME]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"kit.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
