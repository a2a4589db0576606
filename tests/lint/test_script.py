"""What a script asks for, as Slurm reads it."""

import pytest

from kit.lint.script import Script


@pytest.mark.parametrize(
    ("time", "hours"),
    [
        ("15", 0.25),
        ("72", 1.2),
        ("90:00", 1.5),
        ("1:30:00", 1.5),
        ("2-0", 48),
        ("1-12:30", 36.5),
        ("1-00:00:36", 24.01),
        ("UNLIMITED", 0),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, hours: float) -> None:
    assert Script(f"#!/bin/bash\n#SBATCH --time={time}\n").request.hours == pytest.approx(hours)


@pytest.mark.parametrize(
    ("options_", "gpus"),
    [
        ("--gres=gpu:8", 8),
        ("--gres=gpu:a100:4,nvme:1", 4),
        ("--gres=gpu", 1),
        ("--gpus-per-node=h100:4", 4),
        ("-G 4", 4),
        ("-N2 -G 4", None),
        ("--gres=gpu:a100_1g.5gb:2", None),
        ("-n 4", None),
    ],
)
def test_gpus_are_counted_per_node(options_: str, gpus: int | None) -> None:
    assert Script(f"#!/bin/bash\n#SBATCH {options_}\n").gpus_per_node == gpus


@pytest.mark.parametrize(
    ("directive", "command", "tasks"),
    [
        ("--nodes=2 --ntasks-per-node=8", "srun a", 8),
        ("--nodes=2 --ntasks-per-node=8", "srun --ntasks-per-node=1 a", 1),
        ("--nodes=2 --ntasks=16", "srun a", 8),
        ("--nodes=2", "srun -n 4 a", 2),
        ("--nodes=2 --ntasks-per-node=8", "srun -N1 -n1 a", 1),
        ("--nodes=2 --ntasks-per-node=8", "srun -n $N a", None),
        ("--nodes=2", "srun a", 1),
    ],
)
def test_tasks_on_a_node_follow_srun_before_the_directives(directive: str, command: str, tasks: int | None) -> None:
    script = Script(f"#!/bin/bash\n#SBATCH {directive}\n{command}\n")
    assert script.tasks_per_node(script.steps[0]) == tasks
