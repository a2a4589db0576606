"""Work in threads that must not disturb the kernel: slow questions (Slurm, a dead file system), and short turns."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Calls `function` at most every `interval` seconds, for the first time after `delay`, and never twice at a time.

    `value` is its newest result, `error` what it raised last; both None before the first answer.
    """

    def __init__(self, function: Callable[[], T], interval: float, delay: float = 0.0) -> None:
        self.value: T | None = None
        self.error: Exception | None = None
        self.interval = interval
        self._function = function
        self._started: float | None = None  # of the call that is under way
        self._answered = 0.0
        self._due = time.monotonic() + delay

    @property
    def answered(self) -> bool:
        """Whether there was an answer or an error."""
        return self._answered > 0

    @property
    def waiting(self) -> float:
        """Seconds since the call that is under way began; 0 if none is."""
        started = self._started
        return time.monotonic() - started if started is not None else 0.0

    def refresh(self) -> None:
        """Start a call if one is due. Returns at once."""
        if time.monotonic() >= self._due and self._started is None:
            self._started = time.monotonic()
            threading.Thread(target=self._call, daemon=True).start()

    def _call(self) -> None:
        try:
            self.value, self.error = self._function(), None
        except Exception as error:  # whatever it is, the caller shows it
            self.error = error
        self._answered, self._started = time.monotonic(), None
        self._due = self._answered + self.interval


SWITCH_INTERVAL = 0.0005  # seconds for which a thread may keep the interpreter; Python's default is 0.005
_lock, _users, _usual_interval = threading.Lock(), 0, 0.0


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """While the block runs, other threads get the interpreter sooner, so that cells do not feel the board's work.

    The setting is the process's; it is restored when the last thread has left the block.
    """
    global _users, _usual_interval
    with _lock:
        if _users == 0:
            _usual_interval = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                sys.setswitchinterval(_usual_interval)
