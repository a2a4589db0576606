"""torch.distributed.checkpoint.load with the kit's sharded reader, as training resumes."""

from typing import Any

from kit.checkpoints.loaders import dcp_load
from kit.checkpoints.loaders.base import DCP, Loader, LoadRequest


def load(request: LoadRequest) -> list[Any]:
    """This rank's rows of every tensor."""
    from kit.checkpoints.sharded import Reader

    return dcp_load.load_with(request, Reader)


LOADER = Loader("dcp.load, kit's reader", DCP, load)
