"""Train a small model under every strategy on real GPUs: `python tests/gpu/strategies.py OUT.json PREPARED [NAMES]`.

Two GPUs. Each case is launched as by `kit launch` and trains eight steps. Its last checkpoint is then removed, and a
new job resumes from the one at step four. Several cases share the GPUs at a time, so no times are recorded. Models are
small and have random weights in safetensors files; PREPARED is a folder that `kit prepare` made.
"""

import contextlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from scale import ALL, PACKAGES
from speed import cluster_here
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kit.checkpoints.inspect import inspect
from kit.checkpoints.weights import read_headers
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset
from kit.deploy.adapter import export
from kit.deploy.model import export_model
from kit.errors import KitError
from kit.files import read_json, write_json
from kit.forecast.choices import Resolution, resolve
from kit.slurm import launch
from kit.slurm.run import Run
from kit.slurm.submit import submit

AT_A_TIME, BETWEEN_STARTS_S, LIMIT_S = 6, 0.5, 120
SIZES = {
    "vocab_size": 49152, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 8192, "dtype": "bfloat16",
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip  # to try the script without GPUs
EXPERTS = {"hidden_size": 512, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
JOB = {
    "parallel.gpus_per_node": 2, "parallel.compile": "off", "schedule.max_steps": 8,
    "schedule.save_every": 4, "schedule.eval_every": 0, "schedule.lr": 1e-4, "schedule.micro_batch": 1,
    "schedule.grad_accum": 2, "parallel.activation_checkpointing": False,
}  # fmt: skip
FULL = {"tuning.method": "full"}
LORA = {"tuning.method": "lora", "tuning.target_modules": ALL, "schedule.lr": 1e-3}
QLORA = LORA | {"tuning.method": "qlora"}
TENSOR = {"parallel.tensor": 2, "schedule.micro_batch": 2}  # one group of rows in place of two
ONE = threading.Lock()
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full, ddp": ("llama", FULL | {"parallel.strategy": "ddp"}),
    "full, fsdp1": ("llama", FULL | {"parallel.strategy": "fsdp1"}),
    "full, fsdp2": ("llama", FULL | {"parallel.strategy": "fsdp2"}),
    "full, fsdp2, async saves": ("llama", FULL | {"parallel.strategy": "fsdp2", "schedule.save": "async"}),
    "full, fsdp2, offload cpu": ("llama", FULL | {"parallel.strategy": "fsdp2", "parallel.offload": "cpu"}),
    "full, zero1": ("llama", FULL | {"parallel.strategy": "zero1"}),
    "full, zero2": ("llama", FULL | {"parallel.strategy": "zero2"}),
    "full, zero3": ("llama", FULL | {"parallel.strategy": "zero3"}),
    "full, zero3, offload cpu": ("llama", FULL | {"parallel.strategy": "zero3", "parallel.offload": "cpu"}),
    "full, tensor": ("llama", FULL | TENSOR),
    "experts, full, ddp": ("qwen3_moe", FULL | {"parallel.strategy": "ddp"}),
    "experts, full, fsdp2": ("qwen3_moe", FULL | {"parallel.strategy": "fsdp2"}),
    "experts, full, expert": ("qwen3_moe", FULL | {"parallel.expert": 2}),
    "lora, ddp": ("llama", LORA | {"parallel.strategy": "ddp"}),
    "lora, fsdp2": ("llama", LORA | {"parallel.strategy": "fsdp2"}),
    "lora, zero3": ("llama", LORA | {"parallel.strategy": "zero3"}),
    "qlora, ddp": ("llama", QLORA | {"parallel.strategy": "ddp"}),
    "qlora, fsdp2": ("llama", QLORA | {"parallel.strategy": "fsdp2"}),
}


def write_model(folder: Path, family: str, tokenizer: Path) -> None:
    """A small model of random bf16 weights in safetensors files, and its tokenizer."""
    torch.manual_seed(0)
    sizes = SIZES | (EXPERTS if family == "qwen3_moe" else {}) | ({} if torch.cuda.is_available() else TINY)
    settings = CONFIG_MAPPING[family](**sizes, tie_word_embeddings=False)
    settings.architectures = ["Qwen3MoeForCausalLM" if family == "qwen3_moe" else "LlamaForCausalLM"]
    AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).save_pretrained(folder)
    for path in tokenizer.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


