"""Slurm: submit, ask, wait, cancel. Where no sbatch answers, a local runner executes the very same script."""

import math
import os
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError, KitError, SubmitError
from kit.slurm import client as queue
from kit.slurm import local, watcher
from kit.slurm import outcome as evidence
from kit.slurm.run import Run
from kit.slurm.watcher import state as state
from kit.slurm.watcher import task_states as task_states


def available() -> bool:
    """Whether this machine belongs to a Slurm cluster, even one whose controller does not answer just now."""
    return "Slurmctld" in queue.command("scontrol", "ping").stdout  # UP or DOWN, at once


def launch(
    recipe: Recipe,
    cluster: Cluster,
    prepared: Path = Path("prepared"),
    anyway: bool = False,
    after: Run | None = None,
    when: str = "ok",
) -> Run:
    """Prepare the data if need be, freeze everything into a new run folder, submit, and return at once.

    With `after` it starts when that run has ended, well ("ok") or in any way ("any"). Raises InputError for what cannot
    run, KitError for what the forecast says does not fit (unless `anyway`), and SubmitError with Slurm's words where it
    refuses; the run folder then stays.
    """
    from kit.data.dataset import prepare
    from kit.slurm import script as sbatch  # here, so that a kernel which only attaches loads none of it

    check(recipe, cluster)
    if not anyway:
        check_fit(recipe, cluster)
    dataset = prepare(recipe, prepared)
    run = Run.create(recipe, cluster, dataset.path, dataset.manifest["digest"])
    files.write(run.path / "accelerate.yaml", sbatch.render_accelerate(recipe, cluster))
    files.write(run.path / "job.sbatch", sbatch.render_script(run))
    submit(run, after=after, when=when)
    return run


def launch_script(
    script: str, cluster: Cluster, name: str, count: int = 0, limit: int = 0, after: Run | None = None, when: str = "ok"
) -> Run:
    """Submit a user's own script, unchanged, as a run; with `count` as an array of tasks 0 to count - 1.

    At most `limit` tasks run at once (0: all). Raises as `launch` does.
    """
    reach(cluster)
    run = Run.create_for_script(script, cluster, name)
    run.note(array=f"0-{count - 1}" + (f"%{limit}" if limit else "") if count else "")
    submit(run, after=after, when=when)
    return run


