"""Fixes: which faults are corrected, and that nothing else changes."""

from pathlib import Path

import pytest

from kit.lint.fixes import fix, fix_file
from kit.lint.lint import lint
from tests.lint.scripts import ARRAY, FAULTY, GOOD, MUTANTS, ONE_NODE, STEPS, two

BROKEN = """\
#!/bin/bash\r
#SBATCH \u2013nodes=2 \u2014N 2\u00a0--time=10\r
 #SBATCH --requeue\r
#SABTCH --mem=0\r
# SBATCH --exclusive\r
echo "a \u2013b" > log\r
srun python train.py \u2013\u002dname=x \u2013n 3 \u2013 y\r
"""

FIXED = """\
#!/bin/bash
#SBATCH --nodes=2 -N 2 --time=10
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --mem=0
# SBATCH --exclusive
export PYTHONUNBUFFERED=1
echo "a \u2013b" > log
srun --kill-on-bad-exit=1 python train.py --name=x -n 3 \u2013 y
"""


def test_safe_faults_are_fixed_and_nothing_else() -> None:
    assert fix(BROKEN) == FIXED
    assert fix(FIXED) == FIXED


@pytest.mark.parametrize(
    ("rule", "row", "fixed"),
    [
        ("KS408", "srun torchrun --rdzv_id 101 t.py", "srun torchrun --rdzv_id $SLURM_JOB_ID t.py"),
        ("KS408", "srun torchrun --rdzv-id=job t.py job", "srun torchrun --rdzv-id=$SLURM_JOB_ID t.py job"),
        ("KS409", "srun -n1 LR=3 python t.py", "srun -n1 env LR=3 python t.py"),
        ("KS411", "echo $SLURM_JOB_NODELIS", "echo $SLURM_JOB_NODELIST"),
        ("KS415", "export NCCL_ASYNC_ERROR_HANDLING=1", "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1"),
        ("KS416", "srun -N2 python t.py", "srun --kill-on-bad-exit=1 -N2 python t.py"),
        (
            "KS508",
            "scontrol requeue $SLURM_JOB_ID",
            "scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}",
        ),
    ],
)
def test_a_fault_is_fixed_in_its_line(rule: str, row: str, fixed: str) -> None:
    text = two(row, "#SBATCH --array=0-1\n")
    assert rule in {f.rule for f in lint(text)}
    assert fix(text) == text.replace(row, fixed)
    assert rule not in {f.rule for f in lint(fix(text))}


@pytest.mark.parametrize("above", ["\n\n", "\ufeff", "# Licence\n\n# More\n"])
def test_the_interpreter_line_is_moved_to_the_top(above: str) -> None:
    comments = "".join(f"{row}\n" for row in above.split("\n") if row.startswith("#"))
    assert fix(above + ONE_NODE) == ONE_NODE.replace("#!/bin/bash\n", f"#!/bin/bash\n{comments}", 1)


def test_an_interpreter_line_below_a_command_is_not_moved() -> None:
    assert fix("echo\n#!/bin/bash\n") == "echo\n#!/bin/bash\n"


@pytest.mark.parametrize("text", [text for _, _, text in FAULTY] + [text.replace(o, n) for _, text, o, n in MUTANTS])
def test_a_second_fix_changes_nothing_and_a_fix_adds_no_fault(text: str) -> None:
    fixed = fix(text)
    assert fix(fixed) == fixed
    assert {f.rule for f in lint(fixed)} <= {f.rule for f in lint(text)}


@pytest.mark.parametrize("text", [GOOD, ONE_NODE, STEPS, ARRAY])
def test_a_correct_script_is_not_changed(text: str) -> None:
    assert fix(text) == text


def test_a_file_is_replaced_in_one_step_and_keeps_its_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "a.sbatch", tmp_path / "link.sbatch"
    real.write_bytes(ONE_NODE.replace("\n", "\r\n").encode() + b"# caf\xe9\r\n")
    real.chmod(0o750)
    link.symlink_to(real)
    assert fix_file(link) and not fix_file(link)
    assert real.read_bytes() == ONE_NODE.encode() + b"# caf\xe9\n"
    assert real.stat().st_mode & 0o7777 == 0o750 and link.is_symlink()
    assert {p.name for p in tmp_path.iterdir()} == {"a.sbatch", "link.sbatch"}


def test_a_file_without_faults_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.sbatch"
    path.write_text(GOOD)
    path.chmod(0o400)
    before = path.stat()
    assert not fix_file(path)
    assert path.stat().st_ino == before.st_ino and path.stat().st_mtime_ns == before.st_mtime_ns


def test_a_fault_counted_beyond_the_last_line_is_left_alone() -> None:
    text = "#SBATCH -n2\nC='\ny'\nsrun bash -c \"$C"
    assert max(finding.line for finding in lint(text)) > text.count("\n") + 1
    assert text.splitlines()[-1] in fix(text)
