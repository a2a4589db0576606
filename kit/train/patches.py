"""Every change that kit.train makes to another library: what it changes, why, and for which releases.

Each function below changes one library, and does nothing for releases outside of its range. When a range no longer has
the installed release, its test fails: then find out whether the change is still needed.
"""

import dataclasses
import functools
import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
import torch.distributed.checkpoint
from accelerate.state import AcceleratorState, DistributedType, PartialState
from packaging.requirements import Requirement
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.fsdp import FSDPModule

from kit.checkpoints import sharded

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
def keep_loss_in_fp32(plugin: Any) -> None:
    """Have FSDP2 not cast the model's outputs. `plugin`: a FullyShardedDataParallelPlugin.

    accelerate sets output_dtype in the mixed precision policy. The loss is an output, too: in bf16 it would be rounded
    to steps of 1/128 near 1.1.
    """
    if plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)


@patch("peft>=0.20,<0.21")
def leave_casts_to_fsdp(adapted: torch.nn.Module) -> None:
    """Have PEFT's layers not cast their inputs, since FSDP1 casts the inputs of each unit.

    PEFT casts to the type of the adapter's weights: fp32, or bf16 while FSDP1 has them gathered. When activation
    checkpointing runs a layer again, other weights are gathered than the first time. With dropout, torch then raises a
    CheckpointError.
    """
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.cast_input_dtype_enabled = False


@patch("torch>=2.11,<2.13")
def forget_pending_forwards(model: torch.nn.Module) -> None:
    """Have FSDP2 not wait for modules that an evaluation did not run. Call it after each evaluation.

    TRL's loss reads the weight of lm_head and never calls the module. FSDP2 counts it as still to run, and does not
    gather its group again after a save: the next step of a model with tied embeddings fails.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._get_fsdp_state()._modules_to_run_forward.clear()


@patch("accelerate>=1.15,<2")
def load_checkpoints_with_own_reader() -> None:
    """Have accelerate load sharded checkpoints with kit.checkpoints.sharded.Reader, which reads each byte once a node.

    accelerate looks the reader up in torch.distributed.checkpoint at each load.
    """
    torch.distributed.checkpoint.FileSystemReader = sharded.Reader  # type: ignore[attr-defined]


@patch("transformers>=5.20,<6")
def ignore_renamed_arguments() -> None:
    """Ignore a FutureWarning on every rank: TRL and PEFT use names that transformers has renamed."""
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing`", FutureWarning)
