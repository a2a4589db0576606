"""ZeRO on the two nodes of a live Slurm: train, save and resume. tests/train/test_zero.py compares it with DDP."""

import dataclasses
import json
import shutil

import pytest

from kit.checkpoints.inspect import inspect
from kit.slurm import launch as slurm
from tests.conftest import oracle

JOB = {
    "parallel.nodes": 2, "parallel.gpus_per_node": 1, "parallel.strategy": "zero3", "schedule.max_steps": 6,
    "schedule.save_every": 3, "schedule.lr": 1e-3, "model.attention": "sdpa",
}  # fmt: skip


@pytest.fixture
def two_nodes(local, monkeypatch):
    """Two nodes whose ranks find DeepSpeed, as this process does."""
    package = oracle("deepspeed-0.19.8")
    monkeypatch.syspath_prepend(package)
    slurm_options = dataclasses.replace(local.slurm, partition="gpu", time="20")
    variables = local.environment | {"PYTHONPATH": str(package)}
    nodes = dataclasses.replace(local.nodes, count=2, cpus=1)
    return dataclasses.replace(local, nodes=nodes, slurm=slurm_options, environment=variables)


def finish(run):
    end = run.wait(timeout=400)
    assert (end.state, end.conflicts) == ("COMPLETED", []), run.log.read_text()
    history = json.loads((run.path / "checkpoints" / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    return {row["step"]: row["loss"] for row in history if "loss" in row}


@pytest.mark.slow
@pytest.mark.slurm
def test_a_run_under_zero3_trains_on_both_nodes_and_a_new_job_resumes_it_exactly(live_slurm, recipe, two_nodes):
    run = slurm.launch(recipe.override(**JOB), two_nodes)
    losses = finish(run)
    assert len(losses) == 6 and len(set(losses.values())) > 1
    assert {path.stem for path in (run.path / "nodes").glob("*.jsonl")} == {"node1", "node2"}
    last = run.path / "checkpoints" / "checkpoint-6"
    found = inspect(last, values=True, world=2)
    assert (found.complete, found.ranks) == (True, 2)
    assert len(list((last / "global_step6").glob("*zero_pp_rank_?_*optim_states.pt"))) == 2
    shutil.rmtree(last)
    (run.path / "state" / "result.json").unlink()
    run.requeue()
    assert finish(run) == pytest.approx(losses, rel=1e-5)
    assert "resuming from checkpoint-3" in run.log.read_text()
