"""fastsafetensors (optional package): parallel O_DIRECT reads, here without GPUDirect Storage."""

import importlib
from collections.abc import Iterator
from typing import Any

from kit.checkpoints.loaders.base import SAFETENSORS, Loader, LoadRequest


def load(request: LoadRequest) -> Iterator[Any]:
    """The tensors of all files."""
    import torch

    open_file = importlib.import_module("fastsafetensors").fastsafe_open
    device = f"cuda:{torch.cuda.current_device()}" if request.device == "cuda" else request.device
    for file in request.weights.files:
        with open_file([str(file)], device=device, nogds=True) as stream:
            yield from [stream.get_tensor(name) for name in stream.keys()]  # noqa: SIM118


LOADERS = (Loader("fastsafetensors", SAFETENSORS, load, package="fastsafetensors"),)
