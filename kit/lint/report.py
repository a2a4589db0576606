"""Findings next to the lines of the script that they are about."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kit.lint.lint import Finding
from kit.show import Mark, Part, Result, Table

MARKS: dict[str, Mark] = {"error": "bad", "warning": "warning"}
SECRET_RULES = ("KS601", "KS602")  # their lines hold a secret and are not shown


@dataclass(frozen=True)
class Report(Result):
    """The findings of one script."""

    script: str
    findings: Sequence[Finding]

    def as_dict(self) -> dict[str, Any]:
        """The findings, as `kit lint --json` prints them."""
        return {"findings": [asdict(finding) for finding in self.findings]}

    def parts(self) -> Iterator[Part]:
        """A row for each finding: the line, its source, and what is wrong with it."""
        if not self.findings:
            return
        secret = {finding.line for finding in self.findings if finding.rule in SECRET_RULES}
        source = ["" if number in secret else row for number, row in enumerate(["", *self.script.split("\n"), ""])]
        rows = [
            [
                finding.line,
                source[finding.line],
                f"{finding.severity} {finding.rule}",
                f"{finding.message} {finding.fix}",
            ]
            for finding in self.findings
        ]
        marks = {n: MARKS[finding.severity] for n, finding in enumerate(self.findings) if finding.severity in MARKS}
        yield Table(["line", "source", "finding", "what to do"], rows, marks=marks)
