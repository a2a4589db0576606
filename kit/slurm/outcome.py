"""How a run ended: records from every witness in an append-only ledger, and one pure function that judges them.

Accounting is often off and Slurm forgets a job within minutes. Gone with nothing recorded is LOST, never COMPLETED.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError
from kit.slurm import logs as joblog
from kit.slurm.run import Run

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
         "DEADLINE", "LOST")  # fmt: skip
PROVISIONAL = ("PREEMPTED", "NODE_FAIL")  # with Requeue=1 the same job may start again
SILENT = 120  # seconds without a heartbeat (one every 10) after which a job that Slurm forgot counts as gone
SKEW = 60  # seconds by which clocks of nodes may differ

# bash reads this file before a user's own script (BASH_ENV); a trap that the script sets itself takes its place.
WITNESS = """\
case $0 in */slurm_script | */job.sbatch)
  unset BASH_ENV
  _kit_task=${SLURM_ARRAY_TASK_ID:+.$SLURM_ARRAY_TASK_ID}
  _kit_record() {
    local file=$1.${SLURM_RESTART_COUNT:-0}$_kit_task.json job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
    printf '{"job_id": "%s", "time": %(%s)T, %s}\\n' "${KIT_JOB_ID:-$job}" -1 "$2" > "$KIT_RUN/state/.$file" &&
      mv "$KIT_RUN/state/.$file" "$KIT_RUN/state/$file"
  } 2>/dev/null
  trap '_kit_record exit "\\"exit_code\\": $?"' EXIT
  _kit_record start "\\"nodes\\": \\"$SLURM_JOB_NODELIST\\""
  (while kill -0 $$ && : > "$KIT_RUN/state/heartbeat$_kit_task"; do sleep 10; done &) < /dev/null > /dev/null 2>&1
esac
"""


@dataclass(frozen=True)
class State:
    """What is known of a run; `as_dict` is what `kit state --json` prints. `tasks`: the state of each array task."""

    run: str
    job_id: str | None
    state: str
    exit_code: int | None = None
    signal: str = ""
    cause: str = ""
    confidence: str = "high"
    evidence: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    tasks: dict[int, str] = field(default_factory=dict)
    provisional: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ENDED and not self.provisional

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
    (run.path / "state").mkdir(exist_ok=True)
    handle = os.open(run.path / "state" / "ledger.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def records(run: Run) -> list[dict[str, Any]]:
    """Every record of the present job: the ledger, the job's own start and exit files, the heartbeat.

    Job ids wrap and are given again, so the key is the id and the time of submission. A torn line is no record.
    """
    ledger, info = run.path / "state" / "ledger.jsonl", run.info
    out = [record for _, record in _left(run)]
    for line in ledger.read_text(errors="replace").splitlines() if ledger.exists() else []:
        with contextlib.suppress(ValueError):
            out.append(json.loads(line))
    for beat in (run.path / "state").glob("heartbeat*"):
        facts = {"task": int(beat.suffix[1:])} if beat.suffix else {}
        out.append({"source": "heartbeat", "time": beat.stat().st_mtime, "job_id": info["job_id"], **facts})
    began = (info.get("submitted") or 0) - SKEW
    return sorted((r for r in out if r["job_id"] == info["job_id"] and r["time"] >= began), key=lambda r: r["time"])


def by_task(found: Iterable[dict[str, Any]], tasks: Iterable[int | None]) -> dict[int | None, list[dict[str, Any]]]:
    """The records that speak of each array task, or of the whole job."""
    out: dict[int | None, list[dict[str, Any]]] = {task: [] for task in tasks}
    for record in found:
        task = record.get("task")
        for one in out.values() if task is None else [out.get(task, [])]:
            one.append(record)
    return out


def _left(run: Run) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files that the job's script leaves: start and exit.<restart>[.<task>].json."""
    for path in sorted((run.path / "state").glob("[!.]*.*.json")):
        kind, restart, *task = path.stem.split(".")
        facts = {"source": kind, "restart": int(restart)} | ({"task": int(task[0])} if task else {})
        with contextlib.suppress(InputError):
            yield path, facts | files.read_json(path)


