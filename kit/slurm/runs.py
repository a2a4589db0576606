"""The table of all runs with their states, as `kit runs` shows it."""

import contextlib
import getpass
import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kit.errors import KitError
from kit.show import Mark, Part, Result, Table
from kit.slurm.ended import EndedRuns
from kit.slurm.outcome import RunState
from kit.slurm.run import Run, find_runs
from kit.slurm.states import JobState


@dataclass(frozen=True)
class Progress:
    """How far a run is: its newest optimizer step and training loss; None where nothing is logged."""

    step: int | None = None
    loss: float | None = None


@dataclass(frozen=True)
class RunTable(Result):
    """The state of every run that was found, newest first.

    others: the owners of runs that are another user's. progress: of those runs for which it was read.
    """

    states: Mapping[Run, RunState]
    others: Mapping[Run, str] = field(default_factory=dict)
    progress: Mapping[Run, Progress] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What `kit runs --json` prints."""
        return {
            "runs": [
                {
                    "run": str(run.path),
                    "owner": self.others.get(run) or getpass.getuser(),
                    "own": run not in self.others,
                    "job_id": state.job_id,
                    "state": str(state.state),
                    "tasks": dict(state.tasks),
                    **asdict(self.progress.get(run, Progress())),
                }
                for run, state in self.states.items()
            ]
        }

    def parts(self) -> Iterable[Part]:
        """A table of the runs."""
        rows = [self._row(run, state) for run, state in self.states.items()]
        marks: dict[int, Mark] = {
            index: "good" if state.state is JobState.COMPLETED else "bad"
            for index, state in enumerate(self.states.values())
            if state.ended
        }
        names = ("run", *(["owner"] if self.others else []), "job", "state", "step", "loss", "age", "tasks")
        yield Table(names, rows, marks=marks) if rows else "No runs were found."

    def _row(self, run: Run, state: RunState) -> tuple[object, ...]:
        progress, created = self.progress.get(run, Progress()), run.info.get("created")
        owner = [self.others.get(run) or getpass.getuser()] if self.others else []
        age = format_age(time.time() - created) if created else None
        tasks = format_tasks(state.tasks)
        return (run.name, *owner, state.job_id, str(state.state), progress.step, progress.loss, age, tasks)


def runs(everyone: bool = False) -> RunTable:
    """The state of this user's runs in ./runs and in each other folder in which this user launched one.

    With `everyone` those of other users as well, with their owners.

    A run whose state cannot be read is shown as UNKNOWN, with the reason as its cause.
    """
    states: dict[Run, RunState] = {}
    others: dict[Run, str] = {}
    ended = EndedRuns()
    for run in find_runs(everyone):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            others |= {} if run.is_own else {run: run.owner}
        try:
            states[run] = ended.state_of(run)
        except (KitError, OSError) as error:
            states[run] = RunState(run.name, None, JobState.UNKNOWN, cause=str(error))
    ended.save()
    return RunTable(states, others)


def format_age(seconds: float) -> str:
    """The largest unit of a duration, such as "5 min"."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_tasks(states: Mapping[int, JobState]) -> str:
    """The array tasks of each state, such as "0-2 4 COMPLETED, 3 FAILED"."""
    words = []
    for name in dict.fromkeys(states.values()):
        tasks = sorted(task for task, state in states.items() if state == name)
        # Consecutive tasks differ from their position by the same number.
        spans = [list(span) for _, span in itertools.groupby(enumerate(tasks), lambda pair: pair[1] - pair[0])]
        ends = [(span[0][1], span[-1][1]) for span in spans]
        words.append(" ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in ends) + f" {name}")
    return ", ".join(words)
