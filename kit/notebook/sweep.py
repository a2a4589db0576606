"""Sweep: execute a notebook, or train a recipe, at many settings, as one Slurm array or one after another here.

The folder of a sweep is a run folder with sweep.json (the settings), the notebook as it was, and for each task
notebooks/0003.ipynb or runs/<run>. `python -m kit.notebook.sweep RUN [TASK]` is what its job runs.
"""

import os
import re
import shlex
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import prepare
from kit.errors import InputError, KitError
from kit.notebook.execute import execute
from kit.notebook.grid import Setting, label
from kit.notebook.parameters import check, read_notebook, read_parameters
from kit.show import Mark, Part, Result, Table
from kit.slurm import environment as jobscript
from kit.slurm import launch as slurm
from kit.slurm import ledger
from kit.slurm import script as job_script
from kit.slurm.outcome import RunState
from kit.slurm.run import Run
from kit.slurm.states import FINAL_STATES, JobState, SubmitRecord
from kit.slurm.submit import reach, submit
from kit.slurm.variables import Variable

STOPPED = (130, 143)  # exit codes after SIGINT and SIGTERM
# Slurm's SIGTERM goes to every process. For a notebook the shell waits until it is saved, and leaves the exit code; a
# run's own script does all that, so it takes the place of this one.
BODY = "{how} {python} -m kit.notebook.sweep {run} ${{SLURM_ARRAY_TASK_ID-}}"
WAIT_FOR_NOTEBOOK, REPLACED_BY_RUN = "trap : TERM\n", "exec"
NOT_STARTED, NOT_RUN = "", "NOT RUN"  # of a task: not yet, and not before the sweep ended
T = TypeVar("T")


@dataclass(frozen=True)
class Task(ABC):
    """One setting of a sweep and what comes of it, the notebook or run folder `out`."""

    number: int
    values: Setting
    out: Path
    state: str = ""  # as Slurm names it, or NOT RUN

    @abstractmethod
    def own_state(self) -> str:
        """The state as its notebook or run says; NOT_STARTED before."""

    @abstractmethod
    def execute(self, sweep: Run) -> int:
        """Do the work of this task; the exit code."""

    def enter(self, sweep: Run, array_job: str) -> None:  # noqa: B027  (nothing to note in a notebook)
        """Note in the task's folder that it is a task of this array job."""

    @property
    def completed(self) -> bool:
        """True if it ran to its end."""
        return self.state == "COMPLETED"


class NotebookTask(Task):
    """A notebook to be executed with parameters."""

    @override
    def own_state(self) -> str:
        return notebook_state(read_notebook(self.out).metadata) if self.out.exists() else NOT_STARTED

    @override
    def execute(self, sweep: Run) -> int:
        execute(sweep.path / sweep.info["notebook"], self.out, self.values, overwrite=True)
        return 0


class RunTask(Task):
    """A recipe to be trained; `out` is an ordinary run folder."""

    @override
    def own_state(self) -> str:
        run = Run(self.out)
        return str(run.state.state) if run.job_id else NOT_STARTED

    @override
    def execute(self, sweep: Run) -> int:
        array_job = os.environ.get("SLURM_ARRAY_JOB_ID")
        if array_job:
            self.enter(sweep, array_job)
            os.environ[Variable.JOB_ID] = self.job_id(array_job)
            os.environ.pop(Variable.SUBMISSION, None)  # it is the sweep's, and not in the run.json of this run
            os.execvp("bash", ["bash", str(self.out / "job.sbatch")])
        run = Run(self.out)
        submit(run)
        return run.wait().exit_code or 0

    def job_id(self, array_job: str) -> str:
        """Slurm's name of this task of the array."""
        return f"{array_job}_{self.number}"

    @override
    def enter(self, sweep: Run, array_job: str) -> None:
        run, job_id = Run(self.out), self.job_id(array_job)
        if run.job_id == job_id:
            return
        ledger.archive(run)  # what an earlier job left goes into the ledger
        log, script = sweep.path / "logs" / f"slurm-{job_id}.out", sweep.path / "job.sbatch"
        run.note(job_id=job_id, submitted=sweep.info["submitted"], script=str(script), log=str(log))
        ledger.append(run, SubmitRecord(time=time.time(), job_id=job_id))


