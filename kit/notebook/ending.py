"""How the execution of a notebook can end: for each ending the status of the cell, the exit code and the message."""

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Ending(StrEnum):
    """The value is written into the metadata of the executed notebook, as kit.ending."""

    COMPLETED = "completed"
    LEFT = "left with sys.exit(0)"
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
    exit_code: int  # where Outcome.number is 0
    message: str


TIMED_OUT = 124  # as timeout(1) exits
_RULES = {
    Ending.COMPLETED: _Rule("completed", 0, ""),
    # A graceful end for papermill too: what the author of a notebook calls when there is nothing left to do.
    Ending.LEFT: _Rule("completed", 0, "The cell called sys.exit(0), so the cells behind it did not run."),
    Ending.CELL_FAILED: _Rule("failed", 1, "The cell raised {detail}."),
    Ending.CELL_TIMED_OUT: _Rule("terminated", TIMED_OUT, "The cell ran longer than {detail} s."),
    Ending.OUTPUT_TIMED_OUT: _Rule("terminated", 1, "The cell's output did not arrive within {detail} s."),
    Ending.KERNEL_NOT_STARTED: _Rule("pending", 1, "The kernel did not start: {detail}."),
    Ending.KERNEL_SIGKILLED: _Rule(
        "terminated", 1, "The kernel was killed (SIGKILL), as the system does when memory runs out."
    ),
    Ending.KERNEL_SIGNALLED: _Rule("terminated", 1, "The kernel died ({signal})."),
    # A kernel that leaves with 0 in the middle of a cell did not complete the notebook.
    Ending.KERNEL_EXITED: _Rule("terminated", 1, "The kernel died (exit code {number})."),
    Ending.STOPPED: _Rule("terminated", 1, "{signal} stopped the notebook."),
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
    def failed(self) -> bool:
        """True unless the notebook completed, or left with sys.exit(0)."""
        return self.exit_code != 0

    @property
    def cell_status(self) -> str:
        """The status of the last cell that ran."""
        return _RULES[self.ending].cell_status

    @property
    def exit_code(self) -> int:
        """0 if the notebook completed or left with sys.exit(0), 1 for an exception, 124 for a time-out, 128 + signal.

        Where the kernel exited, it is the kernel's own.
        """
        if self.ending in _BY_SIGNAL:
            return 128 + self.number
        return self.number or _RULES[self.ending].exit_code

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
