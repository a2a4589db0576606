"""Launches a run: checks recipe and cluster, prepares the data, freezes everything into a run folder, and submits."""

import math
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from kit import files
from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset, find_prepared, prepare
from kit.errors import InputError, KitError
from kit.forecast.shape import load_shape
from kit.forecast.timing import Prediction
from kit.slurm import client as queue
from kit.slurm import environment, local
from kit.slurm import outcome as evidence
from kit.slurm import script as job_script
from kit.slurm.run import Run
from kit.slurm.submit import reach, submit
from kit.slurm.watcher import state as state
from kit.slurm.watcher import task_states as task_states


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
    check(recipe, cluster)
    found = find_prepared(recipe, prepared)
    predicted = job_script.forecast(recipe, cluster, found.manifest if found else None)
    if not anyway:
        check_fit(recipe, cluster, predicted)
    dataset = prepare(recipe, prepared)
    if found is None or found.path != dataset.path:  # times depend on the number of rows
        predicted = job_script.forecast(recipe, cluster, dataset.manifest)
    run = freeze(recipe, cluster, dataset, predicted)
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


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for a recipe that this cluster, or its trainer, cannot run."""
    if cluster.slurm.env_file:
        environment.check_token_file(cluster.slurm.env_file)
    job_script.TRAINER.check(recipe, cluster)
    parallel, nodes = recipe.parallel, cluster.nodes
    if parallel.nodes > nodes.count or (nodes.gpus and parallel.gpus_per_node > nodes.gpus):
        raise InputError(
            f"The recipe asks for {parallel.nodes} nodes x {parallel.gpus_per_node} GPUs; the cluster {cluster.name} "
            f"has {nodes.count} x {nodes.gpus}. Lower parallel.nodes or parallel.gpus_per_node."
        )
    models.check_weights(recipe.model.name, cluster.paths.hf_home)
    _check_layers(recipe)
    reach(cluster, parallel.nodes)


def _check_layers(recipe: Recipe) -> None:
    """Raises InputError for settings that transformers or PEFT would refuse for this model."""
    try:
        shape = load_shape(recipe.model.name)
    except InputError:  # the forecast does not know the family, but it may train
        return
    shape.check(recipe)


def check_fit(recipe: Recipe, cluster: Cluster, predicted: Prediction | None) -> None:
    """Raises KitError where the job runs out of memory by the forecast, with the cheapest change that fits."""
    if predicted is None or predicted.memory.verdict != "does not fit":
        return
    memory = predicted.memory
    raise KitError(
        f"{recipe.name} does not fit {cluster.name}: {memory.allocated_gib:.1f} GiB allocated in {memory.peak_phase}, "
        f"of {memory.capacity_gib:.1f}. {memory.cheapest_fix} Use --anyway to launch regardless."
    )


def freeze(recipe: Recipe, cluster: Cluster, dataset: Dataset, predicted: Prediction | None) -> Run:
    """A new run folder with recipe, profile, the trainer's config files and the job script; nothing is submitted.

    Raises InputError where the folder cannot be written.
    """
    run = Run.create(recipe, cluster, dataset.path, dataset.manifest["digest"])
    run.note(warning_s=job_script.warning_s(recipe, cluster, predicted), script_version=job_script.SCRIPT_VERSION)
    for name, text in job_script.TRAINER.render(recipe, cluster, run.path).files.items():
        files.write(run.path / name, text)
    files.write(run.path / "job.sbatch", job_script.render_script(run))
    return run


# Source: the reasons in squeue(1).
PENDING = {
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs of higher priority go first",
    "Resources": "it is next, and waits until enough nodes, CPUs or GPUs are free",
    "Dependency": "the run that it follows has not ended",
    "DependencyNeverSatisfied": "the run that it follows did not end well: cancel it",
    "BeginTime": "its start time has not come; a requeued job waits two minutes",
    "JobHeldUser": "it is held: `scontrol release` it",
    "JobHeldAdmin": "an administrator holds it",
    "JobArrayTaskLimit": "as many tasks of the array run as it allows",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved: see `sinfo -R`",
    "PartitionDown": "the partition is closed",
    "PartitionTimeLimit": "it asks for more time than the partition gives: lower slurm.time and submit again",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives: lower parallel.nodes and submit again",
    "QOS": "a limit of its QOS is reached",
    "Assoc": "a limit of its account is reached",
}


def wait(run: Run, timeout: float | None = None, every: float = 0.5) -> evidence.State:
    """Block until the run ends. Ctrl-C ends a local run, which then is CANCELLED, and leaves a Slurm job alone.

    Raises KitError after `timeout` seconds. Looks at the run's files; Slurm is asked as `queue.look` allows.
    """
    deadline = time.monotonic() + timeout if timeout else None
    try:
        while not (now := state(run)).ended:
            if deadline and time.monotonic() > deadline:
                raise KitError(f"{run.path.name} is still {now.state} after {timeout:.0f} s; it goes on.")
            time.sleep(every)
            every = min(every * 1.2, 5.0)
    except KeyboardInterrupt:
        if str(run.job_id).startswith("local-"):
            cancel(run)
        raise
    return now


def cancel(run: Run, task: int | None = None) -> None:
    """End the run, or one task of an array: scancel, or the local runner.

    Raises InputError where it has ended, since its job id may be another job's by now; KitError where Slurm refuses.
    """
    if (now := state(run)).ended or not now.job_id:
        raise InputError(f"{now.run} is {now.state}: there is nothing to cancel.")
    _told(run, "cancel", task, "scancel")


def requeue(run: Run, task: int | None = None) -> None:
    """Start the run again from its last checkpoint: as the same job while Slurm remembers it, else as a new one.

    One task of an array can start again only while Slurm remembers. Raises KitError where Slurm refuses.
    """
    ended, job = state(run).ended, run.job_id or ""
    known = job.isdigit() and f" Command={run.info.get('script')} " in queue.records([job]).get(job, "")
    if not job.isdigit() or (ended and not known):
        if task is not None:
            raise KitError(f"Slurm does not know job {job} any more: launch the work of task {task} as a new run.")
        return submit(run)
    return _told(run, "requeue", task, "scontrol", "requeue")


def _told(run: Run, what: str, task: int | None, *command: str) -> None:
    key, facts = (run.job_id or "", {}) if task is None else (f"{run.job_id}_{task}", {"task": task})
    if not key.startswith("local-"):
        done = queue.command(*command, key)
        if done.returncode != 0:
            raise KitError(f"{' '.join(command)} {key}: {done.stderr.strip() or 'failed'}")
    evidence.witness(run, what, **facts)
    if key.startswith("local-"):
        local.stop(run)


def why_pending(run: Run) -> str:
    """Slurm's reason in words, and its estimate of the start, for a job that waits; empty for another."""
    now, rows = state(run), queue.look().rows
    if now.state == "PENDING" and now.job_id not in {key.partition("_")[0] for key in rows}:
        rows = queue.jobs("-j", str(now.job_id))[0]  # younger than the shared answer
    row = next((r for k, r in rows.items() if k.partition("_")[0] == now.job_id and r["State"] == "PENDING"), None)
    if not row:
        return ""
    words = next((text for key, text in PENDING.items() if key in row["Reason"]), "see `man squeue`")
    start = "not known yet" if row["StartTime"] == "N/A" else row["StartTime"]
    return f"pending, reason {row['Reason']}: {words}; estimated start {start}"


def follow(run: Run, ranks: Collection[int] | None = None, lines: int = 20, seconds: float = math.inf) -> Iterator[str]:
    """Lines of the job's log and of every rank's, or of these ranks', each with its file's name, as they are written.

    Begins with the last `lines` of each, of 64 KiB at most; stops when the run ends, or after some seconds.
    """
    places: dict[Path, int] = {}
    deadline, ended = time.monotonic() + seconds, False
    while not ended:
        ended = state(run).ended or time.monotonic() > deadline
        for path in run.logs(ranks):
            with path.open("rb") as stream:
                place = stream.seek(places.get(path, max(0, path.stat().st_size - 2**16)))
                whole, newline, _ = stream.read().rpartition(b"\n")
            places[path] = place + len(whole + newline)
            yield from (f"[{path.stem}] {line}" for line in whole.decode(errors="replace").splitlines()[-lines:])
        lines = 0  # from now on all
        time.sleep(0 if ended else 1)
