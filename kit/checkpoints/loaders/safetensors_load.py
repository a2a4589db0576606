"""safetensors.torch: maps a file, so that bytes are read when first touched, or reads it.

vLLM loads by the same functions: its strategy lazy is `load_file`, and eager is `load, read first`.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kit.checkpoints.loaders.base import SAFETENSORS, Loader, LoadRequest


def load(request: LoadRequest, read: Callable[[Path, str], dict[str, Any]], clone: bool = False) -> Iterator[Any]:
    """The tensors of all files; with `clone` copies, which do not depend on the mapped file."""
    for file in request.weights.files:
        for tensor in read(file, request.device).values():
            yield tensor.clone() if clone else tensor


def mapped(file: Path, device: str) -> dict[str, Any]:
    """The tensors of a mapped file."""
    from safetensors.torch import load_file

    return load_file(file, device=device)


def positioned(file: Path, device: str) -> dict[str, Any]:
    """The tensors of a file, read by pread instead of mapped."""
    from safetensors.torch import load_file

    return load_file(file, device=device, backend="pread")


def read_first(file: Path, device: str) -> dict[str, Any]:
    """The tensors of a file that is read into memory first."""
    from safetensors.torch import load as parse

    return {name: tensor.to(device) for name, tensor in parse(file.read_bytes()).items()}


def no_backends() -> str:
    """Why the installed release only maps files; empty if it can read them."""
    from safetensors.torch import load_file

    return "" if "backend" in inspect.signature(load_file).parameters else "it needs safetensors 0.8 or newer"


LOADERS = (
    Loader("load_file", SAFETENSORS, partial(load, read=mapped), "safetensors"),
    Loader("load_file, clone", SAFETENSORS, partial(load, read=mapped, clone=True), "safetensors"),
    Loader("load_file, pread", SAFETENSORS, partial(load, read=positioned), "safetensors", hindered=no_backends),
    Loader("load, read first", SAFETENSORS, partial(load, read=read_first), "safetensors"),
)