@dataclass(frozen=True)
class Sweep(Result):
    """A sweep and the state of its tasks. Raises InputError for a run that is not a sweep."""

    run: Run

    def tasks(self) -> list[Task]:
        """Every task with its state now."""
        states = self.run.task_states()
        return [replace(task, state=_task_state(task, states)) for task in read_plan(self.run)]

    def rerun(self) -> list[int]:
        """Submit the tasks that did not complete, and return their numbers; runs go on from their newest checkpoint.

        Raises InputError while the sweep has not ended.
        """
        reach(self.run.cluster)
        again = [task.number for task in self.tasks() if not task.completed]
        if again:
            self.submit(again, limit=self.run.info.get("array_limit", 0))
        return again

    def submit(self, numbers: Sequence[int], limit: int) -> None:
        """Submit these tasks as one array; at most `limit` run at once (0: all)."""
        array = ",".join(map(str, numbers)) + (f"%{limit}" if limit else "")
        self.run.note(array=array, array_limit=limit)
        submit(self.run)
        array_job = str(self.run.job_id)
        if array_job.isdigit():
            plan = read_plan(self.run)
            for number in numbers:
                plan[number].enter(self.run, array_job)

    def as_dict(self) -> dict[str, Any]:
        """The sweep's folder, its job, and a record for each task."""
        tasks = [
            {"task": task.number, "values": task.values, "out": str(task.out), "state": task.state}
            for task in self.tasks()
        ]
        return {"sweep": str(self.run.path), "job_id": self.run.job_id, "tasks": tasks}

    def parts(self) -> Iterator[Part]:
        """A row for each task."""
        yield f"{self.run.path}, job {self.run.job_id}"
        tasks = self.tasks()
        rows = [[task.number, task.state, label(task.values), self._shown(task.out)] for task in tasks]
        failed = {*FINAL_STATES, NOT_RUN} - {JobState.COMPLETED}
        marks: dict[int, Mark] = {place: "bad" for place, task in enumerate(tasks) if task.state in failed}
        yield Table(["task", "state", "setting", "result"], rows, marks=marks)

    def _shown(self, out: Path) -> str:
        return str(out.relative_to(self.run.path) if self.run.path in out.parents else out)


def sweep(what: str | Path, settings: Sequence[Setting], cluster: Cluster, limit: int = 0) -> Sweep:
    """Check every setting, then submit all; at most `limit` run at once (0: all). `what`: a notebook, or a recipe.

    Raises InputError before anything is made (unknown name, bad value, a setting given twice), and as slurm.launch.
    """
    if Path(what).suffix == ".ipynb":
        run = _notebook_sweep(Path(what), settings, cluster)
    else:
        run = _recipe_sweep(what, settings, cluster)
    found = Sweep(run)
    found.submit(range(len(settings)), limit)
    return found


def measure(recipe: Recipe, settings: Sequence[Setting], cluster: Cluster) -> Sweep:
    """Submit short runs of a recipe, one at a time, that save and evaluate nothing. Raises as `sweep` does."""
    found = Sweep(_recipe_sweep(recipe, settings, cluster, measures=True))
    found.submit(range(len(settings)), limit=1)
    return found


def submit_notebook(notebook: Path, values: Setting, out: Path, cluster: Cluster) -> Run:
    """Submit the execution of one notebook as a job. Raises InputError before: a bad value, or `out` exists."""
    if out.exists():
        raise InputError(f"{out} exists; choose another name for the executed notebook.")
    run = _notebook_sweep(notebook, [values], cluster, out.absolute())
    submit(run)
    return run


def notebook_state(metadata: Mapping[str, Any]) -> str:
    """The state of an executed notebook, in Slurm's words, from its metadata."""
    exception = metadata["papermill"]["exception"]
    if exception is None:
        return "RUNNING"
    return "FAILED" if exception else "COMPLETED"


def read_plan(run: Run) -> list[Task]:
    """The tasks of a sweep, without their states. Raises InputError for a run that is not a sweep."""
    path = run.path / "sweep.json"
    if not path.exists():
        raise InputError(f"{run.path.name} is a run, but not a sweep: it has no sweep.json.")
    tasks: list[Task] = []
    for number, entry in enumerate(files.read_json(path)):
        out = run.path / entry["out"]
        kind = NotebookTask if out.suffix == ".ipynb" else RunTask
        tasks.append(kind(number, entry["values"], out))
    return tasks


def _task_state(task: Task, slurm_states: Mapping[int | None, RunState]) -> str:
    """What the task itself left says that it completed; otherwise Slurm knows more than the task."""
    own = task.own_state()
    if own != "COMPLETED" and task.number in slurm_states:
        return str(slurm_states[task.number].state)
    sweep = slurm_states.get(None)  # the tasks run here, one after another
    if sweep and sweep.ended and own in (NOT_STARTED, "RUNNING"):
        return str(sweep.state) if own else NOT_RUN
    return own or "PENDING"


