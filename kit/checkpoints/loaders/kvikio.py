"""KvikIO (optional package, GPUs only): reads a file into GPU memory, by GPUDirect Storage or by its POSIX mode.

KvikIO's own choice between the two is silent, so each is a method here, and GPUDirect is refused where it cannot act.
"""

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from kit.checkpoints.formats.safetensors_files import pieces
from kit.checkpoints.loaders.base import SAFETENSORS, Loader, LoadRequest
from kit.checkpoints.weights import torch_dtype

THREADS = 16  # KvikIO's default is 1


def load(request: LoadRequest, compatibility: str) -> Iterator[Any]:
    """The tensors of all files, as parts of one buffer for each file."""
    import torch

    kvikio, defaults = importlib.import_module("kvikio"), importlib.import_module("kvikio.defaults")
    defaults.set({"compat_mode": getattr(kvikio.CompatMode, compatibility), "num_threads": THREADS})
    places = [piece for parts in pieces(request.weights).values() for piece in parts]
    for file in request.weights.files:
        buffer = torch.empty(file.stat().st_size, dtype=torch.uint8, device=request.device)
        with kvikio.CuFile(str(file)) as stream:
            stream.pread(buffer).get()
        for piece in places:
            if piece.file == file:
                data, dtype = buffer[piece.start : piece.start + piece.length], torch_dtype(piece.dtype)
                values = data if piece.start % dtype.itemsize == 0 else data.clone()
                yield values.view(dtype).reshape(piece.shape)


def no_library() -> str:
    """Why KvikIO cannot be imported; empty if it can."""
    try:
        importlib.import_module("kvikio")
    except (ImportError, RuntimeError) as error:  # RuntimeError where CUDA's libraries are missing
        return f"KvikIO cannot be imported: {error}".partition("\n")[0]
    return ""


def no_gpudirect() -> str:
    """Why reads would not go from the drive to the GPU directly; empty if they would."""
    if reason := no_library():
        return reason
    driver = importlib.import_module("kvikio.cufile_driver")
    if importlib.import_module("kvikio.defaults").is_compat_mode_preferred() or not driver.get("is_gds_available"):
        return "GPUDirect Storage is not available: it needs libcufile, nvidia-fs and a file system that they support"
    return ""


def _loader(name: str, compatibility: str, hindered: Any) -> Loader:
    run = partial(load, compatibility=compatibility)
    return Loader(name, SAFETENSORS, run, "kvikio", install="kvikio-cu13", devices=("cuda",), hindered=hindered)


LOADERS = (_loader("kvikio, GPUDirect", "OFF", no_gpudirect), _loader("kvikio, POSIX", "ON", no_library))
