"""Every change to another library: that the installed release needs it, and that it does what it says."""

import inspect
import re
import warnings

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import fsdp_utils
from packaging.requirements import Requirement

from kit.checkpoints.sharded import Reader
from kit.train import patches
from kit.train.shards import ShardedBase
from tests.ranks import TRAINING, run_ranks

NOT_NEEDED = {"forget_pending_forwards"}  # torch 2.13 does it


def test_every_function_names_the_releases_that_it_is_for_and_the_installed_ones_are_among_them():
    functions = [
        name
        for name, function in vars(patches).items()
        if inspect.isfunction(function) and function.__module__ == patches.__name__
    ]
    assert set(functions) - {"applies", "patch"} == patches.REQUIREMENTS.keys()
    applied = {name for name, requirement in patches.REQUIREMENTS.items() if patches.applies(requirement)}
    assert patches.REQUIREMENTS.keys() - applied == NOT_NEEDED


def test_a_function_does_nothing_for_other_releases(monkeypatch):
    calls = []
    monkeypatch.setattr(patches, "REQUIREMENTS", {})
    for text in ("torch<1", "torch>=1"):
        patches.patch(text)(lambda text=text: calls.append(text))()
    assert calls == ["torch>=1"]
    assert not patches.applies(Requirement("torch<1"))


def printed_by_two_ranks(folder, script):
    """The words that two gloo ranks print that run this script."""
    (folder / "ranks.py").write_text(script)
    return run_ranks(2, folder / "ranks.py", imports=TRAINING).split()


FSDP1 = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from transformers import LlamaConfig, LlamaForCausalLM
from kit.train.patches import leave_casts_to_autocast

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
        leave_casts_to_autocast(model)
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
    assert printed_by_two_ranks(tmp_path, FSDP1) == ["CheckpointError", "trained"]


CPU_RANKS = """
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from kit.train.patches import shard_cpu_processes

for patched in (False, True):
    if patched:
        shard_cpu_processes()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    state = Accelerator(cpu=True, fsdp_plugin=plugin).state
    if state.process_index == 0:
        print(state.distributed_type.value, getattr(state, "fsdp_plugin", None) is plugin)
    dist.barrier()
    AcceleratorState._reset_state()
dist.destroy_process_group()
"""


def test_accelerate_uses_fsdp_for_cpu_ranks_only_with_the_patch(tmp_path):
    assert printed_by_two_ranks(tmp_path, CPU_RANKS) == ["MULTI_CPU", "False", "FSDP", "True"]


def test_the_loss_is_not_cast_to_bf16_by_fsdp2():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16  # what accelerate sets
    patches.keep_loss_in_fp32(plugin)
    assert plugin.mixed_precision_policy.output_dtype is None
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16


def test_the_shards_of_fsdp2_are_saved_without_a_copy_of_all_on_the_host():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    assert fsdp_utils._prepare_sd_options(plugin).cpu_offload  # what accelerate sets
    patches.save_shards_from_the_gpu(plugin, True)
    assert not fsdp_utils._prepare_sd_options(plugin).cpu_offload
    patches.save_shards_from_the_gpu(plugin, False)
    assert fsdp_utils._prepare_sd_options(plugin).cpu_offload


def test_accelerate_loads_sharded_checkpoints_with_the_kits_reader(monkeypatch):
    original = torch.distributed.checkpoint.FileSystemReader
    monkeypatch.setattr(torch.distributed.checkpoint, "FileSystemReader", original)  # and back after the test
    patches.load_checkpoints_with_own_reader()
    assert torch.distributed.checkpoint.FileSystemReader is Reader
    for function in (fsdp_utils.load_fsdp_model, fsdp_utils.load_fsdp_optimizer):
        source = inspect.getsource(function)
        assert "dist_cp.FileSystemReader(" in source  # looked up at each load


def test_accelerate_asks_for_the_values_of_the_shards_where_the_patch_says(monkeypatch):
    monkeypatch.setattr(fsdp_utils, "fsdp2_load_full_state_dict", fsdp_utils.fsdp2_load_full_state_dict)  # and back
    arguments = inspect.signature(fsdp_utils.fsdp2_load_full_state_dict).parameters
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False)
    patches.fill_shards(plugin, ShardedBase.fill)
    assert plugin.cpu_ram_efficient_loading
    assert fsdp_utils.fsdp2_load_full_state_dict is ShardedBase.fill
    assert list(inspect.signature(ShardedBase.fill).parameters)[1:] == ["accelerator", "model", "state", "cpu_offload"]
    assert list(arguments) == ["accelerator", "model", "full_sd", "cpu_offload"]  # the last one by name


def test_accelerate_saves_by_the_function_that_the_patch_says(monkeypatch):
    monkeypatch.setattr(torch.distributed.checkpoint, "save", torch.distributed.checkpoint.save)  # and back
    patches.save_checkpoints_by(print)
    assert torch.distributed.checkpoint.save is print
    for function in (fsdp_utils.save_fsdp_model, fsdp_utils.save_fsdp_optimizer):
        (call,) = re.findall(r"dist_cp\.save\((.*?)\n *\)", inspect.getsource(function), re.DOTALL)
        assert re.findall(r"^ *(\w+)=", call, re.MULTILINE) == ["state_dict", "storage_writer", "planner"]


PENDING = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from kit.train.patches import forget_pending_forwards

dist.init_process_group("gloo")
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
state = model._get_fsdp_state()
state._modules_to_run_forward.add(model)
forget_pending_forwards.__wrapped__(model)
if dist.get_rank() == 0:
    print(len(state._modules_to_run_forward))
dist.destroy_process_group()
"""


def test_fsdp2_forgets_modules_that_an_evaluation_did_not_run(tmp_path):
    """Whether torch needs it shows tests/train/test_trainer.py, where a tied model trains on after an evaluation."""
    assert printed_by_two_ranks(tmp_path, PENDING) == ["0"]


@pytest.mark.parametrize("words", ["`gradient_checkpointing` is renamed", "`is_gradient_checkpointing` is renamed"])
def test_a_warning_of_renamed_arguments_is_ignored_and_no_other(words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patches.ignore_renamed_arguments()
        warnings.warn(words, FutureWarning, stacklevel=1)
        warnings.warn("something else", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["something else"]
