"""Every change that kit.train makes to another library: what it changes, why, and for which releases.

Each function below changes one library, and does nothing for releases outside of its range. When a range no longer has
the installed release, its test fails: then find out whether the change is still needed.
"""

import dataclasses
import functools
import importlib.metadata
import os
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
import torch.distributed.checkpoint
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import fsdp_utils
from packaging.requirements import Requirement
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.fsdp import FSDPModule, StateDictType
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
from trl.trainer import utils as trl_utils

from kit.checkpoints import sharded
from kit.train.loss import FrozenHead

Arguments = ParamSpec("Arguments")
REQUIREMENTS: dict[str, Requirement] = {}  # by the name of the function


def applies(requirement: Requirement) -> bool:
    """Whether the installed release of a library is in the range."""
    return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)


def patch(text: str) -> Callable[[Callable[Arguments, None]], Callable[Arguments, None]]:
    """Decorator: the function runs only for the releases of this requirement, such as "accelerate>=1.15,<2"."""
    requirement = Requirement(text)

    def decorate(function: Callable[Arguments, None]) -> Callable[Arguments, None]:
        REQUIREMENTS[function.__name__] = requirement

        @functools.wraps(function)
        def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            if applies(requirement):
                function(*args, **kwargs)

        return wrapper

    return decorate


@patch("accelerate>=1.15,<2")
def shard_cpu_processes() -> None:
    """Let accelerate use FSDP for processes on CPUs. Call it before the first AcceleratorState is made.

    For gloo processes AcceleratorState chooses MULTI_CPU and drops the FSDP plugin.
    """
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


