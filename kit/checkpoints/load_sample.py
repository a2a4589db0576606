"""One sample of a load, in a fresh process on each rank: bytes and times until every page is touched."""

import importlib
import mmap
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.checkpoints import pagecache
from kit.checkpoints.loaders import loaders_for
from kit.checkpoints.loaders.base import LoadRequest
from kit.checkpoints.processes import join
from kit.checkpoints.weights import read_headers


@dataclass(frozen=True)
class RankSample:
    """What one rank measured.

    call_s: until the loader returned. touched_s: until a byte of every page was read; on a GPU, until all copies were
    done. wanted: bytes of the rank's tensors. asked: bytes of read calls. device: bytes from the device. residency:
    part of the files' pages that was in memory before, 0 to 1.
    """

    call_s: float
    touched_s: float
    wanted: int
    asked: int
    device: int
    residency: float


def sample(method: str, path: str, state: str, device: str) -> dict[str, Any]:
    """This rank's RankSample as a dictionary; `state` is "cold" or "warm".

    Imports, headers and the process group come before the clock starts.
    """
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.empty(1, device=device)
    rank, world = join(device)
    request = LoadRequest(read_headers(Path(path)), Path(path), rank, world, device)
    (loader,) = loaders_for(request.weights.format, [method], device)
    importlib.import_module(loader.package)
    (pagecache.evict if state == "cold" else pagecache.warm)(request.weights.files)
    residency = pagecache.residency(request.weights.files)
    if world > 1:
        dist.barrier()
    device_before, asked_before = pagecache.device_bytes(), pagecache.read_bytes()
    begun = time.perf_counter()
    tensors = list(loader.load(request))
    called = time.perf_counter()
    touch(tensors)
    if device == "cuda":
        torch.cuda.synchronize()
    touched = time.perf_counter()
    return asdict(
        RankSample(
            call_s=called - begun,
            touched_s=touched - begun,
            wanted=sum(tensor.nbytes for tensor in tensors),
            asked=pagecache.read_bytes() - asked_before,
            device=pagecache.device_bytes() - device_before,
            residency=residency,
        )
    )


def touch(tensors: list[Any]) -> None:
    """Read one byte of every page of the CPU tensors: a mapped file is read only then."""
    import torch

    for tensor in tensors:
        if not tensor.is_cuda:
            tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
