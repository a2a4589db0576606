"""The local runner: a job script executed here with Slurm's variables set and stand-ins for srun and scontrol."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from kit import files
from kit.errors import InputError
from kit.slurm import outcome as evidence
from kit.slurm.run import Run

# srun runs its command once, as the only task of the only node; options of ours all have the form --name=value.
STAND_INS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    "scontrol": """case "$1 $2" in
"show hostnames") echo "$3" ;;
"show node") echo "NodeName=$3 NodeAddr=127.0.0.1" ;;
"show job") echo "JobId=$4 JobState=RUNNING PreemptTime=None" ;;
"requeue "*) : > "$KIT_RUN/state/requeue" ;;
*) echo "scontrol: no Slurm here: $*" >&2; exit 1 ;;
esac
""",
}
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL


def start(run: Run) -> None:
    """Start the run's script as a process of its own session, which outlives this one."""
    run.note(job_id=f"local-{int(time.time() * 10) % 10_000_000}")
    _pid_file(run).unlink(missing_ok=True)
    with (run.path / "logs" / "runner.log").open("a") as log:
        command = [sys.executable, "-m", "kit.slurm.local", str(run.path)]
        subprocess.run(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
    deadline = time.monotonic() + 30
    while not _pid_file(run).exists():
        if time.monotonic() > deadline:
            raise InputError(f"The local runner did not start; see {run.path / 'logs' / 'runner.log'}.")
        time.sleep(0.05)


def _pid_file(run: Run) -> Path:
    return run.path / "state" / "local.json"


def execute(run: Run) -> int:
    """Run the script to its end; the last record says how it ended."""
    job = str(run.job_id).removeprefix("local-")
    stand_ins = run.path / "state" / "stand-ins"
    _write_stand_ins(stand_ins)
    env = os.environ | {
        "PATH": f"{stand_ins}{os.pathsep}{os.environ['PATH']}",
        "KIT_JOB_ID": str(run.job_id), "SLURM_JOB_ID": job, "SLURM_JOB_NAME": run.path.name,
        "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0", "SLURM_CPUS_PER_TASK": str(os.cpu_count()), "SLURMD_NODENAME": "localhost",
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
    }  # fmt: skip
    again = run.path / "state" / "requeue"
    again.touch()
    with run.log.open("a") as log:
        for restart in itertools.takewhile(lambda _: again.exists(), itertools.count()):
            again.unlink()
            env["SLURM_RESTART_COUNT"] = str(restart)
            script = subprocess.Popen(["bash", str(run.path / "job.sbatch")], env=env, stdout=log, stderr=log)
            signal.signal(signal.SIGTERM, lambda *_, pid=script.pid: _end_tree(pid))
            files.write_json(_pid_file(run), {"pid": os.getpid(), "created": psutil.Process().create_time()})
            code = script.wait()
    _end_tree(os.getpid(), itself=False)  # whatever the script left behind
    cancelled = any(r["source"] == "cancel" for r in evidence.records(run))
    ended = "CANCELLED" if cancelled else "COMPLETED" if code == 0 else "FAILED"
    evidence.witness(
        run, "slurm", state=ended, exit_code=max(code, 0), signal=str(-code) if code < 0 else "", runner="local"
    )
    shutil.rmtree(stand_ins)
    return code


def _write_stand_ins(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}")
        (folder / name).chmod(0o755)


def _end_tree(pid: int, itself: bool = True) -> None:
    """SIGTERM to a process and all below it, SIGKILL after PATIENCE to these and what they started meanwhile."""
    family = _family(pid, itself)
    for process in family:
        _signal(process, signal.SIGTERM)
    left = psutil.wait_procs(family, timeout=PATIENCE)[1]
    for process in {late for slow in left for late in _family(slow.pid)}:
        _signal(process, signal.SIGKILL)


def _family(pid: int, itself: bool = True) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [*([root] if itself else []), *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def status(run: Run) -> dict[str, Any]:
    """As Slurm would put it: RUNNING, or gone; the runner itself records the end."""
    return {"state": "RUNNING"} if _runner(run) else {"gone": True}


def _runner(run: Run) -> psutil.Process | None:
    """The live runner; a recycled process id has another creation time."""
    known = files.read_json(_pid_file(run))
    try:
        process = psutil.Process(known["pid"])
        same = abs(process.create_time() - known["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def stop(run: Run) -> None:
    """End the ranks and wait until the runner has recorded it."""
    if process := _runner(run):
        _signal(process, signal.SIGTERM)
        psutil.wait_procs([process], timeout=2 * PATIENCE)


if __name__ == "__main__":
    if os.fork():  # the parent returns at once; the runner belongs to nobody and leaves no zombie behind
        os._exit(0)
    sys.exit(execute(Run(Path(sys.argv[1]))))
