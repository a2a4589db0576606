"""safetensors.torch.load_file, then a copy of each tensor, which does not depend on the mapped file."""

from collections.abc import Iterator
from typing import Any

from kit.checkpoints.loaders import safetensors_file
from kit.checkpoints.loaders.base import SAFETENSORS, Loader, LoadRequest


def load(request: LoadRequest) -> Iterator[Any]:
    """Copies of the tensors of all files."""
    return (tensor.clone() for tensor in safetensors_file.load(request))


LOADER = Loader("load_file, clone", SAFETENSORS, load, package="safetensors")
