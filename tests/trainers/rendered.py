"""Recipes that are rendered for other trainers, and what the trainers' own parsers said of them.

`python -m tests.trainers.rendered CACHE NAME...` builds the environments of env/trainers in CACHE and writes the
answers to NAME.json here.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from kit import files
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
    return render(recipe, Cluster.load(cluster), folder, name, folder.parent / "prepared")


def config_lines(folder, name):
    """The lines of the rendered config file, with the paths of this machine replaced."""
    (file,) = folder.glob(f"{name}.*")
    text = file.read_text()
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
