"""Recipes that are rendered for other trainers, and what the trainers' own parsers said of them.

`python -m tests.trainers.rendered CACHE NAME...` builds the environments of env/trainers in CACHE and writes the
answers to NAME.json here.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from kit import files
from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.slurm.render import render

HERE = Path(__file__).parent
LORA = {"schedule.max_steps": 6, "schedule.eval_every": 3, "schedule.save_every": 3, "schedule.warmup_ratio": 0.5}
ONE = {"parallel.gpus_per_node": 1}
FULL = {"tuning.method": "full"}
# The cases of each trainer: changes of the demo's recipe. The CPU cluster where the parser refuses what needs a GPU.
CASES = {
    "litgpt": ("local", {
        "lora": ONE | {"data.packing": False},
        "lora-of-the-mlp": ONE | {
            "data.packing": False, "tuning.target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
        "full": ONE | FULL | {"data.packing": False},
        "pretrain": ONE | FULL | {"data.loss": "all"},
    }),
    "axolotl": ("two-node-pcie", {
        "lora": {},
        "lora-unpacked-ddp": {"data.packing": False, "parallel.strategy": "ddp"},
        "qlora-ddp": {"tuning.method": "qlora", "parallel.strategy": "ddp"},
        "full-offload": FULL | {"parallel.offload": "cpu", "parallel.sharding": "grad_op"},
    }),
    "automodel": ("two-node-pcie", {
        "lora": {"data.packing": False},
        "lora-ddp": {"data.packing": False, "parallel.strategy": "ddp", "parallel.activation_checkpointing": False},
        "full": FULL | {"data.packing": False, "data.loss": "all", "schedule.scheduler": "linear"},
    }),
    "torchtitan": ("two-node-pcie", {
        "full": FULL | {"data.loss": "all"},
        "full-hybrid-offload": FULL | {
            "data.loss": "all", "parallel.sharding": "hybrid", "parallel.nodes": 2, "parallel.offload": "cpu",
            "parallel.activation_checkpointing": False},
    }),
    "megatron": ("two-node-pcie", {
        "replicas": FULL | {"data.loss": "all", "parallel.strategy": "ddp"},
        "tensor-zero1": FULL | {
            "data.loss": "all", "parallel.strategy": "zero1", "parallel.tensor": 3, "parallel.gpus_per_node": 6,
            "parallel.activation_checkpointing": False},
    }),
    "llamafactory": ("local", {
        "lora": ONE,
        "lora-unpacked": ONE | {"data.packing": False},
        "full-fsdp2": FULL,
        "full-fsdp1-offload": FULL | {"parallel.strategy": "fsdp1", "parallel.offload": "cpu"},
    }),
}  # fmt: skip


def render_case(name, case, folder):
    """Render one case into `folder`, whose parent also gets the prepared data."""
    cluster, cases = CASES[name]
    recipe = Recipe.load("demo", **LORA | cases[case] | {"trainer.python": "python"})
    if name == "torchtitan":
        recipe = recipe.override(**{"model.name": str(shaped_as_llama_8b(recipe, folder.parent / "llama-8b"))})
    profile = Cluster.load(cluster)
    if name == "megatron":
        profile = dataclasses.replace(profile, environment=profile.environment | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        recipe = recipe.override(**{"model.name": str(Path(models.source(recipe.model.name)) / "config.json")})
    return render(recipe, profile, folder, name, folder.parent / "prepared")


def shaped_as_llama_8b(recipe, folder):
    """The recipe's model with the sizes of Llama 3.1 8B in config.json: torchtitan renders only models that it has."""
    if not folder.exists():
        own = Path(models.source(recipe.model.name)).absolute()
        folder.mkdir(parents=True)
        for file in own.iterdir():
            (folder / file.name).symlink_to(file)
        config = json.loads((own / "config.json").read_text()) | {"hidden_size": 4096, "num_hidden_layers": 32}
        (folder / "config.json").unlink()
        files.write_json(folder / "config.json", config)
    return folder


def config_lines(folder, name):
    """The lines of the rendered config file, with the paths of this machine replaced."""
    (file,) = folder.glob(f"{name}.*")
    text = file.read_text().replace(str(folder.parent / "llama-8b"), "MODEL")
    return text.replace(str(folder), "FOLDER").replace(str(files.REPOSITORY), "KIT").splitlines()


def ask(name, cache, folder):
    """What the trainer's own parser says of all cases, rendered into `folder`: versions, and an answer for each."""
    cases = CASES[name][1]
    for case in cases:
        render_case(name, case, folder / case)
    script = files.REPOSITORY / "env" / "trainers" / name
    command = ["bash", script, cache, *(folder / case for case in cases)]
    answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    said = {case: {"answer": answer["files"][case], "file": config_lines(folder / case, name)} for case in cases}
    return {"versions": answer["versions"], "cases": said}


def main(cache, *names):
    """Ask the parsers of these trainers, and record what they say."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            files.write_json(HERE / f"{name}.json", ask(name, Path(cache).absolute(), Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
