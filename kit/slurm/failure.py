"""In a job that failed: print the rank that died first and its last lines, and exit with its exit code.

Usage, by the job script: python -m kit.slurm.failure RUN EXIT_CODE
"""

import sys
from pathlib import Path

from kit.errors import InputError
from kit.slurm import logs
from kit.slurm.folder import RunFolder

SEARCHED_LINES = 100_000  # of the end of the job's log, which is at most a MiB
SHOWN_LINES = 12


def last_lines_of_rank(run: RunFolder, rank: int) -> str:
    """The last lines of a rank's log or, where it has none, those of the job's log that torch marks as the rank's."""
    path, mark = run.path / "logs" / f"rank-{rank:03}.log", f"[rank{rank}]: "
    if path.exists():
        return logs.last_lines(path, SHOWN_LINES)
    marked = [line for line in logs.last_lines(run.log, SEARCHED_LINES).splitlines() if line.startswith(mark)]
    return "\n".join(line.removeprefix(mark) for line in marked[-SHOWN_LINES:])


def report(run: RunFolder, exit_code: int) -> int:
    """Print which rank died and why. Returns the rank's exit code as a shell gives it; `exit_code` where none died."""
    log = logs.last_lines(run.log, SEARCHED_LINES)
    dead = logs.find_dead_rank(log)
    if dead is None:
        return exit_code
    of_rank = f"{logs.title_of_rank(dead.rank)}\n{last_lines_of_rank(run, dead.rank)}"
    cause = logs.find_cause(f"{log}\n{of_rank}")
    print(f"\nThe job failed: {cause}\n{of_rank}")
    return dead.exit_code if dead.exit_code > 0 else 128 - dead.exit_code


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise InputError("usage: python -m kit.slurm.failure RUN EXIT_CODE")
    sys.exit(report(RunFolder(Path(sys.argv[1])), int(sys.argv[2])))
