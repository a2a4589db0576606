"""Batch: the preparation of a large corpus as a Slurm array, a part of the rows a task, and a job that merges them."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from kit import files
from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import merge
from kit.data.engine import Name
from kit.data.parts import encode_part
from kit.errors import InputError
from kit.slurm import environment as jobscript
from kit.slurm import launch as slurm
from kit.slurm.client import available
from kit.slurm.run import Run


def submit(recipe: Recipe, cluster: Cluster, out: Path, tasks: int, engine: Name = "tokenizers") -> tuple[Run, Run]:
    """Submit both and return at once: the array, and the merge, which starts when all tasks have ended well.

    A task that failed can be requeued alone (`kit.slurm.launch.requeue`). Raises InputError without Slurm.
    """
    if not available():
        raise InputError("No Slurm answers here; prepare on this machine with --workers instead.")
    work = (out / f".{recipe.name}.tasks").absolute()
    work.mkdir(parents=True, exist_ok=True)
    source = files.locate(recipe.data.source)
    if source.exists():  # the tasks start elsewhere
        recipe = replace(recipe, data=replace(recipe.data, source=str(source.absolute())))
    files.write(work / "recipe.toml", recipe.toml())
    files.write_json(work / "tasks.json", {"tasks": tasks, "engine": engine})
    script = _script(cluster, work)
    encoding = slurm.launch_script(script, cluster, f"{recipe.name}-encode", tasks)
    merging = slurm.launch_script(script, cluster, f"{recipe.name}-merge", after=encoding)
    return encoding, merging


def _script(cluster: Cluster, work: Path) -> str:
    cpus = max(1, min(8, cluster.nodes.cpus))
    threads = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(cpus), "HF_HUB_OFFLINE": "1"}
    threads |= models.hf_environment(cluster.paths.hf_home)
    command = f"exec {jobscript.python(cluster)} -m kit.slurm.prepare {shlex.quote(str(work))}"
    return jobscript.render(
        cluster, jobscript.options(cluster, nodes=1, ntasks=1, cpus_per_task=cpus), command, threads
    )


def main(work: Path) -> int:
    """One task of the array, or the merge where there is no task."""
    recipe, told = Recipe.load(work / "recipe.toml"), files.read_json(work / "tasks.json")
    task, count = os.environ.get("SLURM_ARRAY_TASK_ID"), told["tasks"]
    if task is not None:
        print(encode_part(recipe, work / "parts", (int(task), count), told["engine"]))
        return 0
    parts = [work / "parts" / f"part-{i:05d}-of-{count:05d}.arrow" for i in range(count)]
    print(merge(recipe, parts, work.parent, progress=print).path)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
