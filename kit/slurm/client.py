"""Slurm's programs: run one, and ask squeue, scontrol and sacct about jobs. No other module starts them.

All kernels of a user share one answer of squeue in a file. One of them asks again when the answer is old; the pause
between two questions doubles while nothing changes.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kit import files
from kit.slurm.states import JobState, SacctRecord, SlurmRecord

# Exit codes that `command` gives, as a shell, timeout(1) and sysexits.h do.
NOT_INSTALLED, TIMED_OUT, NOT_CONFIGURED = 127, 124, 78
# Text, since `squeue --json` ignores every filter before 24.05. Command is last: a path may contain the separator.
SQUEUE_FIELDS = (
    "JobArrayID", "State", "exit_code", "RestartCnt", "Requeue", "Reason", "StartTime", "NodeList", "Command",
)  # fmt: skip
DAY = 86400.0


@dataclass(frozen=True)
class JobRow:
    """A row of squeue; array tasks have a row each, with a job id such as 12_3.

    start: when Slurm started the job or will, as text. command: the path of its script. said: the row as a record for
    the ledger; its `time`, `job_id` and `task` are not set.
    """

    job: str
    start: str
    command: str
    said: SlurmRecord

    @classmethod
    def parse(cls, values: Sequence[str]) -> "JobRow":
        """From the texts of SQUEUE_FIELDS."""
        job, state, wait_status, restarts, requeue, reason, start, nodes, command = values
        code, signal = divmod(int(wait_status), 256)
        signal &= 127  # bit 7 says that a core was dumped
        said = SlurmRecord(
            time=0.0,
            restart=int(restarts),
            state=JobState.parse(state),
            exit_code=0 if signal else code,
            signal=str(signal or ""),
            reason="" if reason == "None" else reason,
            requeue=requeue == "1",
            nodes=nodes,
        )
        return cls(job, start, command, said)

    @property
    def array_job(self) -> str:
        """The job id without the array index."""
        return self.job.partition("_")[0]

    @property
    def task(self) -> int | None:
        """The array index; None for a plain job."""
        index = self.job.partition("_")[2]
        return int(index) if index.isdigit() else None

    @property
    def job_state(self) -> JobState:
        """The state."""
        return self.said.state or JobState.UNKNOWN


@dataclass(frozen=True)
class Queue:
    """All jobs of this user at `time`, by job id. Times are seconds since the epoch.

    left: pending jobs that disappeared, and when; Slurm keeps no record of them. trouble: what Slurm said instead of an
    answer since then. no_cluster: this machine does not belong to a Slurm cluster (any more).
    asked: when squeue was started last; pause: seconds from then to the next question.
    min_job_age: seconds that Slurm remembers a job after its end; 0: forever. accounting: whether sacct can answer.
    """

    time: float = 0.0
    rows: dict[str, JobRow] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    trouble: str = ""
    no_cluster: bool = False
    asked: float = 0.0
    pause: float = 0.0
    min_job_age: float = 300.0
    accounting: bool = False
    config_read: float = 0.0

    @property
    def longest_pause(self) -> float:
        """60 s while nothing changes; less where Slurm forgets jobs sooner: three questions before it does."""
        return min(60.0, max(1.0, self.min_job_age / 3)) if self.min_job_age else 60.0

    @property
    def shortest_pause(self) -> float:
        """2 s while things change, and more with many jobs: 30 s for 500 that have not ended."""
        live = sum(not row.job_state.final for row in self.rows.values())
        return min(max(2.0, live * 30 / 500), self.longest_pause)

    @property
    def next_question(self) -> float:
        """When squeue may be asked again."""
        return self.asked + self.pause


SAVED_QUEUE = TypeAdapter(Queue)


def command(*words: str, timeout: float = 30, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's programs. Where it is absent or does not answer in time, that is in returncode and stderr.

    timeout: seconds. options: of `subprocess.run`.
    """
    conf = os.environ.get("SLURM_CONF")
    if conf and not Path(conf).exists():  # the programs would wait a minute for it
        return subprocess.CompletedProcess(words, NOT_CONFIGURED, "", f"SLURM_CONF names {conf}, which does not exist")
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False, **options)
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, NOT_INSTALLED, "", f"{words[0]} is not installed here")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, TIMED_OUT, "", f"{words[0]} timed out after {timeout:.0f} s")


