"""ZeRO by DeepSpeed on two ranks: the losses of DDP, exact resumes, and adapters that are exported."""

import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from kit.checkpoints.inspect import inspect
from kit.deploy.adapter import export
from kit.slurm.run import Run
from tests import shared
from tests.conftest import oracle, tiny_recipe
from tests.train import forked

pytestmark = pytest.mark.slow
JOB = {
    "schedule.max_steps": 6, "schedule.save_every": 3, "schedule.lr": 1e-3, "model.attention": "sdpa",
    "parallel.activation_checkpointing": True,
}  # fmt: skip
KINDS = {
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
    "zero3-cpu": {"parallel.strategy": "zero3", "parallel.offload": "cpu"},
}


def losses(run):
    return {row["step"]: row["loss"] for row in forked.history(run)}


@pytest.fixture
def ddp(tiny, local):
    """The losses of six steps under DDP of a method, trained once a session."""

    def train(method, folder):
        run = forked.freeze(tiny_recipe(tiny).override(**JOB, **{"parallel.strategy": "ddp"} | method), local)
        forked.train(run)
        (folder / "losses.json").write_text(json.dumps(losses(run)))

    def found(**method):
        name = "-".join(["ddp", *method.values()])
        text = (shared.once(name, functools.partial(train, method)) / "losses.json").read_text()
        return {int(step): loss for step, loss in json.loads(text).items()}

    return found


@pytest.fixture
def package(monkeypatch):
    """DeepSpeed, which this process finds, too."""
    folder = oracle("deepspeed-0.19.8")
    monkeypatch.syspath_prepend(folder)
    return folder


def resumed(run, package):
    """The losses of the run when its last three steps are trained again from the checkpoint of the third."""
    shutil.rmtree(run.path / "checkpoints" / "checkpoint-6")
    (run.path / "state" / "result.json").unlink()
    assert "resuming from checkpoint-3" in forked.train(run, package)
    return losses(run)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_under_zero_have_the_losses_of_ddp_resume_exactly_and_are_exported(
    recipe, local, ddp, package, tmp_path, kind
):
    run = forked.freeze(recipe.override(**JOB, **KINDS[kind]), local)
    forked.train(run, package)
    assert losses(run) == pytest.approx(ddp(), rel=1e-5)
    first, first_losses = exported(run, tmp_path / "adapter"), losses(run)
    assert resumed(run, package) == pytest.approx(first_losses, rel=1e-5)
    again = exported(run, tmp_path / "again")
    assert all(torch.allclose(first[name], again[name], atol=1e-6) for name in first)


def exported(run: Run, folder):
    """The tensors of the adapter that is exported from the last checkpoint, which two ranks have saved."""
    checkpoint = run.path / "checkpoints" / "checkpoint-6"
    assert inspect(checkpoint, values=True, world=2).complete
    assert len(list((checkpoint / "global_step6").glob("*zero_pp_rank_?_*optim_states.pt"))) == 2
    found = export(checkpoint, folder)
    assert (found.tensors, found.problems) == (16, ())
    return load_file(folder / "adapter_model.safetensors")


def test_a_full_fine_tune_under_zero3_has_the_losses_of_ddp_and_resumes_exactly(recipe, local, ddp, package):
    full = {"tuning.method": "full"}
    run = forked.freeze(recipe.override(**JOB, **full, **{"parallel.strategy": "zero3"}), local)
    forked.train(run, package)
    first = losses(run)
    assert first == pytest.approx(ddp(**full), rel=1e-5)
    found = inspect(run.path / "checkpoints" / "checkpoint-6", values=True, world=2)
    assert (found.complete, found.format, found.ranks) == (True, "deepspeed", 2)
    assert resumed(run, package) == pytest.approx(first, rel=1e-5)
