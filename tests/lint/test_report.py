"""Findings are shown next to the lines that they are about."""

from kit.lint.lint import Finding, lint
from kit.lint.report import Report

CLEAN = "#!/bin/bash\n#SBATCH --job-name=mine --time=1 --nodes=1\nset -euo pipefail\n"


def test_a_finding_is_next_to_its_line() -> None:
    script = CLEAN + 'srun python train.py "<b>" | tee log\n'
    report = Report(script, lint(script.replace("set -euo pipefail", "set -e")))
    (table,) = report.parts()
    row = next(row for row in table.rows if row[2] == "error KS502")
    assert row[:2] == [4, 'srun python train.py "<b>" | tee log']
    shown = report._repr_mimebundle_()
    assert 'srun python train.py "<b>" | tee log' in shown["text/plain"]
    assert "&lt;b&gt;" in shown["text/html"] and "<b>" not in shown["text/html"]


def test_errors_and_warnings_are_marked() -> None:
    found = [Finding("x", "KS000", severity, 1, "A fault.", "Fix it.") for severity in ("error", "warning", "info")]
    (table,) = Report(CLEAN, found).parts()
    assert table.marks == {0: "bad", 1: "warning"}


def test_a_line_with_a_secret_is_not_shown() -> None:
    token = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"  # made up
    script = CLEAN + f"export HF_TOKEN={token} CUDA_LAUNCH_BLOCKING=1\npython -u train.py\n"
    found = lint(script)
    assert {"KS601", "KS605"} <= {finding.rule for finding in found}
    assert token not in str(Report(script, found)) + str(Report(script, found)._repr_mimebundle_())


def test_without_findings_nothing_is_shown() -> None:
    assert str(Report(CLEAN, [])) == ""
