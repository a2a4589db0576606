"""torch.load with weights_only: reads the file into memory."""

from collections.abc import Iterator
from typing import Any

from kit.checkpoints.formats import torch_files
from kit.checkpoints.loaders.base import TORCH, Loader, LoadRequest


def load(request: LoadRequest) -> Iterator[Any]:
    """The tensors of all files."""
    return load_files(request, mmap=False)


def load_files(request: LoadRequest, mmap: bool) -> Iterator[Any]:
    """The tensors of all files, by reading or by mapping them."""
    for file in request.weights.files:
        for tensor in torch_files.load(file, mmap=mmap).values():
            yield tensor.to(request.device)


LOADER = Loader("torch.load", TORCH, load)
