"""The forecast beside other tools' on the measured rows: `python tests/truth/compare.py` rewrites comparison.md."""

import csv
import io
import statistics
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from kit.config.cluster import Cluster, Nodes
from kit.config.recipe import Recipe
from kit.forecast.fit import Memory, memory
from kit.forecast.layout import GIB
from kit.forecast.shape import load_shape, shipped

FOLDER = Path(__file__).resolve().parent
H100 = Cluster("h100", Nodes(count=1, gpus=8, gpu="H100", gpu_memory_gib=79.2, cpus=64, ram_gib=1000.0))
FITTED = ("Llama-3.2-1B", "Llama-3.2-3B", "TinyLlama")
SHARDED = ("fsdp1", "fsdp2")
Row = dict[str, str]


def rows() -> list[Row]:
    """The measured rows; what an earlier case had left in the process is taken off every figure that holds it."""
    with (FOLDER / "h100.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    for row in found:
        for key in ("allocated", "reserved", "device", "loss", "backward", "optimizer"):
            if row[f"{key}_gib"] and row["leftover_gib"]:
                row[f"{key}_gib"] = str(float(row[f"{key}_gib"]) - float(row["leftover_gib"]))
    return found


def fitted(row: Row) -> bool:
    """Whether the model is one on which numbers may be fitted."""
    return any(name in row["model"] for name in FITTED)


def recipe_of(row: Row) -> Recipe:
    """The recipe that a row was measured with."""
    keys = {
        "model.name": row["model"], "model.attention": row["attention"], "tuning.method": row["method"],
        "parallel.strategy": row["strategy"].replace("none", "ddp"), "parallel.sharding": row["sharding"],
        "parallel.gpus_per_node": row["gpus"], "parallel.nodes": 1,
        "parallel.activation_checkpointing": row["checkpointing"].lower(), "data.seq_len": row["seq_len"],
        "data.packing": row["packing"].lower(), "schedule.micro_batch": row["micro_batch"],
        "schedule.grad_accum": row["grad_accum"], "schedule.optimizer": row["optimizer"], "parallel.compile": "off",
    }  # fmt: skip
    if row["method"] != "full":
        keys |= {
            "tuning.r": row["r"],
            "tuning.dropout": row["dropout"],
            "tuning.target_modules": row["targets"].split(),
        }
    return Recipe.load("demo").override(**keys)


def forecast(row: Row) -> Memory:
    """This kit's forecast of a row."""
    return memory(recipe_of(row), H100)


def ranks(row: Row) -> int:
    """Over how many ranks the states are spread."""
    return int(row["gpus"]) if row["strategy"] in SHARDED else 1


def accelerate(row: Row, cache: dict[str, int] = {}) -> float:  # noqa: B006
    """`accelerate estimate-memory`, its column for training with Adam in bfloat16; by its own code, on a meta model."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModelForCausalLM

    if row["model"] not in cache:
        config = AutoConfig.for_model(**{k: v for k, v in shipped()[row["model"]].items() if not k.startswith("_")})
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        cache[row["model"]] = calculate_maximum_sizes(model)[0]
    return max(estimate_training_usage(cache[row["model"]], "bfloat16").values()) / GIB


def deepspeed(row: Row) -> float:
    """DeepSpeed's estimate_zero3_model_states_mem_needs where states are spread, else the one for ZeRO-2; no offload.

    4 x largest module + 18 x parameters / ranks; 4 x parameters + 16 x parameters / ranks.
    """
    s = load_shape(row["model"])
    if row["strategy"] in SHARDED:
        return (4 * s.embedding + 18 * s.total / ranks(row)) / GIB
    return (4 * s.total + 16 * s.total / int(row["gpus"])) / GIB


def megatron(row: Row) -> float:
    """Megatron-LM's theoretical_memory_usage.py: 18 bytes a parameter, 6 + 12 / ranks with a distributed optimizer;
    activations of Table 2 of arXiv 2205.05198 with selective recomputation, embedding, norm, head and loss.
    """
    s, tokens = load_shape(row["model"]), int(row["micro_batch"]) * int(row["seq_len"])
    state = s.total * (6 + 12 / ranks(row) if ranks(row) > 1 else 18)
    layers = s.layers * tokens * s.hidden * (18 + 4 * s.ffn / s.hidden)
    return (state + layers + tokens * (8 + s.hidden) + 4 * tokens * (s.hidden + s.vocab)) / GIB


def llama_factory(row: Row) -> float:
    """The table in LLaMA-Factory's README, GB for x billion parameters: 18x full, 8x in pure bf16, 2x LoRA."""
    masters = row["method"] == "full" and row["strategy"] in SHARDED  # these train fp32 masters, the others pure bf16
    times = 2 if row["method"] == "lora" else 18 if masters else 8
    return times * load_shape(row["model"]).total / ranks(row) / GIB


TOOLS: dict[str, Callable[[Row], float]] = {
    "this kit": lambda row: forecast(row).allocated_gib,
    "accelerate estimate-memory": accelerate,
    "DeepSpeed's estimators": deepspeed,
    "Megatron-LM's theoretical memory": megatron,
    "LLaMA-Factory's table": llama_factory,
}


def errors(tool: Callable[[Row], float], chosen: list[Row]) -> list[float]:
    """Absolute relative errors of the peak allocated, sorted."""
    return sorted(abs(tool(row) / float(row["allocated_gib"]) - 1) for row in chosen if row["outcome"] == "ran")


def p90(values: list[float]) -> float:
    """The 90th percentile of sorted values."""
    return values[int(0.9 * len(values))]


def wrong_verdicts(tool: Callable[[Row], float], chosen: list[Row]) -> int:
    """Rows that ran and are put above the card's memory, or ran out of it and are put below."""
    return sum((tool(row) > H100.nodes.gpu_memory_gib) != (row["outcome"] != "ran") for row in chosen)


def table() -> str:
    """The comparison as Markdown."""
    every, held = rows(), [row for row in rows() if not fitted(row)]
    full, lora = ([row for row in held if row["method"] == m] for m in ("full", "lora"))
    text = io.StringIO()
    with redirect_stdout(text):
        print(f"""\
# Peak memory: forecast against measurement

{len(every)} configurations on H100 80GB through accelerate, TRL and PEFT (h100.csv). Absolute error of the peak
allocated on a GPU, and rows for which the tool's figure is on the wrong side of {H100.nodes.gpu_memory_gib} GiB. "Other
models" are those other than Llama-3.2-1B, Llama-3.2-3B and TinyLlama, on which numbers may be fitted.
Remade by `python tests/truth/compare.py`; a test fails when this file is not what it writes.

| tool | all rows: median | 90th % | other models: median | 90th % | of these full | LoRA | wrong side |
|---|---|---|---|---|---|---|---|""")
        for name, tool in TOOLS.items():
            e, h = errors(tool, every), errors(tool, held)
            by = [statistics.median(errors(tool, part)) for part in (full, lora)]
            cells = [statistics.median(e), p90(e), statistics.median(h), p90(h), *by]
            print(f"| {name} | {' | '.join(f'{c:.2%}' for c in cells)} | {wrong_verdicts(tool, every)} |")
        print("""
accelerate's command knows neither GPUs, adapters nor sequences; DeepSpeed's estimators and LLaMA-Factory's table leave
activations out, and DeepSpeed's adapters too; Megatron-LM's formula is for training from scratch with its own kernels.
Each is used as its users use it: the states divided by the GPUs where it says how. This kit was made for this stack,
and all rows were in view while its terms were sought: its figures say how well it explains them, and its accuracy on
configurations that nobody has measured yet remains to be shown.""")
    return text.getvalue()


def main(arguments: list[Any]) -> int:
    """Rewrite comparison.md, or with --rows print every row instead."""
    if "--rows" in arguments:
        for row in rows():
            m, truth = forecast(row), float(row["allocated_gib"])
            print(f"{m.allocated_gib:7.2f} {truth:7.2f} {m.allocated_gib / truth - 1:+7.1%} {m.peak_phase:22}"
                  f"{row['outcome']:14}" + " ".join(list(row.values())[:15]))  # fmt: skip
        return 0
    (FOLDER / "comparison.md").write_text(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
