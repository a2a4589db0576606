"""How a run ended: records from every witness in an append-only ledger, and one pure function that judges them.

Accounting is often off and Slurm forgets a job within minutes. Gone with nothing recorded is LOST, never COMPLETED.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError
from kit.run import Run

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
         "DEADLINE", "LOST")  # fmt: skip
# What Slurm's line in the log says, most telling first.
ENDED_BY = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL", "CANCELLED": "CANCELLED"}
SILENT = 120  # seconds without a heartbeat (one every 10) after which a job that Slurm forgot counts as gone


@dataclass(frozen=True)
class State:
    """What is known of a run; `as_dict` is what `kit state --json` prints."""

    run: str
    job_id: str | None
    state: str
    exit_code: int | None = None
    signal: str = ""
    cause: str = ""
    confidence: str = "high"
    evidence: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ENDED

    def as_dict(self) -> dict[str, Any]:
        """The fields, JSON-ready."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The state for a person: what, why, and every witness."""
        code = "" if self.exit_code is None else f", exit code {self.exit_code}"
        out = [f"{self.run}: {self.state}{code} (confidence {self.confidence})", *([self.cause] if self.cause else [])]
        return out + [f"  {e}" for e in self.evidence] + [f"CONFLICT: {c}" for c in self.conflicts]


def witness(run: Run, source: str, **facts: Any) -> None:
    """Append a record of the run's present job to the ledger: one line, one write."""
    line = json.dumps({"time": time.time(), "source": source, "job_id": run.job_id, **facts}) + "\n"
    handle = os.open(run.path / "state" / "ledger.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def records(run: Run) -> list[dict[str, Any]]:
    """Every record of the present job: the ledger, the job's own start and exit files, the heartbeat."""
    ledger = run.path / "state" / "ledger.jsonl"
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    out = [*map(json.loads, lines), *(record for _, record in _left(run))]
    heartbeat = run.path / "state" / "heartbeat"
    if heartbeat.exists():
        out.append({"source": "heartbeat", "time": heartbeat.stat().st_mtime, "job_id": run.job_id})
    return sorted((r for r in out if r["job_id"] == run.job_id), key=lambda r: r["time"])


def _left(run: Run) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files that the job's script leaves: start.<restart>.json and exit.<restart>.json."""
    for path in sorted((run.path / "state").glob("*.*.json")):
        kind, restart, _ = path.name.split(".")
        yield path, {"source": kind, "restart": int(restart), **files.read_json(path)}


def archive(run: Run) -> None:
    """Before the run is submitted again: what the last job left goes into the ledger, under its own job id."""
    for path, record in list(_left(run)):
        witness(run, **record)
        path.unlink()
    (run.path / "state" / "heartbeat").unlink(missing_ok=True)


def resolve(run: str, job_id: str | None, found: Iterable[dict[str, Any]], log: str, now: float) -> State:
    """Judge the records. Pure: the same records, log text and time give the same State."""
    latest: dict[str, dict[str, Any]] = {}
    for record in found:
        latest[record["source"]] = record  # in order of time, so the newest of each source stays
    if job_id is None:
        return State(run, None, "NOT SUBMITTED", evidence=["run.json has no job id"])
    evidence = [f"{s}: {_words(r)}" for s, r in latest.items()]
    slurm, left, asked = latest.get("slurm", {}), latest.get("exit"), latest.get("cancel")
    exit_file = left if left and left["time"] >= latest.get("start", left)["time"] else None
    said = slurm.get("state", "")
    cause = cause_in(log)
    conflicts = []
    if exit_file and said in ENDED and (exit_file["exit_code"] == 0) != (said == "COMPLETED"):
        conflicts.append(f"the script left exit code {exit_file['exit_code']}, but Slurm says {said}")

    def judged(state: str, confidence: str = "high") -> State:
        code = exit_file["exit_code"] if exit_file else slurm.get("exit_code")
        signal = (exit_file or {}).get("signal") or slurm.get("signal") or ""
        why = cause if state not in ("COMPLETED", "RUNNING", "PENDING") else ""
        return State(run, job_id, state, code, signal, why, confidence, evidence, conflicts)

    if said in ENDED:
        return judged(said)
    if exit_file:
        if exit_file["exit_code"] == 0:
            return judged("COMPLETED")
        told = (s for words, s in ENDED_BY.items() if words in cause)
        return judged(next(told, "CANCELLED" if asked else "FAILED"))
    if said and not slurm.get("gone"):
        return judged(said)
    if asked:
        return judged("CANCELLED", "medium")
    if now - latest.get("heartbeat", {"time": 0})["time"] < SILENT:
        return judged("RUNNING", "medium")
    return judged("LOST", "low")


def _words(record: dict[str, Any]) -> str:
    facts = [f"{k} {v}" for k, v in record.items() if k not in ("source", "time") and v not in ("", None)]
    return f"{', '.join(facts) or 'seen'} at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record['time']))}"


# torch's elastic agent prints a block for the first rank that died; Slurm prints a line for what it did itself.
_RANK = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+) \(pid: \d+\)")
_HOST = re.compile(r"host\s*:\s*(\S+)")
_SLURM = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON (\S+) CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*")
_OOM = re.compile(r"oom.kill event|CUDA out of memory|OutOfMemoryError", re.IGNORECASE)


def dead_rank(log: str) -> tuple[int, int] | None:
    """(rank, exit code) of the first rank that died by itself; a rank ended by SIGTERM died of another."""
    found = [(int(rank), int(code)) for rank, code in _RANK.findall(log)]
    return next((f for f in found if f[1] != -15), found[0] if found else None)


def cause_in(log: str) -> str:
    """One line of cause from the job's log; empty where it names none."""
    if match := _SLURM.search(log):
        return f"Slurm ended it on {match[1]}: CANCELLED" + (f" DUE TO {match[2]}" if match[2] else "")
    said = re.findall(r"^\[rank \d+ on .*$", log, re.MULTILINE)
    if dead := dead_rank(log):
        rank, code = dead
        own = next((line for line in said if line.startswith(f"[rank {rank} ")), "")
        ended = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return own or f"rank {rank} {ended}" + (" (out of memory)" if _OOM.search(log) else "")
    return said[0] if said else ""


def last_words(run: Run, rank: int, lines: int = 12) -> str:
    """The end of a rank's own log."""
    path = run.path / "logs" / f"rank-{rank:03}.log"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def main(arguments: list[str]) -> int:
    """Inside the failed job: name the dead rank and its last lines; the exit code is the rank's."""
    run, code = Run.attach(arguments[0]), int(arguments[1])
    log = run.log.read_text(errors="replace")
    if not (dead := dead_rank(log)):
        return code
    rank, own = dead
    print(f"\nThe job failed: {cause_in(log)}\nLast lines of logs/rank-{rank:03}.log:\n{last_words(run, rank)}")
    return own if own > 0 else 128 - own


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise InputError("usage: python -m kit.evidence RUN EXIT_CODE")
    sys.exit(main(sys.argv[1:]))
