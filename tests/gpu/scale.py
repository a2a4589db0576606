"""Measure how a sharded base is loaded, and how long saves block: `python tests/gpu/scale.py OUT PREPARED [NAMES]`.

Two GPUs or more. Models of the shapes of Llama 3.1 8B, Llama 3.2 1B and SmolLM2 360M with random weights are written to
the disk that holds the temporary folder (17 GB, and 31 GB for checkpoints), and then trained by `kit launch` under
FSDP2. Cold runs read files that are not in the page cache, and plain reads of the same files are timed before and
after. All other runs read from the page cache. PREPARED is a folder that `kit prepare` made. NAMES: parts of the names
of runs, separated by semicolons.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from speed import LLAMA, cluster_here
from transformers import AutoConfig, AutoModelForCausalLM

from kit.checkpoints.pagecache import evict, residency
from kit.checkpoints.storage import PlainReads
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset
from kit.files import REPOSITORY, read_json, write_json
from kit.forecast.choices import Resolution, resolve
from kit.slurm import launch
from kit.slurm.run import Run
from kit.slurm.submit import submit
from kit.watch.metrics import Metrics

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"tuning.method": "lora", "tuning.target_modules": ALL, "schedule.max_steps": 6, "schedule.save_every": 6}
COLD = {"schedule.max_steps": 1, "schedule.save_every": 1}
FULL = {"tuning.method": "full"}
SYNC = FULL | {"schedule.save": "sync", "schedule.max_steps": 16, "schedule.save_every": 8, "schedule.keep": 1}
ASYNC = FULL | {"schedule.save": "async", "schedule.max_steps": 170, "schedule.save_every": 80, "schedule.keep": 1}
LONGER = {"schedule.max_steps": 300, "schedule.save_every": 150}  # an async save of 15 GB takes longer
LIMIT_S = 150
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


def write_model(folder: Path, name: str, tokenizer: Path) -> None:
    """A model of random bf16 weights in safetensors files, and its tokenizer."""
    shapes = read_json(REPOSITORY / "kit" / "forecast" / "shapes.json")
    shape: Any = name
    while isinstance(shape, str):
        shape = shapes[shape]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape | LLAMA))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    for path in tokenizer.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    del model
    torch.cuda.empty_cache()


def ranks_of(run: Run) -> list[psutil.Process]:
    """The training processes of a run on this machine."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and process.info["cmdline"][-3:] == ["-m", "kit.train", str(run.path)]
    ]


def host_gb(process: psutil.Process) -> dict[str, float]:
    """Anonymous, file-backed and shared memory of a process in GB, from /proc."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {name: int(value.split()[0]) * 1024 / 1e9 for name, value in found.items()}


def watch(run: Run, last_step: int, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Follow a run until it ends, or cancel it after a step; the most host memory of a rank in each phase."""
    begun, peaks = time.monotonic(), dict[str, dict[str, float]]()
    while not (state := run.state).ended and time.monotonic() - begun < limit_s:
        with contextlib.suppress(OSError, psutil.Error, ValueError):
            folder = run.path / "state"
            phase = read_json(folder / "phase.json")["phase"] if (folder / "phase.json").exists() else "start"
            for process in ranks_of(run):
                for name, value in host_gb(process).items():
                    of_phase = peaks.setdefault(phase, {})
                    of_phase[name] = round(max(of_phase.get(name, 0.0), value), 3)
            progress = folder / "progress.json"
            if last_step and progress.exists() and read_json(progress)["step"] >= last_step:
                run.cancel()
                break
        time.sleep(0.2)
    return {"state": state.state, "wall_s": round(time.monotonic() - begun, 1), "most_host_gb_of_a_rank": peaks}


