"""KS2: logs. Files that Slurm cannot open, overwrites or truncates."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kit.lint.options import Option
from kit.lint.rule import Hit, rule
from kit.lint.script import Script

LOGS = ("output", "error")


class MissingFolder(NamedTuple):
    """The folder of a log that does not exist here.

    certain: it would be visible from here if it existed, or the script creates it, too late.
    """

    hit: Hit
    certain: bool


def _log_options(script: Script) -> Iterator[Option]:
    yield from (option for name, option in script.request.accepted.items() if name in LOGS)


def _missing_folders(script: Script) -> Iterator[MissingFolder]:
    if script.site.release >= "23.02":  # from this release on Slurm makes the folder
        return
    created = {Path(word) for step in script.steps if step.program == "mkdir" for word in step.texts[1:]}
    for option in _log_options(script):
        folder = Path(option.value).parent
        exists = any((place / folder).is_dir() for place in (Path(), Path(script.file).parent))
        if exists or re.search(r"[$<{%~]", str(folder)):
            continue
        visible = Path(*folder.parts[:2]).is_dir() if folder.is_absolute() else Path(script.file).is_file()
        yield MissingFolder(Hit(option.line, str(folder)), visible or folder in created)


@rule("KS201")
def log_folder_is_missing(script: Script) -> Iterator[Hit]:
    """A log in a folder that does not exist when the job starts."""
    yield from (missing.hit for missing in _missing_folders(script) if missing.certain)


@rule("KS201b")
def log_folder_not_seen(script: Script) -> Iterator[Hit]:
    """A log in a folder that is not seen from here."""
    yield from (missing.hit for missing in _missing_folders(script) if not missing.certain)


@rule("KS202")
def log_is_overwritten(script: Script) -> Iterator[Hit]:
    """A log with the same name for each job or each array task."""
    if script.request.value("open-mode").startswith("a"):
        return
    # An array task has its own %j and %a; %A is the same for all of them.
    unique = r"/dev/null|%\d*[jJa]" if script.request.has("array") else r"/dev/null|%\d*[jJA]"
    for option in _log_options(script):
        if not re.search(unique, option.value):
            yield Hit(option.line, option.value)


@rule("KS203")
def requeue_truncates_log(script: Script) -> Iterator[Hit]:
    """--requeue without --open-mode."""
    if script.request.has("requeue") and not script.request.has("open-mode"):
        yield Hit(script.request.line_of("requeue"))


@rule("KS204")
def array_pattern_without_array(script: Script) -> Iterator[Hit]:
    """%A or %a in the log's name of a job that is not an array."""
    if script.request.has("array"):
        return
    for option in _log_options(script):
        if re.search(r"%\d*[Aa]", option.value):
            yield Hit(option.line, option.value)
