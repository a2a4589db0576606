"""Launches a run: checks recipe and cluster, prepares the data, freezes everything into a run folder, and submits."""

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kit import files
from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset, find_prepared, prepare
from kit.data.sources import check_place
from kit.errors import InputError, KitError
from kit.forecast import choices, limits, split
from kit.forecast.choices import Resolution
from kit.forecast.shape import Shape, load_shape
from kit.forecast.timing import Prediction
from kit.slurm import environment
from kit.slurm import script as job_script
from kit.slurm.client import available
from kit.slurm.creation import check_root
from kit.slurm.render import hand_over
from kit.slurm.run import Run
from kit.slurm.submit import reach, submit
from kit.trainers import installed, trainer_of


def launch(
    recipe: Recipe,
    cluster: Cluster,
    prepared: Path = Path("prepared"),
    anyway: bool = False,
    after: Run | None = None,
    when: str = "ok",
) -> Run:
    """Submit a run of this recipe, and return at once. The data are prepared first where they are not yet.

    With `after` it starts when that run has ended: well (`when` = "ok") or in any way ("any"). Raises InputError for
    what cannot run, KitError for what does not fit by the forecast (unless `anyway`), and SubmitError with Slurm's
    words where Slurm refuses it; the run folder then stays.
    """
    shape = check(recipe, cluster)
    if recipe.trainer.is_other and not anyway:
        installed.check(recipe.trainer)
    found = find_prepared(recipe, prepared, cluster)
    chosen = choose(recipe, cluster, found.manifest if found else None, shape)
    predicted = job_script.forecast(chosen.recipe, cluster, found.manifest if found else None, shape)
    if not anyway:
        check_fit(chosen.recipe, cluster, predicted)
    dataset = prepare(recipe, prepared, cluster=cluster)
    if found is None or found.path != dataset.path:  # times, and with them choices, depend on the number of rows
        chosen = choose(recipe, cluster, dataset.manifest, shape)
        predicted = job_script.forecast(chosen.recipe, cluster, dataset.manifest, shape)
    run = freeze(chosen, cluster, dataset, predicted)
    submit(run, after, when)
    return run


def launch_script(
    script: str, cluster: Cluster, name: str, count: int = 0, limit: int = 0, after: Run | None = None, when: str = "ok"
) -> Run:
    """Submit a user's own script, unchanged, as a run; with `count` as an array of tasks 0 to count - 1.

    At most `limit` tasks run at once (0: all). Raises as `launch` does.
    """
    reach(cluster)
    run = Run.create_for_script(script, cluster, name)
    if count:
        run.note(array=f"0-{count - 1}" + (f"%{limit}" if limit else ""))
    submit(run, after, when)
    return run


def choose(
    recipe: Recipe, cluster: Cluster, manifest: Mapping[str, Any] | None = None, shape: Shape | None = None
) -> Resolution:
    """The recipe with a value for each "auto", with the reasons: exactly what a run of it trains."""
    if recipe.trainer.is_other:  # its renderer has a value for each "auto"
        return Resolution(recipe)
    return choices.resolve(recipe, cluster, manifest, shape, compiler_here(cluster))


def compiler_here(cluster: Cluster) -> bool | None:
    """Whether this machine has a C compiler, where the local runner trains here; else None: it says nothing."""
    return None if available() or environment.has_image(cluster) else bool(limits.find_compiler())


def check(recipe: Recipe, cluster: Cluster) -> Shape | None:
    """Raises InputError for a recipe that this cluster, or its trainer, cannot run.

    Returns the sizes of the model; None for a family that the forecast does not know, which may train all the same.
    """
    shape = check_settings(recipe, cluster, compiler_here(cluster))
    models.check_weights(recipe.model.name, cluster.paths.hf_home)
    reach(cluster, recipe.parallel.nodes)
    return shape


def check_settings(recipe: Recipe, cluster: Cluster, compiler: bool | None) -> Shape | None:
    """As `check`, without a look at the model's weights and at Slurm: for a plan, and for settings to choose from.

    compiler: what `compiler_here` returns, which asks Slurm.
    """
    check_root(Path(cluster.paths.runs).absolute())
    if cluster.slurm.env_file:
        environment.check_token_file(cluster.slurm.env_file)
    check_place(recipe.data.source)
    trainer_of(recipe).check(recipe, cluster)
    if recipe.trainer.is_other and environment.has_image(cluster):
        raise InputError(
            f"slurm.container is for the kit's own trainer, and {recipe.trainer.name} runs in trainer.python on the "
            "nodes: take a profile without a container."
        )
    parallel, nodes = recipe.parallel, cluster.nodes
    if parallel.nodes > nodes.count or (nodes.gpus and parallel.gpus_per_node > nodes.gpus):
        raise InputError(
            f"The recipe asks for {parallel.nodes} nodes x {parallel.gpus_per_node} GPUs; the cluster {cluster.name} "
            f"has {nodes.count} x {nodes.gpus}. Lower parallel.nodes or parallel.gpus_per_node."
        )
    shape = None
    with contextlib.suppress(InputError):
        shape = load_shape(recipe.model.name, cluster.paths.hf_home)
    if recipe.trainer.is_other:
        return shape  # its trainer has checked what it can express
    if shape is not None:
        shape.check(recipe)  # what transformers or PEFT would refuse for this model
        split.check_room(recipe, cluster, shape)
    limits.check(recipe, cluster, compiler)
    return shape


def check_fit(recipe: Recipe, cluster: Cluster, predicted: Prediction | None) -> None:
    """Raises KitError where the job runs out of memory by the forecast, with the cheapest change that fits."""
    if predicted is None or predicted.memory.verdict != "does not fit":
        return
    memory = predicted.memory
    raise KitError(
        f"{recipe.name} does not fit {cluster.name}: {memory.allocated_gib:.1f} GiB allocated in {memory.peak_phase}, "
        f"of {memory.capacity_gib:.1f}. {memory.cheapest_fix} Use --anyway to launch regardless."
    )


def freeze(chosen: Resolution, cluster: Cluster, dataset: Dataset, predicted: Prediction | None, **facts: Any) -> Run:
    """A new run folder with recipe, profile, the trainer's config files and the job script; nothing is submitted.

    run.json has the choices that made the recipe, with their reasons, and `facts`. Raises InputError where the folder
    cannot be written.
    """
    recipe = chosen.recipe
    seconds = job_script.warning_s(recipe, cluster, predicted)
    run = Run.create(recipe, cluster, dataset.path, dataset.manifest["digest"])
    try:
        made = [asdict(decision) for decision in chosen.decisions]
        run.note(warning_s=seconds, script_version=job_script.SCRIPT_VERSION, choices=made, **facts)
        if recipe.trainer.is_other:
            recipe, _ = hand_over(recipe, dataset, run.path)
            files.write(run.path / "recipe.toml", recipe.toml())
        for name, text in trainer_of(recipe).render(recipe, cluster, run.path).files.items():
            files.write(run.path / name, text)
        files.write(run.path / "job.sbatch", job_script.render_script(run))
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)  # nothing was submitted from it
        raise InputError(
            f"The run folder {run.path} cannot be written: {error.strerror}. Free space there, or set paths.runs in "
            "the cluster profile to a folder that every node sees."
        ) from None
    return run
