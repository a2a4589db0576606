"""safetensors.torch.load_file: maps the file, so that bytes are read when first touched, or when they are copied."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from kit.checkpoints.loaders.base import SAFETENSORS, Loader, LoadRequest


def load(request: LoadRequest, clone: bool) -> Iterator[Any]:
    """The tensors of all files; with `clone` copies, which do not depend on the mapped file."""
    from safetensors.torch import load_file

    for file in request.weights.files:
        for tensor in load_file(file, device=request.device).values():
            yield tensor.clone() if clone else tensor


LOADERS = (
    Loader("load_file", SAFETENSORS, partial(load, clone=False), package="safetensors"),
    Loader("load_file, clone", SAFETENSORS, partial(load, clone=True), package="safetensors"),
)
