"""The demo: every notebook, headless, on the embedded default. Repeating it skips what is done."""

import sys
import time
from pathlib import Path
from typing import Any

from kit import files
from kit.config import models as model
from kit.errors import KitError
from kit.notebook.execute import execute
from kit.notebook.parameters import read_notebook
from kit.slurm.run import Run

NOTEBOOKS = files.REPOSITORY / "notebooks"


def demo(out: Path, recipe: str = "demo", cluster: str = "local") -> int:
    """Execute notebooks 00 to 06 into `out`, one run among them; prints where everything is. Returns 0."""
    start = time.monotonic()
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    _tell("the embedded model (SmolLM2-135M-Instruct)")
    model.unpack_embedded()
    what, where = {"recipe": recipe}, {"cluster": cluster}
    _notebook("00_check_cluster", out, where)
    _notebook("01_prepare_data", out, what)
    _notebook("02_explore_memory", out, what | where)
    _notebook("03_launch_run", out, what | where, again=_failed(out))
    run = _runs(out)[-1]
    _notebook("04_watch_run", out, {"run": str(run.path), "wait": True})
    _notebook("05_time_checkpoints", out, {"run": str(run.path), "merge_base": True})
    _notebook("06_compare_runs", out, {})
    _report(run, out, time.monotonic() - start)
    return 0


def _runs(out: Path) -> list[Run]:
    found = sorted((out / "runs").glob("*/run.json"), key=lambda p: p.stat().st_mtime)
    return [Run(p.parent) for p in found]


def _failed(out: Path) -> bool:
    """Whether the last demo's run ended badly, so that another must be launched."""
    found = [run.state for run in _runs(out)[-1:]]
    return any(s.ended and s.state != "COMPLETED" for s in found)


def _notebook(name: str, out: Path, parameters: dict[str, Any], again: bool = False) -> None:
    """Execute one notebook, unless a copy that ran to its end with these parameters is there."""
    target = out / f"{name}.ipynb"
    if target.exists() and not again and _done(target, parameters):
        print(f"{name}: done before, skipped ({target})")
        return
    _tell(name)
    execute(NOTEBOOKS / f"{name}.ipynb", target, parameters, cwd=out, stream=sys.stdout, overwrite=True)


def _done(path: Path, parameters: dict[str, Any]) -> bool:
    noted = read_notebook(path).metadata
    same = noted.get("kit", {}).get("parameters", {})
    return noted.get("papermill", {}).get("exception") is False and all(same.get(k) == v for k, v in parameters.items())


def _report(run: Run, out: Path, seconds: float) -> None:
    from kit.checkpoints.inspect import inspect
    from kit.notebook.compare import result

    left, adapter = result(run), inspect(run.path / "adapter")
    before, after = left["eval_loss_before"], left["eval_loss_after"]
    if not after < before:
        raise KitError(f"The eval loss did not fall: {before} before, {after} after.")
    _tell("done")
    print(f"eval loss {before:.4f} before, {after:.4f} after {left['steps']} steps")
    print(f"adapter: {adapter.tensors} tensors, all finite")
    print(f"executed notebooks: {out}")
    print(f"run folder:         {run.path}")
    print(f"{seconds:.0f} s")


def _tell(text: str) -> None:
    print(f"\n== {text}", flush=True)
