"""The kit's sharded reader: parallel reads past the page cache, each rank its rows as FSDP2 cuts them."""

from collections.abc import Iterable
from typing import Any

from kit.checkpoints.loaders.base import EVERY, Loader, LoadRequest


def load(request: LoadRequest) -> Iterable[Any]:
    """This rank's rows of every tensor."""
    from kit.checkpoints.sharded import load_sharded

    return load_sharded(request.path, request.rank, request.world, request.device).values()


LOADERS = (Loader("kit", EVERY, load),)
