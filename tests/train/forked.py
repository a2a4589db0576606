"""Runs trained by forked ranks, for tests of training and not of how it starts; also the ranks' script.

The ranks do what `python -m kit.train` does in a job, with the variables that the job's script and `accelerate launch`
set. tests/slurm/ and tests/notebook/ train runs that are launched.
"""

import json
import os
import sys
from pathlib import Path

from kit.data.dataset import prepare
from kit.slurm import launch as slurm
from kit.slurm import script
from kit.slurm.run import Run
from kit.slurm.variables import Variable
from tests.ranks import TRAINING, run_ranks

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def freeze(recipe, cluster):
    """The run that a launch would submit."""
    return slurm.freeze(slurm.choose(recipe, cluster), cluster, prepare(recipe), predicted=None)


def train(run, *packages):
    """Train the run to its last step, on from its newest checkpoint; returns the lines of the job's log."""
    try:
        said = run_ranks(run.recipe.world_size, __file__, run.path, packages=packages, imports=TRAINING)
    except AssertionError as error:
        logs = "".join(path.read_text()[-3000:] for path in sorted((run.path / "logs").glob("rank-*.log")))
        raise AssertionError(f"{error}\n{logs}") from None
    assert (run.path / "state" / "result.json").exists(), said
    return said


def history(run):
    """The rows with a loss that the newest checkpoint holds."""
    state = json.loads((run.checkpoints()[-1] / "trainer_state.json").read_text())
    return [row for row in state["log_history"] if "loss" in row]


def use_accelerate_config(path):
    """Set the variables that `accelerate launch` sets for its ranks."""
    import torch.distributed.run
    from accelerate.commands import launch

    place, found = {name: os.environ.pop(name) for name in PLACE}, {}
    words = ["--config_file", str(path), "--main_process_port", "0", "-m", "kit.train"]
    if int(place["WORLD_SIZE"]) == 1:
        arguments, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
        os.environ |= launch.prepare_simple_launcher_cmd_env(arguments)[1]
        return
    torch.distributed.run.run = lambda _: found.update(os.environ)  # it would start the ranks
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    os.environ |= found | place


def rank(folder):
    """One rank of the run in this folder; returns its exit code."""
    run = Run(folder)
    os.environ |= script.exported(script.Job.of_run(run)) | {Variable.RUN: str(folder)}
    use_accelerate_config(folder / "accelerate.yaml")
    from kit.train.__main__ import main

    return main(str(folder))


if __name__ == "__main__":
    sys.exit(rank(Path(sys.argv[1])))
