"""Sweep: a notebook or a recipe at many settings, as one Slurm array, or one after another here. A sweep is a Run.

Its folder also has sweep.json (the settings), the notebook as it was, and notebooks/0003.ipynb or runs/<run> for each.
"""

import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kit import files
from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError, KitError
from kit.notebook.parameters import check, label, read_notebook, read_parameters
from kit.slurm import environment as jobscript
from kit.slurm import launch as slurm
from kit.slurm import ledger
from kit.slurm.outcome import RunState
from kit.slurm.run import Run
from kit.slurm.states import SubmitRecord
from kit.slurm.submit import reach, submit

STOPPED = (130, 143)  # exit codes after SIGINT and SIGTERM
# Slurm's SIGTERM goes to every process. For a notebook the shell waits until it is saved, and leaves the exit code; a
# run's own script does all that, so it takes the place of this one.
BODY = "{how} {python} -m kit.notebook.sweep {run} ${{SLURM_ARRAY_TASK_ID-}}"
Settings = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """One setting of a sweep, the notebook or run folder that comes of it, and its state as Slurm names it."""

    number: int
    values: Settings
    out: Path
    state: str = ""


def sweep(what: str | Path, points: Sequence[Settings], cluster: Cluster, limit: int = 0) -> Run:
    """Check every setting, then submit all; at most `limit` run at once (0: all). `what`: a notebook, or a recipe.

    Raises InputError before anything is made (unknown name, bad value, a setting given twice), and as slurm.launch.
    """
    run = _notebook(Path(what), points, cluster) if Path(what).suffix == ".ipynb" else _recipe(what, points, cluster)
    _submit(run, range(len(points)), limit)
    return run


def job(notebook: Path, values: Settings, out: Path, cluster: Cluster) -> Run:
    """The notebook as one job, submitted. Raises InputError before that: a bad value, or `out` exists."""
    if out.exists():
        raise InputError(f"{out} exists; choose another name for the executed notebook.")
    submit(run := _notebook(notebook, [values], cluster, out.absolute()))
    return run


def rerun(run: Run) -> list[int]:
    """Submit the tasks that did not end well, and only these; a run goes on from its newest checkpoint.

    Raises InputError while the sweep has not ended.
    """
    reach(run.cluster)
    if again := [task.number for task in tasks(run) if task.state != "COMPLETED"]:
        _submit(run, again, int(run.info["array"].partition("%")[2] or 0))
    return again


def _submit(run: Run, numbers: Sequence[int], limit: int) -> None:
    run.note(array=",".join(map(str, numbers)) + (f"%{limit}" if limit else ""))
    submit(run)
    if str(run.job_id).isdigit():
        for task in [_plan(run)[number] for number in numbers]:
            _enter(run, task, str(run.job_id))


def tasks(run: Run) -> list[Task]:
    """Every task. What it left says whether it ended well, else Slurm how it is. Raises InputError for no sweep."""
    plan, said = _plan(run), run.task_states()
    return [replace(task, state=_state(task, said)) for task in plan]


def _plan(run: Run) -> list[Task]:
    if not (path := run.path / "sweep.json").exists():
        raise InputError(f"{run.path.name} is a run, but no sweep: it has no sweep.json.")
    return [Task(n, one["values"], run.path / one["out"]) for n, one in enumerate(files.read_json(path))]


def _state(task: Task, said: Mapping[int | None, RunState]) -> str:
    told, whole = _told(task.out), said.get(None)
    if told != "COMPLETED" and task.number in said:
        return said[task.number].state
    if whole and whole.ended and told in ("", "RUNNING"):  # they ran here, one after another
        return whole.state if told else "NOT RUN"
    return told or "PENDING"


def _told(out: Path) -> str:
    """How a task is by its own run or notebook; empty before it started."""
    if out.suffix != ".ipynb":
        return run.state.state if (run := Run(out)).job_id else ""
    meta = read_notebook(out).metadata.papermill if out.exists() else {}
    return {None: "RUNNING", True: "FAILED", False: "COMPLETED"}[meta["exception"]] if meta else ""


def _checked(points: Sequence[Settings], check: Callable[[Settings], T], key: Callable[[T], str]) -> list[T]:
    """The settings as `check` reads them. Raises InputError for the first bad one, and for two that are the same."""
    seen: dict[str, int] = {}
    out = []
    for number, point in enumerate(points):
        try:
            out.append(check(point))
        except InputError as error:
            raise InputError(f"Setting {number} ({label(point)}): {error}") from None
        if (before := seen.setdefault(key(out[-1]), number)) != number:
            raise InputError(f"Settings {before} and {number} are the same ({label(point)}); leave one of them out.")
    return out


