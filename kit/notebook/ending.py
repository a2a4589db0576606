"""How the execution of a notebook can end: for each ending the status of the cell, the exit code and the message."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Ending(StrEnum):
    """The value is written into the metadata of the executed notebook, as kit.ending."""

    COMPLETED = "completed"
    CELL_FAILED = "cell failed"
    CELL_TIMED_OUT = "cell timed out"
    OUTPUT_TIMED_OUT = "output timed out"
    KERNEL_NOT_STARTED = "kernel not started"
    KERNEL_SIGKILLED = "kernel killed"
    KERNEL_SIGNALLED = "kernel ended by a signal"
    KERNEL_EXITED = "kernel exited"
    STOPPED = "stopped by a signal"


class _Rule(NamedTuple):
    cell_status: str  # of the cell that ran; papermill's words, and "terminated" for one that could not end itself
    exit_code: Callable[[int], int]  # from Outcome.number
    message: str


TIMED_OUT = 124  # as timeout(1) exits
_RULES = {
    Ending.COMPLETED: _Rule("completed", lambda number: 0, ""),
    Ending.CELL_FAILED: _Rule("failed", lambda number: 1, "The cell raised {detail}."),
    Ending.CELL_TIMED_OUT: _Rule("terminated", lambda number: TIMED_OUT, "The cell ran longer than {detail} s."),
    Ending.OUTPUT_TIMED_OUT: _Rule(
        "terminated", lambda number: 1, "The cell's output did not arrive within {detail} s."
    ),
    Ending.KERNEL_NOT_STARTED: _Rule("pending", lambda number: 1, "The kernel did not start: {detail}."),
    Ending.KERNEL_SIGKILLED: _Rule(
        "terminated",
        lambda number: 128 + number,
        "The kernel was killed (SIGKILL), as the system does when memory runs out.",
    ),
    Ending.KERNEL_SIGNALLED: _Rule("terminated", lambda number: 128 + number, "The kernel died ({signal})."),
    # A kernel that leaves with 0 in the middle of a cell did not complete the notebook.
    Ending.KERNEL_EXITED: _Rule("terminated", lambda number: number or 1, "The kernel died (exit code {number})."),
    Ending.STOPPED: _Rule("terminated", lambda number: 128 + number, "{signal} stopped the notebook."),
}
_BY_SIGNAL = {Ending.KERNEL_SIGKILLED, Ending.KERNEL_SIGNALLED, Ending.STOPPED}


@dataclass(frozen=True)
class Outcome:
    """How an execution ended."""

    ending: Ending
    number: int = 0  # the signal, or the kernel's exit code
    detail: str = ""
    cell: int | None = None  # index of the cell that did not complete; None: none did, or no kernel started

    @property
    def completed(self) -> bool:
        """True if every cell ran to its end."""
        return self.ending is Ending.COMPLETED

    @property
    def cell_status(self) -> str:
        """The status of the last cell that ran."""
        return _RULES[self.ending].cell_status

    @property
    def exit_code(self) -> int:
        """0 for a completed notebook, 1 for an exception, 124 for a time-out, 128 + signal, or the kernel's own."""
        return _RULES[self.ending].exit_code(self.number)

    @property
    def reason(self) -> str:
        """A sentence; empty for a completed notebook."""
        name = signal.Signals(self.number).name if self.ending in _BY_SIGNAL else ""
        return _RULES[self.ending].message.format(detail=self.detail, number=self.number, signal=name)


def kernel_death(return_code: int) -> Outcome:
    """The outcome for a kernel process that is gone; `return_code` as subprocess gives it, negative for a signal."""
    if return_code >= 0:
        return Outcome(Ending.KERNEL_EXITED, return_code)
    killed = return_code == -signal.SIGKILL
    return Outcome(Ending.KERNEL_SIGKILLED if killed else Ending.KERNEL_SIGNALLED, -return_code)
