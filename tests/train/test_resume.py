"""What a resumed run loads from its checkpoint, where transformers and accelerate lose a part of it."""

import json
import shutil

import pytest
import torch

from kit.train.resume import create_state
from tests.train import forked
from tests.train.strategies import base_model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "tied"])
def test_a_full_fine_tune_that_nothing_shards_resumes_exactly(recipe, tiny, local, kind):
    changes = {
        "model.name": str(base_model(kind, tiny)), "tuning.method": "full", "model.attention": "sdpa",
        "parallel.gpus_per_node": 1, "parallel.strategy": "ddp", "data.seq_len": 64, "schedule.lr": 1e-2,
        "schedule.max_steps": 6, "schedule.save_every": 3,
    }  # fmt: skip
    run = forked.freeze(recipe.override(**changes), local)
    forked.train(run)
    last = run.path / "checkpoints" / "checkpoint-6"
    first = history(last)
    assert len(first) == 6
    shutil.rmtree(last)
    forked.train(run)
    assert history(last) == first


def history(checkpoint):
    """Loss and gradient norm by step."""
    rows = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


def test_the_state_of_a_new_optimizer_is_made_without_a_change_of_weights_or_rates():
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0))]
    optimizer = torch.optim.AdamW([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": 0.2}])
    create_state(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert {"exp_avg", "exp_avg_sq"} <= optimizer.state[weights[0]].keys()
    assert torch.equal(weights[0], torch.ones(3)) and weights[0].grad is None