def _notebook(notebook: Path, points: Sequence[Settings], cluster: Cluster, out: Path | None = None) -> Run:
    known = read_parameters(read_notebook(notebook))
    defaults = {name: parameter.default for name, parameter in known.items()}
    checked = _checked(points, lambda p: check(known, p), lambda values: repr(sorted((defaults | values).items())))
    reach(cluster)
    name = re.sub(r"[^\w.-]", "-", notebook.stem)
    run = Run.create_for_script("", cluster, name)
    shutil.copyfile(notebook, run.path / notebook.name)
    run.note(notebook=notebook.name)
    asks = jobscript.options(cluster, job_name=name, nodes=1, ntasks=1, cpus_per_task=1)
    _write(run, checked, [str(out or f"notebooks/{n:04}.ipynb") for n in range(len(points))], asks, "trap : TERM\n")
    return run


def _recipe(name: str | Path, points: Sequence[Settings], cluster: Cluster) -> Run:
    from kit.data.dataset import prepare
    from kit.slurm import script as job_script

    base = Recipe.load(name)
    recipes = _checked(points, lambda point: base.override(**point), Recipe.digest)
    if len({(recipe.parallel.nodes, recipe.parallel.gpus_per_node) for recipe in recipes}) > 1:
        raise InputError("The tasks of an array ask for the same nodes and GPUs; sweep each of these sizes by itself.")
    for recipe in recipes:
        slurm.check(recipe, cluster)
        slurm.check_fit(recipe, cluster, job_script.forecast(recipe, cluster))
    with models.use_hf_home(cluster.paths.hf_home):
        datasets = [prepare(recipe) for recipe in recipes]
    sweep = Run.create_for_script("", cluster, f"{base.name}-sweep")
    inside = replace(cluster, paths=replace(cluster.paths, runs=str(sweep.path / "runs")))
    runs = [
        slurm.freeze(recipe, inside, data, job_script.forecast(recipe, inside, data.manifest))
        for recipe, data in zip(recipes, datasets, strict=True)
    ]
    earliest = max((job_script.Job.of_run(run) for run in runs), key=lambda job: job.warning_s)
    options = job_script.options(earliest)  # the tasks differ in nothing else, and the earliest warning does for all
    _write(sweep, points, [f"runs/{run.path.name}" for run in runs], options, "exec")
    return sweep


def _write(run: Run, points: Sequence[Settings], outs: Sequence[str], asks: Sequence[str], how: str) -> None:
    tasks = [{"values": values, "out": out} for values, out in zip(points, outs, strict=True)]
    files.write_json(run.path / "sweep.json", tasks)
    body = BODY.format(how=how, python=jobscript.python(run.cluster), run=shlex.quote(str(run.path)))
    files.write(run.path / "job.sbatch", jobscript.render(run.cluster, asks, body))


def main(run: Run, number: int | None) -> int:
    """Inside the job: this task, or every one that is not done, one after another. The worst exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that goes on here is then cancelled
    worst = 0
    for task in _plan(run) if number is None else [_plan(run)[number]]:
        if number is not None or _told(task.out) != "COMPLETED":
            worst = max(worst, code := _execute(run, task))
            if code in STOPPED:
                break
    return worst


def _execute(run: Run, task: Task) -> int:
    print(f"task {task.number}: {label(task.values)}", flush=True)
    try:
        if task.out.suffix == ".ipynb":
            from kit.notebook.execute import execute

            execute(run.path / run.info["notebook"], task.out, task.values, overwrite=True, say=print)
            return 0
        if job := os.environ.get("SLURM_ARRAY_JOB_ID"):
            os.environ["KIT_JOB_ID"] = _enter(run, task, job)
            os.execvp("bash", ["bash", str(task.out / "job.sbatch")])
        submit(one := Run(task.out))
        return one.wait().exit_code or 0
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 143


def _enter(sweep: Run, task: Task, job: str) -> str:
    """Where a task is a run, make the task of the array its job; what an earlier job left goes into its ledger."""
    job = f"{job}_{task.number}"
    if task.out.suffix != ".ipynb" and (run := Run(task.out)).job_id != job:
        ledger.archive(run)
        log, script = sweep.path / "logs" / f"slurm-{job}.out", sweep.path / "job.sbatch"
        run.note(job_id=job, submitted=sweep.info["submitted"], script=str(script), log=str(log))
        ledger.append(run, SubmitRecord(time=time.time(), job_id=job))
    return job


if __name__ == "__main__":
    sys.exit(main(Run(Path(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else None))
