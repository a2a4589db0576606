"""Which versions another trainer's environment has, compared with those that its renderer knows."""

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kit.config.recipe import TrainerChoice
from kit.errors import InputError
from kit.show import Answer, Table
from kit.trainers.catalog import other

ANSWER_S = 60  # seconds for an interpreter on a slow file system
CODE = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(python: str, packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that the interpreter's environment has. Raises InputError where it cannot tell."""
    path = shutil.which(Path(python).expanduser())
    if path is None:
        raise InputError(f"{python} is not an interpreter on this machine: give the path of the environment's python.")
    command = [path, "-I", "-c", CODE, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S)
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        raise InputError(f"{python} does not tell its versions: {''.join(last)}.") from None


def differences(name: str, python: str) -> dict[str, tuple[str, str]]:
    """(installed, known) for each package that is absent ("") or has another version. Raises InputError."""
    known = other(name).KNOWN
    if not python:
        raise InputError(
            f"No interpreter is named: set trainer.python to that of an environment with {name}, which every node "
            f"sees; `bash env/trainers/{name} FOLDER` builds one."
        )
    found = versions(python, known)
    return {name: (found.get(name, ""), known[name]) for name in known if found.get(name) != known[name]}


def check(trainer: TrainerChoice) -> None:
    """Raises InputError where the environment is absent, or has other versions than the renderer knows."""
    if differing := differences(trainer.name, trainer.python):
        listed = ", ".join(
            f"{name} {found} instead of {known}" if found else f"no {name} {known}"
            for name, (found, known) in differing.items()
        )
        raise InputError(
            f"The environment of {trainer.python} is not the one that {trainer.name} is rendered for: {listed}. "
            "Install these versions, or launch with --anyway."
        )


def report(name: str, python: str) -> tuple[Answer, bool]:
    """What `kit check --trainer` prints, and whether every version is the known one. Raises InputError."""
    known, differing = other(name).KNOWN, differences(name, python)
    found = {package: differing[package][0] if package in differing else known[package] for package in known}
    rows = [(package, found[package] or "absent", version) for package, version in known.items()]
    values = {"trainer": name, "python": python, "installed": found, "known": dict(known)}
    return Answer(values, Table(("package", "installed", "known"), rows)), not differing
