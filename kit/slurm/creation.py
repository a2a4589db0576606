"""Make the folder of a new run: complete or absent, with a name that is never used twice."""

import getpass
import re
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError
from kit.slurm.folder import RunFolder

FOLDERS = ("logs", "state", "nodes", "wandb", "checkpoints")
MOST_OF_A_NAME = 999  # runs of one name in one minute
LEFTOVER_AFTER_S = 3600  # a launch makes its folder within a second
_LEFTOVER = re.compile(r"\..+-\d{8}-\d{4}(-\d+)?\.[a-z0-9_]{8}", re.ASCII)  # names of `files.new_folder`


def create(root: Path, name: str, texts: Mapping[str, str], facts: Mapping[str, Any]) -> Path:
    """A new folder root/name-date-time with these files, and with these facts in run.json. Returns its path.

    Raises InputError where the folder cannot be written, or sbatch could not read its path.
    """
    check_root(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = _create(root, f"{name}-{time.strftime('%Y%m%d-%H%M')}", texts, facts)
        path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))  # what is in it is executed as this user
        _remove_leftovers(root, path)
    except OSError as error:
        raise InputError(
            f"No run folder can be made in {root}: {error.strerror} ({error.filename or name}). "
            "Free space there, or set paths.runs in the cluster profile to a folder that every node sees."
        ) from None
    return path


def check_root(root: Path) -> None:
    """Raises InputError for a path that sbatch would change: the job's log is in it, and its name is a pattern."""
    found = [sign for sign in '%\\"' if sign in str(root)]
    if found:
        raise InputError(
            f"paths.runs: {root} contains {found[0]}, which sbatch does not take as it is in the path of a log. "
            "Choose a folder without it."
        )


def _create(root: Path, name: str, texts: Mapping[str, str], facts: Mapping[str, Any]) -> Path:
    for suffix in ["", *(f"-{number}" for number in range(2, MOST_OF_A_NAME + 1))]:
        path = root / (name + suffix)
        if path.exists():
            continue
        try:
            with files.new_folder(path) as made:
                _fill(made, path.name, texts, facts)
        except InputError:  # another launch has taken the name since
            continue
        return path
    raise InputError(f"{root} holds a thousand runs named {name}; wait a minute or rename the recipe.")


def _fill(folder: Path, name: str, texts: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    for subfolder in FOLDERS:
        (folder / subfolder).mkdir(0o755)
    for file, text in texts.items():
        files.write(folder / file, text)
    RunFolder(folder).note(
        name=name, job_id=None, wandb_id=secrets.token_hex(4), created=time.time(),
        host=socket.gethostname(), user=getpass.getuser(), python=sys.executable, git=git_state(), **facts,
    )  # fmt: skip


def _remove_leftovers(root: Path, new: Path) -> None:
    """Remove what launches that were killed have left unfinished. Ages are by the file system's clock."""
    now = new.stat()
    for path in root.glob(".*"):
        if not _LEFTOVER.fullmatch(path.name):
            continue
        try:
            status = path.lstat()
        except FileNotFoundError:  # another launch has given it its final name since
            continue
        ours = status.st_uid == now.st_uid and stat.S_ISDIR(status.st_mode)
        if ours and now.st_mtime - status.st_mtime > LEFTOVER_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def git_state() -> str:
    """The kit's commit, with -dirty where the tree differs from it; empty outside a git checkout."""
    command = ["git", "-C", str(files.REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()
