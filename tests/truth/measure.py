"""Measure peak memory by phase and step time on these GPUs: `python tests/truth/measure.py CASES.json OUT.csv`.

CASES.json is a list of tables of recipe keys, plus `shape` (a shipped hub id) and `gpus`. Each runs through kit.train's
own trainer on random weights and random rows of exact length; cases of fewer GPUs run side by side. A process group
goes from case to case and is started afresh only after a failure, so that a row costs 10 to 40 s.
"""

import csv
import gc
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.files import REPOSITORY

STEPS, WARM_UP, LIMIT_S = 6, 2, 100
WRITING = threading.Lock()
DOCUMENT = 448  # tokens: the mean of the 100 real OASST conversations, for packed rows
COLUMNS = (
    "model", "method", "r", "targets", "dropout", "strategy", "sharding", "gpus", "checkpointing", "seq_len", "packing",
    "micro_batch", "grad_accum", "optimizer", "attention", "outcome", "allocated_gib", "reserved_gib", "device_gib",
    "load_gib", "loss_gib", "backward_gib", "optimizer_gib", "held_gib", "leftover_gib", "step_s", "step_low_s",
    "step_high_s", "card", "torch", "transformers", "trl", "peft", "accelerate", "base", "compile",
)  # fmt: skip
CLUSTER = """name = "here"
[nodes]
count = 1
gpus = 8
gpu = "H100"
gpu_memory_gib = 79.2
gpu_bf16_tflops = 989.0
cpus = 64
ram_gib = 512
[links]
intra = { kind = "nvlink4", gb_s = 450.0 }
"""


def recipe_of(case: dict[str, Any]) -> Recipe:
    """The recipe that a case stands for."""
    keys = {k: v for k, v in case.items() if k not in ("shape", "gpus")}
    fixed = {
        "name": "measure",
        "model.name": case["shape"],
        "parallel.gpus_per_node": case["gpus"],
        "parallel.nodes": 1,
    }
    defaults = {"schedule.eval_every": 0, "model.attention": "sdpa", "parallel.activation_checkpointing": True}
    return Recipe.load("demo").override(**defaults | keys | fixed)


def described(case: dict[str, Any]) -> dict[str, Any]:
    """The columns that say what was measured."""
    recipe = recipe_of(case)
    p, t, k, d = recipe.parallel, recipe.tuning, recipe.schedule, recipe.data
    lora = t.method != "full"
    return {
        "model": recipe.model.name, "method": t.method, "r": t.r * lora, "targets": " ".join(t.target_modules) * lora,
        "dropout": t.dropout * lora, "strategy": p.strategy if case["gpus"] > 1 else "none", "sharding": p.sharding,
        "gpus": case["gpus"], "checkpointing": p.activation_checkpointing, "seq_len": d.seq_len, "packing": d.packing,
        "micro_batch": k.micro_batch, "grad_accum": k.grad_accum, "optimizer": k.optimizer,
        "attention": recipe.model.attention, "base": recipe.model.base, "compile": recipe.parallel.compile,
    }  # fmt: skip


# The side of the ranks


