"""Layers and experts split over two ranks: the losses of one rank, exact resumes, and whole checkpoints."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.checkpoints.inspect import inspect
from kit.checkpoints.saved_by import SavedBy
from kit.deploy.model import export_model
from kit.errors import InputError
from tests import shared
from tests.train import forked
from tests.train.strategies import base_model

pytestmark = pytest.mark.slow
# Several micro-batches in a step, as transformers by itself sums some gradients of the earlier ones again.
JOB = {
    "tuning.method": "full", "model.attention": "sdpa", "data.seq_len": 64, "schedule.lr": 1e-2,
    "schedule.max_steps": 6, "schedule.save_every": 3, "schedule.eval_every": 6, "schedule.grad_accum": 6,
}  # fmt: skip
ONE_RANK = {"parallel.gpus_per_node": 1, "parallel.strategy": "ddp"}
TENSOR, EXPERT = {"parallel.tensor": 2}, {"parallel.expert": 2, "schedule.grad_accum": 3}


def job(recipe, tiny, changes):
    """A full fine-tune of a small mixture of experts."""
    return recipe.override(**JOB | changes | {"model.name": str(base_model("qwen3_moe", tiny))})


def history(run):
    """Losses, gradient norms and losses of evaluations by step, and the tokens that were trained on."""
    rows = json.loads((run.checkpoints()[-1] / "trainer_state.json").read_text())["log_history"]
    kept = ("loss", "grad_norm", "eval_loss", "num_tokens", "loss_tokens")
    return {f"{key} {row['step']}": row[key] for row in rows for key in kept if key in row}


def exported_logits(run, out):
    """Some logits of the run's newest checkpoint, exported as a model folder."""
    export_model(run.path, out, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits[0, ::6, ::5000].flatten().tolist()


@pytest.fixture
def one_rank(recipe, tiny, local):
    """The history, and logits, of six steps of a small model on one rank, trained once a session."""

    def train(folder):
        run = forked.freeze(job(recipe, tiny, ONE_RANK), local)
        forked.train(run)
        (folder / "history").write_text(json.dumps(history(run)))
        (folder / "logits").write_text(json.dumps(exported_logits(run, folder / "model")))

    def found(what):
        return json.loads((shared.once("one-rank", train) / what).read_text())

    return found


@pytest.mark.parametrize("split", [TENSOR, EXPERT], ids=["tensor", "expert"])
def test_split_layers_train_as_one_rank_does_and_resume_exactly(recipe, tiny, local, one_rank, tmp_path, split):
    run = forked.freeze(job(recipe, tiny, split), local)
    forked.train(run)
    first = history(run)
    assert first == pytest.approx(one_rank("history"), rel=1e-5)
    checkpoint = run.path / "checkpoints" / "checkpoint-6"
    assert inspect(checkpoint, values=True, world=2).problems == ()
    assert SavedBy.read(checkpoint) == SavedBy(2, 6, reshards=False)
    assert exported_logits(run, tmp_path / "model") == pytest.approx(one_rank("logits"), abs=1e-3)
    shutil.rmtree(checkpoint)
    (run.path / "state" / "result.json").unlink()
    assert "resuming from checkpoint-3" in forked.train(run)
    assert history(run) == first


def test_a_run_that_trains_adapters_has_no_model_to_export(recipe, local, tmp_path):
    run = forked.freeze(recipe, local)
    with pytest.raises(InputError, match="trains an adapter: see kit adapter export"):
        export_model(run.path, tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(InputError, match="elsewhere is neither a run nor a checkpoint"):
        export_model(tmp_path / "elsewhere", tmp_path / "model")
