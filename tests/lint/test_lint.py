"""Findings: what they contain, their order, and texts of all kinds."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kit.errors import InputError
from kit.lint.fixes import fix
from kit.lint.lint import lint, lint_file
from kit.lint.site import Site
from tests.lint.scripts import ARRAY, FAULTY, GOOD, ONE_NODE, SET, STEPS, TOKEN, one, option, two


def rules(text: str, **more: object) -> set[tuple[str, str]]:
    """Rules and severities of the findings in a script."""
    return {(f.rule, f.severity) for f in lint(text, **more)}  # type: ignore[arg-type]


def test_findings_are_plain_json_in_line_order() -> None:
    found = lint(two("srun python train.py --token $HF_TOKEN", "#SBATCH --requeue\n"), "job.sh")
    rows = json.loads(json.dumps([asdict(f) for f in found]))
    assert [set(r) for r in rows] == [{"file", "rule", "severity", "line", "message", "fix"}] * len(found)
    assert [f.line for f in found] == sorted(f.line for f in found)
    assert {f.file for f in found} == {"job.sh"}


@pytest.mark.parametrize(("rule", "severity", "text"), FAULTY)
def test_messages_are_sentences_without_placeholders_or_secrets(rule: str, severity: str, text: str) -> None:
    found = [f for f in lint(text) if f.rule == rule]
    for f in found:
        assert f.message.endswith(".") and f.fix.endswith(".") and 1 <= f.line <= text.count("\n") + 1
        assert "{}" not in f.message and "\x1a" not in f.message and TOKEN not in f.message


@pytest.mark.parametrize(
    ("rule", "line", "text"),
    [
        ("KS105", 1, "#!/bin/bash\r\nhostname\r\n"),
        ("KS102", 5, "#!/bin/bash\n\n# x\nset -e\n#SBATCH --nodes=2\n"),
        ("KS106", 3, "#!/bin/bash\n#SBATCH --time=10\n#SBATCH --output=$HOME/%j\nhostname\n"),
        ("KS111", 4, "#!/bin/bash\n#SBATCH --time=10\n\nif true; fi\n"),
        ("KS401", 6, two("srun torchrun \\\n  --nnodes=2 \\\n  --node_rank=$SLURM_PROCID t.py").replace(SET, "\n")),
        ("KS502", 7, one("\nA='\nx'\npython t.py | tee log", set_="\n")),
    ],
)
def test_the_finding_has_the_line_of_the_fault(rule: str, line: int, text: str) -> None:
    assert [f.line for f in lint(text) if f.rule == rule] == [line]


def test_messages_do_not_repeat_a_secret() -> None:
    found = lint(one(f"export HF_TOKEN={TOKEN}\npython train.py --token {TOKEN}"))
    assert [f.rule for f in found if f.severity == "error"] == ["KS601", "KS601"]
    assert TOKEN not in str(found)


@pytest.mark.parametrize("row", ["#SBATCH --export=ALL,HF_TOKEN=hunter2", "# SBATCH --export=HF_TOKEN=hunter2"])
def test_a_directive_with_a_secret_is_not_repeated(row: str) -> None:
    found = lint(f"#!/bin/bash\n#SBATCH --time=10\n{row}\nhostname\n{row}\n")
    assert {"KS102", "KS103"} & {finding.rule for finding in found}
    assert "hunter2" not in str(found)


def test_the_log_folder_may_be_in_the_working_directory_or_next_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "jobs" / "a.sbatch"
    script.parent.mkdir()
    script.write_text(option("--output=logs/%j.out"))
    assert [(f.rule, f.severity) for f in lint_file(script, Site(release="22.05"))] == [("KS201", "error")]
    assert [(f.rule, f.severity) for f in lint_file(script)] == [("KS201", "info")]
    (script.parent / "logs").mkdir()
    assert lint_file(script) == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert lint(option("--output=here/%j.out")) == []
    assert rules(option(f"--output={tmp_path}/there/%j.out"), site=Site(release="22.05")) == {("KS201", "error")}
    assert rules(option("--output=/no_such_mount/logs/%j.out")) == {("KS201", "info")}


def test_options_and_network_settings_of_the_site_are_accepted() -> None:
    site = Site(frozenset(["frobnicate"]), 1, 8, {"NCCL_IB_DISABLE": "1"})
    text = one("export NCCL_IB_DISABLE=1\npython train.py", "#SBATCH --frobnicate=1\n")
    assert rules(text) == {("KS108", "warning"), ("KS604", "info")}
    assert lint(text, site=site) == []


def test_a_template_may_contain_placeholders_and_invalid_shell() -> None:
    text = option("--partition={{ partition }}") + "{% if x %}\n(\n{% endif %}\n"
    assert rules(text, file="job.sbatch.j2") == set()
    assert {r for r, _ in rules(text)} == {"KS107", "KS111"}


def test_a_python_batch_script_is_read_for_its_directives_only() -> None:
    assert rules("#!/usr/bin/env python\n#SBATCH --time=10\nprint('''$(''')\n") == set()


def test_a_script_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    path = tmp_path / "latin.sh"
    path.write_bytes(option("--time=10").encode() + b"echo caf\xe9\n")
    assert lint_file(path) == []


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        lint_file(tmp_path / "absent.sh")


JUNK = st.one_of(
    st.binary(max_size=200).map(lambda b: b.decode(errors="surrogateescape")),
    st.text(max_size=200),
    st.builds(
        lambda text, cut, junk, at: text[:cut][:at] + junk + text[:cut][at:],
        st.sampled_from([GOOD, ONE_NODE, STEPS, ARRAY, *(text for _, _, text in FAULTY)]),
        st.integers(0, 900),
        st.sampled_from(["", "'", '"', "`", "$(", "${", "<<E", "\\", "#SBATCH --", "srun ", "\0", "\x1a", "{%", "))"]),
        st.integers(0, 900),
    ),
)


@given(JUNK, st.sampled_from(["", "22.05.8", "24.11"]))
@example("\U00109417\U000b884e\U0010a162/S{\U000cf30d\n", "")  # crashed the grammar's scanner
@example("#!/bin/bash\nhead=$(s\\", "")  # bash counts lines beyond its end
@settings(max_examples=200, deadline=None)
def test_any_text_can_be_linted(text: str, version: str) -> None:
    found = lint(text, site=Site(nodes=1, gpus_per_node=0, release=version))
    assert all(1 <= f.line <= text.count("\n") + 2 and f.message for f in found)
    assert fix(fix(text)) == fix(text)
