"""Preparation as a Slurm array: each task encodes a part of the rows, and a job after the array merges the parts."""

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import merge
from kit.data.documents import encode_part, part_path
from kit.data.engine import EngineName
from kit.data.sources import Part, open_source
from kit.errors import InputError
from kit.show import Part as ResultPart
from kit.show import Result, Table
from kit.slurm import environment as jobscript
from kit.slurm import launch as slurm
from kit.slurm.client import available
from kit.slurm.run import Run


@dataclass(frozen=True)
class PreparationJobs(Result):
    """The two jobs of a preparation; the dataset is there when `merging` has ended well."""

    encoding: Run  # the array
    merging: Run

    def as_dict(self) -> dict[str, Any]:
        """{"runs": [run folders]}."""
        return {"runs": [str(run.path) for run in (self.encoding, self.merging)]}

    def parts(self) -> Iterator[ResultPart]:
        """A table of the jobs."""
        yield Table(("run", "job"), [(run.path, run.job_id) for run in (self.encoding, self.merging)])


def submit(recipe: Recipe, cluster: Cluster, out: Path, tasks: int, engine: EngineName = "auto") -> PreparationJobs:
    """Submit the array and the merge, which starts when all tasks have ended well; return at once.

    A failed task can be requeued alone (`kit.slurm.launch.requeue`). Raises InputError without Slurm.
    """
    if not available():
        raise InputError("Slurm does not answer here; prepare on this machine with --workers instead.")
    work = (out / f".{recipe.name}.tasks").absolute()
    work.mkdir(parents=True, exist_ok=True)
    source = files.locate(recipe.data.source)
    if source.exists():  # the tasks start in another folder
        recipe = recipe.override(**{"data.source": str(source.absolute())})
    files.write(work / "recipe.toml", recipe.toml())
    files.write_json(work / "tasks.json", {"tasks": tasks, "engine": engine})
    script = _script(cluster, work)
    encoding = slurm.launch_script(script, cluster, f"{recipe.name}-encode", tasks)
    merging = slurm.launch_script(script, cluster, f"{recipe.name}-merge", after=encoding)
    return PreparationJobs(encoding, merging)


def _script(cluster: Cluster, work: Path) -> str:
    cpus = max(1, min(8, cluster.nodes.cpus))
    variables = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(cpus), **jobscript.NOTHING_LEAVES}
    variables |= models.hf_environment(cluster.paths.hf_home)
    command = f"exec {jobscript.python(cluster)} -m kit.slurm.prepare {shlex.quote(str(work))}"
    return jobscript.render(
        cluster, jobscript.options(cluster, nodes=1, ntasks=1, cpus_per_task=cpus), command, variables
    )


def main(work: Path) -> int:
    """In the job: encode the part of this array task, or merge all parts where the job is not an array."""
    recipe, job = Recipe.load(work / "recipe.toml"), files.read_json(work / "tasks.json")
    folder, count, task = work / "parts", job["tasks"], os.environ.get("SLURM_ARRAY_TASK_ID")
    if task is None:
        parts = [part_path(folder, Part(index, count)) for index in range(count)]
        print(merge(recipe, parts, work.parent))
        return 0
    source = open_source(recipe.data.source, recipe.data.source_format)
    print(encode_part(recipe, source, folder, Part(int(task), count), job["engine"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
