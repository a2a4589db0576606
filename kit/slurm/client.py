"""The queue as Slurm tells it: one batched, backing-off question for all of a user's jobs, shared by every kernel."""

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError
from kit.slurm.outcome import ENDED
from kit.slurm.run import state_home

# Text, since squeue --json ignores every filter before 24.05. Command is last: a path may hold anything.
FIELDS = ("JobArrayID", "State", "exit_code", "RestartCnt", "Requeue", "Reason", "StartTime", "NodeList", "Command")
Row = dict[str, str]


@dataclass(frozen=True)
class Queue:
    """All of this user's jobs at `time`, array tasks as 12_3; `trouble` is what Slurm said since, in place of them."""

    time: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict)
    left: dict[str, float] = field(
        default_factory=dict
    )  # jobs that went while pending, which leave no record, and when
    trouble: str = ""
    asked: float = 0.0
    wait: float = 0.0  # seconds from `asked` to the next question
    min_job_age: float = 300.0  # seconds that Slurm remembers a job after its end; 0: for ever
    accounting: bool = False
    config_read: float = 0.0

    @property
    def most(self) -> float:
        """Seconds between questions while nothing changes: 60, but three looks before Slurm forgets a job."""
        return min(60.0, max(1.0, self.min_job_age / 3)) if self.min_job_age else 60.0

    @property
    def least(self) -> float:
        """Seconds between questions while things change: 2, rising to 30 for 500 jobs that have not ended."""
        return min(max(2.0, sum(row["State"] not in ENDED for row in self.rows.values()) * 30 / 500), self.most)


def command(*words: str, timeout: float = 30, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a Slurm client. One that is absent or does not answer in time counts as failed, and its stderr says so."""
    conf = Path(os.environ.get("SLURM_CONF", __file__))
    if not conf.exists():  # clients would wait a minute for it
        return subprocess.CompletedProcess(words, 1, "", f"SLURM_CONF names {conf}, which is not there")
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False, **more)
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]} is not installed here")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", f"{words[0]} timed out after {timeout:.0f} s")


def place(name: str) -> Path:
    """A file of this user's: one a login host, since locks do not cross hosts everywhere, and a cluster."""
    cluster = hashlib.sha256(os.environ.get("SLURM_CONF", "").encode()).hexdigest()[:8]
    return state_home() / f"{name}-{socket.gethostname()}-{cluster}"


def look(since: float = 0.0) -> Queue:
    """The queue from the shared file, or from squeue where it is time to ask again.

    The pause doubles from 2 s to 60 s while nothing changes; news that the caller has, of `since`, cut it short.
    """
    path = place("queue")
    with _lock(path.with_suffix(".lock"), wait=not path.exists()) as alone:
        last = _read(path)
        pause = min(last.wait, last.least) if since > last.time and not last.trouble else last.wait
        if not alone or time.time() < last.asked + pause:
            return last
        new = _ask(last)
        with contextlib.suppress(OSError):  # a full home folder is no reason not to answer
            files.write_json(path, asdict(new))
        return new


@contextlib.contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Whether this process may ask; False where another is asking just now."""
    with contextlib.ExitStack() as stack:
        alone = True
        with contextlib.suppress(OSError):  # no room or no locks here: then each kernel asks for itself
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(path.open("a"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                alone = False
        yield alone


def _read(path: Path) -> Queue:
    with contextlib.suppress(InputError, TypeError, OSError):  # absent, damaged, or of another version
        return Queue(**files.read_json(path))
    return Queue()


def _ask(last: Queue) -> Queue:
    now = time.time()
    last = replace(last, asked=now, trouble="")
    if now - last.config_read > 86400 and (config := command("scontrol", "show", "config").stdout):
        age = re.search(r"MinJobAge\s*= (\d+)", config)
        last = replace(last, config_read=now, accounting="accounting_storage/slurmdbd" in config)
        last = replace(last, min_job_age=float(age[1])) if age else last
    rows, trouble = jobs("-u", str(os.getuid()))
    if trouble:
        return replace(last, trouble=trouble, wait=min(max(2.0, 2 * last.wait), 60.0))
    ended = {key: last.rows.get(key, {}).get("record") for key, row in rows.items() if row["State"] in ENDED}
    new = records([key for key, record in ended.items() if record is None])
    for key, record in ended.items():
        rows[key]["record"] = record or new.get(key, "")
    forgotten = now - (last.min_job_age or 86400)
    left = {job: at for job, at in last.left.items() if at > forgotten}
    if last.time > forgotten:  # a job that ran and ended since would still be remembered
        left |= {job: now for job, row in last.rows.items() if job not in rows and row["State"] == "PENDING"}
    now_known = replace(last, time=now, rows=rows, left=left)
    least, most = now_known.least, now_known.most
    return replace(now_known, wait=least if rows != last.rows else min(max(least, 2 * last.wait), most))


def jobs(*which: str) -> tuple[dict[str, Row], str]:
    """squeue's rows by job id, ended jobs too as long as Slurm remembers them, or Slurm's words where it gave none."""
    done = command("squeue", *which, "-t", "all", "-h", "-r", "-O", ":|,".join(FIELDS) + ":4096")
    lines = [[v.strip() for v in line.split("|", len(FIELDS) - 1)] for line in done.stdout.splitlines()]
    words = "" if done.returncode == 0 else done.stderr.strip() or f"squeue failed with exit code {done.returncode}"
    return {values[0]: dict(zip(FIELDS, values, strict=True)) for values in lines}, words


def facts(row: Row) -> dict[str, Any]:
    """What a row says, in the ledger's words. Its exit_code is a raw wait status."""
    code, signal = divmod(int(row["exit_code"]), 256)
    signal &= 127
    return {
        "state": row["State"], "reason": row["Reason"].replace("None", ""), "restart": int(row["RestartCnt"]),
        "requeue": row["Requeue"] == "1", "nodes": row["NodeList"],
        "exit_code": 0 if signal else code, "signal": str(signal or ""), "verbatim": row.get("record", ""),
    }  # fmt: skip


def records(keys: Collection[str]) -> dict[str, str]:
    """scontrol's own record, on one line, of each job that Slurm remembers; in one call."""
    if not keys:
        return {}
    lines: dict[str, str] = {}
    for line in command("scontrol", "show", "job", "-d", "-o", *(keys if len(keys) == 1 else ())).stdout.splitlines():
        if match := re.match(r"JobId=(\d+)(?: ArrayJobId=(\d+) ArrayTaskId=(\S+))?", line):
            lines |= {match[2] or match[1]: line, f"{match[2] or match[1]}_{match[3]}": line}
    return {key: lines[key] for key in keys if key in lines}


def accounted(keys: Collection[str]) -> dict[str, dict[str, Any]]:
    """What sacct says of each job, in one call; of several jobs with one id, of the last."""
    if not keys:
        return {}
    done = command("sacct", "-X", "-P", "-n", "-j", ",".join(keys), "-o", "JobID,State%40,ExitCode,SubmitLine")
    found = {}
    for line in done.stdout.splitlines():
        key, state, codes, submit_line = line.split("|", 3)
        code, _, signal = codes.partition(":")
        facts = {"state": state.split()[0], "exit_code": int(code), "signal": "" if signal == "0" else signal}
        found[key] = facts | {"command": submit_line}
    return found
