"""How a run ended: a table from the evidence about its job to a state and a confidence.

Accounting is often off, and Slurm forgets a job within minutes of its end. So every witness appends records to a ledger
(`kit.slurm.ledger`), and `resolve` judges them. It is pure: the same records, log and time give the same result. A job
that is gone, with nothing recorded about its end, is LOST and never COMPLETED.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any

from kit.show import Part, Result
from kit.slurm import logs
from kit.slurm.folder import LOCAL_PREFIX
from kit.slurm.signs import Evidence, Sign
from kit.slurm.states import FINAL_STATES, Confidence, JobState, ProgressRecord, Record, SlurmRecord, Witness

LAUNCH_FAILED_SIGNAL = "53"  # slurmd sets it where it cannot open the script's output file


@dataclass(frozen=True)
class RunState(Result):
    """The state of a run. `as_dict` is what `kit state --json` prints.

    tasks: the state of each array task. provisional: Slurm may start the same job again. pending: why it waits in the
    queue, and Slurm's estimate of its start. stalled_s: seconds for which training has not gone on, where it should
    have; 0 where it goes on, or does something else that may take long.
    """

    run: str
    job_id: str | None
    state: JobState
    exit_code: int | None = None
    signal: str = ""
    cause: str = ""
    confidence: Confidence = Confidence.HIGH
    evidence: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    tasks: dict[int, JobState] = field(default_factory=dict)
    provisional: bool = False
    pending: str = ""
    stalled_s: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the job has ended and will not start again."""
        return self.state.final and not self.provisional

    def parts(self) -> Iterable[Part]:
        """The state, its cause, what each witness says, and where witnesses disagree."""
        code = "" if self.exit_code is None else f", exit code {self.exit_code}"
        lines = [f"{self.run}: {self.state}{code} (confidence {self.confidence})", self.cause]
        lines += [f"  {line}" for line in self.evidence]
        lines += [f"CONFLICT: {line}" for line in self.conflicts]
        yield "\n".join(filter(None, [*lines, self.pending]))


# --------------------------------------------------------------------------------------------------------- the table


class StateFrom(Enum):
    """Where a verdict takes the state from, if it is not a fixed one."""

    SLURM = auto()
    LOG = auto()


@dataclass(frozen=True)
class Rule:
    """A row of the table: where all signs of `needs` and none of `excludes` are there, the job has this state.

    lowered_by: signs that lower the confidence from high to medium.
    """

    needs: Sign
    state: JobState | StateFrom
    confidence: Confidence
    lowered_by: Sign = Sign.NOTHING
    excludes: Sign = Sign.NOTHING

    def matches(self, signs: Sign) -> bool:
        """Whether this row applies."""
        return self.needs in signs and not self.excludes & signs

    def confidence_with(self, signs: Sign) -> Confidence:
        """How sure this row is, given all signs."""
        return Confidence.MEDIUM if self.lowered_by & signs else self.confidence


HIGH, MEDIUM, LOW = Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW
# The first row that matches decides. Slurm's own words come before the script's, and these before traces of an end.
RULES = (
    # Slurm, or its accounting, names the end.
    Rule(Sign.FINAL, StateFrom.SLURM, HIGH, lowered_by=Sign.NO_EXIT_CODE),
    # The script's exit record is the best that is left.
    Rule(Sign.ENDED | Sign.KILLED, StateFrom.LOG, HIGH),
    Rule(Sign.ENDED | Sign.CANCEL | Sign.NONZERO, JobState.CANCELLED, HIGH, lowered_by=Sign.SIGNAL_CODE),
    Rule(Sign.ENDED | Sign.CANCEL | Sign.TRAP_ONLY, JobState.CANCELLED, MEDIUM),
    Rule(Sign.ENDED | Sign.NONZERO | Sign.OUT_OF_MEMORY, JobState.OUT_OF_MEMORY, HIGH, lowered_by=Sign.SIGNAL_CODE),
    Rule(Sign.ENDED | Sign.NONZERO, JobState.FAILED, HIGH, lowered_by=Sign.SIGNAL_CODE),
    Rule(Sign.ENDED, JobState.COMPLETED, HIGH, lowered_by=Sign.TRAP_ONLY),
    # The job lives, or its script has ended and Slurm has not said yet how.
    Rule(Sign.EXIT | Sign.RUNNING, JobState.COMPLETING, HIGH, lowered_by=Sign.SILENT),
    Rule(Sign.LIVE, StateFrom.SLURM, HIGH, lowered_by=Sign.SILENT | Sign.STALE),
    Rule(Sign.EXIT, JobState.COMPLETING, HIGH, lowered_by=Sign.SILENT, excludes=Sign.GONE),
    # No exit record: traces of an end, then signs of life.
    Rule(Sign.KILLED, StateFrom.LOG, MEDIUM),
    Rule(Sign.CANCEL, JobState.CANCELLED, MEDIUM),
    Rule(Sign.STARTED, JobState.RUNNING, MEDIUM, excludes=Sign.GONE),
    Rule(Sign.SUBMITTED, JobState.PENDING, MEDIUM, excludes=Sign.GONE),
    Rule(Sign.HEARTBEAT, JobState.RUNNING, MEDIUM),
    Rule(Sign.NOTHING, JobState.LOST, LOW),
)


