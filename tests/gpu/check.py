"""Run kit.train on real GPUs and write down what was seen: `python tests/gpu/check.py OUT TOKENIZER_FOLDER [CASE ...]`.

No Slurm is needed: the local runner executes the same job script. Weights are random, of Llama shapes; the data are the
project's own sample. Each case leaves one JSON object in OUT_FOLDER/gpu_check.json with the card and versions.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path

import torch

from kit.checkpoints.inspect import inspect
from kit.config.cluster import Cluster
from kit.config.models import load_model
from kit.config.recipe import Recipe
from kit.deploy.adapter import export
from kit.files import REPOSITORY, read_json, write_json
from kit.forecast.timing import predict
from kit.slurm import launch as slurm
from kit.watch.metrics import Metrics

CASES = {
    "1b-lora-fsdp2": {},
    "1b-lora-fsdp1": {"parallel.strategy": "fsdp1"},
    "1b-lora-ddp": {"parallel.strategy": "ddp"},
    "1b-full-fsdp2": {"tuning.method": "full"},
    "8b-lora-fsdp2": {"model": "8B"},
}
SHAPES = {"1B": "meta-llama/Llama-3.2-1B-Instruct", "8B": "meta-llama/Llama-3.1-8B-Instruct"}


def model_folder(size: str, tokenizer: Path, out: Path) -> Path:
    """A model of a published shape with random weights and a small tokenizer; the 8B one is made on each GPU."""
    shapes = json.loads((REPOSITORY / "kit" / "forecast" / "shapes.json").read_text())
    shape = shapes[SHAPES[size]]
    while isinstance(shape, str):
        shape = shapes[shape]
    folder = out / f"llama{size}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in tokenizer.iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            (folder / path.name).write_bytes(path.read_bytes())
    config = folder / "config.json"
    if config.exists():
        return folder if size == "1B" else config
    config.write_text(json.dumps(shape | {"architectures": ["LlamaForCausalLM"]}))
    if size == "1B":  # on disk, as a real model lies there
        load_model(str(config), torch.bfloat16, "sdpa").save_pretrained(folder)
        return folder
    return config


def cluster_here(out: Path) -> Cluster:
    """This machine as a cluster profile."""
    card = torch.cuda.get_device_properties(0)
    text = (
        f'name = "gpus-here"\n[nodes]\ncount = 1\ngpus = {torch.cuda.device_count()}\ngpu = "{card.name}"\n'
        f"gpu_memory_gib = {card.total_memory / 2**30:.1f}\ngpu_bf16_tflops = 989.0\ncpus = 16\nram_gib = 128\n"
        '[links]\nintra = { kind = "nvlink4", gb_s = 450.0 }\n'
        f'[paths]\nruns = "{out}/runs"\n'
    )
    (out / "gpus-here.toml").write_text(text)
    return Cluster.load(out / "gpus-here.toml")


def check(name: str, changes: dict[str, object], tokenizer: Path, out: Path) -> dict[str, object]:
    """Launch one case, wait, look at everything it left."""
    size = str(changes.pop("model", "1B"))
    recipe = Recipe.load("demo").override(
        **{
            "name": name, "model.name": str(model_folder(size, tokenizer, out)), "data.seq_len": 2048,
            "parallel.gpus_per_node": torch.cuda.device_count(), "schedule.max_steps": 20, "schedule.eval_every": 10,
            "schedule.save_every": 10, "schedule.lr": 1e-4,
        }
        | changes
    )  # fmt: skip
    cluster = cluster_here(out)
    start = time.monotonic()
    run = slurm.launch(recipe, cluster, out / "prepared")
    end = run.wait(timeout=400)
    seen: dict[str, object] = {"case": name, "state": end.state, "cause": end.cause, "wall_s": time.monotonic() - start}
    if end.state != "COMPLETED":
        return seen | {"log": run.log.read_text()[-1500:]}
    metrics = Metrics(run.path)
    while metrics.poll():
        pass
    losses = list(metrics.series["train/loss"].values)
    found = inspect(run.checkpoints()[-1])
    foreseen = predict(recipe, cluster)
    seen |= read_json(run.state_folder.result) | {
        "losses": losses,
        "step_seconds": [round(v, 4) for v in metrics.series["train/step_s"].values],
        "losses_finer_than_bf16": any(torch.tensor(v).bfloat16().float().item() != v for v in losses),
        "gpu_series": sum(isinstance(k, tuple) and k[1] != "cpu" and k[2] == "util" for k in metrics.series),
        "checkpoint": found.as_dict(),
        "forecast": {"allocated_gib": foreseen.memory.allocated_gib, "step_s": foreseen.time.step_s},
    }
    return seen | (adapter_facts(run, recipe) if recipe.tuning.method == "lora" and size == "1B" else {})


def adapter_facts(run: "slurm.Run", recipe: Recipe) -> dict[str, object]:
    """Export the adapter, load it with PEFT, and see that it changes the logits to other finite ones."""
    from peft import PeftModel

    adapter = export(run.path, run.path / "adapter").path
    base = load_model(recipe.model.name, torch.bfloat16, "sdpa", recipe.schedule.seed).cuda().eval()
    tokens = torch.arange(1, 65, device="cuda")[None]
    with torch.no_grad():
        before = base(tokens).logits
        after = PeftModel.from_pretrained(base, adapter).eval()(tokens).logits
    return {
        "adapter": inspect(adapter).as_dict(),
        "adapter_logits_finite": bool(torch.isfinite(after).all()),
        "adapter_changes_logits_by": (after - before).abs().max().item(),
    }


def main() -> int:
    """All cases, or those named."""
    out = Path(sys.argv[1]).absolute()
    tokenizer = Path(sys.argv[2])
    packages = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "wandb")
    report: dict[str, object] = {
        "card": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "cases": [],
    }
    for name in sys.argv[3:] or list(CASES):
        seen = check(name, dict(CASES[name]), tokenizer, out / "work")
        report["cases"].append(seen)  # type: ignore[attr-defined]
        print(json.dumps(seen, default=str), flush=True)
        write_json(out / "gpu_check.json", report)
    return int(any(c["state"] != "COMPLETED" for c in report["cases"]))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
