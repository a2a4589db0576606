"""The right to submit a run: one process at a time, also on file systems whose locks do not cross hosts.

Each attempt claims the next number by renaming a complete folder to `state/submissions/<number>`, which succeeds for
one process only, on every file system. Claims are never removed, so a process that was slow to look cannot take the
place of a newer one. A claim whose process was killed ends with that process.
"""

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from kit import files
from kit.errors import InputError
from kit.slurm.folder import RunFolder

ELSEWHERE_S = 120.0  # seconds after which a process on another host no longer submits: sbatch has 30 of them
SETTLING_S = 2.0  # seconds in which the controller records a job whose sbatch was killed after it had sent the job
_open_here: set[Path] = set()  # claims that threads of this process hold


@contextmanager
def claim(run: RunFolder) -> Iterator[None]:
    """Hold the right to submit this run. Raises InputError while another process or thread holds it."""
    folder = run.state_folder.submissions
    number = max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=0)
    last = folder / str(number)
    if is_open(last):
        _check_not_held(run, last)
        time.sleep(SETTLING_S)
    mine = folder / str(number + 1)
    _take(run, mine)
    try:
        yield
    finally:
        _open_here.discard(mine)
        with contextlib.suppress(OSError):  # it then ends with this process
            (mine / "open").unlink()


def is_open(claim: Path) -> bool:
    """Whether the process that made the claim has not come to the end of its submission."""
    return (claim / "open").exists()


def _take(run: RunFolder, mine: Path) -> None:
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "created": psutil.Process().create_time()}
    try:
        with files.new_folder(mine) as made:
            files.write_json(made / "holder.json", holder)
            (made / "open").touch()
            _open_here.add(mine)
    except InputError:
        _open_here.discard(mine)
        raise InputError(
            f"Another process has begun to submit {run.name} at the same moment: `kit state {run.name}` shows its job."
        ) from None
    except OSError as error:
        _open_here.discard(mine)
        raise InputError(f"Nothing was submitted: {error.strerror} ({error.filename or mine}).") from None


def _check_not_held(run: RunFolder, last: Path) -> None:
    holder = files.read_json(last / "holder.json")
    if _is_held(run, last, holder):
        raise InputError(
            f"{run.name} is being submitted by process {holder['pid']} on {holder['host']}: wait, and look at "
            f"`kit state {run.name}`."
        )


def _is_held(run: RunFolder, last: Path, holder: dict[str, Any]) -> bool:
    if holder["host"] != socket.gethostname():
        with tempfile.TemporaryFile(dir=last.parent) as now:  # the file system's clock, which the claim has, too
            return os.fstat(now.fileno()).st_mtime - (last / "open").stat().st_mtime < ELSEWHERE_S
    if holder["pid"] == os.getpid():
        return last in _open_here
    try:
        return bool(psutil.Process(holder["pid"]).create_time() == holder["created"]) or _sbatch_lives(run)
    except psutil.NoSuchProcess:
        return _sbatch_lives(run)


def _sbatch_lives(run: RunFolder) -> bool:
    """Whether an sbatch of this run, whose parent was killed, may still submit it."""
    script = str(run.path / "job.sbatch")
    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return any("sbatch" in Path(words[0]).name and script in words for words in commands if words)
