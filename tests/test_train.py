import json

import pytest
import torch

from kit import slurm
from kit.train import collate, count_tokens

COMMON = {"schedule.max_steps": 6, "schedule.save_every": 0, "tuning.dropout": 0.0, "schedule.lr": 1e-3}
ALONE = {"parallel.gpus_per_node": 1, "schedule.micro_batch": 2}


def finished(run):
    end = slurm.wait(run, timeout=400)
    assert end.state == "COMPLETED", run.log.read_text()
    state = json.loads((run.checkpoints()[-1] / "trainer_state.json").read_text())
    history = [h for h in state["log_history"] if "loss" in h]
    assert all(h["tokens_per_s"] > 0 and h["step_s"] > 0 for h in history[1:])
    assert "tokens_per_s" not in history[0]  # the first step is timed from nowhere
    return history


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_fsdp2_on_two_ranks_learns_as_one_process_does_with_the_same_batch(recipe, local, method):
    job = recipe.override(**COMMON, **{"tuning.method": method, "name": method})
    both = [slurm.launch(job, local), slurm.launch(job.override(**ALONE), local)]
    two, one = map(finished, both)
    assert len(two) == len(one) == 6
    for a, b in zip(two, one, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["num_tokens"] == b["num_tokens"]
    assert two[0]["loss"] != two[-1]["loss"]
    result = json.loads((both[0].path / "state" / "result.json").read_text())
    assert result["eval_loss_after"] < result["eval_loss_before"]


def rows():
    return [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8], "seq_lengths": [2, 2]},
        {"input_ids": [9, 10], "labels": [-100, 10], "seq_lengths": [2]},
    ]


def test_positions_restart_at_each_document_and_padding_counts_for_nothing():
    batch = collate(rows())
    assert batch["position_ids"][:, :4].tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]
    assert batch["labels"][:, :4].tolist() == [[-100, 6, -100, 8], [-100, 10, -100, -100]]
    assert not batch["position_ids"][:, 4:].any() and (batch["labels"][:, 4:] == -100).all()
    assert "attention_mask" not in batch
    assert count_tokens(batch["position_ids"]) == 6


def test_packed_documents_do_not_see_each_other(tiny):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="sdpa").eval()
    batch = collate(rows())
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        alone = model(input_ids=torch.tensor([[7, 8]]), use_cache=False).logits
        leaking = model(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits
    assert torch.allclose(packed[0, 2:4], alone[0], atol=1e-6)
    assert not torch.allclose(leaking[0, 2:], alone[0], atol=1e-6)
    assert torch.isfinite(packed).all()


@pytest.mark.slow
def test_a_tied_model_goes_on_after_an_evaluation_and_a_save_at_one_step(recipe, local):
    job = recipe.override(**COMMON | {"schedule.eval_every": 2, "schedule.save_every": 2})
    assert [h["step"] for h in finished(slurm.launch(job, local))] == [1, 2, 3, 4, 5, 6]
