"""Fix what is safe to fix in a batch script: `kit lint --fix`."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kit import files
from kit.lint.lint import read_script
from kit.lint.rule import Hit
from kit.lint.rules import RULES
from kit.lint.rules.directives import ALMOST_DIRECTIVE, DASH, QUOTE, SPACE
from kit.lint.script import Script


def fix(text: str) -> str:
    """The script with the faults corrected that are safe to correct; nothing else in it changes.

    These are the rules of ROW_FIXES, and KS104, KS105, KS203 and KS609.
    """
    rows = _interpreter_first(Script(text).rows)
    for id, fix_row in ROW_FIXES.items():
        for hit in list(RULES[id](Script("\n".join(rows)))):
            if hit.line <= len(rows):  # a variable of several lines, run by bash -c, may count beyond the end
                rows[hit.line - 1] = fix_row(rows[hit.line - 1], hit)
    return "\n".join(_with_missing_rows(rows))


def fix_file(path: Path) -> bool:
    """Fix a file in one step; its mode stays. Returns whether it changed. Raises InputError if it cannot be read."""
    text, real = read_script(path), path.resolve()
    fixed = fix(text)
    if fixed == text:
        return False
    temporary = real.with_name(f".{real.name}.fixed")
    files.write(temporary, fixed)
    temporary.chmod(real.stat().st_mode & 0o7777)
    temporary.replace(real)
    return True


def _interpreter_first(rows: list[str]) -> list[str]:
    """The rows with #! at the top, where only comments and blank rows are above it (KS104)."""
    rows = [rows[0].removeprefix("\ufeff"), *rows[1:]]
    first = next((index for index, row in enumerate(rows) if row.startswith("#!")), 0)
    above = rows[:first]
    if any(row.strip() and not row.startswith("#") for row in above):
        return rows
    return [rows[first], *(row for row in above if row.strip()), *rows[first + 1 :]]


def _with_missing_rows(rows: list[str]) -> list[str]:
    """The rows with those that KS203 and KS609 miss."""
    script = Script("\n".join(rows))
    rows = list(rows)
    for _ in RULES["KS609"](script):
        rows.insert(script.body_line - 1, "export PYTHONUNBUFFERED=1")
    for hit in RULES["KS203"](script):
        rows.insert(hit.line, "#SBATCH --open-mode=append")
    return rows


def _to_ascii(text: str) -> str:
    """The text with plain quotes and spaces, and with - or -- before options."""
    text = re.sub(QUOTE, '"', re.sub(SPACE, " ", text))
    return re.sub(rf"(?<![^\sH]){DASH}-?(?=(\w\w?))", lambda match: "--" if len(match[1]) > 1 else "-", text)


def _fix_characters(row: str, hit: Hit) -> str:
    if row.startswith("#SBATCH"):
        return _to_ascii(row)
    return row.replace(hit.found, _to_ascii(hit.found))


def _fix_directive(row: str, _hit: Hit) -> str:
    """#SBATCH for what was meant as such; "# SBATCH" stays, since it may have been switched off on purpose."""
    return ALMOST_DIRECTIVE.sub(lambda match: match[0] if match[3] else "#SBATCH", row)


# Rules that are fixed in their own row by a regular expression and its replacement. FOUND is what the rule found.
FOUND, INSTEAD = "<found>", "<instead>"
REPLACEMENTS = {
    "KS408": (rf"(rdzv[-_]id[= ]['\"]?){FOUND}\b", r"\1$SLURM_JOB_ID"),
    "KS409": (rf"^(.*?\s){FOUND}", rf"\1env {FOUND}"),
    "KS411": (rf"\b{FOUND}\b", INSTEAD),
    "KS415": (r"\bNCCL_ASYNC_ERROR_HANDLING\b", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "KS416": (r"^((?:(?!srun).)*)\bsrun\b(?!.*srun)", r"\1srun --kill-on-bad-exit=1"),  # the only srun of the row
    "KS508": (r"(requeue \"?)\$\{?SLURM_JOB_?ID\b\}?", r"\1${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"),
}


def _replace(id: str, row: str, hit: Hit) -> str:
    pattern, replacement = (
        text.replace(FOUND, hit.found).replace(INSTEAD, hit.replacement) for text in REPLACEMENTS[id]
    )
    return re.sub(pattern, replacement, row)


# Rules that are fixed in their own row: from the row and the hit to the row as it should be.
ROW_FIXES: dict[str, Callable[[str, Hit], str]] = {
    "KS101": _fix_characters,
    "KS103": _fix_directive,
    **{id: partial(_replace, id) for id in REPLACEMENTS},
}
