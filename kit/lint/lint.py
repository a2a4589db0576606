"""What is wrong with an sbatch script: the rules' findings, sbatch's own verdict, and mending what is safe to mend."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kit import files
from kit.errors import InputError
from kit.lint.rules import DASH, DEAD, RULES, SPACE
from kit.lint.script import Script
from kit.lint.shell import LATE
from kit.lint.site import Site


class RuleText(NamedTuple):
    """What rules.toml has for a rule. message: with {} in place of what was found."""

    severity: str
    message: str
    fix: str


RULE_TEXTS = {
    name: RuleText(*texts)
    for name, texts in tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8")).items()
}


def rule_text(name: str) -> RuleText:
    """Severity, message and fix of a rule, such as "KS108"."""
    return RULE_TEXTS[name]


@dataclass(frozen=True)
class Finding:
    """One fault: where it is, what happens because of it, and what to write instead. severity: error, warning, info."""

    file: str
    rule: str
    severity: str
    line: int
    message: str
    fix: str


def lint(text: str, file: str = "script", site: Site | None = None) -> list[Finding]:
    """All findings in a script, by line."""
    script = Script(text, file, site or Site())
    found = {_finding(file, name, line, detail) for name, find in RULES.items() for line, detail in find(script)}
    return sorted(found, key=lambda finding: (finding.line, finding.rule, finding.message))


def _finding(file: str, name: str, line: int, detail: str) -> Finding:
    severity, message, fix_text = rule_text(name)
    return Finding(file, name[:5], severity, line, message.replace("{}", detail.replace(LATE, "$")), fix_text)


def lint_file(path: Path, site: Site | None = None) -> list[Finding]:
    """All findings in a file, by line. Raises InputError where it cannot be read."""
    return lint(read_script(path), str(path), site)


def read_script(path: Path) -> str:
    """The text with every byte and line end kept. Raises InputError where it cannot be read."""
    try:
        return path.read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give the path of a batch script.") from None


def _ascii(text: str) -> str:
    text = re.sub("[\u201c-\u201f]", '"', re.sub(SPACE, " ", text))
    return re.sub(rf"(?<![^\sH]){DASH}-?(?=(\w\w?))", lambda m: "--" if len(m[1]) > 1 else "-", text)


# Rules that are safe to mend in their own line: the row and what was found there give the row as it should be.
MENDS: dict[str, Callable[[str, str], str]] = {
    "KS101": lambda row, word: _ascii(row) if row.startswith("#SBATCH") else row.replace(word, _ascii(word)),
    "KS103": lambda row, _: DEAD.sub(lambda m: m[0] if m[3] else "#SBATCH", row),
    "KS408": lambda row, given: re.sub(rf"(rdzv[-_]id[= ]['\"]?){given}\b", r"\1$SLURM_JOB_ID", row),
    "KS409": lambda row, given: re.sub(rf"(?<=\s){given[:-3]}", lambda m: f"env {m[0]}", row, count=1),
    "KS411": lambda row, text: re.sub(rf"\b{text.split()[3][:-1]}\b", text.split()[-1], row),
    "KS415": lambda row, _: re.sub(r"\bNCCL_ASYNC_ERROR_HANDLING\b", "TORCH_NCCL_ASYNC_ERROR_HANDLING", row),
    "KS416": lambda row, _: re.sub(r"\bsrun\b", "srun --kill-on-bad-exit=1", row) if row.count("srun") == 1 else row,
    "KS508": lambda row, _: re.sub(
        r"(requeue \"?)\$\{?SLURM_JOB_?ID\b\}?", r"\1${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}", row
    ),
}


def fix(text: str) -> str:
    """The script with what is safe to mend mended (MENDS, KS104, KS105, KS203, KS609); nothing else in it changes."""
    rows = Script(text).text.removeprefix("\ufeff").split("\n")
    start = next((i for i, row in enumerate(rows) if row.startswith("#!")), 0)
    if all(not row.strip() or row.startswith("#") for row in rows[:start]):
        rows = [rows[start], *(row for row in rows[:start] if row.strip()), *rows[start + 1 :]]
    for name, mend in MENDS.items():
        for line, detail in list(RULES[name](Script("\n".join(rows)))):
            rows[line - 1] = mend(rows[line - 1], detail)
    script = Script("\n".join(rows))
    for _ in RULES["KS609"](script):
        rows.insert(script.body - 1, "export PYTHONUNBUFFERED=1")
    for line, _ in RULES["KS203"](script):
        rows.insert(line, "#SBATCH --open-mode=append")
    return "\n".join(rows)


def fix_file(path: Path) -> bool:
    """Mend a file in one step, with its mode kept; whether anything changed. Raises InputError as read_script does."""
    text, real = read_script(path), path.resolve()
    if (mended := fix(text)) == text:
        return False
    temporary = real.with_name(f".{real.name}.mended")
    files.write(temporary, mended)
    temporary.chmod(real.stat().st_mode & 0o7777)
    temporary.replace(real)
    return True
