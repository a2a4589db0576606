"""Findings are shown with the lines that they are about, and secrets are not."""

import pytest

from kit.lint.lint import Finding, lint
from kit.lint.report import LintReport
from kit.show import Table
from tests.lint.scripts import TOKEN

CLEAN = "#!/bin/bash\n#SBATCH --job-name=mine --time=1 --nodes=1\nset -euo pipefail\n"


def report(script: str) -> LintReport:
    return LintReport({"job.sh": script}, lint(script, "job.sh"))


def tables(shown: LintReport) -> list[Table]:
    return [part for part in shown.parts() if isinstance(part, Table)]


def everything(shown: LintReport) -> str:
    return str(shown) + str(shown._repr_mimebundle_()) + "".join(str(part) for part in shown.parts())


def test_a_finding_is_next_to_its_line() -> None:
    script = CLEAN.replace("set -euo pipefail", "set -e") + 'srun python train.py "<b>" | tee log\n'
    shown = report(script)
    (table,) = tables(shown)
    row = next(row for row in table.rows if row[2] == "error KS502")
    assert row[:2] == (4, 'srun python train.py "<b>" | tee log')
    bundle = shown._repr_mimebundle_()
    assert 'srun python train.py "<b>" | tee log' in bundle["text/plain"]
    assert "&lt;b&gt;" in bundle["text/html"] and "<b>" not in bundle["text/html"]


def test_in_pipes_a_finding_begins_with_file_and_line_as_compilers_print_them() -> None:
    shown = report(CLEAN + "export CUDA_LAUNCH_BLOCKING=1\npython -u train.py\n")
    (finding,) = shown.findings
    lines = str(shown).splitlines()
    assert lines[0] == f"job.sh:4: warning KS605: {finding.message}"
    assert lines[1:] == ["    export CUDA_LAUNCH_BLOCKING=1", f"    fix: {finding.fix}", "1 warning."]


def test_errors_and_warnings_are_marked_and_counted() -> None:
    found = [Finding("x", "KS000", severity, 1, "A fault.", "Fix it.") for severity in ("error", "warning", "info")]
    shown = LintReport({"x": CLEAN}, [*found, found[0]])
    (table,) = tables(shown)
    assert table.marks == {0: "bad", 1: "warning", 3: "bad"}
    assert shown.summary == "2 errors, 1 warning, 1 info"
    assert shown.errors == [found[0], found[0]]


def test_each_file_has_its_own_table_with_its_own_lines() -> None:
    scripts = {"a.sh": CLEAN + "CUDA_LAUNCH_BLOCKING=1 python -u a.py\n", "b.sh": "hostname\n"}
    shown = LintReport(scripts, [finding for name, text in scripts.items() for finding in lint(text, name)])
    assert [table.title for table in tables(shown)] == ["a.sh", "b.sh"]
    assert [table.rows[0][1] for table in tables(shown)] == ["CUDA_LAUNCH_BLOCKING=1 python -u a.py", "hostname"]


@pytest.mark.parametrize(
    ("secret", "row"),
    [
        (TOKEN, f"export HF_TOKEN={TOKEN} CUDA_LAUNCH_BLOCKING=1"),
        ("hunter2", "export WANDB_API_KEY='hunter2' CUDA_LAUNCH_BLOCKING=1"),  # too short for KS601
        ("hunter2", "CUDA_LAUNCH_BLOCKING=1 wget --password hunter2 x.org"),
        (TOKEN, f"CUDA_LAUNCH_BLOCKING=1 curl -H 'Authorization: {TOKEN}' x.org"),
        ("0123456789abcdef" * 2, f"CUDA_LAUNCH_BLOCKING=1 wandb login {'0123456789abcdef' * 2}01234567"),
    ],
)
def test_a_line_that_may_contain_a_secret_is_not_shown(secret: str, row: str) -> None:
    shown = report(CLEAN + row + "\npython -u train.py\n")
    assert "KS605" in {finding.rule for finding in shown.findings}
    assert secret not in everything(shown)


@pytest.mark.parametrize(
    "row",
    [
        "export HF_TOKEN=$(cat ~/.hf) CUDA_LAUNCH_BLOCKING=1",
        f"git checkout {'0123456789' * 4}; export CUDA_LAUNCH_BLOCKING=1",
    ],
)
def test_a_line_without_the_secret_itself_is_shown(row: str) -> None:
    assert row in str(report(f"{CLEAN}{row}\npython -u train.py\n"))


def test_bytes_and_control_characters_can_be_printed() -> None:
    shown = report(CLEAN + "CUDA_LAUNCH_BLOCKING=1 python -u caf\udce9.py \x1b[31m\n")
    assert "caf\ufffd.py \ufffd[31m" in str(shown)
    everything(shown).encode()


def test_a_report_without_findings_says_no_findings() -> None:
    shown = LintReport({"x": CLEAN}, [])
    assert shown.as_dict() == {"findings": []}
    assert list(shown.parts()) == ["No findings."]
