"""QLoRA over several ranks: 4-bit weights that FSDP2 shards are the same words, or the job does not begin."""

import importlib.util

import pytest

from tests.ranks import TRAINING, run_ranks
from tests.train import forked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]
CHECK = """
import sys
import torch
from accelerate.state import PartialState
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from kit.errors import KitError
from kit.train import patches
from kit.train.base import check_nf4_shards

PartialState(cpu=True)
gathered = []
inputs, metadatas = _fsdp_param.FSDPParam.all_gather_inputs, _fsdp_collectives._get_all_gather_input_metadatas


def noted(found):
    result = metadatas(found)
    gathered.append(all(tensor.isnan().any() for tensors in found for tensor in tensors))
    return result


_fsdp_collectives._get_all_gather_input_metadatas = noted
if "bytes" in sys.argv:
    patches.gather_bytes()
if "one NaN" in sys.argv:  # as a copy on GPUs that writes each NaN as the same one
    same = lambda self: [torch.where(tensor.isnan(), torch.nan, tensor) for tensor in inputs.fget(self)]
    _fsdp_param.FSDPParam.all_gather_inputs = property(same)
try:
    check_nf4_shards()
    print("equal", gathered)
except KitError as error:
    print(error)
"""
JOB = {
    "tuning.method": "qlora", "schedule.max_steps": 6, "schedule.save_every": 3, "schedule.lr": 1e-3,
    "model.attention": "sdpa", "parallel.activation_checkpointing": True,
}  # fmt: skip
WAYS = {
    "one process": {"parallel.strategy": "ddp", "parallel.gpus_per_node": 1, "schedule.micro_batch": 2},
    "ddp": {"parallel.strategy": "ddp"},
    "fsdp2": {"parallel.strategy": "fsdp2"},
}


@pytest.mark.parametrize("way", ["as torch does", "bytes"])
def test_sharded_words_that_are_nan_as_floats_keep_their_bits(tmp_path, way):
    (tmp_path / "check.py").write_text(CHECK)
    assert run_ranks(2, tmp_path / "check.py", way, imports=TRAINING).splitlines()[-2:] == ["equal [True]"] * 2


def test_a_gather_that_changes_a_nan_is_found_on_every_rank_and_said_with_what_to_do(tmp_path):
    (tmp_path / "check.py").write_text(CHECK)
    output = run_ranks(2, tmp_path / "check.py", "one NaN", imports=TRAINING)
    assert output.count("bitsandbytes#1945). Set parallel.strategy to ddp") == 2


def test_qlora_has_the_same_losses_in_one_process_under_ddp_and_under_fsdp2(recipe, local):
    losses = {}
    for way, changes in WAYS.items():
        run = forked.freeze(recipe.override(**JOB, **changes), local)
        forked.train(run)
        losses[way] = [row["loss"] for row in forked.history(run)]
    assert len(losses["ddp"]) == 6
    assert losses["ddp"] == pytest.approx(losses["one process"], rel=1e-5)
    assert losses["fsdp2"] == pytest.approx(losses["one process"], rel=1e-5)