def train(name: str, recipe: Recipe, cluster: Cluster, prepared: Dataset, last_step: int = 0) -> dict[str, Any]:
    """Launch a run as `kit launch` does; what it logged about loads and saves.

    last_step: cancels it then; where it has a checkpoint, it is resumed to its end.
    """
    chosen = resolve(recipe.override(**{"schedule.max_steps": 1000}), cluster, compiler=True)
    steps = {"schedule.max_steps": recipe.schedule.max_steps}
    run = launch.freeze(Resolution(chosen.recipe.override(**steps)), cluster, prepared, None)
    submit(run)
    found = {"run": name} | watch(run, last_step)
    if last_step and run.checkpoints():
        while not run.state.ended:
            time.sleep(0.5)
        run.requeue()
        found["resumed"] = watch(run, 0) | read_json(run.state_folder.result)
    metrics = Metrics(run.path)
    while metrics.poll():
        pass
    wanted = ("train/base_load_s", "train/base_load_gb", "train/base_load_gb_s", "train/save_blocked_s", "train/step_s")
    found |= {key: [round(value, 4) for value in metrics.series[key].values] for key in wanted if key in metrics.series}
    found["log"] = (run.path / "logs" / "rank-000.log").read_text(errors="replace")[-1200:]
    return found


def train_cold(name: str, recipe: Recipe, cluster: Cluster, prepared: Dataset) -> dict[str, Any]:
    """As `train`, of a base that is not in the page cache; and the GB/s of plain reads before and after."""
    files = sorted(Path(recipe.model.name).glob("*.safetensors"))
    reads = PlainReads(files, cold=True)
    reads.measure()
    os.sync()
    evict(files)
    before = residency(files)
    found = train(name, recipe, cluster, prepared)
    reads.measure()
    return found | {"residency_before": before, "plain_reads": reads.description, "plain_gb_s": reads.best_rates}


def main(out: Path, prepared: Path, only: str = "") -> None:
    """All runs, or those whose names contain a part of `only`; the JSON written after each."""
    scratch = Path(tempfile.mkdtemp(prefix="scale-"))
    cluster, dataset = cluster_here(scratch), Dataset(prepared.absolute())
    report: dict[str, Any] = {
        "card": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "runs": [],
    }
    small, middle, large = scratch / "360m", scratch / "1b", scratch / "8b"
    base = Recipe.load("demo").override(**{
        "data.seq_len": 4096, "parallel.strategy": "fsdp2", "parallel.gpus_per_node": 2, "schedule.eval_every": 0,
        "schedule.lr": 1e-5,
    })  # fmt: skip
    jobs: list[tuple[str, dict[str, Any], int]] = [
        ("8B, LoRA, FSDP2", LORA | {"model.name": str(large)}, 0),
        ("0.36B, full, FSDP2, sync saves", SYNC | {"model.name": str(small)}, 0),
        ("0.36B, full, FSDP2, async saves", ASYNC | {"model.name": str(small)}, 0),
        ("1B, full, FSDP2, sync saves", SYNC | {"model.name": str(middle)}, 0),
        ("1B, full, FSDP2, async saves", ASYNC | LONGER | {"model.name": str(middle)}, 0),
        ("8B, cold base", LORA | COLD | {"model.name": str(large)}, 0),
        ("8B, cold base, again", LORA | COLD | {"model.name": str(large)}, 0),
        ("8B, full, FSDP2", FULL | {"model.name": str(large), "schedule.max_steps": 50, "schedule.save_every": 50}, 3),
    ]
    shapes = {
        small: "HuggingFaceTB/SmolLM2-360M", middle: "meta-llama/Llama-3.2-1B", large: "meta-llama/Llama-3.1-8B"
    }  # fmt: skip
    for name, changes, last_step in jobs:
        if not any(part in name for part in only.split(";")):
            continue
        model = Path(changes["model.name"])
        if not model.exists():
            write_model(model, shapes[model], dataset.path / "tokenizer")
        recipe = base.override(**changes)
        cold = "cold" in name
        report["runs"].append(
            train_cold(name, recipe, cluster, dataset) if cold else train(name, recipe, cluster, dataset, last_step)
        )
        write_json(out, report)
        print(json.dumps(report["runs"][-1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
