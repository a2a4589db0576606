"""Time disk to GPU by every method: `python tests/gpu/load.py [GB] [SECONDS]`, results in $OUT/load.json.

A model of random bf16 weights (8.6 GB) is written as DCP, safetensors and a torch file (three times GB on the disk that
holds the temporary folder). Then rounds of all methods, each in a fresh process after eviction, beside plain reads of
the disk and pinned copies to the GPU, until SECONDS (220) are over. What could not be proven cold is labelled mixed.
Needs torch, safetensors, psutil; fastsafetensors, and runai-model-streamer with humanize, take part where installed.
"""

import importlib.metadata
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from kit import loadtime
from kit.errors import KitError
from kit.weights import weights

METHODS = {
    "safetensors": ("load_file", "dcp.load, HF reader", "fastsafetensors", "runai-model-streamer", "kit"),
    "dcp": ("dcp.load", "dcp.load, kit's reader", "kit"),
    "torch": ("torch.load", "torch.load, mmap", "kit"),
}


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


def one(method: str, path: Path, gb: float, cold: bool) -> dict[str, Any]:
    """One sample, or why there is none."""
    state = "cold" if cold else "warm"
    try:
        (row,) = loadtime.run_ranks(("-m", "kit.loadtime", method, str(path), state, "cuda"), 1)
    except KitError as error:
        return {"error": str(error)[-600:]}
    return row | {"gb_s": gb / row["touched"], "label": loadtime.label(row["residency"], row["device"] / row["wanted"])}


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and ranges of the samples that worked."""
    good = [s for s in samples if "error" not in s]
    if not good:
        return {"error": samples[0]["error"]}
    rates = [s["gb_s"] for s in good]
    keys = ("call", "touched", "device", "asked", "wanted", "residency")
    return {key: statistics.median(s[key] for s in good) for key in keys} | {
        "gb_s": statistics.median(rates), "gb_s_range": (min(rates), max(rates)), "samples": len(good),
        "labels": sorted({s["label"] for s in good}),
    }  # fmt: skip


def main(gb: float = 8.6, seconds: float = 220) -> None:
    """Rounds until the time is over, the JSON written after each."""
    begun, scratch = time.perf_counter(), Path(tempfile.mkdtemp(prefix="load-"))
    packages = ("torch", "safetensors", "fastsafetensors", "runai-model-streamer")
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(), "cpus": os.cpu_count(), "storage": loadtime.mount(scratch),
        "versions": {name: installed.get(name, "not installed") for name in packages},
        "pinned_gb_s": copies(pinned=True), "pageable_gb_s": copies(pinned=False),
    }  # fmt: skip
    samples: dict[str, list[dict[str, Any]]] = {}
    disk: dict[int, list[float]] = {}
    try:
        paths = make(scratch, gb)
        held = {form: weights(path) for form, path in paths.items()}
        result |= {"gb": held["dcp"].bytes / 1e9, "written_s": time.perf_counter() - begun}
        longest = 0.0
        for number in range(20):
            started = time.perf_counter()
            cold = number != 2  # the third round is warm
            for depth in (1, 4, 16, 32):
                disk.setdefault(depth, []).append(loadtime._rate(held["safetensors"].files, True, depth))
            for form, methods in METHODS.items():
                for method in set(methods) & set(loadtime.known(form)):
                    key = f"{form}: {method}{'' if cold else ', warm'}"
                    samples.setdefault(key, []).append(one(method, paths[form], result["gb"], cold))
            longest = max(longest, time.perf_counter() - started)
            table = {key: summary(taken) for key, taken in samples.items()}
            rates = {depth: (statistics.median(r), min(r), max(r)) for depth, r in disk.items()}
            result |= {
                "disk_gb_s": rates,
                "methods": table,
                "rounds": number + 1,
                "wall_s": time.perf_counter() - begun,
            }
            out = Path(os.environ["OUT"]) / "load.json"
            out.write_text(json.dumps(result, indent=1))
            if time.perf_counter() - begun + longest > seconds:
                break
        print(json.dumps(result, indent=1))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
