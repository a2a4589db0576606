"""The survey's job: one small task per node inspects its node and writes what it found into a shared folder."""

import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kit import files
from kit.check.facts import Finding
from kit.check.machine import inspect_machine
from kit.config.cluster import Cluster
from kit.errors import KitError
from kit.slurm import environment
from kit.slurm.launch import launch_script
from kit.slurm.run import Run

PATIENCE = 600.0  # seconds that the job may wait and run before it is cancelled
PROFILE = "cluster.toml"


def inspect_nodes(
    cluster: Cluster, nodes: int, gres: str, say: Callable[[str], None], patience: float = PATIENCE
) -> dict[str, list[Finding]]:
    """What each node finds, by node name, and under "Slurm" how the job went. Ctrl-C cancels the job."""
    folder = Path(cluster.paths.runs).absolute() / f".survey-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True)
        files.write(folder / PROFILE, cluster.toml())
        run = launch_script(render_script(cluster, folder, nodes, gres), cluster, "survey")
        note = f"job {run.job_id} inspects {nodes} nodes; it takes a minute once it has started"
        outcome, answer_timeout = _wait(run, patience, lambda: say(note))
        answers = _collect(folder, nodes, answer_timeout)
    except (KitError, OSError) as error:
        return {"Slurm": [Finding("job", "not submitted", "sbatch", str(error))]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    problem = ""
    if len(answers) < nodes:
        problem = f"{nodes - len(answers)} of {nodes} nodes gave no answer: {run.tail(lines=3)}"
    job = Finding("job", outcome, f"job {run.job_id}, {run.path.name}", problem)
    return {"Slurm": [job]} | answers


def _wait(run: Run, patience: float, announce: Callable[[], None]) -> tuple[str, float]:
    """How the job ended, and for how many seconds answers may still arrive over the network file system."""
    try:
        announce()
        end = run.wait(patience)
    except BaseException as error:  # Ctrl-C, or too long in the queue
        pending = run.state.pending
        run.cancel()
        if not isinstance(error, KitError):
            raise
        return f"cancelled after {patience:.0f} s: {pending}", 0.0
    return f"{end.state} {end.cause}".strip(), 60.0 if end.state == "COMPLETED" else 10.0


def _collect(folder: Path, nodes: int, timeout: float) -> dict[str, list[Finding]]:
    last = time.monotonic() + timeout
    while len(list(folder.glob("*.json"))) < nodes and time.monotonic() < last:
        time.sleep(1)
    answers = {path.stem: files.read_json(path) for path in sorted(folder.glob("*.json"))}
    return {name: [Finding(**finding) for finding in found] for name, found in answers.items()}


def render_script(cluster: Cluster, folder: Path, nodes: int, gres: str) -> str:
    """A job with one small task per node. It asks for all GPUs, since others may be hidden from it."""
    asked = environment.options(
        cluster,
        job_name="survey",
        nodes=nodes,
        ntasks_per_node=1,
        cpus_per_task=1,
        mem="1G",
        time="00:05:00",
        gres=gres,
    )
    command = f"{environment.python(cluster)} -m kit.check.node_job {shlex.quote(str(folder))}"
    return environment.render(cluster, asked, f"srun --ntasks-per-node=1 --kill-on-bad-exit=0 {command}")


def main() -> None:
    """One node's task: `python -m kit.check.node_job FOLDER`, in which the login node left the profile."""
    folder, name = Path(sys.argv[1]), os.environ["SLURMD_NODENAME"]
    if not (folder / PROFILE).exists():
        sys.exit(f"{name} does not see {folder}, which the login node made: set paths.runs to a folder that all share.")
    found = inspect_machine(Cluster.load(folder / PROFILE))
    found.append(Finding("shared folder", f"{folder.parent}: seen by both", f"read {folder.name}, wrote {name}.json"))
    files.write_json(folder / f"{name}.json", [asdict(finding) for finding in found])


if __name__ == "__main__":
    main()
