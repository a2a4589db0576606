"""The local runner: executes a job script on this machine, with Slurm's variables and stand-ins for its programs."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from kit import files
from kit.errors import InputError
from kit.slurm import ledger
from kit.slurm.folder import LOCAL_PREFIX, RunFolder
from kit.slurm.states import CancelRecord, JobState, SlurmRecord
from kit.slurm.variables import Variable

# srun runs its command once, as the only task of the only node; the kit's own options all have the form --name=value.
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
KILL_WAIT = 10.0  # seconds between SIGTERM and SIGKILL
START_WAIT = 30.0  # seconds in which the runner has to start


def start(run: RunFolder) -> None:
    """Start the run's script in a process that outlives this one. Raises InputError where it does not start."""
    run.state_folder.runner.unlink(missing_ok=True)
    now = time.time()
    run.note(job_id=f"{LOCAL_PREFIX}{int(now * 10) % 10_000_000}", submitted=now)
    log_path = run.path / "logs" / "runner.log"
    with log_path.open("a") as log:
        command = [sys.executable, "-m", "kit.slurm.local", str(run.path)]
        subprocess.run(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
    deadline = time.monotonic() + START_WAIT
    while not run.state_folder.runner.exists():
        if time.monotonic() > deadline:
            raise InputError(f"The local runner did not start; see {log_path}.")
        time.sleep(0.05)


def execute(run: RunFolder) -> int:
    """Run the script, again as long as it requeues itself, and record how it ended. Returns its exit code."""
    folder = run.state_folder
    stand_ins = folder.path / "stand-ins"
    _write_stand_ins(stand_ins)
    environment = _environment(run, stand_ins)
    folder.local_requeue.touch()
    with run.log.open("a") as log:
        for restart in itertools.count():
            if not folder.local_requeue.exists():
                break
            folder.local_requeue.unlink()
            environment["SLURM_RESTART_COUNT"] = str(restart)
            script = subprocess.Popen(["bash", str(run.path / "job.sbatch")], env=environment, stdout=log, stderr=log)
            signal.signal(signal.SIGTERM, lambda *_, pid=script.pid: _end_tree(pid))
            files.write_json(folder.runner, {"pid": os.getpid(), "created": psutil.Process().create_time()})
            code = script.wait()
    _end_tree(os.getpid(), itself=False)  # what the script left running
    ledger.append(run, _end_record(run, code))
    shutil.rmtree(stand_ins)
    return code


def _environment(run: RunFolder, stand_ins: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{stand_ins}{os.pathsep}{os.environ['PATH']}",
        Variable.RUN: str(run.path),
        Variable.JOB_ID: str(run.job_id),
        Variable.SUBMISSION: "",  # of a job that this process may run in
        "SLURM_JOB_ID": str(run.job_id).removeprefix(LOCAL_PREFIX),
        "SLURM_JOB_NAME": run.name,
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_CPUS_PER_TASK": str(os.cpu_count()),
        "SLURMD_NODENAME": "localhost",
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
    }


def _end_record(run: RunFolder, code: int) -> SlurmRecord:
    """What Slurm would say of the end. code: of the script, negative for a signal."""
    cancelled = any(isinstance(record, CancelRecord) for record in ledger.read_records(run))
    ended = JobState.COMPLETED if code == 0 else JobState.FAILED
    return SlurmRecord(
        time=time.time(),
        job_id=run.job_id,
        state=JobState.CANCELLED if cancelled else ended,
        exit_code=max(code, 0),
        signal=str(-code) if code < 0 else "",
        runner="local",
    )


def _write_stand_ins(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}")
        (folder / name).chmod(0o755)


def _end_tree(pid: int, itself: bool = True) -> None:
    """SIGTERM to a process and all below it, SIGKILL after KILL_WAIT to these and what they started meanwhile."""
    family = _family(pid, itself)
    for process in family:
        _signal(process, signal.SIGTERM)
    left = psutil.wait_procs(family, timeout=KILL_WAIT)[1]
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


def is_running(run: RunFolder) -> bool:
    """Whether the run's local runner lives, or still has time to start; it records the end itself."""
    return _runner(run) is not None if run.state_folder.runner.exists() else _may_start(run)


def _may_start(run: RunFolder) -> bool:
    return abs(time.time() - (run.info.get("submitted") or 0)) < START_WAIT


def _runner(run: RunFolder) -> psutil.Process | None:
    """The live runner. A process that was given the same id later has another creation time."""
    known = files.read_json(run.state_folder.runner)
    try:
        process = psutil.Process(known["pid"])
        same = abs(process.create_time() - known["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{run.state_folder.runner} does not name the process of a local runner.") from None
    return process if same else None


def stop(run: RunFolder) -> None:
    """End the ranks and wait until the runner has recorded it."""
    while not run.state_folder.runner.exists():
        if not _may_start(run):
            return
        time.sleep(0.05)
    process = _runner(run)
    if process:
        _signal(process, signal.SIGTERM)
        psutil.wait_procs([process], timeout=2 * KILL_WAIT)


if __name__ == "__main__":
    if os.fork():  # the parent returns at once, so the runner is not its child and leaves no zombie
        os._exit(0)
    sys.exit(execute(RunFolder(Path(sys.argv[1]))))
