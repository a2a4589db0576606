"""Steps: variables are filled in, and the programs that start another one are taken off."""

import pytest

from kit.lint.script import Script
from tests.lint.test_shell import marked


def steps(body: str) -> list[tuple[str, list[str]]]:
    script = Script("#!/bin/bash\n" + body)
    return [(s.program, [marked(w) for w in s.words]) for s in script.steps]


@pytest.mark.parametrize(
    ("body", "program", "texts"),
    [
        ('C="a b"\n$C c', "a", ["a", "b", "c"]),
        ('C="a b"\nx "$C"', "x", ["x", "a b"]),
        ('A=(b "c d")\na "${A[@]}"', "a", ["a", "b", "c", "d"]),
        ("X=1\nX=2\na $X", "a", ["a", "2"]),
        ("X=1\nif b; then X=2; fi\na $X", "a", ["a", "$X"]),
        ("for X in 1 2; do a $X; done", "a", ["a", "$X"]),
        ("X=\n$X\na $X b", "a", ["a", "b"]),
        ("A=1 srun -n2 env B=1 numactl -N 0 python3 -m torch.distributed.run x.py", "torchrun", ["python3", "-m"]),
        ("uv run accelerate launch x.py", "accelerate", ["accelerate", "launch", "x.py"]),
        ("accelerate config", "", ["accelerate", "config"]),
        ("L='torchrun x.py'\nsrun bash -lc \"exec $L\"", "torchrun", ["torchrun", "x.py"]),
        ("eval \"torchrun $A '$B'\"", "torchrun", ["torchrun", "$A", "§B"]),
        ('srun bash -c "a \\$SLURM_PROCID $SLURM_NODEID"', "a", ["a", "§SLURM_PROCID", "$SLURM_NODEID"]),
        ("export R=$SLURM_NODEID\nsrun bash -c 'a $R $S'", "a", ["a", "$SLURM_NODEID", "§S"]),
        ('srun bash -c "a $(b c) d"', "a", ["a", "$(b c)", "d"]),
    ],
)
def test_a_step_is_the_program_that_wrappers_start(body: str, program: str, texts: list[str]) -> None:
    found = steps(body)[-1]
    assert found[0] == program
    assert found[1][: len(texts)] == texts


def test_reading_a_script_that_calls_itself_ends() -> None:
    assert len(Script('C=\'eval "$C"; eval "$C"\'\neval "$C"\n').steps) < 2000
    double = "".join(f'A{i + 1}="$A{i}$A{i}"\n' for i in range(40))
    assert max(len(a.value) for a in Script(f"A0=xxxxxxxx\n{double}").scope.assignments) < 50_000