def set_environment(recipe: Recipe, folder: Path) -> None:
    """What `accelerate launch` would export for this recipe."""
    from kit.trainers.trl import render_accelerate

    for key in [k for k in os.environ if k.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[key]
    (folder / "cluster.toml").write_text(CLUSTER)
    config = yaml.safe_load(render_accelerate(recipe, Cluster.load(folder / "cluster.toml")))
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    if config["distributed_type"] == "FSDP":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        for key, value in config["fsdp_config"].items():
            os.environ[f"FSDP_{key.removeprefix('fsdp_').upper()}"] = (
                str(value).lower() if isinstance(value, bool) else str(value)
            )


def random_model(recipe: Recipe, sharded: bool) -> Any:
    """On the GPU where it stays whole, else on the CPU: rank 0 fills it, FSDP hands it to the others."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    table = json.loads((REPOSITORY / "kit" / "forecast" / "shapes.json").read_text())
    shape = table[recipe.model.name]
    while isinstance(shape, str):
        shape = table[shape]
    config = AutoConfig.for_model(**{k: v for k, v in shape.items() if not k.startswith("_")})
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=recipe.model.attention
        )
    device = "cpu" if sharded else "cuda"
    noise = torch.randn(2**26, device=device, dtype=torch.float32).mul_(0.02).bfloat16()
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new = torch.empty(old.shape, dtype=torch.bfloat16, device=device)  # untouched pages cost a CPU nothing
            if not sharded or os.environ["RANK"] == "0":
                if old.dim() == 1:
                    new.fill_(1.0)
                else:
                    flat = new.view(-1)
                    for at in range(0, flat.numel(), noise.numel()):
                        part = flat[at : at + noise.numel()]
                        part.copy_(noise[: part.numel()])
            setattr(module, name, torch.nn.Parameter(new))
    model.tie_weights()
    if not sharded:
        model.to("cuda")  # the buffers
    del noise
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return model


def rows_of(recipe: Recipe, count: int) -> Any:
    """Random rows of exactly seq_len tokens: one document each, or as many as packing would put there."""
    import datasets
    import numpy as np

    size, rng = recipe.data.seq_len, np.random.default_rng(0)
    lengths = [size]
    if recipe.data.packing:
        lengths = [DOCUMENT] * (size // DOCUMENT) + [size % DOCUMENT] * (size % DOCUMENT > 0)
    ids = rng.integers(5, 30000, (count, size)).tolist()
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids, "seq_lengths": [lengths] * count})


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one case on this rank. Raises torch.OutOfMemoryError."""
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import PreTrainedTokenizerFast, TrainerCallback

    from kit.train import attention
    from kit.train import trainer as train

    attention.register()
    torch._dynamo.reset()  # code that was compiled for earlier cases
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    gc.collect()  # what only these states and compiled code referred to
    leftover = torch.cuda.memory_allocated()  # of an earlier case in this process, in every figure of this one
    recipe = recipe_of(case)
    set_environment(recipe, folder)
    arguments = train.settings(folder, recipe, STEPS)
    arguments.report_to, arguments.save_strategy = [], "no"
    phases: dict[str, float] = {}
    seconds: list[float] = []

    def phase(name: str) -> None:
        phases[name] = max(phases.get(name, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    class Phases(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            phase("backward")

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            phase("optimizer")

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.began)

    class Measured(train.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step:
                phase("backward")  # of an earlier micro-batch
            else:
                phase("load")
            out = super().compute_loss(*args, **kwargs)
            phase("loss")
            return out

    train.Trainer, kept = Measured, train.Trainer
    try:
        rows = rows_of(recipe, STEPS * recipe.batch)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(os.environ["KIT_TOKENIZER"])
        trainer = train.build_trainer(
            recipe,
            arguments,
            rows,
            None,
            tokenizer,
            random_model(recipe, train.is_sharded(recipe) and case["gpus"] > 1),
        )
    finally:
        train.Trainer = kept
    trainer.add_callback(Phases())
    trainer.train()
    free, total = torch.cuda.mem_get_info()
    found = {f"{k}_gib": v for k, v in phases.items()} | {
        "allocated_gib": max(v for k, v in phases.items() if k != "load"), "held_gib": torch.cuda.memory_allocated(),
        "leftover_gib": leftover, "reserved_gib": torch.cuda.max_memory_reserved(), "device_gib": total - free,
    }  # fmt: skip
    steady = seconds[WARM_UP:]
    return {k: round(v / 2**30, 3) for k, v in found.items()} | {
        "outcome": "ran", "step_s": round(statistics.median(steady), 4),
        "step_low_s": round(min(steady), 4), "step_high_s": round(max(steady), 4),
    }  # fmt: skip


def rank_main(cases: Path, out: Path) -> None:
    """All cases of a group one after another; stops at the first that fails, for a fresh process to go on."""
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if world > 1:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    for case in json.loads(cases.read_text()):
        try:
            found = measure(case, out.parent)
        except torch.OutOfMemoryError:
            gib = torch.cuda.max_memory_allocated() / 2**30
            append(out, {"case": case, "outcome": "out of memory", "allocated_gib": round(gib, 3)})
            os._exit(1)
        gathered = [found]
        if world > 1:
            gathered = [None] * world
            torch.distributed.all_gather_object(gathered, found)
        if rank == 0:
            append(
                out,
                {"case": case}
                | {k: v if isinstance(v, str) else max(g[k] for g in gathered) for k, v in found.items()},
            )
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def append(out: Path, row: dict[str, Any]) -> None:
    """One JSON line, whole."""
    with out.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


# The side of the driver


def run_group(devices: list[int], cases: list[dict[str, Any]], out: Path, landed: Callable[[], None]) -> None:
    """Cases on these GPUs, in as few process starts as failures allow."""
    name, left, port = "-".join(map(str, devices)), list(cases), 29600 + devices[0]
    lines = out / f"gpus{name}-{len(cases)}-{time.time_ns()}.jsonl"
    while left:
        todo = out / f"todo{name}.json"
        todo.write_text(json.dumps(left))
        before = len(lines.read_text().splitlines()) if lines.exists() else 0
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "OMP_NUM_THREADS": "8"}
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={len(devices)}", f"--master-port={port}", __file__]
        with (out / f"log{name}.txt").open("a") as log:
            watched([sys.executable, *command, "--rank", str(todo), str(lines)], env, log, lines, landed)
        done = {json.dumps(json.loads(x)["case"]) for x in lines.read_text().splitlines()} if lines.exists() else set()
        after = len(lines.read_text().splitlines()) if lines.exists() else 0
        if after == before:
            print((out / f"log{name}.txt").read_text()[-1500:])
            append(lines, {"case": left[0], "outcome": "failed"})
            done.add(json.dumps(left[0]))
        left = [c for c in left if json.dumps(c) not in done]


def watched(command: list[str], env: dict[str, str], log: Any, lines: Path, landed: Callable[[], None]) -> None:
    """Run to the end, or until no row has come for LIMIT_S: a hang costs that and no more."""
    process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    last, size = time.monotonic(), 0
    while process.poll() is None:
        time.sleep(0.2)
        if lines.exists() and lines.stat().st_size > size:
            last, size = time.monotonic(), lines.stat().st_size
            landed()
        if time.monotonic() - last > LIMIT_S:
            process.terminate()  # torchrun then ends its workers
            process.wait()


def main() -> int:
    """Cases of one GPU side by side on all, then of two, then of four; rows as CSV."""
    import torch

    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).absolute()
    work, count = Path(tempfile.mkdtemp()), torch.cuda.device_count()
    for size in sorted({c["gpus"] for c in cases}):
        groups = [list(range(i, i + size)) for i in range(0, count - size + 1, size)]
        mine = [c for c in cases if c["gpus"] == size]
        shares = [mine[i :: len(groups)] for i in range(len(groups))]
        with ThreadPoolExecutor(len(groups)) as pool:
            list(pool.map(lambda g, c: run_group(g, c, work, lambda: write_csv(work, out)), groups, shares))
    write_csv(work, out)
    return 0


def write_csv(work: Path, out: Path) -> None:
    """All rows so far, with card and versions."""
    with WRITING:
        _write_csv(work, out)


def _write_csv(work: Path, out: Path) -> None:
    import torch

    stack = {n: importlib.metadata.version(n) for n in ("torch", "transformers", "trl", "peft", "accelerate")}
    with out.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        for path in sorted(work.glob("gpus*.jsonl")):
            rows = {json.dumps(row["case"]): row for row in map(json.loads, path.read_text().splitlines())}
            for row in rows.values():  # several ranks may report that they are out of memory
                case = described(row.pop("case"))
                writer.writerow(case | row | {"card": torch.cuda.get_device_name(0)} | stack)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank_main(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main())
