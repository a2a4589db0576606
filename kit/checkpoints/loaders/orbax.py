"""Orbax (optional package, with JAX): restores the arrays of Orbax checkpoints to host memory."""

import importlib
from collections.abc import Iterator
from typing import Any

from kit.checkpoints.formats import orbax
from kit.checkpoints.loaders.base import Loader, LoadRequest


def load(request: LoadRequest) -> Iterator[Any]:
    """The bytes of the arrays, in their memory: torch does not take bfloat16 from numpy."""
    import numpy as np
    import torch

    checkpoint, jax = importlib.import_module("orbax.checkpoint"), importlib.import_module("jax")
    values: list[Any] = []
    with checkpoint.PyTreeCheckpointer() as reader:
        for folder in orbax.folders_of(request.weights):
            described = reader.metadata(folder.absolute()).item_metadata.tree
            to_numpy = jax.tree.map(lambda _: checkpoint.RestoreArgs(restore_type=np.ndarray), described)
            values += jax.tree.leaves(reader.restore(folder.absolute(), restore_args=to_numpy))
    for value in values:
        yield torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


LOADERS = (
    Loader(
        "orbax", frozenset({orbax.FORMAT}), load, package="orbax.checkpoint", install="orbax-checkpoint jax",
        devices=("cpu",),
    ),
)  # fmt: skip
