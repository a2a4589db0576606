"""The demo: execute every notebook on the embedded model. A second demo skips what is done."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit import files
from kit.checkpoints.formats.base import ProblemKind, join_messages
from kit.checkpoints.inspect import inspect
from kit.config.models import unpack_embedded
from kit.errors import KitError
from kit.notebook.compare import training_result
from kit.notebook.execute import execute
from kit.notebook.parameters import read_notebook
from kit.show import Answer, Table, format_duration
from kit.slurm.run import Run

NOTEBOOKS = files.REPOSITORY / "notebooks"
COUNT = len(list(NOTEBOOKS.glob("*.ipynb")))


def demo(out: str | Path, recipe: str = "demo", cluster: str = "local") -> Answer:
    """Execute notebooks 00 to 06 into `out`; 03 launches a run. Prints the output of the cells.

    Raises KitError if the eval loss did not fall or the exported adapter has problems.
    """
    began, out = time.monotonic(), Path(out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    unpack_embedded()
    what, where = {"recipe": recipe}, {"cluster": cluster}
    _execute("00_check_cluster", out, where)
    _execute("01_prepare_data", out, what)
    _execute("02_explore_memory", out, what | where)
    _execute("03_launch_run", out, what | where, again=_newest_run_failed(out))
    run = _runs(out)[-1]
    _execute("04_watch_run", out, {"run": str(run.path), "wait": True})
    _execute("05_time_checkpoints", out, {"run": str(run.path), "merge_base": True})
    _execute("06_compare_runs", out, {"folder": str(out / "runs")})
    return _report(run, out, time.monotonic() - began)


def _execute(name: str, out: Path, parameters: Mapping[str, Any], again: bool = False) -> None:
    """Execute one notebook, unless a copy that completed with these parameters exists."""
    target = out / f"{name}.ipynb"
    heading = f"\n== notebook {int(name[:2]) + 1} of {COUNT}: {name}"
    if target.exists() and not again and _completed(target, parameters):
        print(f"{heading}: done before, skipped ({target})", flush=True)
        return
    print(heading, flush=True)
    execute(NOTEBOOKS / f"{name}.ipynb", target, parameters, cwd=out, stream=sys.stdout, overwrite=True)


def _completed(path: Path, parameters: Mapping[str, Any]) -> bool:
    metadata = read_notebook(path).metadata
    used = metadata.get("kit", {}).get("parameters", {})
    same = all(used.get(name) == value for name, value in parameters.items())
    return same and metadata.get("papermill", {}).get("exception") is False


def _runs(out: Path) -> list[Run]:
    """The runs of this demo, oldest first."""
    found = sorted((out / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    return [Run(path.parent) for path in found]


def _newest_run_failed(out: Path) -> bool:
    """True if the last demo's run did not end well, so that another must be launched."""
    runs = _runs(out)
    if not runs:
        return False
    end = runs[-1].state
    return end.ended and end.state != "COMPLETED"


def _report(run: Run, out: Path, seconds: float) -> Answer:
    result = training_result(run)
    before, after = result["eval_loss_before"], result["eval_loss_after"]
    if not after < before:
        raise KitError(f"The eval loss did not fall: {before} before, {after} after.")
    adapter = inspect(run.path / "adapter", values=True)
    problems = [problem for problem in adapter.problems if problem.kind is not ProblemKind.HIDDEN_FROM_GROUP]
    if problems:
        raise KitError(f"{run.path / 'adapter'}: {join_messages(problems)}")
    facts = {
        "eval loss": f"{before:.4f} before, {after:.4f} after {result['steps']} steps",
        "adapter": f"{adapter.tensors} tensors, all values finite",
        "executed notebooks": str(out),
        "run folder": str(run.path),
        "took": format_duration(seconds),
    }
    return Answer(dict(facts), Table(("demo", "result"), list(facts.items())))
