"""Time disk to GPU by every method: `python tests/gpu/load.py OUT.json [GB] [WHAT]`.

A model of random bf16 weights (8.6 GB) is written as DCP, safetensors and a torch file (three times GB on the disk that
holds the temporary folder). Then every method loads it to the GPU, three times cold and twice warm, beside plain reads
of the disk and copies to the GPU. WHAT: ranks, for 2 and 8 ranks that load the DCP one to the CPU instead; or names of
methods, separated by semicolons, which load the safetensors file, warm before cold.
Needs torch, safetensors, psutil; fastsafetensors, runai-model-streamer with humanize, instanttensor, and kvikio-cu13
take part where installed.
"""

import importlib.metadata
import json
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch

from kit.checkpoints.storage import mount
from kit.checkpoints.timing import time_load


def make(folder: Path, gb: float) -> dict[str, Path]:
    """One state in three formats, in tensors of 134 MB."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    count = max(1, round(gb * 1e9 / (2 * 4096 * 16384)))
    state = {f"layers.{n}.weight": torch.randn(16384, 4096, device="cuda").bfloat16().cpu() for n in range(count)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process is one process
        writer = dcp.FileSystemWriter(folder / "dcp", sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=True)
    save_file(state, folder / "model.safetensors")
    torch.save(state, folder / "pytorch_model.bin")
    return {"dcp": folder / "dcp", "safetensors": folder / "model.safetensors", "torch": folder / "pytorch_model.bin"}


def copies(pinned: bool) -> list[float]:
    """GB/s of ten copies of 1 GiB to the GPU: what the link gives."""
    source, target = (
        torch.empty(1 << 30, dtype=torch.uint8, pin_memory=pinned),
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
    )
    rates = []
    for _ in range(10):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(source.nbytes / 1e9 / (time.perf_counter() - begun))
    return sorted(rates)


def main(out: Path, gb: float = 8.6, what: str = "gpu") -> None:
    """All tables, the JSON written after each."""
    scratch = Path(tempfile.mkdtemp(prefix="load-"))
    packages = ("torch", "safetensors", "fastsafetensors", "runai-model-streamer", "instanttensor", "kvikio-cu13")
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(), "cpus": psutil.cpu_count(), "storage": mount(scratch),
        "versions": {name: installed.get(name, "not installed") for name in packages},
        "pinned_gb_s": copies(pinned=True), "pageable_gb_s": copies(pinned=False),
    }  # fmt: skip

    def timed(name: str, *words: Any, **more: Any) -> None:
        begun = time.perf_counter()
        found = time_load(*words, **more)
        result[name] = [t | {"path": Path(t["path"]).name} for t in found.as_dict()["methods"]]
        print(f"{name}, {time.perf_counter() - begun:.0f} s", found, sep="\n", flush=True)
        out.write_text(json.dumps(result, indent=1))

    try:
        paths = make(scratch, gb)
        if what == "ranks":
            timed("ranks", paths["dcp"], ["dcp.load", "kit"], cold=True, repeats=2, ranks=(2, 8))
        elif what == "gpu":
            timed("cold", list(paths.values()), cold=True, device="cuda")
            timed("warm", list(paths.values()), repeats=2, device="cuda")
        else:
            timed("warm", paths["safetensors"], what.split(";"), repeats=3, device="cuda")
            timed("cold", paths["safetensors"], what.split(";"), cold=True, repeats=2, device="cuda")
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:3]), *sys.argv[3:4])
