"""Folders and services that all workers of a test session share: made once, guarded by file locks.

The process that starts the session creates the folder and passes its path on in the environment. It also stops the
services and removes the folder at the end, when all workers have ended.
"""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

VARIABLE = "TESTS_SHARED_FOLDER"


def create() -> Path | None:
    """The folder of a new session; None where this process belongs to a session that has one."""
    if VARIABLE in os.environ:
        return None
    folder = Path(tempfile.mkdtemp(prefix="kit-tests-"))
    os.environ[VARIABLE] = str(folder)
    return folder


def remove(folder: Path) -> None:
    """Stop the services, the last first, and delete the folder."""
    stops = folder / "stop.jsonl"
    for line in reversed(stops.read_text().splitlines() if stops.exists() else []):
        subprocess.run(json.loads(line), check=False)
    shutil.rmtree(folder, ignore_errors=True)
    os.environ.pop(VARIABLE, None)


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """The session's folder, while this process alone holds the lock of that name."""
    folder = Path(os.environ[VARIABLE])
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def once(name: str, build: Callable[[Path], object]) -> Path:
    """The folder `name` of this session, filled by the first caller's `build(folder)`; other callers wait for it.

    A build that fails or skips is not repeated: later callers fail or skip with the same words.
    """
    with locked(name) as folder:
        result, path = folder / f"{name}.result", folder / name
        if not result.exists():
            path.mkdir()
            outcome = "made"
            try:
                build(path)
            except pytest.skip.Exception as skipped:
                outcome = f"skip {skipped.msg}"
                raise
            except BaseException as error:
                outcome = f"fail {error!r}"
                raise
            finally:
                result.write_text(outcome)
        outcome, _, words = result.read_text().partition(" ")
        if outcome == "skip":
            pytest.skip(words)
        if outcome == "fail":
            pytest.fail(f"{name} could not be made for an earlier test: {words}")
        return path


def store(name: str, text: str) -> None:
    """Write a file of the session; readers see the complete text."""
    folder = Path(os.environ[VARIABLE])
    partial = folder / f"{name}.{os.getpid()}"
    partial.write_text(text)
    partial.replace(folder / name)


def stored(name: str) -> str:
    """The text of a file of the session."""
    return (Path(os.environ[VARIABLE]) / name).read_text()


def stop_at_end(*command: object) -> None:
    """Run this command when the session ends."""
    with locked("stop") as folder, (folder / "stop.jsonl").open("a") as stops:
        stops.write(json.dumps([str(word) for word in command]) + "\n")


def start_slurm(folder: Path, **settings: str) -> None:
    """Start the two-node Slurm of env/slurm in this folder; it is stopped when the session ends."""
    scripts = Path(__file__).resolve().parents[1] / "env" / "slurm"
    environment = os.environ | settings
    up = subprocess.run(["bash", scripts / "up", folder], capture_output=True, text=True, env=environment)
    if up.returncode == 3:
        pytest.skip(f"no live Slurm: {up.stderr.strip()}")
    stop_at_end("bash", scripts / "down", folder)
    assert up.returncode == 0, up.stderr
