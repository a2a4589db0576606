"""Job logs: their last lines, new lines as they are written, what Slurm did to the job, and why it failed."""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kit.errors import InputError
from kit.show import Part, Result
from kit.slurm.states import JobState

# torch's elastic agent prints a block for each failed rank (torch/distributed/elastic/multiprocessing/errors).
_ROOT_CAUSE = "Root Cause (first observed failure)"  # torch.distributed.elastic
_FAILED_RANK = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+) \(pid: \d+\)")
# slurmstepd prints a line when Slurm ends a job or a step (slurmstepd/req.c, _handle_signal_container and others).
_SLURM_KILL = re.compile(
    r"\*\*\* (JOB|STEP) \S+ ON (\S+) CANCELLED AT (\S+)(?: DUE TO ([A-Z ]+))?(?:, SEE [A-Z ]+)? \*\*\*"
)
_FAILED_TASK = re.compile(r"^srun: error: (\S+): (tasks? \S+): (.+)$", re.MULTILINE)
# The kit's own messages: of a rank, of the checks on a node, of the rendezvous.
_MESSAGE = re.compile(r"^\[(?:rank \d+|start|rendezvous) on .*$", re.MULTILINE)
# Slurm's words for a process that the kernel killed for its memory, of 22.05 and older releases.
_OOM_KILL = re.compile(r"oom.kill event|Exceeded job memory limit|Out Of Memory")
_OUT_OF_MEMORY = re.compile(_OOM_KILL.pattern + "|CUDA out of memory|OutOfMemoryError", re.IGNORECASE)
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)$", re.MULTILINE)
_RANK_LABEL = re.compile(r"^(\[rank\d+\]|\d+): ", re.MULTILINE)  # of torch, and of `srun --label`
_EXCEPTION_LINE = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)
_IGNORED_EXCEPTION = ("Exception ignored", "Error in atexit")  # the line before such a traceback
_KILL_STATES = {
    "": JobState.CANCELLED,
    "TIME LIMIT": JobState.TIMEOUT,
    "PREEMPTION": JobState.PREEMPTED,
    "NODE FAILURE": JobState.NODE_FAIL,
}
SIGTERM_EXIT = -15  # exit code of a rank that was ended because another one had died
MOST_BYTES = 2**20  # that are read of the end of a log
FOLLOWED_BYTES = 2**16  # of the end of a log that `follow` begins with


@dataclass(frozen=True)
class SlurmKill:
    """Slurm's line that it ended the job. `reason`: Slurm's words, such as "TIME LIMIT"; empty for scancel."""

    node: str
    state: JobState
    reason: str


class DeadRank(NamedTuple):
    """A rank that ended with an error; the exit code is negative for a signal."""

    rank: int
    exit_code: int


class LoggedException(NamedTuple):
    """The last traceback's exception, and whether nothing but messages of Slurm follows it."""

    text: str
    at_end: bool


def since_start(log: str, started: float) -> str:
    """The part of a log that a start wrote: a requeued job appends to the log of the start before.

    started: seconds since the epoch. Cuts after the last line of Slurm that is older.
    """
    kills = [(m.end(), time.mktime(time.strptime(m[3], "%Y-%m-%dT%H:%M:%S"))) for m in _SLURM_KILL.finditer(log)]
    return log[max((end for end, when in kills if when < started - 1), default=0) :]


def find_slurm_kill(log: str) -> SlurmKill | None:
    """The last line in which Slurm says that it ended the job.

    A line of a step counts only with a reason: a step is also cancelled when one of its tasks has died.
    """
    for match in reversed(list(_SLURM_KILL.finditer(log))):
        what, node, reason = match[1], match[2], match[4] or ""
        if reason in _KILL_STATES and (what == "JOB" or reason):
            return SlurmKill(node, _KILL_STATES[reason], reason)
    return None


def find_exception(log: str) -> LoggedException | None:
    """The last exception of a log, without those that Python reports as ignored."""
    log = _RANK_LABEL.sub("", log)
    last = None
    for match in _TRACEBACK.finditer(log):
        line_before = log[: match.start()].rstrip().rpartition("\n")[2]
        if not line_before.startswith(_IGNORED_EXCEPTION):
            last = match
    if last is None:
        return None
    rest = [line for line in log[last.end() :].split("\n") if line.strip()]
    return LoggedException(last[1], all(line.startswith(("srun: ", "slurmstepd")) for line in rest))


def find_dead_rank(log: str) -> DeadRank | None:
    """The first rank that died by itself; a rank that SIGTERM ended died because of another one.

    torchrun lists the first failure under "Root Cause", after the ranks that it ended itself, by SIGKILL if need be.
    """
    found = _FAILED_RANK.findall(log[log.rfind(_ROOT_CAUSE) :]) if _ROOT_CAUSE in log else []
    dead = [DeadRank(int(rank), int(code)) for rank, code in found + _FAILED_RANK.findall(log)]
    return next((one for one in dead if one.exit_code != SIGTERM_EXIT), dead[0] if dead else None)


