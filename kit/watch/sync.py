"""Uploads a run that was logged offline to the W&B server, by `wandb sync` in a child process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from kit.errors import InputError, KitError
from kit.slurm.run import Run
from kit.watch.wandb_log import find_logs


def sync(place: str | Path | Run, echo: Callable[[str], None] = print, timeout: float = 600.0) -> None:
    """Upload all segments of the run; `echo` gets each line that `wandb sync` prints.

    Raises InputError where there is no log, KitError with the last line where it failed or took over `timeout` seconds.
    """
    logs = find_logs(place.path if isinstance(place, Run) else Path(place))
    if not logs:
        raise InputError(f"{place} has no W&B log to sync.")
    folders = [str(log.parent) for log in logs if log.name == logs[-1].name]
    command, line = [sys.executable, "-m", "wandb", "sync", *folders], ""
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=_environment(), text=True, stdout=pipe, stderr=merged) as process:
        alarm = threading.Timer(timeout, _kill, (process.pid,))
        alarm.start()
        for line in process.stdout or ():
            echo(line.rstrip())
        alarm.cancel()
    if process.returncode == -signal.SIGKILL:
        raise KitError(f"wandb sync did not end within {timeout:.0f} s and was stopped: {line.strip()}")
    if process.returncode:
        raise KitError(f"wandb sync ended with exit code {process.returncode}: {line.strip()}")


def _environment() -> dict[str, str]:
    """Of a child that finds kit, but not this process's wandb service, nor its setting to stay offline."""
    kept = {name: value for name, value in os.environ.items() if name not in ("WANDB_SERVICE", "WANDB_MODE")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), kept.get("PYTHONPATH", "")])}


def _kill(pid: int) -> None:
    """Kill the process and its children: wandb's service keeps the output open."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            one.kill()