def _own_options(run: Run) -> list[str]:
    """What sbatch is told beside a user's own script: the array, and where the log goes unless the script says."""
    array, script = run.info.get("array"), (run.path / "job.sbatch").read_text(errors="surrogateescape")
    directives = " ".join(re.findall(r"^#SBATCH(.*)", script, re.MULTILINE))
    name = "%A_%a" if array or re.search(r"\s(-a|--array)", directives) else "%j"
    log = [] if re.search(r"\s(-o|--out)", directives) else [f"--output={run.path}/logs/slurm-{name}.out"]
    return log + ([f"--array={array}"] if array else [])


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for a recipe that this cluster, or kit.train, cannot run."""
    from kit.config import models as model
    from kit.forecast.shape import load_shape
    from kit.slurm import environment as jobscript

    if cluster.slurm.env_file:
        jobscript.private(cluster.slurm.env_file)
    parallel, nodes = recipe.parallel, cluster.nodes
    if parallel.strategy.startswith("zero") or recipe.tuning.method == "qlora":
        what = "tuning.method qlora" if recipe.tuning.method == "qlora" else f"parallel.strategy {parallel.strategy}"
        raise InputError(f"{what} can be forecast but not launched: kit.train runs ddp, fsdp1 and fsdp2, full or lora.")
    if parallel.strategy == "fsdp1" and nodes.gpus == 0:
        raise InputError("parallel.strategy fsdp1 needs GPUs; on a CPU cluster use fsdp2 or ddp.")
    if parallel.sharding == "hybrid" and parallel.strategy == "fsdp2":
        raise InputError("parallel.sharding hybrid runs with fsdp1 only; use full or grad_op with fsdp2.")
    if parallel.nodes > nodes.count or (nodes.gpus and parallel.gpus_per_node > nodes.gpus):
        raise InputError(
            f"The recipe asks for {parallel.nodes} nodes x {parallel.gpus_per_node} GPUs; the cluster {cluster.name} "
            f"has {nodes.count} x {nodes.gpus}. Lower parallel.nodes or parallel.gpus_per_node."
        )
    model.check_weights(recipe.model.name, cluster.paths.hf_home)
    try:
        shape = load_shape(recipe.model.name)
    except InputError:  # a config that the formulas cannot read may still train
        pass
    else:
        shape.check(recipe)
    reach(cluster, parallel.nodes)


def reach(cluster: Cluster, nodes: int = 1) -> None:
    """Raises InputError where no Slurm answers, and the job is not one that runs on this machine instead."""
    if available():
        return
    if cluster.slurm.partition:
        raise InputError(
            f"No Slurm answers here, and {cluster.name} names the partition {cluster.slurm.partition}: its jobs "
            "are not run on this machine instead. Set SLURM_CONF, or take a profile without a partition."
        )
    if nodes > 1:
        raise InputError(f"No Slurm answers here, and the local runner has one node; {nodes} were asked for.")


def check_fit(recipe: Recipe, cluster: Cluster) -> None:
    """Raises KitError where the forecast says that the job runs out of memory, with the cheapest change that fits."""
    from kit.forecast.timing import predict

    try:
        memory = predict(recipe, cluster).memory
    except InputError:  # a family of models that the forecast does not know
        return
    if memory.verdict == "does not fit":
        raise KitError(
            f"{recipe.name} does not fit {cluster.name}: {memory.allocated_gib:.1f} GiB allocated in "
            f"{memory.peak_phase}, of {memory.capacity_gib:.1f}. {memory.cheapest_fix} "
            "To launch it all the same, say --anyway."
        )


# What sbatch says, and what to change. Source: slurm_errno.c of Slurm 22.05.
REFUSALS = {
    "invalid partition": "Set slurm.partition to one of: {partitions}.",
    "invalid qos": "Take --qos out of slurm.options, or name one that `sacctmgr show qos` lists.",
    "qos": "A limit of your account or QOS is reached: wait for jobs to end, ask for less, or for another QOS.",
    "account": "Set slurm.account to one that `sacctmgr show associations user=$USER` lists.",
    "configuration is not available": "No node has that many GPUs, CPUs or that memory: see `sinfo -o '%P %c %m %G'`.",
    "processors": "Lower nodes.cpus: the job asks for all of them; `sinfo -o '%P %c'` lists what nodes have.",
    "node count": "Lower the number of nodes; `sinfo -o '%P %D'` lists what each partition has.",
    "generic resource": "Set slurm.gres to what `sinfo -o '%P %G'` lists.",
    "time limit": "Lower slurm.time; `sinfo -o '%P %l'` lists the limits.",
    "timed out": "Slurm may have taken the job all the same: `kit state` finds it by its script when Slurm answers.",
    "controller": "Nothing was submitted. Try again when `scontrol ping` says UP.",
}

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


def submit(run: Run, after: Run | None = None, when: str = "ok") -> None:
    """sbatch, or the local runner; a run that was submitted before goes on where its last checkpoint is.

    Raises SubmitError with Slurm's own words, InputError while the run's last job has not ended.
    """
    script, own = run.path / "job.sbatch", not run.trains
    options = _dependency(after, when) + (_own_options(run) if own else [])
    if run.job_id:
        if not (now := state(run)).ended:
            raise InputError(f"{run.path.name} is {now.state} as job {run.job_id}; cancel it, or wait for its end.")
        evidence.archive(run)
        if run.info.get("script", str(script)) != str(script) and not own:
            from kit.slurm import script as sbatch

            files.write(script, sbatch.render_script(run))  # the folder was moved, and the script holds its path
    if not available():
        return local.start(run)
    environment = dict(os.environ)
    try:
        if own:  # the kit's own script leaves its evidence itself
            files.write(run.path / "state" / "witness.sh", evidence.WITNESS)
            environment |= {"BASH_ENV": str(run.path / "state" / "witness.sh"), "KIT_RUN": str(run.path)}
        run.note(job_id=None, script=str(script), submitted=time.time())
        watcher.enlist(run)  # first: where this kernel dies now, the watcher finds the job by its script
    except OSError as error:
        raise InputError(f"Nothing was submitted: {error.strerror} ({error.filename or run.path}).") from None
    done = queue.command("sbatch", "--parsable", *options, str(script), env=environment)
    if done.returncode != 0:
        if "timed out" not in done.stderr:
            run.note(submitted=None)
        raise SubmitError(f"sbatch did not take {script}: {done.stderr.strip()}. {advice(done.stderr)}".strip())
    job = done.stdout.strip().split(";")[0]
    try:
        return watcher.note_job(run, job)
    except OSError as error:
        raise KitError(
            f"Job {job} was submitted, but {run.path} cannot be written: {error.strerror}. Free space there; then "
            f"`kit state {run.path.name}` finds the job by its script."
        ) from None


def advice(words: str) -> str:
    """What to change where sbatch says this; empty for what nobody foresaw."""
    text = next((text for key, text in REFUSALS.items() if key in words.lower()), "")
    partitions = queue.command("sinfo", "-h", "-o", "%P").stdout.split() if "{" in text else []
    return text.format(partitions=", ".join(partitions))


def _dependency(after: Run | None, when: str) -> list[str]:
    """sbatch's options for a run that follows another. Raises InputError where it would never start."""
    if when not in ("ok", "any"):
        raise InputError(f'when is {when!r}; it is "ok" or "any".')
    if after is None or (before := state(after)).state == "COMPLETED" or (before.ended and when == "any"):
        return []  # asking Slurm is no use: it takes a job that it has forgotten for one that ended well
    if before.ended or before.job_id is None:
        raise InputError(f'{before.run} is {before.state}, so what follows it would never start; say when="any".')
    if before.job_id.startswith("local-"):
        raise InputError(f"{before.run} runs here, without a queue; wait for its end.")
    return [f"--dependency=after{when}:{before.job_id}", "--kill-on-invalid-dep=yes"]


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