def archive(run: Run) -> None:
    """Before the run is submitted again: what the last job left goes into the ledger, under its own job id."""
    for path, record in list(_left(run)):
        witness(run, **record)
        path.unlink()
    for beat in (run.path / "state").glob("heartbeat*"):
        beat.unlink()


def resolve(run: str, job_id: str | None, found: Iterable[dict[str, Any]], log: str, now: float) -> State:
    """Judge the records. Pure: the same records, log text and time give the same State."""
    if job_id is None:
        return State(run, None, "NOT SUBMITTED", evidence=["run.json has no job id"])
    found = list(found)
    restart = max((r.get("restart", 0) for r in found), default=0)
    # In order of time, so the newest of each source stays; what an earlier start left says nothing of the present one.
    latest = {r["source"]: r for r in found if r.get("restart", restart) == restart}
    slurm, asked, exit_file = latest.get("slurm", {}), "cancel" in latest, latest.get("exit")
    gone = "gone" in latest and latest["gone"]["time"] >= slurm.get("time", 0)
    log = joblog.of_this_start(log, latest["start"]["time"]) if "start" in latest else log
    told, cause = joblog.ended_by(log), joblog.cause_in(log)
    word = next((r for r in (slurm, latest.get("sacct", {})) if r.get("state") in ENDED), {})
    live = "" if word or gone else slurm.get("state", "")
    live = "RUNNING" if live == "PENDING" and "start" in latest else live  # it has begun since Slurm was asked
    base = State(run, job_id, "", evidence=[f"{s}: {_words(r)}" for s, r in latest.items()])
    code: Any = (exit_file or word).get("exit_code")
    signal = (exit_file or {}).get("signal") or word.get("signal") or ""
    base = replace(base, exit_code=code, signal=signal, confidence="medium")

    if word:
        again = word["state"] in PROVISIONAL and word.get("requeue") and not (word.get("again") or gone)
        certain = "exit_code" in word  # else it only vanished, as it also would where a controller lost its state
        end = replace(base, state=word["state"], confidence="high" if certain else "medium", provisional=bool(again))
    elif exit_file and "requeued" not in exit_file.get("reason", "") and (gone or "queue" in latest):
        # Where a signal ends bash, an EXIT trap sees the code of the command before. The kit's script notes the signal.
        sure = "signal" in exit_file or code > 0
        guess = "OUT_OF_MEMORY" if joblog.OOM_KILL.search(log) else "FAILED"
        guess = told[1] if told else "CANCELLED" if asked and (code or not sure) else guess if code else "COMPLETED"
        end = replace(base, state=guess, confidence="high" if told or (sure and code <= 128) else "medium")
    elif live or (exit_file and not gone):
        state = "COMPLETING" if exit_file and live in ("", "RUNNING") else live
        return replace(base, state=state, confidence="medium" if "queue" in latest else "high")
    elif told or asked:
        end = replace(base, state=told[1] if told else "CANCELLED")
    elif not gone and latest.keys() & {"submit", "start"}:
        return replace(base, state="RUNNING" if "start" in latest else "PENDING")
    elif now - latest.get("heartbeat", {"time": 0})["time"] < SILENT:
        return replace(base, state="RUNNING")
    else:
        seen = max(found, key=lambda r: (r["source"] not in ("gone", "queue", "sacct"), r["time"]), default=None)
        last = f"the last sign is {seen['source']}: {_words(seen)}" if seen else "there is no sign of it"
        return replace(base, state="LOST", confidence="low", cause=f"Nothing recorded how it ended; {last}.")
    return _explained(end, latest, log, cause)


def together(run: str, job_id: str | None, tasks: Mapping[Any, State]) -> State:
    """The state of an array: live while a task is; when all have ended, that of its worst task."""
    live = [s.state for s in tasks.values() if not s.ended]
    bad = [n for n, s in tasks.items() if s.state != "COMPLETED"]
    counts = ", ".join(f"{n} {state}" for state, n in Counter(s.state for s in tasks.values()).most_common())
    worst = State(run, job_id, "COMPLETED", 0)
    if bad and not live:
        worst = tasks[min(bad, key=lambda n: ENDED.index(tasks[n].state))]
    return replace(
        worst, run=run, job_id=job_id, state="RUNNING" if "RUNNING" in live else live[0] if live else worst.state,
        cause=f"{len(tasks)} tasks: {counts}" + (f"; {worst.cause}" if worst.cause else ""),
        evidence=[f"task {n}: {s.state}" + (f": {s.cause}" if s.cause else "") for n, s in tasks.items()],
        conflicts=[f"task {n}: {c}" for n, s in tasks.items() for c in s.conflicts],
        tasks={n: s.state for n, s in tasks.items()}, provisional=bool(live),
    )  # fmt: skip


