"""InstantTensor (optional package, GPUs only): reads past the page cache while earlier bytes are copied to the GPU."""

import importlib
from collections.abc import Iterator
from typing import Any

from kit.checkpoints.loaders.base import SAFETENSORS, Loader, LoadRequest


def load(request: LoadRequest) -> Iterator[Any]:
    """The tensors of all files, which its own memory holds."""
    import torch

    files = [str(file) for file in request.weights.files]
    safe_open = importlib.import_module("instanttensor").safe_open
    with safe_open(files, framework="pt", device=torch.cuda.current_device()) as stream:
        yield from (tensor for _, tensor in stream.tensors())


LOADERS = (Loader("instanttensor", SAFETENSORS, load, package="instanttensor", devices=("cuda",)),)
