"""ZeRO on the two nodes of a live Slurm: train, save, resume and export, with the losses of DDP."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from kit.checkpoints.inspect import inspect
from kit.deploy.adapter import export
from kit.slurm import launch as slurm
from kit.slurm.run import Run
from tests import shared
from tests.conftest import oracle, tiny_recipe

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
JOB = {
    "parallel.nodes": 2, "parallel.gpus_per_node": 1, "schedule.max_steps": 6, "schedule.save_every": 3,
    "schedule.lr": 1e-3, "model.attention": "sdpa", "parallel.activation_checkpointing": True,
}  # fmt: skip
KINDS = {
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
    "zero3-cpu": {"parallel.strategy": "zero3", "parallel.offload": "cpu"},
}


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


@pytest.fixture
def ddp(live_slurm, tiny, two_nodes):
    """The losses of six steps under DDP of a method, run once a session."""

    def losses(method):
        def train(folder):
            job = tiny_recipe(tiny).override(**JOB, **{"parallel.strategy": "ddp", "tuning.method": method})
            cluster = dataclasses.replace(two_nodes, paths=dataclasses.replace(two_nodes.paths, runs=str(folder)))
            finish(slurm.launch(job, cluster))

        run = Run(next(shared.once(f"ddp-{method}", train).iterdir()))
        return finish(run)

    return losses


def resumed_losses(run):
    """The losses of the run when its last three steps are trained again from the checkpoint of the third."""
    shutil.rmtree(run.path / "checkpoints" / "checkpoint-6")
    (run.path / "state" / "result.json").unlink()
    run.requeue()
    losses = finish(run)
    assert "resuming from checkpoint-3" in run.log.read_text()
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_under_zero_have_the_losses_of_ddp_resume_exactly_and_are_exported(
    live_slurm, recipe, two_nodes, ddp, tmp_path, kind
):
    run = slurm.launch(recipe.override(**JOB, **KINDS[kind]), two_nodes)
    losses = finish(run)
    assert losses == pytest.approx(ddp("lora"), rel=1e-5)
    checkpoint = run.path / "checkpoints" / "checkpoint-6"
    assert inspect(checkpoint, values=True, world=2).complete
    assert len(list((checkpoint / "global_step6").glob("*zero_pp_rank_?_*optim_states.pt"))) == 2
    exported = export(checkpoint, tmp_path / "adapter")
    first = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert (exported.tensors, exported.problems) == (16, ())
    assert resumed_losses(run) == pytest.approx(losses, rel=1e-5)
    export(checkpoint, tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert all(torch.allclose(first[name], again[name], atol=1e-6) for name in first)


def test_a_full_fine_tune_under_zero3_has_the_losses_of_ddp_and_resumes_exactly(live_slurm, recipe, two_nodes, ddp):
    run = slurm.launch(recipe.override(**JOB, **{"tuning.method": "full", "parallel.strategy": "zero3"}), two_nodes)
    losses = finish(run)
    assert losses == pytest.approx(ddp("full"), rel=1e-5)
    found = inspect(run.path / "checkpoints" / "checkpoint-6", values=True, world=2)
    assert (found.complete, found.format, found.ranks) == (True, "deepspeed", 2)
    assert resumed_losses(run) == pytest.approx(losses, rel=1e-5)