@patch("accelerate>=1.15,<2")
def partition_cpu_processes() -> None:
    """Let accelerate use DeepSpeed for processes on CPUs, where its launcher is configured for it.

    Call it before torch's process group is made, which DeepSpeed has to make itself. For gloo processes
    AcceleratorState chooses MULTI_CPU and drops the DeepSpeed plugin: they would train by DDP.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its collectives, which it would compile here
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, deepspeed_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, deepspeed_plugin=deepspeed_plugin, **kwargs)
        if deepspeed_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            deepspeed_plugin.set_mixed_precision(self._mixed_precision)
            deepspeed_plugin.select(_from_accelerator_state=True)
            self.deepspeed_plugins = deepspeed_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED

    AcceleratorState.__init__ = init


@patch("accelerate>=1.15,<2")
def count_cpu_processes() -> None:
    """Let accelerate accept processes on CPUs that split layers between them, as it does GPUs.

    It counts only types of GPUs as several devices, and refuses tensor parallelism elsewhere.
    """
    Accelerator.multi_device = property(lambda self: self.use_distributed)


@patch("accelerate>=1.15,<2")
def keep_loss_in_fp32(plugin: Any) -> None:
    """Have FSDP2 not cast the model's outputs. `plugin`: a FullyShardedDataParallelPlugin.

    accelerate sets output_dtype in the mixed precision policy. The loss is an output, too: in bf16 it would be rounded
    to steps of 1/128 near 1.1.
    """
    if plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)


@patch("accelerate>=1.15,<2")
def save_shards_from_the_gpu(plugin: Any, on: bool) -> None:
    """Have saves of FSDP2 refer to the shards, or, at the end, copy them to the host first, as accelerate does.

    plugin: a FullyShardedDataParallelPlugin; None changes nothing. Training waits for accelerate's copy, of 12 bytes a
    parameter in a full fine-tune, over the ranks; torch.distributed.checkpoint copies what it writes.
    """
    if plugin is not None and plugin.fsdp_version == 2 and plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT:
        plugin.state_dict_config.offload_to_cpu = not on


@patch("accelerate>=1.15,<2")
def fill_shards(plugin: Any, fill: Callable[..., Any]) -> None:
    """Have accelerate shard a model on meta under FSDP2, and call `fill` for the values of the shards.

    `plugin`: a FullyShardedDataParallelPlugin. accelerate's own function, of the same arguments, broadcasts a whole
    copy from rank 0.
    """
    plugin.cpu_ram_efficient_loading = True
    fsdp_utils.fsdp2_load_full_state_dict = fill


@patch("peft>=0.20,<0.21")
def leave_casts_to_autocast(adapted: torch.nn.Module) -> None:
    """Have PEFT's layers not cast their inputs, which autocast and FSDP do.

    PEFT casts to the type of the adapter's weights, fp32, and autocast back to 16 bits for the matmul, which takes time
    and memory. FSDP1 gathers the weights in bf16: when activation checkpointing runs a layer again, other weights are
    gathered than the first time, and with dropout torch then raises a CheckpointError.
    """
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.cast_input_dtype_enabled = False


@patch("trl>=1.16,<1.17")
def project_frozen_head_once() -> None:
    """Have TRL compute the loss with `FrozenHead` wherever the LM head is not trained.

    TRL projects the hidden states in the forward pass, and twice in the backward pass: to have the logits again, and
    for the gradient. Heads that are trained, have a bias or change their logits keep TRL's function.
    """
    original = trl_utils._ChunkedLogProbFunction
    if original is FrozenHeadWhereFrozen:
        return
    FrozenHeadWhereFrozen.original = original
    trl_utils._ChunkedLogProbFunction = FrozenHeadWhereFrozen


class FrozenHeadWhereFrozen:
    """Stands in for TRL's ChunkedLogProbFunction, of which it has the one function that TRL calls."""

    original: Any = None

    @classmethod
    def apply(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """log_probs, entropy, log_sum_sq_probs, mean_logits and is_top1 of each target."""
        changed = bias is not None or softcap is not None or (temperature, logit_scale) != (1.0, 1.0)
        beyond = {"log_sum_sq_probs", "mean_logits"} & set(outputs)
        if weight.requires_grad or changed or beyond:
            rest = (temperature, chunk_size, softcap, logit_scale, outputs)
            return tuple(cls.original.apply(hidden, weight, bias, targets, *rest))
        log_probabilities, entropy, is_top = FrozenHead.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
        return log_probabilities, entropy, None, None, is_top


@patch("torch>=2.11,<2.13")
def forget_pending_forwards(model: torch.nn.Module) -> None:
    """Have FSDP2 not wait for modules that an evaluation did not run. Call it after each evaluation.

    TRL's loss reads the weight of lm_head and never calls the module. FSDP2 counts it as still to run, and does not
    gather its group again after a save: the next step of a model with tied embeddings fails.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._get_fsdp_state()._modules_to_run_forward.clear()


@patch("torch>=2.11,<2.14")
def gather_bytes() -> None:
    """Have FSDP2 gather weights as bytes, for 4-bit weights that are stored as floats.

    Where all weights of a group have one type, they are copied as such, and on GPUs that copy writes another NaN than
    it read: bitsandbytes#1945. Weights of several types are gathered as bytes by torch itself.
    """
    original = _fsdp_collectives._get_all_gather_input_metadatas

    def as_bytes(param_all_gather_inputs: Any) -> tuple[Any, Any, torch.dtype]:
        dtypes, counts, _ = original(param_all_gather_inputs)
        return dtypes, counts, torch.uint8

    _fsdp_collectives._get_all_gather_input_metadatas = as_bytes


@patch("accelerate>=1.15,<2")
def load_checkpoints_with_own_reader() -> None:
    """Have accelerate load sharded checkpoints with kit.checkpoints.sharded.Reader, which reads each byte once a node.

    accelerate looks the reader up in torch.distributed.checkpoint at each load.
    """
    torch.distributed.checkpoint.FileSystemReader = sharded.Reader  # type: ignore[attr-defined]


@patch("accelerate>=1.15,<2")
def save_checkpoints_by(save: Callable[..., None]) -> None:
    """Have accelerate save sharded checkpoints by `save`, which has the arguments of torch.distributed.checkpoint.save.

    accelerate looks that function up at each save, and has no option for saves in the background.
    """
    torch.distributed.checkpoint.save = save  # type: ignore[attr-defined]


@patch("transformers>=5.24,<5.25")
def sum_gradients_of_one_pass() -> None:
    """Have transformers sum the gradients of norms between split layers once for each backward pass.

    Each rank normalises the heads that it has. transformers sums over the ranks what such a weight has accumulated:
    where a step has several micro-batches, the gradients of the earlier ones are summed again, and count as often as
    there are ranks. Plans of Qwen3, Gemma 3 and others say replicated_with_grad_allreduce.
    """
    ALL_PARALLEL_STYLES.register("replicated_with_grad_allreduce", SummedEachPass())


class SummedEachPass(TensorParallelLayer):  # type: ignore[misc]
    """A style of transformers' plans: a weight of which each rank has a copy, and uses it for some heads alone."""

    def install_forward(self, module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        """Have the gradient of each backward pass summed over the mesh. Returns the module."""
        hooked: set[torch.nn.Parameter] = set()

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone()
            torch.distributed.all_reduce(total, group=mesh.get_group())
            return total

        def hook(module: torch.nn.Module, inputs: Any) -> None:
            for parameter in set(module.parameters(recurse=False)) - hooked:  # in a forward pass FSDP has another one
                if parameter.requires_grad and torch.is_grad_enabled():
                    parameter.register_hook(summed)  # type: ignore[no-untyped-call]
                    hooked.add(parameter)

        module.register_forward_pre_hook(hook)
        return module


@patch("transformers>=5.20,<6")
def ignore_renamed_arguments() -> None:
    """Ignore a FutureWarning on every rank: TRL and PEFT use names that transformers has renamed."""
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing`", FutureWarning)
