"""`python -m kit.train RUN`: one rank of a training run, started on every rank by the trainer's launcher."""

import contextlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch
import wandb
from torch.distributed.checkpoint.api import CheckpointException

from kit.errors import KitError
from kit.show import count
from kit.slurm.folder import RunFolder
from kit.slurm.states import Phase
from kit.train import patches
from kit.train.callbacks import Progress
from kit.train.output import redirect_output
from kit.train.trainer import train


def main(folder: str) -> int:
    """The exit code of this rank: 0, or that of the error, which goes to the job's log and to the rank's."""
    run, rank = RunFolder(Path(folder)), int(os.environ.get("RANK", 0))
    console = redirect_output(run, rank)
    progress = Progress(run, rank, console)
    progress.enter(Phase.STARTING)
    if not torch.cuda.is_available():
        patches.shard_cpu_processes()
        patches.partition_cpu_processes()
    patches.ignore_renamed_arguments()
    try:
        train(run, progress)
        with contextlib.suppress(OSError):  # W&B's service has ended
            wandb.teardown()  # finish() may return before the log is on disk
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except (Exception, CheckpointException) as error:  # CheckpointException derives from BaseException
        return report(error, progress)
    finally:
        console.flush()
    return 0


def report(error: BaseException, progress: Progress) -> int:
    """Write the traceback to the rank's log and one line to the job's log. Returns the exit code.

    Where the launcher has sent a SIGTERM, another rank died first and this error only follows from that: this rank then
    ends by the signal, so that the cause in the log is the other rank's.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    traceback.print_exc()
    if progress.terminated:
        os.kill(os.getpid(), signal.SIGTERM)
    where = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    log = f"logs/rank-{progress.rank:03}.log"
    print(f"[rank {progress.rank} on {where}] {_describe(error)} ({log})", file=progress.console)
    return error.exit_code if isinstance(error, KitError) else 1


def _describe(error: BaseException) -> str:
    """The type and the first line of an error; of a save or load that failed on ranks, of the first of these."""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        cause, _ = error.failures[rank]
        return f"{_describe(cause)}, on {count(len(error.failures), 'rank')} in a save or load of a checkpoint"
    first_line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first_line}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
