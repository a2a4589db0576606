"""Start the ranks of another trainer on a node: `python -m kit.train.other RUN PYTHON MODULE WORDS...`.

The trainer runs in its own interpreter, in the run folder, where wandb writes the log that the board reads. This
process keeps the rendezvous port reserved, passes signals on, and records on the first node that training ended well.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from kit import files
from kit.slurm.folder import RunFolder, StateFolder
from kit.slurm.variables import Variable
from kit.watch.runs import progress_of

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def start(run: Path, command: list[str]) -> int:
    """Run the command in the run folder; returns its exit code, or 128 and its signal's number."""
    process = subprocess.Popen(command, cwd=run, env=environment())
    for number in SIGNALS:
        signal.signal(number, lambda received, _: process.send_signal(received))
    code = process.wait()
    return 128 - code if code < 0 else code


def environment() -> dict[str, str]:
    """This process's environment without what is meant for the kit's own ranks."""
    return {name: value for name, value in os.environ.items() if name not in (*Variable, "PET_SIGNALS_TO_HANDLE")}


def record_result(run: RunFolder) -> None:
    """Write state/result.json, by which the job script sees that the training came to its end."""
    progress = progress_of(run)
    files.write_json(
        StateFolder(run.path / "state").result, {"steps": run.recipe.schedule.max_steps, "loss": progress.loss}
    )


def main(run: str, python: str, *words: str) -> int:
    """The exit code of the trainer's launcher on this node."""
    code = start(Path(run), [python, "-m", *words])
    if code == 0 and os.environ.get("SLURM_NODEID", "0") == "0":
        record_result(RunFolder(Path(run)))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
