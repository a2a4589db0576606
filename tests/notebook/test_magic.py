"""%%sbatch: values reach the script as they are, faults stop it, and what is submitted is a Run like any other."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from kit.errors import InputError, KitError, SubmitError
from kit.notebook.magic import fill
from kit.slurm.run import Run

CLEAN = "#!/bin/bash\n#SBATCH --job-name=mine --time=1 --nodes=1\nset -euo pipefail\n"


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """A notebook's shell with the extension loaded."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "kit")
    yield shell
    InteractiveShell.clear_instance()


def bash(script: str) -> str:
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout


def test_only_double_braces_are_replaced() -> None:
    cell = "echo ${HOME} {a,b} {{a,b},c} $((1+2)) '{' \"{{}}\" %{x} {x}\nawk '{ print $1 }'\n"
    assert fill(cell, {}.__getitem__) == cell


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("plain", ["plain"]),
        ("", [""]),
        ("a b; rm -rf $HOME `x` \"y\" 'z' \\ *\n!", ["a b; rm -rf $HOME `x` \"y\" 'z' \\ *\n!"]),
        (3e-4, ["0.0003"]),
        (Path("/a b/c"), ["/a b/c"]),
        (["a b", 1, "$x"], ["a b", "1", "$x"]),
        ((), []),
    ],
)
def test_values_reach_the_program_unchanged(value: object, words: list[str]) -> None:
    script = fill("printf '<%s>' é {{value}} end", {"value": value}.__getitem__)
    assert bash(script) == "".join(f"<{w}>" for w in ["é", *words, "end"])


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=40, deadline=None)
def test_any_text_reaches_the_program_unchanged(value: str) -> None:
    script = fill("X=a{{value}}b\nprintf '%s' \"$X\" | od -An -tx1", {"value": value}.__getitem__)
    assert bytes.fromhex(bash(script)).decode() == f"a{value}b"


def test_attributes_and_items_are_looked_up_too(shell: InteractiveShell) -> None:
    shell.run_cell("import types; job = types.SimpleNamespace(lr=0.1, files=['a', 'b c'])")
    assert fill("x {{job.lr}} {{ job.files[1] }}", shell.ev) == "x 0.1 'b c'"
    with pytest.raises(InputError, match=r"\{\{absent\}\} is not known to this notebook"):
        fill("x {{absent}}", shell.ev)
    with pytest.raises(InputError, match=r"is a SimpleNamespace; give text"):
        fill("x {{job}}", shell.ev)


@pytest.mark.parametrize(
    ("cell", "where"),
    [
        ('echo "{{value}}"', "string"),
        ("bash -c 'echo {{value}}'", "raw string"),
        ("echo # {{value}}", "comment"),
        ("cat <<EOF\n{{value}}\nEOF", "heredoc body"),
    ],
)
def test_a_value_that_cannot_be_quoted_there_is_an_error(cell: str, where: str) -> None:
    assert fill(cell, {"value": "plain-1.5/x"}.__getitem__) == cell.replace("{{value}}", "plain-1.5/x")
    with pytest.raises(InputError, match=rf"is in a {where}, where its value, 'a b', cannot be quoted"):
        fill(cell, {"value": "a b"}.__getitem__)


def test_a_directive_accepts_quotes_and_no_line_break() -> None:
    assert fill("#SBATCH --comment={{value}}\n", {"value": "a b"}.__getitem__) == "#SBATCH --comment='a b'\n"
    with pytest.raises(InputError, match="cannot be quoted"):
        fill("#SBATCH --comment={{value}}\n", {"value": "a\nrm -rf x"}.__getitem__)


def test_an_error_stops_it_before_anything_is_written(shell: InteractiveShell) -> None:
    with capture_output() as out, pytest.raises(KitError, match="Not submitted: KS104"):
        shell.run_cell_magic("sbatch", "", "\n" + CLEAN + "hostname\n")
    assert "KS104" in str(out.outputs[0].data["text/html"]) and not Path("runs").exists()


def test_a_dry_run_shows_script_and_findings_without_submitting(shell: InteractiveShell) -> None:
    shell.run_cell("nodes = 3")
    with capture_output() as out:
        cell = CLEAN.replace("--nodes=1", "--nodes={{nodes}}") + "srun hostname | tee log; pip install x\n"
        assert shell.run_cell_magic("sbatch", "--dry-run", cell) is None
    assert "--nodes=3" in out.stdout and "Nothing was submitted" in out.stdout
    assert "KS606" in str(out.outputs[0].data) and not Path("runs").exists()


def test_a_wrong_option_is_a_usage_error(shell: InteractiveShell) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        shell.run_cell_magic("sbatch", "--nodes=2", CLEAN)


@pytest.mark.slurm
def test_a_cell_becomes_a_run_on_the_cluster(live_slurm: Path, shell: InteractiveShell) -> None:
    shell.run_cell("names = ['a b', '$HOME']; nodes = 2")
    cell = CLEAN.replace("--nodes=1", "--nodes={{nodes}} --requeue --open-mode=append") + (
        "printf '<%s>' {{names}} \"${SLURM_JOB_NUM_NODES}\"; echo\n"
    )
    with capture_output() as out:
        run = shell.run_cell_magic("sbatch", "--name 'my run'", cell)
    assert not [o for o in out.outputs if "error" in o.data["text/plain"]]
    assert isinstance(run, Run) and run.path.name.startswith("my-run-") and run.job_id and run.job_id.isdecimal()
    end = run.wait(timeout=60, every=0.2)
    assert end.state == "COMPLETED" and end.exit_code == 0
    assert "<a b><$HOME><2>" in run.log.read_text()
    assert "printf '<%s>' 'a b' '$HOME'" in (run.path / "job.sbatch").read_text()
    assert Run.attach(run.job_id).path == run.path


@pytest.mark.slurm
def test_an_error_of_sbatch_is_shown(live_slurm: Path, shell: InteractiveShell) -> None:
    with pytest.raises(SubmitError, match=r"(?i)invalid partition"):
        shell.run_cell_magic("sbatch", "", CLEAN.replace("--nodes=1", "--partition=absent") + "hostname\n")


@pytest.mark.slurm
def test_anyway_submits_in_spite_of_errors(live_slurm: Path, shell: InteractiveShell) -> None:
    cell = CLEAN.replace("set -euo pipefail", "srun -n1 bash x.sh | tee log")
    with capture_output(), pytest.raises(KitError, match="KS502"):
        shell.run_cell_magic("sbatch", "", cell)
    with capture_output():
        run = shell.run_cell_magic("sbatch", "--anyway", cell)
    assert run.wait(timeout=60, every=0.2).state in ("COMPLETED", "FAILED")


@pytest.mark.slurm
def test_the_cell_works_in_a_notebook(live_slurm: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = [
        "%load_ext kit\nlr = 0.1",
        f"%%sbatch --name cell\n{CLEAN}echo {{{{lr}}}}",
        "print(_.job_id, _)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute(cwd=str(tmp_path), env=env)
    assert "/runs/cell-" in notebook.cells[1].outputs[-1]["data"]["text/plain"]
    (run,) = (tmp_path / "runs").iterdir()
    assert "echo 0.1" in (run / "job.sbatch").read_text()
