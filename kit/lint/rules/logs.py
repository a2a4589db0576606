"""KS2: logs. Files that Slurm cannot open, overwrites or truncates."""

import re
from collections.abc import Iterator
from pathlib import Path

from kit.lint.options import Option
from kit.lint.rule import Hit, rule
from kit.lint.script import Script

LOGS = ("output", "error")


def _log_options(script: Script) -> Iterator[Option]:
    yield from (option for name, option in script.request.accepted.items() if name in LOGS)


@rule("KS201")
def log_folder_is_missing(script: Script) -> Iterator[Hit]:
    if script.site.release >= "23.02":  # from this release on Slurm makes the folder
        return
    created = {Path(word) for step in script.steps if step.program == "mkdir" for word in step.texts[1:]}
    folders = {Path(option.value).parent: option.line for option in reversed(list(_log_options(script)))}
    for folder, line in folders.items():
        exists = any((place / folder).is_dir() for place in (Path(), Path(script.file).parent))
        if exists or re.search(r"[$<{%~]", str(folder)):
            continue
        visible = Path(*folder.parts[:2]).is_dir() if folder.is_absolute() else Path(script.file).is_file()
        created_too_late = folder in created
        certain = script.site.release and (visible or created_too_late)
        yield Hit(line, str(folder), milder=not certain)


@rule("KS202")
def log_is_overwritten(script: Script) -> Iterator[Hit]:
    if script.request.value("open-mode").startswith("a"):
        return
    # An array task has its own %j and %a; %A is the same for all of them.
    unique = r"/dev/null|%\d*[jJa]" if script.request.has("array") else r"/dev/null|%\d*[jJA]"
    for option in _log_options(script):
        if not re.search(unique, option.value):
            yield Hit(option.line, option.value)