def _check_settings(settings: Sequence[Setting], check: Callable[[Setting], T], key: Callable[[T], str]) -> list[T]:
    """What `check` makes of the settings. Raises InputError for the first bad one, and for two that are the same."""
    checked: list[T] = []
    first_with: dict[str, int] = {}
    for number, setting in enumerate(settings):
        try:
            checked.append(check(setting))
        except InputError as error:
            raise InputError(f"Setting {number} ({label(setting)}): {error}") from None
        before = first_with.setdefault(key(checked[-1]), number)
        if before != number:
            raise InputError(f"Settings {before} and {number} are the same ({label(setting)}); leave one of them out.")
    return checked


def _notebook_sweep(notebook: Path, settings: Sequence[Setting], cluster: Cluster, out: Path | None = None) -> Run:
    """The folder of a sweep over a notebook; `out` is where the only task's notebook goes, if not into the folder."""
    known = read_parameters(read_notebook(notebook))
    defaults = {name: parameter.default for name, parameter in known.items()}
    checked = _check_settings(
        settings, lambda setting: check(known, setting), lambda values: repr(sorted((defaults | values).items()))
    )
    reach(cluster)
    name = re.sub(r"[^\w.-]", "-", notebook.stem)
    run = Run.create_for_script("", cluster, name)
    shutil.copyfile(notebook, run.path / notebook.name)
    run.note(notebook=notebook.name)
    outs = [str(out or f"notebooks/{number:04}.ipynb") for number in range(len(settings))]
    options = jobscript.options(cluster, job_name=name, nodes=1, ntasks=1, cpus_per_task=1)
    _write(run, checked, outs, options, WAIT_FOR_NOTEBOOK)
    return run


def _recipe_sweep(name: str | Path | Recipe, settings: Sequence[Setting], cluster: Cluster, **facts: Any) -> Run:
    """The folder of a sweep over a recipe, with a run folder for each setting, whose run.json has `facts`."""
    base = Recipe.load(name)
    recipes = _check_settings(settings, lambda setting: base.override(**setting), Recipe.digest)
    if len({(recipe.parallel.nodes, recipe.parallel.gpus_per_node) for recipe in recipes}) > 1:
        raise InputError("The tasks of an array ask for the same nodes and GPUs; sweep each of these sizes by itself.")
    for recipe in recipes:
        slurm.check(recipe, cluster)
        chosen = slurm.choose(recipe, cluster).recipe
        slurm.check_fit(chosen, cluster, job_script.forecast(chosen, cluster))
    datasets = [prepare(recipe, cluster=cluster) for recipe in recipes]
    sweep = Run.create_for_script("", cluster, f"{base.name}-sweep")
    inside = replace(cluster, paths=replace(cluster.paths, runs=str(sweep.path / "runs")))
    runs: list[Run] = []
    for recipe, data in zip(recipes, datasets, strict=True):
        resolved = slurm.choose(recipe, inside, data.manifest)
        predicted = job_script.forecast(resolved.recipe, inside, data.manifest)
        runs.append(slurm.freeze(resolved, inside, data, predicted, **facts))
    # The tasks' options differ in the time of the warning before the time limit only; the earliest does for all.
    earliest = max((job_script.Job.of_run(run) for run in runs), key=lambda job: job.warning_s)
    outs = [f"runs/{run.path.name}" for run in runs]
    _write(sweep, settings, outs, job_script.options(earliest), REPLACED_BY_RUN)
    return sweep


def _write(run: Run, settings: Sequence[Setting], outs: Sequence[str], options: Sequence[str], how: str) -> None:
    tasks = [{"values": values, "out": out} for values, out in zip(settings, outs, strict=True)]
    files.write_json(run.path / "sweep.json", tasks)
    body = BODY.format(how=how, python=jobscript.python(run.cluster), run=shlex.quote(str(run.path)))
    files.write(run.path / "job.sbatch", jobscript.render(run.cluster, options, body))


def main(run: Run, number: int | None) -> int:
    """Inside the job: this task, or every task that has not completed, one after another. The highest exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a run which goes on here is cancelled
    plan = read_plan(run)
    if number is not None:
        return _execute(run, plan[number])
    highest = 0
    for task in plan:
        if task.own_state() == "COMPLETED":
            continue
        code = _execute(run, task)
        highest = max(highest, code)
        if code in STOPPED:
            break
    return highest


def _execute(run: Run, task: Task) -> int:
    print(f"task {task.number}: {label(task.values)}", flush=True)
    try:
        return task.execute(run)
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main(Run(Path(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else None))