# ---------------------------------------------------------------------------------------------------------- verdicts


def resolve(run: str, job_id: str | None, records: Iterable[Record], log: str, now: float) -> RunState:
    """The state of a job, or of one array task, from its records.

    run: the run's name. records: as ledger.read_records has them. log: the end of the job's log. now: seconds since
    the epoch.
    """
    if job_id is None:
        return RunState(run, None, JobState.NOT_SUBMITTED, evidence=["run.json has no job id"])
    records = list(records)
    evidence = Evidence.of(records, log, now)
    signs = evidence.signs
    rule = next(rule for rule in RULES if rule.matches(signs))
    ended_by = evidence.exit or evidence.final
    verdict = RunState(
        run,
        job_id,
        _state_of(rule, evidence),
        exit_code=ended_by.exit_code if ended_by else None,
        signal=_signal(evidence),
        confidence=rule.confidence_with(signs),
        evidence=[
            f"{_name(record.witness, job_id)}: {_describe(record)}"
            for record in sorted(evidence.latest.values(), key=lambda record: record.time)
        ],
        provisional=_may_start_again(evidence),
    )
    if verdict.state is JobState.LOST:
        return replace(verdict, cause=f"Nothing recorded how it ended; {_last_sign(records)}.")
    if verdict.state.final:
        return _with_cause(_with_conflicts(verdict, evidence), evidence)
    if verdict.state is JobState.RUNNING and Sign.STALE in signs:
        return replace(verdict, conflicts=[_describe_silence(evidence)])
    if verdict.state is JobState.RUNNING and Sign.STALLED in signs:
        return replace(verdict, cause=_describe_stall(evidence), stalled_s=evidence.stalled_s)
    return verdict


def combine_tasks(run: str, job_id: str | None, tasks: Mapping[Any, RunState]) -> RunState:
    """The state of an array: live while one of its tasks is; then the state of its worst task, by FINAL_STATES."""
    counts = Counter(str(task.state) for task in tasks.values())
    summary = f"{len(tasks)} tasks: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())
    worst = _worst(run, job_id, tasks)
    return replace(
        worst,
        run=run,
        job_id=job_id,
        cause=f"{summary}; {worst.cause}" if worst.cause else summary,
        evidence=[f"task {n}: {task.state}" + (f": {task.cause}" if task.cause else "") for n, task in tasks.items()],
        conflicts=[f"task {n}: {conflict}" for n, task in tasks.items() for conflict in task.conflicts],
        tasks={n: task.state for n, task in tasks.items()},
        provisional=any(not task.ended for task in tasks.values()),
    )


def _worst(run: str, job_id: str | None, tasks: Mapping[Any, RunState]) -> RunState:
    live = [task.state for task in tasks.values() if not task.ended]
    if live:
        return RunState(run, job_id, JobState.RUNNING if JobState.RUNNING in live else live[0], exit_code=0)
    bad = [task for task in tasks.values() if task.state is not JobState.COMPLETED]
    if not bad:
        return RunState(run, job_id, JobState.COMPLETED, exit_code=0)
    return min(bad, key=lambda task: FINAL_STATES.index(task.state))


def _state_of(rule: Rule, evidence: Evidence) -> JobState:
    if isinstance(rule.state, JobState):
        return rule.state
    if rule.state is StateFrom.LOG and evidence.kill:
        return evidence.kill.state
    final = evidence.final.state if evidence.final else None
    return final or evidence.live_state or JobState.UNKNOWN


def _signal(evidence: Evidence) -> str:
    by_script = evidence.exit.signal if evidence.exit else None
    by_slurm = evidence.final.signal if evidence.final else None
    return by_script or by_slurm or ""


def _may_start_again(evidence: Evidence) -> bool:
    """Whether Slurm may start the job again after the final state that it names.

    It is settled once a second answer was the same, or Slurm has forgotten the job.
    """
    final = evidence.final
    if not isinstance(final, SlurmRecord) or final.state is None:
        return False
    settled = final.again or evidence.gone
    return final.state.may_restart and bool(final.requeue) and not settled


# ------------------------------------------------------------------------------------------------ conflicts and causes


def _describe_silence(evidence: Evidence) -> str:
    """That a job which Slurm has as RUNNING shows no sign of life."""
    beat = evidence.latest[Witness.HEARTBEAT]
    return (
        f"Slurm says RUNNING, but the job's script, which touches {Witness.HEARTBEAT} every 10 s, has not done so for "
        f"{abs(evidence.now - beat.time):.0f} s: look at its node and its log, and cancel it if it is dead"
    )


