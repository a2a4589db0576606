"""Probe: what this job's GPUs and links give. One process a GPU: `torchrun ... -m kit.probe OUT.json`, or under srun."""

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SIDE = 8192 if ON_GPU else 1024  # of the square matrices
GATHERED = 2**30 if ON_GPU else 2**26  # bytes of the whole tensor: about a layer of a 70B model and more
LAUNCHES = 2000  # small kernels in a row: what they take is the host's work, not the GPU's


def seconds(work: Callable[[], Any], repeats: int = 7) -> float:
    """Median time of one call, finished on the device; the first two calls do not count."""
    times = []
    for _ in range(repeats + 2):
        if ON_GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if ON_GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def matmul_tflops() -> float:
    """TFLOP/s of a square matmul, in bf16 on a GPU and fp32 on a CPU: 2 n^3 operations."""
    kind = torch.bfloat16 if ON_GPU else torch.float32
    a, b = (torch.randn(SIDE, SIDE, device=DEVICE, dtype=kind) for _ in range(2))
    return float(2 * SIDE**3 / seconds(lambda: a @ b) / 1e12)


def launch_us() -> float:
    """Microseconds in which the host issues one small operation."""
    one = torch.zeros(1, device=DEVICE)

    def many() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    return seconds(many, 3) / LAUNCHES * 1e6


def gather_gb_s(group: Any, ranks: int) -> float:
    """GB/s that every link of a ring carries in an all-gather: (ranks - 1) / ranks of the whole over the time."""
    part = torch.ones(GATHERED // 4 // ranks, device=DEVICE)
    whole = torch.empty(part.numel() * ranks, device=DEVICE)
    took = seconds(lambda: dist.all_gather_into_tensor(whole, part, group=group))
    return whole.nbytes * (ranks - 1) / ranks / took / 1e9


def probe(ranks: int, local: int) -> dict[str, Any]:
    """This rank's figures; links that the job does not have are left out."""
    found: dict[str, Any] = {"host": socket.gethostname(), "matmul_tflops": matmul_tflops(), "launch_us": launch_us()}
    if ON_GPU:
        found |= {"gpu": torch.cuda.get_device_name(), "memory_gib": torch.cuda.mem_get_info()[1] / 2**30}
    if local > 1:
        groups = [dist.new_group(list(range(i, i + local))) for i in range(0, ranks, local)]
        found["intra_gb_s"] = gather_gb_s(groups[dist.get_rank() // local], local)
    if ranks > local:
        found["inter_gb_s"] = gather_gb_s(None, ranks)
    return found


def main() -> int:
    """Every rank probes; rank 0 writes the list of what they found."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, probe(ranks, local))
    if rank == 0:
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
        Path(sys.argv[1]).write_text(json.dumps({"ranks": everyone, "versions": versions}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
