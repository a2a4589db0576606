"""Submit a run: sbatch, or the local runner where there is no Slurm, and what to change where sbatch refuses."""

import os
import secrets
import time
from pathlib import Path

from kit import files
from kit.config.cluster import Cluster
from kit.errors import InputError, KitError, SubmitError
from kit.lint.options import directives, parse_options
from kit.slurm import client, evidence, ledger, local, watcher
from kit.slurm import script as job_script
from kit.slurm.claim import claim
from kit.slurm.folder import RunFolder
from kit.slurm.states import JobState
from kit.slurm.variables import Variable

# What sbatch says, and what to change; the first that its message contains counts. Source: slurm_errno.c, 22.05.
REFUSALS = {
    "invalid partition": "Set slurm.partition to one of: {partitions}.",
    "invalid qos": "Remove --qos from slurm.options, or name one that `sacctmgr show qos` lists.",
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


def reach(cluster: Cluster, nodes: int = 1) -> None:
    """Raises InputError where no Slurm answers and the local runner cannot take the job."""
    if client.available():
        return
    if cluster.slurm.partition:
        raise InputError(
            f"No Slurm answers here, and {cluster.name} names the partition {cluster.slurm.partition}, so its jobs do "
            "not run on this machine. Set SLURM_CONF, or take a profile without a partition."
        )
    if nodes > 1:
        raise InputError(f"No Slurm answers here, and the local runner has one node; the job needs {nodes}.")


def submit(run: RunFolder, after: RunFolder | None = None, when: str = "ok") -> None:
    """Submit the run; one that was submitted before goes on from its last checkpoint.

    after, when: start once that run has ended well ("ok") or in any way ("any").
    Raises SubmitError with Slurm's words where it refuses, InputError while the run's last job has not ended, while
    another process submits it, or where the job could never start.
    """
    run.check_own()
    with claim(run):
        evidence.settle_submission(run)
        _submit(run, after, when)


def _submit(run: RunFolder, after: RunFolder | None, when: str) -> None:
    if not (run.path / "job.sbatch").is_file():
        raise InputError(
            f"{run.name} has no job.sbatch, since its launch was interrupted: launch the recipe again, and delete "
            f"{run.path}."
        )
    dependency = dependency_options(after, when)
    own = [] if run.trains else options_for_own_script(run)
    if run.job_id:
        _prepare_resubmission(run)
    if not client.available():
        if after and dependency:
            raise InputError(
                f"{after.name} is job {after.job_id} of Slurm, which does not answer here, so {run.name} cannot wait "
                "for it. Submit it where `scontrol ping` says UP, or when that run has ended."
            )
        run.note(script=str(run.path / "job.sbatch"))  # so that a copy of the folder gets a script for its own path
        return local.start(run)
    return _sbatch(run, [*dependency, *own])


def _prepare_resubmission(run: RunFolder) -> None:
    """Archive what the last job left, and render the script again where it would not run any more.

    Raises InputError where the last job has not ended, by the records or by Slurm's own word.
    """
    state = evidence.state_of(run)
    live = [row.job_state for row in evidence.rows_in_slurm(run) if not row.job_state.final]
    if live or not state.ended:
        states = live or [state.state]
        raise InputError(f"{run.name} is {states[0]} as job {run.job_id}; cancel it, or wait for its end.")
    ledger.archive(run)
    if not run.trains:
        return
    path = run.path / "job.sbatch"
    moved = run.info.get("script", str(path)) != str(path)  # the script contains the folder's path
    outdated = run.info.get("script_version", 0) < job_script.SCRIPT_VERSION
    if moved or outdated:
        files.write(path, job_script.render_script(run))


def _sbatch(run: RunFolder, asked: list[str]) -> None:
    path = run.path / "job.sbatch"
    try:
        submission = secrets.token_hex(8)
        environment = _environment(run) | {Variable.SUBMISSION: submission}
        run.note(job_id=None, script=str(path), submitted=time.time(), submission=submission)
        watcher.enlist(run)  # before sbatch: where this kernel dies now, the watcher finds the job by its script
    except OSError as error:
        raise InputError(f"Nothing was submitted: {error.strerror} ({error.filename or run.path}).") from None
    done = client.command("sbatch", "--parsable", *asked, str(path), env=environment)
    if done.returncode != 0:
        if is_refusal(done.returncode, done.stderr):  # else Slurm may have the job
            run.note(submitted=None)
        raise SubmitError(f"sbatch did not take {path}: {done.stderr.strip()}. {advice(done.stderr)}".strip())
    job = done.stdout.strip().split(";")[0]
    try:
        evidence.note_job(run, job)
    except OSError as error:
        raise KitError(
            f"Job {job} was submitted, but {run.path} cannot be written: {error.strerror}. Free space there; then "
            f"`kit state {run.name}` finds the job by its script."
        ) from None


def _environment(run: RunFolder) -> dict[str, str]:
    """The environment of sbatch. A user's own script does not leave records itself: witness.sh does it."""
    if run.trains:
        return dict(os.environ)
    script = run.state_folder.witness_script
    files.write(script, Path(__file__).with_name("witness.sh").read_text())
    return os.environ | {"BASH_ENV": str(script), Variable.RUN: str(run.path)}


def options_for_own_script(run: RunFolder) -> list[str]:
    """sbatch's options for a user's own script: the array, and where its log goes unless the script says it."""
    array, text = run.info.get("array"), (run.path / "job.sbatch").read_text(errors="surrogateescape")
    given = {setting.name for line, words in directives(text) for setting in parse_options(words, line).options}
    name = "%A_%a" if array or "array" in given else "%j"
    log = [] if "output" in given else [f"--output={run.path}/logs/slurm-{name}.out"]
    return [*log, f"--array={array}"] if array else log


def dependency_options(after: RunFolder | None, when: str) -> list[str]:
    """sbatch's options for a run that follows another one. Raises InputError where it would never start."""
    if when not in ("ok", "any"):
        raise InputError(f'when is {when!r}; it is "ok" or "any".')
    if after is None:
        return []
    before = evidence.state_of(after)
    if before.state is JobState.COMPLETED or (before.ended and when == "any"):
        return []  # Slurm need not be asked to wait, and takes a job that it has forgotten for one that ended well
    if before.ended or before.job_id is None:
        raise InputError(f'{before.run} is {before.state}, so a run after it would never start; set when="any".')
    if after.is_local:
        raise InputError(f"{before.run} runs on this machine, without a queue; wait for its end.")
    return [f"--dependency=after{when}:{before.job_id}", "--kill-on-invalid-dep=yes"]


def is_refusal(exit_code: int, words: str) -> bool:
    """Whether sbatch surely did not submit: it did not start, reached no controller, or Slurm's answer is known."""
    if exit_code in (client.NOT_INSTALLED, client.NOT_CONFIGURED) or "connect failure" in words:
        return True
    return any(key in words.lower() for key in REFUSALS if key not in ("timed out", "controller"))


def advice(words: str) -> str:
    """What to change where sbatch says this; empty for a message that is not in the table."""
    text = next((text for key, text in REFUSALS.items() if key in words.lower()), "")
    return text.format(partitions=", ".join(client.partitions())) if "{" in text else text