def _describe_stall(evidence: Evidence) -> str:
    """That training does not go on, though the job's script lives."""
    progress = evidence.newest(ProgressRecord)
    usual = progress.next_s if progress and progress.next_s else 0.0
    return (
        f"Training stalls: it has written nothing for {evidence.stalled_s:.0f} s, and before that a line every "
        f"{usual:.3g} s. A rank may hang: look at `kit tail` and at the processes of its nodes; after `kit cancel`, "
        "`kit requeue` goes on from the newest checkpoint."
    )


def _with_conflicts(verdict: RunState, evidence: Evidence) -> RunState:
    """Add where witnesses disagree. A log that ends with a traceback makes COMPLETED a failure."""
    conflicts = []
    said = evidence.slurm or evidence.sacct
    state = said.state if said else None
    if evidence.exit and state and state.final and state is not JobState.CANCELLED:
        code = evidence.exit.exit_code
        if (code == 0) != (state is JobState.COMPLETED):
            conflicts.append(f"the script left exit code {code}, but Slurm says {state}")
    if verdict.state is JobState.COMPLETED:
        hidden = "a later command, or a pipe such as `| tee`, hid it"
        # Slurm keeps DerivedExitCode when it starts a job again, so only in the first start is it of this start.
        verbatim = evidence.slurm.verbatim if evidence.slurm and not evidence.slurm.restart else ""
        step = re.search(r"DerivedExitCode=([1-9]\d*):", verbatim)
        exception = logs.find_exception(evidence.log)
        if step:
            conflicts.append(f"exit code 0, but a step ended with exit code {step[1]}: {hidden}")
        if exception:
            conflicts.append(f"exit code 0, but the log holds a traceback, {exception.text}: {hidden}")
            verdict = replace(verdict, state=JobState.FAILED if exception.at_end else verdict.state)
    return replace(verdict, conflicts=conflicts, confidence=Confidence.MEDIUM) if conflicts else verdict


def _with_cause(verdict: RunState, evidence: Evidence) -> RunState:
    """Add the cause of an end that is not simply good: from the log, the script's own words, or the state."""
    if verdict.state is JobState.COMPLETED and not verdict.conflicts:
        return verdict
    cause = logs.find_cause(evidence.log)
    reason = evidence.exit.reason if evidence.exit else ""
    of_state = _cause_of_state(verdict, evidence)
    script_was_killed = verdict.state is JobState.FAILED and verdict.signal and not evidence.exit
    if script_was_killed and cause:  # then the log's last words are what its steps said of that
        return replace(verdict, cause=f"{of_state} {cause}")
    return replace(verdict, cause=cause or reason or of_state)


def _cause_of_state(verdict: RunState, evidence: Evidence) -> str:
    """The cause as far as Slurm's record tells it."""
    slurm = evidence.slurm
    where = f" on {slurm.nodes}" if slurm and slurm.nodes else ""
    if verdict.signal == LAUNCH_FAILED_SIGNAL and Witness.START not in evidence.latest:
        return (
            f"It never started{where}: the folder of its log does not exist, or is not on a file system that the "
            "node sees."
        )
    if verdict.state is JobState.CANCELLED and slurm and slurm.reason.startswith("Dependency"):
        return "The run that it was to follow did not end well."
    if verdict.state is JobState.FAILED:
        number = int(verdict.signal) if verdict.signal.isdigit() else (verdict.exit_code or 0) - 128
        how = f"was killed by signal {number}" if number > 0 else f"exited with code {verdict.exit_code}"
        return f"The script {how}{where}."
    words = {
        JobState.NODE_FAIL: "A node failed",
        JobState.TIMEOUT: "It reached its time limit",
        JobState.PREEMPTED: "It was preempted",
    }
    return f"{words[verdict.state]}{where}." if verdict.state in words else ""


def _name(witness: Witness, job_id: str | None) -> str:
    """The name of a witness; the local runner's answer takes the place of Slurm's."""
    is_local = witness is Witness.SLURM and (job_id or "").startswith(LOCAL_PREFIX)
    return "local runner" if is_local else str(witness)


def _last_sign(records: Iterable[Record]) -> str:
    """The newest record of the job itself; of Slurm's silence only where there is no other."""
    absence = (Witness.GONE, Witness.QUEUE, Witness.SACCT, Witness.LOG)
    newest = max(records, key=lambda record: (record.witness not in absence, record.time), default=None)
    return f"the last sign is {newest.witness}: {_describe(newest)}" if newest else "there is no sign of it"


def _describe(record: Record) -> str:
    """A record's facts and its time, for people."""
    hidden = {"time", "job_id", "task", "restart", "verbatim"}
    names = [field.name for field in fields(record) if field.name not in hidden] + ["restart"]
    values = {name: getattr(record, name) for name in names}
    facts = [f"{name} {value}" for name, value in values.items() if value is not False and value not in (None, "")]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    return f"{', '.join(facts) or 'seen'} at {when}"
