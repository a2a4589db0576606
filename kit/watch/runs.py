"""`kit.runs`: the table of all runs, with the newest step and loss of each."""

import contextlib
from dataclasses import replace

from kit import files
from kit.errors import KitError
from kit.slurm import runs as states
from kit.slurm.folder import RunFolder
from kit.slurm.outcome import RunState
from kit.slurm.runs import Progress, RunTable
from kit.slurm.states import JobState
from kit.watch.metrics import Metrics

NEWEST = 50  # runs whose log is read, which takes some 10 ms of each
LOSSES = ("train/loss", "loss")  # names under which trainers log it
POLLS = 3  # a log's end is read by the first


def runs(everyone: bool = False) -> RunTable:
    """The state of this user's runs in ./runs and in each other folder in which this user launched one, newest first.

    With `everyone` those of other users as well. The newest 50 have step and loss. A run whose state cannot be read is
    shown as UNKNOWN, with the reason as its cause.
    """
    found = states.runs(everyone)
    newest = list(found.states.items())[:NEWEST]
    return replace(found, progress={run: _of_result(run, state) or progress_of(run) for run, state in newest})


def _of_result(run: RunFolder, state: RunState) -> Progress | None:
    """What a completed training has written of its end, which takes less time to read than its log."""
    if state.state is JobState.COMPLETED:
        with contextlib.suppress(KitError, OSError, ValueError, KeyError, TypeError):
            result = files.read_json(run.state_folder.result)
            return Progress(int(result["steps"]), float(result["loss"]))
    return None


def progress_of(run: RunFolder) -> Progress:
    """The newest step and training loss in the run's own W&B log."""
    try:
        metrics = Metrics(run.path)
        for _ in range(POLLS):
            metrics.poll()
    except (KitError, OSError):
        return Progress()
    for name in LOSSES:
        if (loss := metrics.last(name)) is not None:
            steps, _ = metrics.line(name, 2)
            return Progress(int(steps[-1]), loss)
    return Progress()
