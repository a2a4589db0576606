"""The log of a job: its last lines, what Slurm did to the job, and why it failed."""

import os
import re
import time
from pathlib import Path

# torch's elastic agent prints a block for the first rank that died; Slurm prints a line for what it did itself.
_RANK = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+) \(pid: \d+\)")
_SLURM = re.compile(r"\*\*\* (JOB|STEP) \S+ ON (\S+) CANCELLED AT (\S+)(?: DUE TO ([A-Z ]+))?(?:, SEE [A-Z ]+)? \*\*\*")
_SRUN = re.compile(r"^srun: error: (\S+): (tasks? \S+): (.+)$", re.MULTILINE)
OOM_KILL = re.compile(r"oom.kill event|Exceeded job memory limit|Out Of Memory")
_OOM = re.compile(OOM_KILL.pattern + "|CUDA out of memory|OutOfMemoryError", re.IGNORECASE)
_TRACE = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)$", re.MULTILINE)
ENDED_BY = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL", "": "CANCELLED"}


def of_this_start(log: str, began: float) -> str:
    """The part of a log that is not of an earlier start: a job that is requeued appends."""
    stamps = [(m.end(), time.mktime(time.strptime(m[3], "%Y-%m-%dT%H:%M:%S"))) for m in _SLURM.finditer(log)]
    return log[max((end for end, at in stamps if at < began - 1), default=0) :]


def ended_by(log: str) -> tuple[str, str, str] | None:
    """(node, state, why) from Slurm's line on what it did to the job. A step alone is also ended by a dead rank."""
    found = [m for m in _SLURM.finditer(log) if (m[4] or "") in ENDED_BY and (m[1] == "JOB" or m[4])]
    return (found[-1][2], ENDED_BY[found[-1][4] or ""], found[-1][4] or "") if found else None


def traceback_in(log: str) -> tuple[str, bool]:
    """The last exception of a log, and whether the log ends with it; what Python says that it ignored is none."""
    log = re.sub(r"^(\[rank\d+\]|\d+): ", "", log, flags=re.MULTILINE)  # the labels of torch and of srun -l
    ignored = ("Exception ignored", "Error in atexit")
    found = [m for m in _TRACE.finditer(log) if not log[: m.start()].rstrip().rpartition("\n")[2].startswith(ignored)]
    rest = [line for line in log[found[-1].end() :].split("\n") if line.strip()] if found else []
    return found[-1][1] if found else "", all(line.startswith(("srun: ", "slurmstepd")) for line in rest)


def dead_rank(log: str) -> tuple[int, int] | None:
    """(rank, exit code) of the first rank that died by itself; a rank ended by SIGTERM died of another."""
    found = [(int(rank), int(code)) for rank, code in _RANK.findall(log)]
    return next((f for f in found if f[1] != -15), found[0] if found else None)


def cause_in(log: str) -> str:
    """One line of cause from the job's log: rank, node, what; empty where it names none."""
    if told := ended_by(log):
        return f"Slurm ended it on {told[0]}: CANCELLED" + (f" DUE TO {told[2]}" if told[2] else "")
    said = re.findall(r"^\[(?:rank \d+|start|rendezvous) on .*$", log, re.MULTILINE)
    if dead := dead_rank(log):
        rank, code = dead
        own = next((line for line in said if line.startswith(f"[rank {rank} ")), "")
        ended = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return own or f"rank {rank} {ended}" + (" (out of memory)" if _OOM.search(log) else "")
    if said:
        return str(said[0])
    crash = traceback_in(log)[0]
    memory = "out of memory" if _OOM.search(log) else ""
    step = [f"{task} on {node}: {what}" for node, task, what in _SRUN.findall(log) if what != "Terminated"][:1]
    return "; ".join([*step, *filter(None, [crash or memory])])


def end_of(path: Path, lines: int) -> str:
    """The last lines of a file, however long it is; at most 1 MiB of it is read."""
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 2**20))
        return "\n".join(stream.read().decode(errors="replace").splitlines()[-lines:])
