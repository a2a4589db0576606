"""Strategies that spread a model over both nodes of a live Slurm: train, save, resume and export.

tests/train/ compares their losses with those of DDP and of one process, and resumes full fine-tunes.
"""

import dataclasses
import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from kit.checkpoints.inspect import inspect
from kit.deploy.adapter import export
from kit.slurm import launch as slurm
from kit.train import load
from tests.conftest import oracle

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
JOB = {"parallel.nodes": 2, "parallel.gpus_per_node": 1, "schedule.lr": 1e-3, "model.attention": "sdpa"}
ZERO = {
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
    "zero3-cpu": {"parallel.strategy": "zero3", "parallel.offload": "cpu"},
}
HYBRID = {"parallel.gpus_per_node": 2, "parallel.sharding": "hybrid", "tuning.method": "qlora"}


@pytest.fixture
def two_nodes(local):
    """Two nodes with so many ranks each, which find a package."""

    def make(ranks, package=None):
        variables = local.environment | ({"PYTHONPATH": str(package)} if package else {})
        options, nodes = dataclasses.replace(local.slurm, partition="gpu", time="20"), local.nodes
        nodes = dataclasses.replace(nodes, count=2, cpus=ranks)
        return dataclasses.replace(local, nodes=nodes, slurm=options, environment=variables)

    return make


def finish(run, folder):
    """The losses of a run that ends after four steps, and the tensors of the adapter that is exported from the last."""
    end = run.wait(timeout=400)
    assert (end.state, end.conflicts) == ("COMPLETED", []), run.log.read_text()
    checkpoint = run.path / "checkpoints" / "checkpoint-4"
    found = inspect(checkpoint, values=True, world=run.recipe.world_size)
    assert (found.complete, found.ranks) == (True, run.recipe.world_size)
    exported = export(checkpoint, folder)
    assert (exported.tensors, exported.problems) == (16, ())
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    losses = [row["loss"] for row in history if "loss" in row]
    return losses, load_file(folder / "adapter_model.safetensors")


def check_resume(runs, folder):
    """Every run trains on both nodes; its last two steps, trained again by a new job, give the same adapter."""
    first = {name: finish(run, folder / name) for name, run in runs.items()}
    for run in runs.values():
        assert {path.stem for path in (run.path / "nodes").glob("*.jsonl")} == {"node1", "node2"}
        shutil.rmtree(run.path / "checkpoints" / "checkpoint-4")
        (run.path / "state" / "result.json").unlink()
        run.requeue()
    for name, run in runs.items():
        losses, adapter = finish(run, folder / f"{name} again")
        assert "resuming from checkpoint-2" in run.log.read_text()
        assert len(losses) == 4 and losses == pytest.approx(first[name][0], rel=1e-5)
        assert all(torch.allclose(adapter[key], tensor, atol=1e-6) for key, tensor in first[name][1].items())


def test_adapters_under_zero_train_on_both_nodes_and_new_jobs_resume_them_exactly(
    live_slurm, recipe, two_nodes, monkeypatch, tmp_path
):
    package = oracle("deepspeed-0.19.8")
    monkeypatch.syspath_prepend(package)
    cluster = two_nodes(1, package)
    runs = {kind: slurm.launch(recipe.override(**JOB, **changes), cluster) for kind, changes in ZERO.items()}
    check_resume(runs, tmp_path)
    for kind, run in runs.items():
        shards = (run.path / "checkpoints" / "checkpoint-4" / "global_step4").glob("*zero_pp_rank_?_*optim_states.pt")
        assert len(list(shards)) == 2, kind


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_qlora_with_a_replica_on_each_node_trains_and_a_new_job_resumes_it_exactly(
    live_slurm, recipe, two_nodes, tmp_path
):
    job = recipe.override(**JOB | HYBRID)
    assert load.why_not_sharded(job) == ""
    run = slurm.launch(job, two_nodes(2))
    check_resume({"qlora": run}, tmp_path)
    assert "base read into the shards: " in run.log.read_text()
