"""LintReport: the findings of the linter, each with the line of the script that it is about."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kit.lint.lint import Finding
from kit.lint.rule import Severity
from kit.lint.secret import may_hold_secret
from kit.show import Mark, Part, Result, Table

MARKS: dict[Severity, Mark] = {"error": "bad", "warning": "warning"}
SECRET_RULES = ("KS601", "KS602")  # their lines contain a secret or its name
HIDDEN = "(not shown: it may hold a secret)"
LONGEST_ROW = 120  # characters that are shown of a line


@dataclass(frozen=True)
class LintReport(Result):
    """The findings in one or several scripts. scripts: the text of each file."""

    scripts: Mapping[str, str]
    findings: Sequence[Finding]

    @property
    def errors(self) -> list[Finding]:
        """The findings because of which a job fails, or does something else than intended."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def summary(self) -> str:
        """How many findings there are, by severity."""
        counts = Counter(finding.severity for finding in self.findings)
        names: list[Severity] = ["error", "warning", "info"]
        found = [f"{counts[name]} {name}" + ("s" if counts[name] > 1 else "") for name in names if counts[name]]
        return ", ".join(found).replace("infos", "info") or "no findings"

    def as_dict(self) -> dict[str, Any]:
        """What `kit lint --json` prints."""
        return {"findings": [asdict(finding) for finding in self.findings]}

    def parts(self) -> Iterator[Part]:
        """A table for each script with findings: the line, its text, and what is wrong with it; then their number."""
        for file in dict.fromkeys(finding.file for finding in self.findings):
            yield self._table(file)
        yield self.summary[0].upper() + self.summary[1:] + "."

    def __str__(self) -> str:
        """For pipes and editors, in the form of compilers: file:line first, then the text of the line and the fix."""
        return "\n".join([*(self._lines(finding) for finding in self.findings), f"{self.summary}."])

    def _lines(self, finding: Finding) -> str:
        first = f"{finding.file}:{finding.line}: {finding.severity} {finding.rule}: {finding.message}"
        row = self._row(finding).strip()
        return "\n".join([first, *([f"    {row}"] if row else []), f"    fix: {finding.fix}"])

    def _table(self, file: str) -> Table:
        findings = [finding for finding in self.findings if finding.file == file]
        rows = [
            (
                finding.line,
                self._row(finding),
                f"{finding.severity} {finding.rule}",
                f"{finding.message} {finding.fix}",
            )
            for finding in findings
        ]
        marks = {n: MARKS[finding.severity] for n, finding in enumerate(findings) if finding.severity in MARKS}
        return Table(["line", "source", "finding", "what to do"], rows, title=file, marks=marks)

    def _row(self, finding: Finding) -> str:
        """The line of the script that a finding is about; without the text of one that may hold a secret."""
        rows = self.scripts.get(finding.file, "").split("\n")
        row = rows[finding.line - 1] if finding.line <= len(rows) else ""
        secret_lines = {other.line for other in self._in(finding.file) if other.rule in SECRET_RULES}
        if finding.line in secret_lines or may_hold_secret(row):
            return HIDDEN
        row = "".join(char if char.isprintable() else " " if char.isspace() else "\ufffd" for char in row.rstrip())
        return row if len(row) <= LONGEST_ROW else f"{row[: LONGEST_ROW - 3]}..."

    def _in(self, file: str) -> Sequence[Finding]:
        return [finding for finding in self.findings if finding.file == file]
