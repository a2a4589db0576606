"""Watch a run of a minute on real GPUs, live: `python -m tests.gpu.watch OUT TOKENIZER_FOLDER [STEPS]`.

A run of Llama-3.2-1B's shape trains on all GPUs here while a board follows it. Left in OUT: watch.json with the rows of
each GPU, the longest gap between two and how late each was known; the board in mid-run and at the end; the W&B log.
"""

import importlib.metadata
import shutil
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kit import watch
from kit.config.recipe import Recipe
from kit.files import write, write_json
from kit.slurm import launch as slurm
from kit.watch.board import Board
from kit.watch.wandb_log import Tail, find_logs
from tests.gpu.check import cluster_here, model_folder


def lateness(board: Board, seconds: float, picture: Path) -> dict[Any, list[float]]:
    """For each node's GPUs and CPU and for logged rows, how old each row was when the board knew it, in seconds."""
    seen: dict[Any, list[float]] = {}
    begun = time.monotonic()
    while not board.ended and time.monotonic() - begun < seconds:
        series = dict(board.runs[0].metrics.series)
        times = {"logged rows": series["_timestamp"].values} if "_timestamp" in series else {}
        for key, stamps in (times | {key: s.steps for key, s in places(series).items()}).items():
            known = seen.setdefault(key, [])
            known += [time.time() - t for t in stamps[len(known) :]]
        if not picture.exists() and len(seen.get("logged rows", ())) > 40:
            write(picture, board.svg())
        time.sleep(0.02)
    return seen


def spread(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum."""
    cuts = statistics.quantiles(values, n=20)
    return {"p50": round(statistics.median(values), 3), "p95": round(cuts[-1], 3), "max": round(max(values), 3)}


def main(out: Path, tokenizer: Path, steps: int = 200) -> int:
    """Launch, follow, write down."""
    work = out / "work"
    recipe = Recipe.load("demo").override(
        **{
            "name": "minute", "model.name": str(model_folder("1B", tokenizer, work)), "data.seq_len": 2048,
            "parallel.strategy": "fsdp2", "parallel.gpus_per_node": torch.cuda.device_count(),
            "schedule.max_steps": steps, "schedule.eval_every": 50, "schedule.save_every": 100, "schedule.lr": 1e-4,
            "schedule.micro_batch": 4,
        }
    )  # fmt: skip
    run = slurm.launch(recipe, cluster_here(work), work / "prepared")
    board = watch(run)
    seen = lateness(board, 400, out / "board_live.svg")
    board.wait(60)
    series = board.runs[0].metrics.series
    rows = {f"{host} GPU {index}": s.steps for (host, index, name), s in places(series).items() if index != "cpu"}
    log = max(find_logs(run.path), key=lambda p: p.stat().st_size)
    own = [r.values for r in Tail(log).poll() if r.kind == "stats"]
    write_json(
        out / "watch.json",
        {
            "card": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
            "versions": {n: importlib.metadata.version(n) for n in ("torch", "transformers", "trl", "wandb")},
            "status": board.status(), "state": board.runs[0].state, "loss_rows": len(series["train/loss"].values),
            "training_s": series["_timestamp"].values[-1] - series["_timestamp"].values[0],
            "gpu_rows": {name: len(t) for name, t in rows.items()},
            "longest_gap_s": {n: max(b - a for a, b in pairwise(t)) for n, t in rows.items()},
            "known_late_s": {str(key): spread(late) for key, late in seen.items() if len(late) > 20},
            "last": {str(k): s.values[-1] for k, s in series.items() if isinstance(k, tuple)},
            "peaks": {str(k): max(s.values) for k, s in series.items() if isinstance(k, tuple)},
            "wandb_own_gpu_rows": sum(any(k.startswith("gpu.0") for k in values) for values in own),
        },
    )  # fmt: skip
    write(out / "board.svg", board.svg())
    write(out / "board.html", board.html())
    shutil.copy(log, out / log.name)
    for path in run.path.glob("nodes/*.jsonl"):
        shutil.copy(path, out / f"nodes-{path.name}")
    print((out / "watch.json").read_text())
    return int(board.runs[0].state != "COMPLETED")


def places(series: dict[Any, Any]) -> dict[Any, Any]:
    """The utilisation series of nodes."""
    return {key: s for key, s in series.items() if isinstance(key, tuple) and key[2] == "util"}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]), *map(int, sys.argv[3:])))
