"""The device of this rank, for checks before training."""

from contextlib import AbstractContextManager

import torch


def kind() -> str:
    """cuda or cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def kept_random_state() -> AbstractContextManager[None]:
    """Restores the random state of the CPU and of this rank's GPU at its end.

    Without a device, torch.random.fork_rng creates a context on every GPU of the node, of some 0.5 GiB each.
    """
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else [])
