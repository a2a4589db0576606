"""Renders a recipe for another trainer: its config files, its data and its job script, in a new folder."""

import shlex
from pathlib import Path

from kit import files
from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data import handover
from kit.data.dataset import Dataset, prepare
from kit.errors import InputError
from kit.show import Answer, Table
from kit.slurm import environment
from kit.slurm.creation import check_root
from kit.slurm.script import resources, shell_code
from kit.slurm.template import fill
from kit.trainers.base import Rendering
from kit.trainers.catalog import other

DATA, SCRIPT = "data", "job.sbatch"


def render(recipe: Recipe, cluster: Cluster, out: Path, trainer: str = "", prepared: Path = Path("prepared")) -> Answer:
    """Write `out` for the trainer, by default the recipe's: config files, the prepared rows in `data`, job.sbatch.

    The steps are those of the recipe for the rows as the trainer counts them. Raises InputError for what the trainer
    cannot express, or where `out` exists, before anything is written.
    """
    out = out.absolute()
    check_root(out)  # the job's log is in it
    if out.exists():
        raise InputError(f"{out} exists already and was not changed; choose another name.")
    name = trainer or recipe.trainer.name
    module = other(name)
    recipe = recipe.override(**{"trainer.name": name})
    module.check(recipe, cluster)
    models.check_weights(recipe.model.name, cluster.paths.hf_home)
    dataset = prepare(recipe, prepared, cluster=cluster)
    with files.new_folder(out) as folder:
        recipe, counts = hand_over(recipe, dataset, folder)
        rendering = module.render(recipe, cluster, out)
        texts = {
            **rendering.files, "recipe.toml": recipe.toml(), "cluster.toml": cluster.toml(),
            SCRIPT: job_script(recipe, cluster, out, rendering),
        }  # fmt: skip
        for file, text in texts.items():
            files.write(folder / file, text)
    rows = [("trainer", f"{name} {next(iter(module.KNOWN.values()))}"), ("files", ", ".join(texts)),
            ("rows", ", ".join(f"{count:,} {split}" for split, count in counts.items())),
            ("steps", f"{recipe.schedule.max_steps:,}")]  # fmt: skip
    values = {"folder": str(out), "trainer": name, "files": list(texts), "rows": counts,
              "steps": recipe.schedule.max_steps, "notes": list(rendering.notes)}  # fmt: skip
    table = Table(("", str(out)), [*rows, *(("note", note) for note in rendering.notes)])
    return Answer(values, table, f"Submit it with: sbatch {shlex.quote(str(out / SCRIPT))}")


def hand_over(recipe: Recipe, dataset: Dataset, folder: Path) -> tuple[Recipe, dict[str, int]]:
    """Write the rows into `folder`/data. Returns the recipe with the steps for them, and the rows of each split."""
    counts = handover.write(dataset, other(recipe.trainer.name).rows(recipe), folder / DATA)
    return recipe.override(**{"schedule.max_steps": recipe.optimizer_steps(counts["train"])}), counts


def job_script(recipe: Recipe, cluster: Cluster, out: Path, rendering: Rendering) -> str:
    """The job script of a rendered folder: srun starts one task on each node, and torchrun the ranks of that node."""
    variables = {
        "PYTHONUNBUFFERED": "1",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(out),
        "WANDB_PROJECT": recipe.name,
        **environment.NOTHING_LEAVES,
        **models.hf_environment(cluster.paths.hf_home),
        **cluster.environment,
    }
    directives = [f'--output="{out}/slurm-%j.out"', *environment.options(cluster, **resources(recipe, cluster))]
    python = recipe.trainer.python or "python"
    node = fill("other_node.sh", {"python": python, "launcher": rendering.launcher}, {})
    return fill(
        "other.sbatch",
        {"node_script": node},
        shell_code(recipe, cluster, directives, environment.exports(variables), rendering),
    )
