"""The table of all runs with their states, as `kit runs` shows it."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kit.errors import KitError
from kit.show import Mark, Part, Result, Table
from kit.slurm import evidence
from kit.slurm.outcome import RunState
from kit.slurm.run import Run, find_runs
from kit.slurm.states import JobState


@dataclass(frozen=True)
class RunTable(Result):
    """The state of every run that was found, newest first."""

    states: Mapping[Run, RunState]

    def as_dict(self) -> dict[str, Any]:
        """What `kit runs --json` prints."""
        return {
            "runs": [
                {
                    "run": str(run.path),
                    "job_id": state.job_id,
                    "state": str(state.state),
                    "tasks": state.as_dict()["tasks"],
                }
                for run, state in self.states.items()
            ]
        }

    def parts(self) -> Iterable[Part]:
        """A table of the runs."""
        rows = [
            (run.name, state.job_id, str(state.state), format_tasks(state.tasks)) for run, state in self.states.items()
        ]
        marks: dict[int, Mark] = {
            index: "good" if state.state is JobState.COMPLETED else "bad"
            for index, state in enumerate(self.states.values())
            if state.ended
        }
        yield Table(("run", "job", "state", "tasks"), rows, marks=marks) if rows else "No runs were found."


def runs() -> RunTable:
    """The state of every run in ./runs and in each other folder in which this user launched one.

    A run whose state cannot be read is shown as UNKNOWN, with the reason as its cause.
    """
    states: dict[Run, RunState] = {}
    for run in find_runs():
        try:
            states[run] = evidence.state_of(run)
        except (KitError, OSError) as error:
            states[run] = RunState(run.name, None, JobState.UNKNOWN, cause=str(error))
    return RunTable(states)


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
