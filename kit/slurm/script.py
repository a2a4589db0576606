"""Renders the job script of a training run from job.sbatch and node.sh: exactly what is submitted."""

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kit.config import models
from kit.config.cluster import Cluster, gres_for
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.files import REPOSITORY, locate, read_json
from kit.forecast.shape import Shape
from kit.forecast.steptime import disk_rate
from kit.forecast.timing import Prediction, predict
from kit.slurm import environment, rendezvous
from kit.slurm.folder import RunFolder
from kit.slurm.template import fill
from kit.slurm.variables import Variable
from kit.trainers import trainer_of
from kit.trainers.base import PYTHON, Rendering

# Seconds between Slurm's warning and the time limit where nothing is forecast, and at least. Saving takes seconds to
# minutes, and the ranks look for the warning after each step.
LEAST_WARNING_S = 120
# Raised when a script of an earlier version of the kit would not run any more; such a script is rendered again when
# its run is submitted again.
SCRIPT_VERSION = 3


@dataclass(frozen=True)
class Job:
    """What a job script is rendered from. `folder` is the run folder, which need not exist yet.

    warning_s: seconds before the time limit at which Slurm signals the job.
    """

    recipe: Recipe
    cluster: Cluster
    folder: Path
    dataset: Path
    wandb_id: str
    warning_s: int

    @classmethod
    def of_run(cls, run: RunFolder) -> "Job":
        """The job of a run. Runs from before `warning_s` was stored get the same seconds from a new forecast."""
        info = run.info
        dataset = Path(info["dataset"])
        seconds = info.get("warning_s")
        if seconds is None:
            manifest = dataset / "manifest.json"
            predicted = forecast(run.recipe, run.cluster, read_json(manifest) if manifest.exists() else None)
            seconds = warning_s(run.recipe, run.cluster, predicted)
        return cls(run.recipe, run.cluster, run.path, dataset, info["wandb_id"], seconds)


def render_script(run: RunFolder) -> str:
    """The job script of a run."""
    return render(Job.of_run(run))


def render(job: Job) -> str:
    """The job script: srun starts one task on each node, and the trainer's launcher starts the ranks of that node."""
    cluster, variables = job.cluster, exported(job)
    rendering = trainer_of(job.recipe).render(job.recipe, cluster, job.folder)
    environment_lines = environment.exports(variables)
    if environment.has_image(cluster) or cluster.slurm.python:
        environment_lines.append(environment.PYTHONPATH)
    return fill(
        "job.sbatch",
        {
            "run": str(job.folder),
            "python": environment.interpreter(cluster),
            "container": _container(job, list(variables)),
            "node_script": _node_script(job, rendering.launcher),
        },
        shell_code(job.recipe, cluster, [_output(job), *options(job)], environment_lines, rendering),
    )


def shell_code(
    recipe: Recipe, cluster: Cluster, options: Iterable[str], exports: Iterable[str], rendering: Rendering
) -> dict[str, str]:
    """The code in the templates of training jobs: directives, variables, tokens, set-up, and the trainer's commands."""
    return {
        "directives": "".join(f"#SBATCH {option}\n" for option in options),
        "environment": "".join(f"{line}\n" for line in exports),
        "tokens": environment.tokens(cluster),
        "setup": environment.setup(cluster),
        "before": _commands(rendering.before, recipe),
        "after": _commands(rendering.after, recipe),
    }


def _commands(each: Iterable[tuple[str, ...]], recipe: Recipe) -> str:
    """Lines of shell for a rendering's commands, with the trainer's interpreter."""
    python = recipe.trainer.python or "python"
    return "".join(shlex.join(python if word == PYTHON else word for word in one) + "\n" for one in each)


def _node_script(job: Job, launcher: tuple[str, ...]) -> str:
    """The shell code that each node runs, inside of the image where there is one."""
    if job.recipe.trainer.is_other:
        launcher = ("kit.train.other", str(job.folder), job.recipe.trainer.python, *launcher)
    inside = environment.has_image(job.cluster)
    python = job.cluster.slurm.python or ("python3" if inside else sys.executable)
    return fill(
        "node.sh",
        {"python": python, "launcher": launcher},
        {"python_path": f"{environment.PYTHONPATH}\n" if inside else ""},
    )


def _output(job: Job) -> str:
    return f'--output="{job.folder}/logs/slurm-%j.out"'


