"""torch.distributed.checkpoint.load by several readers: rows of each tensor on each rank, as FSDP2 cuts them."""

import importlib
from functools import partial
from typing import Any

from kit.checkpoints.loaders.base import DCP, SAFETENSORS, Loader, LoadRequest


def load(request: LoadRequest, module: str, reader: str) -> list[Any]:
    """This rank's rows of every tensor, by a storage reader of DCP that takes a folder."""
    import torch
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    mesh = init_device_mesh(request.device, (request.world,)) if request.world > 1 else None
    state: dict[str, Any] = {}
    for name, tensor in request.weights.tensors.items():
        dtype = getattr(torch, tensor.dtype)
        if mesh is not None and tensor.shape:
            state[name] = empty(tensor.shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
        else:
            state[name] = torch.empty(tensor.shape, dtype=dtype, device=request.device)
    open_folder = getattr(importlib.import_module(module), reader)
    storage = open_folder(str(request.weights.files[0].parent))
    state_dict_loader.load(state, storage_reader=storage, no_dist=mesh is None)
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in state.values()]


_TORCH = "torch.distributed.checkpoint"
LOADERS = (
    Loader("dcp.load", DCP, partial(load, module=f"{_TORCH}.filesystem", reader="FileSystemReader")),
    Loader("dcp.load, kit's reader", DCP, partial(load, module="kit.checkpoints.sharded", reader="Reader")),
    Loader(
        "dcp.load, HF reader",
        SAFETENSORS,
        partial(load, module=f"{_TORCH}.hf_storage", reader="HuggingFaceStorageReader"),
    ),
)
