"""torch.distributed.checkpoint.load with DCP's file reader: rows of each tensor on each rank, as FSDP2 cuts them."""

from typing import Any

from kit.checkpoints.loaders.base import DCP, Loader, LoadRequest


def load(request: LoadRequest) -> list[Any]:
    """This rank's rows of every tensor."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return load_with(request, FileSystemReader)


def load_with(request: LoadRequest, reader: Any) -> list[Any]:
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
    folder = str(request.weights.files[0].parent)
    state_dict_loader.load(state, storage_reader=reader(folder), no_dist=mesh is None)
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in state.values()]


LOADER = Loader("dcp.load", DCP, load)