def wait(run: Run) -> str:
    """The state in which the run ends."""
    deadline = time.monotonic() + LIMIT_S
    while not (state := run.state).ended and time.monotonic() < deadline:
        time.sleep(0.5)
    return state.state


def history(run: Run, key: str) -> list[float]:
    """Values by step, such as loss or grad_norm."""
    rows = read_json(run.path / "checkpoints" / "checkpoint-8" / "trainer_state.json")["log_history"]
    return [row[key] for row in rows if key in row]


def exported(run: Run, out: Path) -> Any:
    """What the export of the last checkpoint says about its tensors."""
    if run.recipe.tuning.method == "full":
        return str(export_model(run.path, out, dtype="bfloat16"))
    found = export(run.path, out)
    return {"tensors": found.tensors, "problems": list(found.problems)}


def train(recipe: Recipe, cluster: Cluster, prepared: Dataset) -> dict[str, Any]:
    """Train, resume from step four, and export."""
    with ONE:  # transformers' context for models without weights is for one thread
        chosen = resolve(recipe, cluster, compiler=False)
    run = launch.freeze(Resolution(chosen.recipe), cluster, prepared, None)
    submit(run)
    found: dict[str, Any] = {"state": wait(run)}
    with contextlib.suppress(OSError, KitError):
        found |= {"losses": history(run, "loss"), "norms": history(run, "grad_norm")}
        last = run.path / "checkpoints" / "checkpoint-8"
        found["complete"] = inspect(last, values=True, world=2).complete
        found["types"] = sorted({tensor.dtype for tensor in read_headers(last).tensors.values()})
        shutil.rmtree(last)
        (run.path / "state" / "result.json").unlink()
        run.requeue()
        found["resumed"] = wait(run)
        found |= {"losses_again": history(run, "loss"), "norms_again": history(run, "grad_norm")}
        log = run.log.read_text(errors="replace")
        found["resumed_from_4"] = "resuming from checkpoint-4" in log
        found["base"] = [line[line.index("base read") :] for line in log.splitlines() if "base read" in line]
        try:
            with ONE:
                found["exported"] = exported(run, run.path / "exported")
        except KitError as error:
            found["exported"] = f"error: {error}"
        shutil.rmtree(run.path / "checkpoints")
    if found.get("resumed") != "COMPLETED":
        for path in sorted((run.path / "logs").iterdir()):
            found[path.name] = path.read_text(errors="replace")[-3000:]
    return found


def main(out: Path, prepared: Path, only: str = "") -> None:
    """All cases, or those whose names contain a part of `only`; the JSON written after each."""
    scratch = Path(tempfile.mkdtemp(prefix="strategies-"))
    cluster, dataset = cluster_here(scratch), Dataset(prepared.absolute())
    report: dict[str, Any] = {
        "card": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU",
        "versions": {name: importlib.metadata.version(name) for name in (*PACKAGES, "bitsandbytes")},
        "cases": {},
    }
    for family in ("llama", "qwen3_moe"):
        write_model(scratch / family, family, dataset.path / "tokenizer")
    length = {"data.seq_len": read_json(dataset.path / "manifest.json")["settings"]["data"]["seq_len"]}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        running = {}
        for name, (family, changes) in CASES.items():
            if not any(part in name for part in only.split(";")):
                continue
            recipe = Recipe.load("demo").override(**JOB | changes | {"model.name": str(scratch / family)} | length)
            running[name] = pool.submit(train, recipe, cluster, dataset)
            time.sleep(BETWEEN_STARTS_S)  # job ids of the local runner count tenths of seconds
        for name, future in running.items():
            error = future.exception()
            report["cases"][name] = {"error": repr(error)} if error else future.result()
            write_json(out, report)
            print(name, json.dumps(report["cases"][name]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