def _explained(end: State, latest: dict[str, dict[str, Any]], log: str, cause: str) -> State:
    """Add the disagreements between witnesses, and the cause of a bad end."""
    slurm, exit_file = latest.get("slurm") or latest.get("sacct") or {}, latest.get("exit")
    conflicts, said = [], slurm.get("state")
    if exit_file and said in ENDED and said != "CANCELLED" and (exit_file["exit_code"] == 0) != (said == "COMPLETED"):
        conflicts.append(f"the script left exit code {exit_file['exit_code']}, but Slurm says {said}")
    if end.state == "COMPLETED":
        step = re.search(r"DerivedExitCode=([1-9]\d*):", slurm.get("verbatim", ""))
        crash, last = joblog.traceback_in(log)
        hid = "a later command, or a pipe such as `| tee`, hid it"
        conflicts += [f"exit code 0, but a step ended with exit code {step[1]}: {hid}"] if step else []
        conflicts += [f"exit code 0, but the log holds a traceback, {crash}: {hid}"] if crash else []
        end = replace(end, state="FAILED" if crash and last else end.state)
    if conflicts:
        end = replace(end, conflicts=conflicts, confidence="medium")
    if end.state == "COMPLETED" and not conflicts:
        return end
    return replace(end, cause=cause or (exit_file or {}).get("reason", "") or _plain(end, slurm, latest))


def _plain(end: State, slurm: dict[str, Any], latest: dict[str, dict[str, Any]]) -> str:
    """The cause where the log names none."""
    where = f" on {slurm['nodes']}" if slurm.get("nodes") else ""
    if end.signal == "53" and "start" not in latest:  # what slurmd sets where it cannot open the script's output
        return (
            f"It never started{where}: the folder of its log is not there, or is not on a file system that node sees."
        )
    if end.state == "CANCELLED" and "Dependency" in slurm.get("reason", ""):
        return "The run that it was to follow did not end well."
    number = int(end.signal) if end.signal.isdigit() else (end.exit_code or 0) - 128
    if end.state == "FAILED":
        how = f"was killed by signal {number}" if number > 0 else f"exited with code {end.exit_code}"
        return f"The script {how}{where}."
    words = {"NODE_FAIL": "A node failed", "TIMEOUT": "It reached its time limit", "PREEMPTED": "It was preempted"}
    return words[end.state] + where + "." if end.state in words else ""


def _words(record: dict[str, Any]) -> str:
    hidden = ("source", "time", "job_id", "verbatim", "task")
    facts = [f"{k} {v}" for k, v in record.items() if k not in hidden and v is not False and v not in ("", None)]
    return f"{', '.join(facts) or 'seen'} at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record['time']))}"


def last_words(run: Run, rank: int, lines: int = 12) -> str:
    """The end of a rank's own log."""
    path = run.path / "logs" / f"rank-{rank:03}.log"
    return joblog.end_of(path, lines) if path.exists() else ""


def main(arguments: list[str]) -> int:
    """Inside the failed job: name the dead rank and its last lines; the exit code is the rank's."""
    run, code = Run.attach(arguments[0]), int(arguments[1])
    log = run.log.read_text(errors="replace")
    if not (dead := joblog.dead_rank(log)):
        return code
    rank, own = dead
    print(f"\nThe job failed: {joblog.cause_in(log)}\nLast lines of logs/rank-{rank:03}.log:\n{last_words(run, rank)}")
    return own if own > 0 else 128 - own


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise InputError("usage: python -m kit.slurm.outcome RUN EXIT_CODE")
    sys.exit(main(sys.argv[1:]))
