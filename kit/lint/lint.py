"""Lint a batch script: all findings of the rules in its text."""

from dataclasses import dataclass
from pathlib import Path

from kit.errors import InputError
from kit.lint.rule import RULE_TEXTS, Hit, Severity
from kit.lint.rules import RULES
from kit.lint.script import Script
from kit.lint.secret import may_hold_secret
from kit.lint.site import Site


@dataclass(frozen=True)
class Finding:
    """A fault in a file: where it is, what its effect is, and what to write instead."""

    file: str
    rule: str
    severity: Severity
    line: int
    message: str
    fix: str


def lint(text: str, file: str = "script", site: Site | None = None) -> list[Finding]:
    """All findings in a script, by line. `file` is its name; log folders are looked for next to it."""
    script = Script(text, file, site)
    found = {_finding(file, rule, hit) for rule, find in RULES.items() for hit in find(script)}
    return sorted(found, key=lambda finding: (finding.line, finding.rule, finding.message))


def _finding(file: str, rule: str, hit: Hit) -> Finding:
    text = RULE_TEXTS[f"{rule}b" if hit.milder else rule]
    detail = "This line" if may_hold_secret(hit.detail) else hit.detail
    return Finding(file, rule, text.severity, hit.line, text.message.replace("{}", detail), text.fix)


def lint_file(path: Path, site: Site | None = None) -> list[Finding]:
    """All findings in a file, by line. Raises InputError where it cannot be read."""
    return lint(read_script(path), str(path), site)


def read_script(path: Path) -> str:
    """The text with every byte and line end kept. Raises InputError where it cannot be read."""
    try:
        return path.read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give the path of a batch script.") from None
