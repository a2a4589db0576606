"""Findings of `kit check`, and two helpers to get them: run a program, and give up on what hangs."""

import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
PROGRAM_TIMEOUT = 15.0  # seconds


@dataclass(frozen=True)
class Finding:
    """One fact about a machine or the cluster, and how it was found.

    `problem` says what to do about it. `facts` has the same for programs; a name with a dot is a key of the profile,
    such as nodes.gpus.
    """

    name: str
    value: str
    how: str
    problem: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def run_program(*command: str) -> str:
    """The program's output; empty where it is absent, fails or takes longer than 15 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def within(seconds: float, work: Callable[..., T], *arguments: Any) -> T:
    """What the work returns. Raises TimeoutError where a name server or a file system does not answer in time."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout=seconds)
