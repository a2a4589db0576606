"""Files that are whole or absent: written under a temporary name, then renamed."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[1]


def locate(name: str) -> Path:
    """A path as given, else the same under the kit's own folder, where it keeps its sample and the unpacked model."""
    path = Path(name)
    return path if path.exists() or path.is_absolute() or not (REPOSITORY / path).exists() else REPOSITORY / path


def state_home() -> Path:
    """The folder of what the kit remembers for this user: folders with runs, Slurm's answers, runs that are watched."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kit"


def umask_mode(base: int = 0o666) -> int:
    """The mode that a plain open() would give a new file."""
    mask = os.umask(0)
    os.umask(mask)
    return base & ~mask


def write(path: Path, text: str) -> None:
    """Replace the file in one step, on disk before it gets its name."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(umask_mode())  # mkstemp gives 0600, which hides the file from teammates
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    write(path, json.dumps(value, indent=1, default=str) + "\n")


def read_json(path: Path) -> Any:
    """The file's value. Raises InputError where it is absent or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is not there.") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}).") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that gets its name when the block ends well. Raises InputError if the name is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.chmod(umask_mode(0o777))
        try:
            temporary.rename(path)
        except OSError:
            raise InputError(f"{path} exists already and is left as it is; choose another name.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
