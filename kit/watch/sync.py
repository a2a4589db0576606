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
from kit.watch.wandb_log import find_logs


def sync(place: Path, echo: Callable[[str], None], timeout: float = 600.0) -> None:
    """Upload all segments of the run; `echo` gets each line that `wandb sync` prints.

    Raises InputError where there is no log, KitError with the last line where it failed or took over `timeout` seconds.
    """
    logs = find_logs(place)
    if not logs:
        raise InputError(f"{place} has no W&B log to sync.")
    folders = [str(log.parent) for log in logs if log.name == logs[-1].name]
    command, line = [sys.executable, "-m", "wandb", "sync", *folders], ""
    # Neither this process's wandb service, nor its setting to stay offline.
    environment = {name: os.environ[name] for name in os.environ if name not in ("WANDB_SERVICE", "WANDB_MODE")}
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=merged) as process:
        alarm = threading.Timer(timeout, _kill, (process,))
        alarm.start()
        for line in process.stdout or ():
            echo(line.rstrip())
        alarm.cancel()
    if process.returncode == -signal.SIGKILL:
        raise KitError(f"wandb sync did not end within {timeout:.0f} s and was stopped: {line.strip()}")
    if process.returncode:
        raise KitError(f"wandb sync ended with exit code {process.returncode}: {line.strip()}")


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kill the process and its children: wandb's service keeps the output open."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
