"""Fine-tune language models on Slurm clusters from JupyterLab.

`import kit` is light: each name is imported when it is first used. `kit.check`, `kit.watch` and `kit.checkpoints` are
packages that can be called like the functions of the same name.
"""

import importlib
from typing import Any

from kit.callable_room import TARGETS
from kit.show import CONTROLS

_HOME = {
    "Cluster": "kit.config.cluster",
    "Recipe": "kit.config.recipe",
    "Run": "kit.slurm.run",
    "KitError": "kit.errors",
    "InputError": "kit.errors",
    "prepare": "kit.data.dataset",
    "predict": "kit.forecast.predict",
    "explore": "kit.notebook.explorer",
    "form": "kit.notebook.form",
    "tune": "kit.notebook.tuning",
    "plan": "kit.slurm.plan",
    "launch": "kit.slurm.launch",
    "launcher": "kit.notebook.launcher",
    "runs": "kit.watch.runs",
    "compare": "kit.notebook.compare",
    "load_ipython_extension": "kit.notebook.magic",
}
TARGETS |= {
    "kit.check": ("kit.check.survey", "survey"),
    "kit.watch": ("kit.watch.board", "watch"),
    "kit.checkpoints": ("kit.deploy.outputs", "checkpoints"),
}
CONTROLS |= {"Run": ("kit.notebook.run_controls", "run_controls")}
__all__ = [*(room.removeprefix("kit.") for room in TARGETS), *_HOME]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if f"kit.{name}" in TARGETS:
        return importlib.import_module(f"kit.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'kit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
