"""The watcher: what Slurm says of runs goes into their ledgers before it forgets. One process a user."""

import contextlib
import fcntl
import getpass
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import KitError
from kit.slurm import client as queue
from kit.slurm import local
from kit.slurm import logs as joblog
from kit.slurm import outcome as evidence
from kit.slurm.run import Run


def state(run: Run) -> evidence.State:
    """What is known of the run now: asks Slurm or the local runner, then judges every record."""
    states = task_states(run)
    return states.pop(None, None) or evidence.together(run.path.name, run.job_id, states)


def task_states(run: Run) -> dict[int | None, evidence.State]:
    """The state of each task of an array; under None that of a job which is none."""
    trouble = ask([run])
    found, job, now = evidence.records(run), run.job_id, time.time()
    if trouble:
        found.append({"source": "queue", "time": now, "note": trouble})
    logs, name = run.task_logs, run.path.name
    said = {task: joblog.end_of(log, 10_000) if job and log.exists() else "" for task, log in logs.items()}
    return {task: evidence.resolve(name, job, r, said[task], now) for task, r in evidence.by_task(found, logs).items()}


@dataclass
class _Case:
    """A job or an array task that may not have ended, what is recorded of it, and what Slurm says of it now."""

    run: Run
    info: dict[str, Any]
    task: int | None
    found: list[dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.info["job_id"] if self.task is None else f"{self.info['job_id']}_{self.task}"

    def last(self, *sources: str) -> dict[str, Any]:
        return next((r for r in reversed(self.found) if r["source"] in sources), {"time": 0.0})

    @property
    def open(self) -> bool:
        """Whether Slurm, or sacct, which is told late, may still have news."""
        word = self.last("slurm", "gone", "sacct", "requeue")
        if word.get("source") in ("gone", "sacct"):
            return word.get("state") not in evidence.ENDED and time.time() - self.last("gone")["time"] < 600
        again = word.get("state") in evidence.PROVISIONAL and word.get("requeue", True) and not word.get("again")
        return again or word.get("state") not in evidence.ENDED

    def note(self, source: str, **facts: Any) -> None:
        """Write down news."""
        evidence.witness(self.run, source, **facts, job_id=self.info["job_id"], task=self.task)


def ask(runs: Iterable[Run]) -> str:
    """Write into each run's ledger what Slurm, or the local runner, says of it now; only news are written.

    Returns what stands in the way: Slurm's words where it does not answer, a full disk.
    """
    cases = [case for run in runs for case in _cases(run) if case.open]
    own = ("submit", "start", "exit", "cancel", "requeue")
    news = [case.last(*own)["time"] for case in cases if not case.key.startswith("local-")]
    seen = queue.look(max(news)) if news else queue.Queue()
    for case in cases:
        case.facts = local.status(case.run) if case.key.startswith("local-") else _seen(case, seen)
    gone = [c.key for c in cases if "gone" in c.facts and seen.accounting and c.last("sacct")["time"] < seen.time]
    accounted = queue.accounted(gone)
    try:
        for case in cases:
            _write(case)
            if case.key in gone:
                answer = accounted.get(case.key, {"command": ""})
                case.note("sacct", **(answer if str(case.info.get("script")) in answer["command"] else {}))
    except OSError as error:
        return f"the ledger cannot be written: {error.strerror}"
    return f"Slurm does not answer, and is asked again soon: {seen.trouble}" if seen.trouble else ""


def _cases(run: Run) -> list[_Case]:
    info = run.info
    if info["job_id"] is None and info.get("submitted"):  # nobody heard sbatch's answer, but Slurm may have the job
        rows = queue.look(info["submitted"]).rows.values()
        if found := next((row["JobArrayID"] for row in rows if row["Command"] == info["script"]), None):
            note_job(run, found.partition("_")[0])
        info = run.info
    if info["job_id"] is None:
        return []
    by_task = evidence.by_task(evidence.records(run), info.get("tasks") or [None])
    return [_Case(run, info, task, records) for task, records in by_task.items()]


def _seen(case: _Case, seen: queue.Queue) -> dict[str, Any]:
    """What the queue says of a job; nothing where Slurm was not asked since it was submitted."""
    info, rows, trouble = case.info, seen.rows, seen.trouble
    if info["user"] != getpass.getuser():
        rows, trouble = queue.jobs("-j", case.key)
        trouble = "" if "Invalid job id" in trouble else trouble
    row = rows.get(case.key)
    if row and row["Command"] == info.get("script", row["Command"]):  # else the id was given again, to another job
        return queue.facts(row)
    submitted = case.last("submit")["time"]
    if trouble or seen.time < submitted:
        return {}
    # What ran and ended since it was submitted would still be remembered; a task cancelled while it waits is not.
    young = seen.time < submitted + (seen.min_job_age or math.inf) and not case.last("start", "exit")["time"]
    if case.key in seen.left or (young and not row):
        return {"state": "CANCELLED", "reason": "it left the queue before it started"}
    return {"gone": True}


def _write(case: _Case) -> None:
    facts, last = case.facts, case.last("slurm")
    if "gone" in facts:
        if case.last("gone")["time"] <= last["time"]:
            case.note("gone")
    elif any(last.get(k) != v for k, v in facts.items()):
        case.note("slurm", **facts)
    elif facts.get("state") in evidence.PROVISIONAL and not last.get("again"):  # a second look, and nothing has changed
        case.note("slurm", **facts, again=True)


def note_job(run: Run, job: str) -> None:
    """Write down which job it is; of a user's own script also which tasks it has, and where its log goes."""
    facts: dict[str, Any] = {}
    if not (run.path / "recipe.toml").exists():
        facts["tasks"] = sorted(int(key.partition("_")[2]) for key in queue.jobs("-j", job)[0] if "_" in key)
        record = queue.records([job]).get(job, "")
        if log := re.search(r" StdOut=(.*?) \w+=", record):
            # In the record of tasks that wait this number stands for the task; a task that runs has its own there.
            task = re.search(r" ArrayTaskId=(\d+) ", record)
            path = Path(re.sub(rf"(?<=_){task[1] if task else 2**32 - 2}(?=\.)", "%a", log[1]))
            facts["log"] = str(path.relative_to(run.path) if path.is_relative_to(run.path) else path)
    evidence.witness(run, "submit", job_id=job)
    run.note(job_id=job, **facts)  # last: from now on others ask about it


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """The paths of runs that are watched, for one process at a time; what it changes in the list is kept."""
    (path := queue.place("watched")).parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        paths = stream.read().split("\n")[:-1]
        yield paths
        stream.truncate(0)
        stream.writelines(f"{path}\n" for path in paths)


def enlist(run: Run) -> None:
    """Have the run watched by this user's one watcher, which outlives this kernel; start it where there is none."""
    with _watched() as paths:
        paths.append(str(run.path))
    command = [
        "sh",
        "-c",
        '"$@" &',
        "sh",
        sys.executable,
        "-m",
        "kit.slurm.watcher",
    ]  # sh ends at once and leaves no zombie
    with queue.place("watcher").with_suffix(".log").open("w") as log:
        subprocess.run(
            command, start_new_session=True, cwd=files.REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def watcher() -> None:
    """Ask Slurm for the watched runs, often enough that no end is forgotten, until all have ended."""
    with queue.place("watcher").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None  # it is there
        ended: set[str] = set()
        while True:
            with _watched() as paths:
                paths[:] = [path for path in dict.fromkeys(paths) if path not in ended]
                if not paths:
                    return fcntl.flock(lock, fcntl.LOCK_UN)  # before the list is free again: no run falls between
                watched = list(paths)
            with contextlib.suppress(OSError, KitError):  # a full disk, a folder that goes
                ask(Run(Path(path)) for path in watched)
            ended = {path for path in watched if not _lives(Path(path))}
            seen = queue.look()
            if "SLURM_CONF" in seen.trouble or "configuration source" in seen.trouble:
                return None  # there is no Slurm here any more
            time.sleep(max(1.0, seen.asked + seen.wait - time.time()))


def _lives(path: Path) -> bool:
    """Whether a run is still to be watched. What Slurm does not know after ten minutes never came to it."""
    try:
        run = Run(path)
        return not state(run).ended if run.job_id else time.time() - (run.info["submitted"] or 0) < 600
    except (OSError, KitError):
        return (path / "run.json").exists()


if __name__ == "__main__":
    watcher()