def options(job: Job) -> list[str]:
    """Every sbatch option of the job but --output; slurm.options of the profile come last, and so have precedence."""
    return environment.options(
        job.cluster,
        **resources(job.recipe, job.cluster),
        open_mode="append",
        requeue=True,
        signal=f"B:USR2@{job.warning_s}",
    )


def resources(recipe: Recipe, cluster: Cluster) -> dict[str, object]:
    """sbatch options: the job's name, its nodes and what it takes of each, as `environment.options` takes them."""
    parallel, nodes, gres = recipe.parallel, cluster.nodes, cluster.slurm.gres
    share_of_node = min(1.0, parallel.gpus_per_node / nodes.gpus) if nodes.gpus else 1.0
    whole_nodes = nodes.gpus > 0 and share_of_node == 1
    return {
        "job_name": recipe.name,
        "nodes": parallel.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": max(1, int(nodes.cpus * share_of_node)),
        "gres": gres_for(gres, parallel.gpus_per_node) if nodes.gpus and gres else "",
        "exclusive": whole_nodes,
        "mem": "0" if whole_nodes else "",
    }


def forecast(
    recipe: Recipe, cluster: Cluster, manifest: dict[str, object] | None = None, shape: Shape | None = None
) -> Prediction | None:
    """The forecast, by the manifest of prepared data where there is one; None for a family that it does not know."""
    try:
        return predict(recipe, cluster, manifest, shape)
    except InputError:
        return None


def warning_s(recipe: Recipe, cluster: Cluster, predicted: Prediction | None) -> int:
    """Seconds before the time limit at which Slurm should signal the job.

    Twice a step, an evaluation and a save, as forecast; at least LEAST_WARNING_S, and at most half of the time limit.
    """
    needed = 0.0
    if predicted is not None:
        longest_step = predicted.time.step_range_s[1] if predicted.time.step_range_s else 0.0
        save = predicted.storage.checkpoint_gb * 1e9 / disk_rate(cluster, cluster.paths.runs)
        needed = 2 * (longest_step + (predicted.time.evaluation_s or 0.0) + save)
    return math.ceil(min(max(LEAST_WARNING_S, needed), cluster.slurm.limit_s / 2))


def _container(job: Job, variables: list[str]) -> list[str]:
    """The words between srun and the node's script. What the ranks read and write has the same path in the image."""
    image = job.cluster.slurm.container
    if image.kind == "none":
        return []
    mounts = [str(path.expanduser().absolute()) for path in _mounted(job)] + list(image.mounts)
    pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in dict.fromkeys(mounts)]
    if image.kind == "apptainer":
        return ["apptainer", "exec", "--nv", "--bind", ",".join(pairs), image.image]
    return [
        f"--container-image={image.image}",
        f"--container-mounts={','.join(pairs)}",
        f"--container-env={','.join(variables)}",  # variables that are not listed have the image's values
    ]


def _mounted(job: Job) -> list[Path]:
    """Folders that the ranks read and write."""
    hf_home = job.cluster.paths.hf_home or os.environ.get("HF_HOME") or "~/.cache/huggingface"
    folders = [job.folder.parent, job.dataset, REPOSITORY, Path(hf_home)]
    model = locate(job.recipe.model.name)
    return [*folders, model] if model.is_dir() else folders


def exported(job: Job) -> dict[str, str]:
    """Environment variables of every process of the job. Those of the cluster profile have precedence."""
    recipe, cluster = job.recipe, job.cluster
    values = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": os.environ.get("WANDB_MODE", "offline"),
        "WANDB_PROJECT": recipe.name,
        "WANDB_DIR": str(job.folder),
        "WANDB_RUN_ID": job.wandb_id,
        "WANDB_RESUME": "allow",
        "WANDB_SILENT": "true",
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",  # the default is 15 s, lost if the run is killed
        "WANDB_X_STATS_SAMPLING_INTERVAL": "2",
    } | dict(environment.NOTHING_LEAVES)
    if not environment.has_image(cluster) and not cluster.slurm.python:
        # The nodes must have what this process has. Another interpreter has other versions.
        values[Variable.SOFTWARE] = json.dumps(rendezvous.software())
    values |= models.hf_environment(cluster.paths.hf_home)
    if cluster.nodes.gpus == 0:
        threads = max(1, cluster.nodes.cpus // recipe.parallel.gpus_per_node)
        values |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    return values | cluster.environment
