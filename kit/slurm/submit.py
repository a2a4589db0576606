"""Submits a run folder's job script: to Slurm, or where no Slurm answers to the local runner."""

import os
import time

from kit import files
from kit.config.cluster import Cluster
from kit.errors import InputError, KitError, SubmitError
from kit.lint import shell
from kit.slurm import client as queue
from kit.slurm import local, watcher
from kit.slurm import outcome as evidence
from kit.slurm import script as job_script
from kit.slurm.run import Run
from kit.slurm.variables import Variable
from kit.slurm.watcher import state

# What sbatch prints, and what to change. Source: slurm_errno.c of Slurm 22.05.
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


def available() -> bool:
    """Whether this machine belongs to a Slurm cluster, also one whose controller does not answer at the moment."""
    return "Slurmctld" in queue.command("scontrol", "ping").stdout  # UP or DOWN, at once


def reach(cluster: Cluster, nodes: int = 1) -> None:
    """Raises InputError where no Slurm answers and the local runner cannot take the job."""
    if available():
        return
    if cluster.slurm.partition:
        raise InputError(
            f"No Slurm answers here, and {cluster.name} names the partition {cluster.slurm.partition}, so its jobs do "
            "not run on this machine. Set SLURM_CONF, or take a profile without a partition."
        )
    if nodes > 1:
        raise InputError(f"No Slurm answers here, and the local runner has one node; the job needs {nodes}.")


def submit(run: Run, after: Run | None = None, when: str = "ok") -> None:
    """Submit the run's job script. A run that was submitted before continues from its last checkpoint.

    `after` and `when` as `launch`. Raises SubmitError with Slurm's own words, InputError while the last job of the run
    has not ended.
    """
    options = dependency_options(after, when)
    if not run.trains:
        options += options_for_own_script(run)
    if run.job_id:
        _prepare_next_start(run)
    if available():
        _submit_to_slurm(run, options)
    else:
        local.start(run)


def _prepare_next_start(run: Run) -> None:
    """Archive what the last job left, and render the script again where it would not run any more."""
    now = state(run)
    if not now.ended:
        raise InputError(f"{run.path.name} is {now.state} as job {run.job_id}; cancel it, or wait for its end.")
    evidence.archive(run)
    if not run.trains:
        return
    script = run.path / "job.sbatch"
    moved = run.info.get("script", str(script)) != str(script)  # the script contains the path of its folder
    outdated = run.info.get("script_version", 0) < job_script.SCRIPT_VERSION
    if moved or outdated:
        files.write(script, job_script.render_script(run))


def _submit_to_slurm(run: Run, options: list[str]) -> None:
    script, environment = run.path / "job.sbatch", dict(os.environ)
    try:
        if not run.trains:  # the kit's job script leaves its records itself
            witness = run.path / "state" / "witness.sh"
            files.write(witness, evidence.WITNESS)
            environment |= {"BASH_ENV": str(witness), Variable.RUN: str(run.path)}
        run.note(job_id=None, script=str(script), submitted=time.time())
        watcher.enlist(run)  # before sbatch: if this process ends now, the watcher finds the job by its script
    except OSError as error:
        raise InputError(f"Nothing was submitted: {error.strerror} ({error.filename or run.path}).") from None
    done = queue.command("sbatch", "--parsable", *options, str(script), env=environment)
    if done.returncode != 0:
        if "timed out" not in done.stderr:
            run.note(submitted=None)
        raise SubmitError(f"sbatch did not take {script}: {done.stderr.strip()}. {advice(done.stderr)}".strip())
    job = done.stdout.strip().split(";")[0]
    try:
        watcher.note_job(run, job)
    except OSError as error:
        raise KitError(
            f"Job {job} was submitted, but {run.path} cannot be written: {error.strerror}. Free space there; then "
            f"`kit state {run.path.name}` finds the job by its script."
        ) from None


def options_for_own_script(run: Run) -> list[str]:
    """Options for a user's own script: the array, and the log's path unless the script sets one."""
    text = (run.path / "job.sbatch").read_text(errors="surrogateescape")
    words = [word for _, line in shell.directives(text) for word in line]
    named = {setting.name for setting in shell.options(words, 0)[0]}
    array = run.info.get("array")
    options = [f"--array={array}"] if array else []
    if "output" in named:
        return options
    name = "%A_%a" if array or "array" in named else "%j"
    return [f"--output={run.path}/logs/slurm-{name}.out", *options]


def advice(words: str) -> str:
    """What to change where sbatch prints this; empty for an unknown message."""
    text = next((text for key, text in REFUSALS.items() if key in words.lower()), "")
    partitions = queue.command("sinfo", "-h", "-o", "%P").stdout.split() if "{" in text else []
    return text.format(partitions=", ".join(partitions))


def dependency_options(after: Run | None, when: str) -> list[str]:
    """sbatch options for a run that starts after another one has ended: well (`when` = "ok") or in any way ("any").

    Raises InputError where it would never start.
    """
    if when not in ("ok", "any"):
        raise InputError(f'when is {when!r}; it is "ok" or "any".')
    if after is None:
        return []
    before = state(after)
    # No option once it has ended well: Slurm takes a job that it has forgotten for one that ended well.
    if before.state == "COMPLETED" or (before.ended and when == "any"):
        return []
    if before.ended or before.job_id is None:
        raise InputError(f'{before.run} is {before.state}, so a run after it would never start; set when="any".')
    if before.job_id.startswith("local-"):
        raise InputError(f"{before.run} runs on this machine, without a queue; wait for its end.")
    return [f"--dependency=after{when}:{before.job_id}", "--kill-on-invalid-dep=yes"]