def available() -> bool:
    """Whether this machine belongs to a Slurm cluster, even if the controller does not answer now."""
    return "Slurmctld" in command("scontrol", "ping").stdout  # it says UP or DOWN at once


def version() -> str:
    """The release of sbatch, such as "22.05.8"; empty where it is not installed."""
    return "".join(command("sbatch", "--version").stdout.split()[-1:])


def partitions() -> list[str]:
    """The partitions' names, the default one with an asterisk."""
    return command("sinfo", "-h", "-o", "%P").stdout.split()


def unavailable_nodes() -> str:
    """Nodes that are down, drained, failing or reserved for maintenance, as a hostlist; empty if all can be used."""
    return ",".join(command("sinfo", "-h", "-t", "down,drain,fail,maint", "-o", "%N").stdout.split())


# ------------------------------------------------------------------------------------------------- the shared answer


def shared_file(name: str) -> Path:
    """A file that this user's processes share; one for each cluster and login host, since locks may not cross hosts."""
    cluster = hashlib.sha256(os.environ.get("SLURM_CONF", "").encode()).hexdigest()[:8]
    return files.state_home() / f"{name}-{socket.gethostname()}-{cluster}"


def queue(since: float = 0.0) -> Queue:
    """This user's jobs: from the shared file, or from squeue where that may be asked again.

    since: when the caller has seen something happen (seconds since the epoch); an older answer is renewed sooner.
    """
    path = shared_file("queue")
    with _lock(path.with_suffix(".lock"), wait=not path.exists()) as locked:
        last = _read(path)
        pause = min(last.pause, last.shortest_pause) if since > last.time and not last.trouble else last.pause
        if not locked or time.time() < last.asked + pause:
            return last
        answer = _ask(last)
        with contextlib.suppress(OSError):  # the answer is of use even where it cannot be saved
            files.write_json(path, asdict(answer))
        return answer


@contextlib.contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Yield whether this process may ask; False where another one is asking."""
    with contextlib.ExitStack() as stack:
        locked = True
        with contextlib.suppress(OSError):  # no space or no locks on this file system: each process asks for itself
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(path.open("a"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                locked = False
        yield locked


def _read(path: Path) -> Queue:
    """The shared answer. A damaged one, one of another version, or one from the future counts as never asked.

    The clock of a login node may have been ahead for some time; waiting for that time would take as long.
    """
    try:
        last = SAVED_QUEUE.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return Queue()
    from_the_future = max(last.time, last.asked, last.config_read, *last.left.values()) > time.time()
    return Queue() if from_the_future else last


def _ask(last: Queue) -> Queue:
    now = time.time()
    last = replace(last, asked=now, trouble="", no_cluster=False)
    if now - last.config_read > DAY:
        last = _with_config(last, now)
    said = squeue("-u", str(os.getuid()))
    if said.trouble:
        pause = min(max(2.0, 2 * last.pause), 60.0)
        return replace(last, trouble=said.trouble, no_cluster=said.no_cluster, pause=pause)
    rows = _with_records(said.rows, last.rows)
    answer = replace(last, time=now, rows=rows, left=_left(last, rows, now))
    slower = min(max(answer.shortest_pause, 2 * last.pause), answer.longest_pause)
    return replace(answer, pause=slower if rows == last.rows else answer.shortest_pause)


def _with_config(last: Queue, now: float) -> Queue:
    config = command("scontrol", "show", "config").stdout
    if not config:
        return last
    age = re.search(r"MinJobAge\s*= (\d+)", config)
    return replace(
        last,
        config_read=now,
        accounting="accounting_storage/slurmdbd" in config,
        min_job_age=float(age[1]) if age else last.min_job_age,
    )


def _with_records(rows: dict[str, JobRow], before: dict[str, JobRow]) -> dict[str, JobRow]:
    """The rows with scontrol's record of each job that has ended; those that are known are not asked for again."""
    ended = [job for job, row in rows.items() if row.job_state.final]
    known = {job: before[job].said.verbatim for job in ended if job in before and before[job].said.verbatim}
    known |= job_records([job for job in ended if job not in known])
    return {job: replace(row, said=replace(row.said, verbatim=known.get(job, ""))) for job, row in rows.items()}


