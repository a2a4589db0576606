import json
import os
import subprocess
import sys

import pytest
import torch

from kit.errors import KitError
from kit.files import REPOSITORY
from kit.slurm import launch as slurm
from kit.train.isolation import check_isolation, collate, count_tokens

COMMON = {"schedule.max_steps": 6, "schedule.save_every": 0, "tuning.dropout": 0.0, "schedule.lr": 1e-3}
ALONE = {"parallel.gpus_per_node": 1, "schedule.micro_batch": 2}


def finished(run):
    end = run.wait(timeout=400)
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
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=3e-4)  # Adam magnifies rounding; 1.1e-4 seen
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(recipe, attention):
    assert check_isolation(recipe.override(**{"model.attention": attention})) < 1e-6


def test_the_proof_before_training_fails_where_documents_leak(recipe, monkeypatch):
    def leaky(rows):
        return collate([row | {"seq_lengths": [len(row["input_ids"])]} for row in rows])

    monkeypatch.setattr("kit.train.isolation.collate", leaky)
    with pytest.raises(KitError, match=r"model\.attention sdpa, packed documents of .*tiny.* see each other: 100% of"):
        check_isolation(recipe)


def test_the_proof_leaves_no_trace_in_the_random_numbers(recipe):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    check_isolation(recipe)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_a_tied_model_goes_on_after_an_evaluation_and_a_save_at_one_step(recipe, local):
    job = recipe.override(**COMMON | {"schedule.eval_every": 2, "schedule.save_every": 2})
    assert [h["step"] for h in finished(slurm.launch(job, local))] == [1, 2, 3, 4, 5, 6]


FSDP1 = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from transformers import LlamaConfig, LlamaForCausalLM
from kit.train.trainer import leave_casts_to_fsdp

dist.init_process_group("gloo")
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
tokens, bf16 = torch.arange(32)[None], torch.bfloat16
for ours in (False, True):
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**shape)).to(bf16), lora)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    if ours:
        leave_casts_to_fsdp(model)
    policy, mixed = fsdp_auto_wrap_policy(model), MixedPrecision(bf16, bf16, bf16)
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, mixed_precision=mixed, device_id=torch.device("cpu"))
    with torch.autocast("cpu", dtype=bf16):
        loss = sharded(input_ids=tokens, labels=tokens, use_cache=False).loss
    try:
        loss.backward()
        outcome = "trained"
    except torch.utils.checkpoint.CheckpointError:
        outcome = "CheckpointError"
    if dist.get_rank() == 0:
        print(outcome)
dist.destroy_process_group()
"""  # noqa: E501


def test_an_adapter_under_fsdp1_can_be_checkpointed_which_pefts_own_casts_prevent(tmp_path):
    (tmp_path / "ranks.py").write_text(FSDP1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "ranks.py"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["CheckpointError", "trained"], done.stderr[-2000:]
