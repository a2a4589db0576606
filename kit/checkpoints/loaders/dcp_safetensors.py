"""torch.distributed.checkpoint.load with DCP's reader of safetensors files."""

from typing import Any

from kit.checkpoints.loaders import dcp_load
from kit.checkpoints.loaders.base import SAFETENSORS, Loader, LoadRequest


def load(request: LoadRequest) -> list[Any]:
    """This rank's rows of every tensor."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return dcp_load.load_with(request, HuggingFaceStorageReader)


LOADER = Loader("dcp.load, HF reader", SAFETENSORS, load)
