"""Measure loads and saves on this machine: `python tests/benchmarks/load.py FOLDER OUT.json [GB] [REPEATS]`.

FOLDER is on the storage to measure and takes five times GB. Every load is cold, with proof, in fresh processes; the
methods take turns within each round, with plain reads of the same files, so that ratios of one run are comparable on a
noisy machine. Optional loaders take part where they are installed; orbax has another format and is timed separately.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from kit.checkpoints import pagecache
from kit.checkpoints.saving import time_saves
from kit.checkpoints.storage import mount
from kit.checkpoints.timing import time_load
from kit.files import write_json

RANKS = (1, 2, 4, 8)


def make(folder: Path, gb: float) -> None:
    """The same random bf16 state as DCP by one process, safetensors and a nested torch file."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    rows = round(gb * 1e9 / 64 / 4096 / 2)
    state = {f"layers.{n}.weight": torch.randn(rows, 4096).to(torch.bfloat16) for n in range(64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process is one process
        dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
    (folder / "safetensors").mkdir()
    save_file(state, folder / "safetensors" / "model.safetensors")
    torch.save({"model": state}, folder / "lit_model.pth")
    if importlib.util.find_spec("orbax"):
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as saver:
            saver.save(folder / "orbax", {name: t.float().numpy() for name, t in state.items()})


def orbax(folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds and GB/s of cold restores of the same values as fp32, each in a fresh process."""
    code = (
        "import json, sys, time; from pathlib import Path; import orbax.checkpoint as ocp;"
        "from kit.checkpoints import pagecache;"
        "files = [p for p in Path(sys.argv[1]).rglob('*') if p.is_file()]; pagecache.evict(files);"
        "cold = pagecache.residency(files); before = pagecache.device_bytes(); begun = time.perf_counter();"
        "tree = ocp.StandardCheckpointer().restore(Path(sys.argv[1]));"
        "wanted = sum(a.nbytes for a in tree.values()); s = time.perf_counter() - begun;"
        "print(json.dumps({'s': s, 'wanted': wanted, 'device': pagecache.device_bytes() - before, 'residency': cold}))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    rows = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(repeats)]
    rates = [row["wanted"] / 1e9 / row["s"] for row in rows]
    return {"gb_s": statistics.median(rates), "gb_s_range": (min(rates), max(rates)), "samples": rows}


def machine(folder: Path) -> dict[str, Any]:
    """Where and with what the figures were taken."""
    packages = ("torch", "safetensors", "fastsafetensors", "runai-model-streamer", "orbax-checkpoint")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), ":").split(
        ":"
    )
    return {
        "date": time.strftime("%Y-%m-%d"), "cpu": cpu[1].strip(), "cpus": os.cpu_count(), "kernel": platform.release(),
        "storage": mount(folder), "versions": versions,
    }  # fmt: skip


def main(folder: Path, out: Path, gb: float = 1.0, repeats: int = 5) -> None:
    """All tables into one JSON file, written after each."""
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix="load-"))
    result: dict[str, Any] = {"machine": machine(folder), "gb": gb}
    try:
        make(scratch, gb)

        def timed(name: str, path: Path, methods: list[str] | None = None, ranks: tuple[int, ...] = (1,)) -> None:
            found = time_load(path, methods, cold=True, repeats=repeats, ranks=ranks)
            result[name] = [t | {"path": path.name} for t in found.as_dict()["methods"]]
            print(found, flush=True)
            write_json(out, result)

        timed("sharded", scratch / "dcp", ["dcp.load", "dcp.load, kit's reader", "kit"], RANKS)
        timed("safetensors", scratch / "safetensors")
        timed("torch", scratch / "lit_model.pth")
        result["save"] = time_saves(scratch, gb / 2, (1, 2), repeats=repeats).as_dict()["methods"]
        if (scratch / "orbax").exists():
            pagecache.evict(p for p in (scratch / "orbax").rglob("*") if p.is_file())
            result["orbax"] = orbax(scratch / "orbax", repeats)
        write_json(out, result)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *(float(a) for a in sys.argv[3:4]), *(int(a) for a in sys.argv[4:5]))
