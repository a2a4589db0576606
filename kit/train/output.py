"""The output of a rank: messages that a full disk does not take are dropped, and results are tried again."""

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from kit import files
from kit.slurm.folder import RunFolder


class LossyFile(io.FileIO):
    """A file for messages. Neither a write nor closing it raises OSError."""

    def write(self, data: Any) -> int:
        """Write bytes, or drop them where that is not possible. Returns the number of bytes."""
        try:
            return super().write(data)
        except OSError:
            return len(data)

    def close(self) -> None:
        """Close the file; NFS may say only now that the disk is full."""
        try:
            super().close()
        except OSError:
            return


def lossy_stream(descriptor: int) -> TextIO:
    """A text stream to a file descriptor, which stays open; each line is written at once."""
    buffered: io.BufferedWriter = io.BufferedWriter(LossyFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffered, encoding="utf-8", errors="replace", line_buffering=True)


def _open_log(path: Path) -> int | None:
    """A descriptor of a log to append to; None where it cannot be opened."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        return None


def redirect_output(run: RunFolder, rank: int) -> TextIO:
    """Send this process's output to logs/rank-<n>.log. Returns the job's log, for lines that matter to everyone.

    Lines that cannot be written are lost, and nothing is raised.
    """
    console = lossy_stream(os.dup(1))
    path = run.path / "logs" / f"rank-{rank:03}.log"
    log = _open_log(path)
    if log is None:
        print(f"{path} cannot be opened: the output of rank {rank} is in this log.", file=console, flush=True)
    else:
        os.dup2(log, 1)
        os.dup2(log, 2)
    sys.stdout, sys.stderr = lossy_stream(1), lossy_stream(2)
    return console


def write_durably(path: Path, text: str, say: Callable[[str], None], pauses: Sequence[float] = (2, 8, 20)) -> None:
    """Write a file that the job script decides by. Tries again after each pause (seconds), then raises OSError."""
    for pause in pauses:
        try:
            files.write(path, text)
            return
        except OSError as error:
            say(f"{path} cannot be written ({error.strerror}); trying again in {pause:.0f} s")
            time.sleep(pause)
    files.write(path, text)