def was_oom_killed(log: str) -> bool:
    """Whether Slurm says that a process was killed for its memory."""
    return _OOM_KILL.search(log) is not None


def find_cause(log: str) -> str:
    """The cause of a failure from the job's log, with rank and node where it names them; empty where it names none.

    Slurm's line that it ended the job comes first, then messages of the kit, then torchrun's report, then exceptions.
    """
    if kill := find_slurm_kill(log):
        due = f" DUE TO {kill.reason}" if kill.reason else ""
        return f"Slurm ended it on {kill.node}: CANCELLED{due}"
    messages: list[str] = _MESSAGE.findall(log)
    if dead := find_dead_rank(log):
        own = (line for line in messages if line.startswith(f"[rank {dead.rank} "))
        return next(own, _describe_rank(dead, log))
    if messages:
        return messages[0]
    exception = find_exception(log)
    what = exception.text if exception else "out of memory" if _OUT_OF_MEMORY.search(log) else ""
    tasks = [f"{task} on {node}: {end}" for node, task, end in _FAILED_TASK.findall(log) if end != "Terminated"]
    return "; ".join([*tasks[:1], *([what] if what else [])])


def _describe_rank(dead: DeadRank, log: str) -> str:
    code = dead.exit_code
    end = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
    exceptions = _EXCEPTION_LINE.findall(log.partition(title_of_rank(dead.rank))[2]) if code > 0 else []
    if _OUT_OF_MEMORY.search(log):
        return f"rank {dead.rank} {end} (out of memory)"
    return f"rank {dead.rank} {end}" + (f": {exceptions[-1]}" if exceptions else "")


def title_of_rank(rank: int) -> str:
    """The line under which the job's log has the last lines of a rank's log."""
    return f"Last lines of logs/rank-{rank:03}.log:"


def read_end(path: Path, most_bytes: int, start: int = 0) -> str:
    """The end of a file as text, of what follows the byte `start`."""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - most_bytes, start if start <= size else 0))
        return stream.read(most_bytes).decode(errors="replace")


def last_lines(path: Path, lines: int, start: int = 0) -> str:
    """The last lines of a file after the byte `start`, of at most its last MiB.

    Raises InputError for a negative number of lines.
    """
    if lines < 0:
        raise InputError(f"{lines} lines were asked for; give 0 or more.")
    found = read_end(path, MOST_BYTES, start).splitlines()
    return "\n".join(found[len(found) - min(lines, len(found)) :])


@dataclass(frozen=True)
class LogTail(Result):
    """The last lines of a run's logs, by file name; `run` is the run's name."""

    run: str
    logs: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The lines of each log."""
        return {"run": self.run, "logs": {name: text.splitlines() for name, text in self.logs.items()}}

    def parts(self) -> Iterable[Part]:
        """Each log under its name."""
        if not self.logs:
            yield f"{self.run} has no such log yet."
        for name, text in self.logs.items():
            yield f"== {name}\n{text}"


class _LogReader:
    """New complete lines of one log since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = max(0, path.stat().st_size - FOLLOWED_BYTES)

    def read(self, to_the_end: bool) -> Iterator[list[str]]:
        """Complete lines, of at most MOST_BYTES at a time; with `to_the_end` also a last one without a line break.

        A line that is longer comes in parts.
        """
        while data := self._next_lines(to_the_end):
            self.place += len(data)
            yield data.decode(errors="replace").splitlines()

    def _next_lines(self, to_the_end: bool) -> bytes:
        with self.path.open("rb") as stream:
            stream.seek(self.place)
            data = stream.read(MOST_BYTES)
        complete = data[: data.rfind(b"\n") + 1]
        return complete or (data if to_the_end or len(data) == MOST_BYTES else b"")


def follow(find_logs: Callable[[], list[Path]], finished: Callable[[], bool], lines: int = 20) -> Iterator[str]:
    """Lines of logs as they are written, each with its file's name, until `finished` is true.

    find_logs: the logs that exist now; called each second, since logs of ranks appear later.
    lines: how many of the lines that are there at the beginning come first, of each log.
    Raises InputError for a negative number of lines.
    """
    if lines < 0:
        raise InputError(f"{lines} lines were asked for; give 0 or more.")
    readers: dict[Path, _LogReader] = {}
    first_round = True
    over = False
    while not over:
        over = finished()
        for path in find_logs():
            reader = readers.setdefault(path, _LogReader(path))
            for new in reader.read(to_the_end=over):
                shown = new[len(new) - min(lines, len(new)) :] if first_round else new
                yield from (f"[{path.stem}] {line}" for line in shown)
        first_round = False
        if not over:
            time.sleep(1)