def _left(last: Queue, rows: dict[str, JobRow], now: float) -> dict[str, float]:
    """Pending jobs that disappeared since the last answer, and before it, as long as Slurm would remember a job.

    A job that started and ended since then would still be remembered, if the last answer is not older than that.
    """
    forgotten = now - (last.min_job_age or DAY)
    left = {job: when for job, when in last.left.items() if when > forgotten}
    if last.time > forgotten:
        pending = [job for job, row in last.rows.items() if row.job_state is JobState.PENDING]
        left |= {job: now for job in pending if job not in rows}
    return left


# ----------------------------------------------------------------------------------------------- single programs


def squeue(*which: str) -> Queue:
    """The jobs that Slurm knows; ended ones, too, until it forgets them. Only `rows`, or `trouble`, are set.

    which: squeue's options, such as "-j", "12".
    """
    asked = ":|,".join(SQUEUE_FIELDS) + ":4096"
    done = command("squeue", *which, "-t", "all", "-h", "-r", "-O", asked)
    if done.returncode:
        # Slurm's programs say this where they are installed and find no slurm.conf (read_config.c).
        no_cluster = done.returncode in (NOT_CONFIGURED, NOT_INSTALLED) or "configuration source" in done.stderr
        trouble = done.stderr.strip() or f"squeue failed with exit code {done.returncode}"
        return Queue(trouble=trouble, no_cluster=no_cluster)
    lines = [line.split("|", len(SQUEUE_FIELDS) - 1) for line in done.stdout.splitlines()]
    rows = [JobRow.parse([text.strip() for text in line]) for line in lines if len(line) == len(SQUEUE_FIELDS)]
    return Queue(rows={row.job: row for row in rows})


def is_forgotten(answer: Queue) -> bool:
    """Whether this is the answer of `squeue -j` for a job that Slurm does not know (slurm_errno.c)."""
    return "Invalid job id" in answer.trouble


def job_records(jobs: Collection[str]) -> dict[str, str]:
    """The line of `scontrol show job` by job id, of the jobs that Slurm remembers; in one call."""
    if not jobs:
        return {}
    one = tuple(jobs) if len(jobs) == 1 else ()
    records: dict[str, str] = {}
    for line in command("scontrol", "show", "job", "-d", "-o", *one).stdout.splitlines():
        match = re.match(r"JobId=(\d+)(?: ArrayJobId=(\d+) ArrayTaskId=(\S+))?", line)
        if match:
            job, array, task = match[1], match[2], match[3]
            records |= {array or job: line, f"{array or job}_{task}": line}
    return {job: records[job] for job in jobs if job in records}


def sacct(jobs: Collection[str], now: float) -> dict[str, SacctRecord]:
    """What the accounting database says, by job id, in one call; of several jobs with one id the last.

    `job_id` and `task` of the records are not set.
    """
    if not jobs:
        return {}
    done = command("sacct", "-X", "-P", "-n", "-j", ",".join(jobs), "-o", "JobID,State%40,ExitCode,SubmitLine")
    found = {}
    for line in done.stdout.splitlines():
        job, state, codes, submitted = line.split("|", 3)
        code, _, signal = codes.partition(":")
        found[job] = SacctRecord(
            time=now,
            state=JobState.parse(state),
            exit_code=int(code),
            signal="" if signal == "0" else signal,
            command=submitted,
        )
    return found
