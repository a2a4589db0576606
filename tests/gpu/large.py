"""Fine-tune a model that no disk of the machine holds: `python tests/gpu/large.py OUT.json PREPARED MODEL [KEY=VALUE]`.

MODEL is a shipped shape, such as meta-llama/Llama-3.1-70B. Its safetensors files are sparse: they have headers and
sizes, and no content. The ranks of the runs draw their shards instead of reading them (drawn/sitecustomize.py);
everything else is what `kit launch` does: forecast, a run of FSDP2 on all GPUs that is cancelled after a step, resumed
from its checkpoint to its end, and the export of its adapter, whose names are compared with those of the model.
PREPARED is a folder that `kit prepare` made.
"""

import datetime
import importlib.metadata
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from scale import PACKAGES, watch
from speed import LLAMA, cluster_here
from transformers import AutoConfig, AutoModelForCausalLM

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset
from kit.deploy.adapter import export
from kit.files import REPOSITORY, read_json, write_json
from kit.forecast.choices import resolve
from kit.forecast.predict import predict
from kit.slurm import launch
from kit.slurm.run import Run
from kit.slurm.submit import submit
from kit.watch.metrics import Metrics

FILE_BYTES = 40e9
STEPS, SAVE_EVERY, CANCEL_AFTER = 6, 3, 4
LIMIT_S = 260  # of a job


def write_sparse_model(folder: Path, name: str, tokenizer: Path) -> int:
    """config.json, tokenizer, index and safetensors files without content. Returns the bytes of the weights."""
    shapes = read_json(REPOSITORY / "kit" / "forecast" / "shapes.json")
    shape: Any = name
    while isinstance(shape, str):
        shape = shapes[shape]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in shape.items() if not k.startswith("_")} | LLAMA))
    for path in tokenizer.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    files: list[dict[str, list[int]]] = [{}]
    held = 0.0
    for parameter, value in empty_model(folder).named_parameters():
        if held > FILE_BYTES:
            files.append({})
            held = 0.0
        files[-1][parameter] = list(value.shape)
        held += 2 * value.numel()
    index, total = {}, 0
    for number, tensors in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        header, at = {}, 0
        for parameter, size in tensors.items():
            end = at + 2 * math.prod(size)
            header[parameter] = {"dtype": "BF16", "shape": size, "data_offsets": [at, end]}
            index[parameter], at = path.name, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
        total += at
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    return total


def empty_model(folder: Path) -> Any:
    """The model on the meta device."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


def recorded(run: Run) -> dict[str, Any]:
    """GiB of each rank by phase, and what the run logged."""
    metrics = Metrics(run.path)
    while metrics.poll():
        pass
    wanted = ("train/base_load_s", "train/save_blocked_s", "train/step_s", "train/tokens_per_s", "train/loss")
    result = run.state_folder.result
    ranks = [read_json(path) for path in sorted(run.path.glob("memory-*.json"))]
    return {
        "result": read_json(result) if result.exists() else None,
        "gib_of_a_rank": [
            {phase: {k: round(v / 2**30, 3) for k, v in found.items()} for phase, found in rank.items()}
            for rank in ranks
        ],
        **{key: [round(v, 4) for v in metrics.series[key].values] for key in wanted if key in metrics.series},
        "log": (run.path / "logs" / "rank-000.log").read_text(errors="replace")[-1500:],
    }


def check_adapter(model: Path, adapter: Path) -> dict[str, Any]:
    """Whether the names and shapes of an exported adapter are exactly those that PEFT makes on the empty model."""
    settings = LoraConfig.from_pretrained(adapter)
    settings.inference_mode = False
    with torch.device("meta"):
        adapted = get_peft_model(empty_model(model), settings)
    wanted = {k.replace(".default", ""): list(v.shape) for k, v in adapted.named_parameters() if "lora_" in k}
    with safe_open(adapter / "adapter_model.safetensors", "pt") as stream:
        found = {key: list(stream.get_slice(key).get_shape()) for key in stream.keys()}  # noqa: SIM118  # no mapping
        zeros = sum(not bool(stream.get_tensor(key).any()) for key in found)
    return {
        "parameters": sum(math.prod(shape) for shape in found.values()),
        "missing": len(wanted.keys() - found.keys()),
        "unexpected": len(found.keys() - wanted.keys()),
        "other_shapes": sum(found[key] != wanted[key] for key in found.keys() & wanted.keys()),
        "tensors_of_zeros": zeros,
    }


def main(out: Path, prepared: Path, name: str, *changes: str) -> None:
    """Forecast, run, resume, export; the JSON written after each."""
    scratch = Path(tempfile.mkdtemp(prefix="large-"))
    cluster: Cluster = cluster_here(scratch)
    dataset = Dataset(prepared.absolute())
    model = scratch / "model"
    size = write_sparse_model(model, name, dataset.path / "tokenizer")
    recipe = Recipe.load("demo").override(**{
        "model.name": str(model), "data.seq_len": 4096, "parallel.strategy": "fsdp2",
        "parallel.gpus_per_node": torch.cuda.device_count(), "schedule.max_steps": STEPS,
        "schedule.save_every": SAVE_EVERY, "schedule.eval_every": 0,
    } | dict(change.split("=", 1) for change in changes))  # fmt: skip
    chosen = resolve(recipe, cluster, compiler=True)
    report: dict[str, Any] = {
        "model": name,
        "bytes": size,
        "card": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "date": datetime.date.today().isoformat(),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "recipe": chosen.recipe.toml(),
        "forecast": predict(chosen.recipe, cluster, prepared.absolute().parent).as_dict(),
        "parts": {},
    }
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent / 'drawn'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    def part(title: str, found: dict[str, Any]) -> None:
        report["parts"][title] = found
        write_json(out, report)
        print(title, json.dumps(found, default=str)[:3000], flush=True)

    run = launch.freeze(chosen, cluster, dataset, None)
    begun = time.monotonic()
    submit(run)
    part("first job", watch(run, CANCEL_AFTER, LIMIT_S) | recorded(run))
    run.requeue()
    part("resumed", watch(run, 0, LIMIT_S) | recorded(run))
    part("seconds of both jobs", {"wall_s": round(time.monotonic() - begun, 1)})
    begun = time.monotonic()
    exported = export(run.path, scratch / "adapter")
    part("adapter", check_adapter(model, Path(exported.path)) | {"export_s": round(time.monotonic() - begun, 1)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
