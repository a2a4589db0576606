"""torch.load with weights_only: reads a file into memory, or maps it, so that bytes are read when first touched."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from kit.checkpoints.formats import torch_files
from kit.checkpoints.loaders.base import TORCH, Loader, LoadRequest


def load(request: LoadRequest, mmap: bool) -> Iterator[Any]:
    """The tensors of all files."""
    for file in request.weights.files:
        for tensor in torch_files.load(file, mmap=mmap).values():
            yield tensor.to(request.device)


LOADERS = (
    Loader("torch.load", TORCH, partial(load, mmap=False)),
    Loader("torch.load, mmap", TORCH, partial(load, mmap=True)),
)
