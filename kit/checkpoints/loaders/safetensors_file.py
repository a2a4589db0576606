"""safetensors.torch.load_file: maps the file, so that its bytes are read when they are first touched."""

from collections.abc import Iterator
from typing import Any

from kit.checkpoints.loaders.base import SAFETENSORS, Loader, LoadRequest


def load(request: LoadRequest) -> Iterator[Any]:
    """The tensors of all files."""
    from safetensors.torch import load_file

    for file in request.weights.files:
        yield from load_file(file, device=request.device).values()


LOADER = Loader("load_file", SAFETENSORS, load, package="safetensors")
