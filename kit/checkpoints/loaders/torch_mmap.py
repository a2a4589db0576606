"""torch.load with mmap: maps the file, so that its bytes are read when they are first touched."""

from collections.abc import Iterator
from typing import Any

from kit.checkpoints.loaders import torch_read
from kit.checkpoints.loaders.base import TORCH, Loader, LoadRequest


def load(request: LoadRequest) -> Iterator[Any]:
    """The tensors of all files."""
    return torch_read.load_files(request, mmap=True)


LOADER = Loader("torch.load, mmap", TORCH, load)
