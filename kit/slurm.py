"""Slurm: submit, ask, wait, cancel. Where no sbatch answers, a local runner executes the very same script."""

import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kit import evidence, files, local, model, sbatch
from kit.cluster import Cluster
from kit.data import prepare
from kit.errors import InputError, KitError, SubmitError
from kit.recipe import Recipe
from kit.run import Run
from kit.timing import predict

PROVISIONAL = ("PREEMPTED", "NODE_FAIL")  # with --requeue the same job may start again
FIELDS = re.compile(r"(JobState|ExitCode|Reason|Restarts|StartTime|NodeList)=(\S*)")


def available() -> bool:
    """Whether a Slurm controller answers here."""
    try:
        return _command("sinfo", "-h", "-o", "%P", timeout=15).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def _command(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)


def launch(recipe: Recipe, cluster: Cluster, prepared: Path = Path("prepared"), anyway: bool = False) -> Run:
    """Prepare the data if need be, freeze everything into a new run folder, submit, and return at once.

    Raises InputError for what cannot run, KitError for what the forecast says does not fit (unless `anyway`), and
    SubmitError with Slurm's words where it refuses; the run folder then stays.
    """
    check(recipe, cluster)
    if not anyway:
        check_fit(recipe, cluster)
    dataset = prepare(recipe, prepared)
    run = Run.create(recipe, cluster, dataset.path, dataset.manifest["digest"])
    files.write(run.path / "accelerate.yaml", sbatch.render_accelerate(recipe, cluster))
    files.write(run.path / "job.sbatch", sbatch.render_script(run))
    submit(run)
    return run


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for a recipe that this cluster, or kit.train, cannot run."""
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
    if cluster.slurm.partition and not available():
        raise InputError(
            f"No Slurm answers here, and {cluster.name} names the partition {cluster.slurm.partition}: its jobs "
            "are not run on this machine instead. Set SLURM_CONF, or take a profile without a partition."
        )
    if not available() and parallel.nodes > 1:
        raise InputError(
            f"No Slurm answers here, and the local runner has one node; the recipe wants {parallel.nodes}."
        )


def check_fit(recipe: Recipe, cluster: Cluster) -> None:
    """Raises KitError where the forecast says that the job runs out of memory, with the cheapest change that fits."""
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


def submit(run: Run) -> None:
    """sbatch, or the local runner; a run that was submitted before goes on where its last checkpoint is.

    Raises SubmitError with Slurm's own words, InputError while the run's last job has not ended.
    """
    if run.job_id:
        if not (now := state(run)).ended:
            raise InputError(f"{run.path.name} is {now.state} as job {run.job_id}; cancel it, or wait for its end.")
        evidence.archive(run)
    if not available():
        return local.start(run)
    done = _command("sbatch", "--parsable", str(run.path / "job.sbatch"))
    if done.returncode != 0:
        raise SubmitError(f"sbatch refused {run.path / 'job.sbatch'}: {done.stderr.strip()}")
    run.note(job_id=done.stdout.strip().split(";")[0])
    evidence.witness(run, "submit")
    return None


def state(run: Run) -> evidence.State:
    """What is known of the run now: asks Slurm or the local runner, then judges every record."""
    ask([run])
    log = run.log.read_text(errors="replace") if run.job_id and run.log.exists() else ""
    return evidence.resolve(run.path.name, run.job_id, evidence.records(run), log, time.time())


def ask(runs: Iterable[Run]) -> None:
    """Write into each run's ledger what Slurm, or the local runner, says of it now; only news are written."""
    for run in runs:
        job = run.job_id
        known = [r for r in evidence.records(run) if r["source"] == "slurm"]
        last = known[-1] if known else {}
        ended = last.get("state") in evidence.ENDED
        if job is None or (ended and last["state"] not in PROVISIONAL):
            continue
        facts = local.status(run) if job.startswith("local-") else _slurm_status(job)
        if not (ended and facts.get("gone")) and any(last.get(k) != v for k, v in facts.items()):
            evidence.witness(run, "slurm", **facts)


def _slurm_status(job: str) -> dict[str, Any]:
    """State, exit code and reason from Slurm's memory, which lasts MinJobAge after the end; {"gone": True} after."""
    try:
        done = _command("scontrol", "show", "job", "-o", job)
    except FileNotFoundError:
        return {"gone": True, "note": "no scontrol here"}
    if done.returncode != 0:
        words = done.stderr.strip()
        return {"gone": True} if "Invalid job id" in words else {"note": f"scontrol: {words}"}
    found = dict(FIELDS.findall(done.stdout))
    code, _, signal = found.get("ExitCode", "0:0").partition(":")
    facts: dict[str, Any] = {"state": found["JobState"], "reason": found.get("Reason", "").replace("None", "")}
    if found["JobState"] in evidence.ENDED:
        facts |= {"exit_code": int(code), "signal": "" if signal == "0" else signal}
    return facts


def wait(run: Run, timeout: float | None = None, every: float = 1.0) -> evidence.State:
    """Block until the run ends. Ctrl-C ends a local run, which then is CANCELLED, and leaves a Slurm job alone."""
    deadline = time.monotonic() + timeout if timeout else None
    try:
        while not (now := state(run)).ended:
            if deadline and time.monotonic() > deadline:
                raise KitError(f"{run.path.name} is still {now.state} after {timeout:.0f} s; it goes on.")
            time.sleep(every)
            every = min(every * 1.2, 15.0)  # well inside MinJobAge (300 s by default), kind to the controller
    except KeyboardInterrupt:
        if str(run.job_id).startswith("local-"):
            cancel(run)
        raise
    return now


def cancel(run: Run) -> None:
    """End the run: scancel, or the local runner's processes. Raises KitError where Slurm refuses."""
    evidence.witness(run, "cancel")
    job = run.job_id or ""
    if job.startswith("local-"):
        return local.stop(run)
    done = _command("scancel", job)
    if done.returncode != 0:
        raise KitError(f"scancel {job}: {done.stderr.strip()}")
    return None


def why_pending(run: Run) -> str:
    """Slurm's reason and its estimate of the start, for a job that waits."""
    done = _command("squeue", "-h", "-j", str(run.job_id), "-o", "%T|%r|%S")
    if done.returncode != 0 or not done.stdout.strip():
        return "the job is not in the queue"
    status, reason, start = done.stdout.strip().split("|")
    return f"{status.lower()}, reason {reason}, estimated start {start}"
