"""What a Trainer loads from a checkpoint besides what transformers and accelerate load completely."""

from typing import Any

import torch


class ExactResumes:
    """Part of a Trainer: a resumed run has the weights and the optimizer of its checkpoint.

    transformers loads the weights of a model that nothing shards by the names in the files, which are not those of a
    mixture of experts: it would keep the experts of the base, without an error. accelerate loads only as much of the
    optimizer's state under FSDP1 as there is before the load, which is nothing.
    """

    accelerator: Any
    optimizer: Any
    has_weights = False
    """Whether the model was made from the checkpoint (kit.train.load.prepare_base)."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.has_weights:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)  # accelerate sets it only under FSDP
        if checkpoint is not None and plugin is not None and plugin.fsdp_version == 1:
            create_state(self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


def create_state(optimizer: Any) -> None:
    """Give an optimizer that has not stepped yet its state, by a step that changes no weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
