"""What the evidence about a job shows: the newest record of each witness, and the signs that the verdict depends on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from functools import cached_property
from typing import TypeVar

from kit.slurm import logs
from kit.slurm.logs import SlurmKill
from kit.slurm.states import (
    CancelRecord,
    ExitRecord,
    GoneRecord,
    HeartbeatRecord,
    JobState,
    LogRecord,
    ProgressRecord,
    Record,
    RequeueRecord,
    SacctRecord,
    SlurmRecord,
    Witness,
)

SILENT_AFTER = 120  # seconds without a heartbeat (one every 10) or log line after which a forgotten job counts as gone
STALLED_AFTER = 300  # seconds without a word of training, and ...
STALLED_FACTOR = 10  # ... how many times the usual interval, after which it stalls
AnyRecord = TypeVar("AnyRecord", bound=Record)


class Sign(Flag):
    """What the evidence about the present start of a job shows."""

    NOTHING = 0
    FINAL = auto()  # Slurm or sacct names a final state
    NO_EXIT_CODE = auto()  # ... without an exit code: the job left the queue before it started, or the record is lost
    LIVE = auto()  # Slurm's newest answer has the job in a state that is not final
    RUNNING = auto()  # ... and that is RUNNING, or PENDING where the job's script has started since
    GONE = auto()  # Slurm answered, and does not know the job any more
    SILENT = auto()  # Slurm does not answer
    SUBMITTED = auto()  # sbatch returned the job id
    STARTED = auto()  # the job's script has started
    HEARTBEAT = auto()  # the job's script was alive, or wrote into a log, within SILENT_AFTER seconds
    STALE = auto()  # Slurm says RUNNING, and the script has had a heartbeat, but none within SILENT_AFTER seconds
    STALLED = auto()  # Slurm says RUNNING, and the script lives, but training has written nothing for long
    EXIT = auto()  # the job's script has ended
    ENDED = auto()  # ... it will not start again, and Slurm cannot say more, since it is gone or silent
    NONZERO = auto()  # ... with an exit code other than 0
    SIGNAL_CODE = auto()  # ... with an exit code above 128: a signal, and its sender is not known
    TRAP_ONLY = auto()  # ... with exit code 0 by an EXIT trap that does not see signals (see ExitRecord)
    KILLED = auto()  # the log has Slurm's line that it ended the job
    OUT_OF_MEMORY = auto()  # the log has Slurm's line that a process was killed for its memory
    CANCEL = auto()  # the user cancelled the job with the kit


@dataclass(frozen=True)
class Evidence:
    """The newest record of each witness about the present start of a job, and the log of that start."""

    latest: Mapping[Witness, Record]
    log: str
    now: float

    @classmethod
    def of(cls, records: Iterable[Record], log: str, now: float) -> "Evidence":
        """What counts of the records: those of an earlier start do not. Lines of the ledger are in their order."""
        records = _since_requeue(list(records))
        restart = max((record.restart or 0 for record in records), default=0)
        latest: dict[Witness, Record] = {}
        for record in records:
            if record.restart in (None, restart):
                latest.pop(record.witness, None)  # so that the order is that of the newest records
                latest[record.witness] = record
        start = latest.get(Witness.START)
        return cls(latest, logs.since_start(log, start.time) if start else log, now)

    def newest(self, kind: type[AnyRecord]) -> AnyRecord | None:
        """The newest record of a kind."""
        record = self.latest.get(kind.witness)
        return record if isinstance(record, kind) else None

    @property
    def slurm(self) -> SlurmRecord | None:
        """Slurm's newest answer about the job."""
        return self.newest(SlurmRecord)

    @property
    def sacct(self) -> SacctRecord | None:
        """The accounting database's answer."""
        return self.newest(SacctRecord)

    @property
    def exit(self) -> ExitRecord | None:
        """The record of the script's end."""
        return self.newest(ExitRecord)

    @property
    def final(self) -> SlurmRecord | SacctRecord | None:
        """The record in which Slurm, or else sacct, names a final state."""
        named = [record for record in (self.slurm, self.sacct) if record and record.state and record.state.final]
        return named[0] if named else None

    @property
    def gone(self) -> bool:
        """Whether Slurm did not know the job any more when it was asked last."""
        answers = [witness for witness in self.latest if witness in (Witness.SLURM, Witness.GONE)]
        return answers[-1:] == [Witness.GONE]

    @property
    def live_state(self) -> JobState | None:
        """The state of a job that Slurm knows and that has not ended."""
        if self.final or self.gone or self.slurm is None:
            return None
        has_started = Witness.START in self.latest
        pending = self.slurm.state is JobState.PENDING
        return JobState.RUNNING if pending and has_started else self.slurm.state  # it has started since Slurm was asked

    @property
    def stalled_s(self) -> float:
        """Seconds since the last word of a training that should have logged again long ago; 0 of all others.

        Counted up to the newest heartbeat, so the clock of the machine that asks has no effect.
        """
        beat, progress = self.newest(HeartbeatRecord), self.newest(ProgressRecord)
        if beat is None or progress is None or progress.next_s is None or self.live_state is not JobState.RUNNING:
            return 0.0
        silence = beat.time - progress.time
        return silence if silence > max(STALLED_AFTER, STALLED_FACTOR * progress.next_s) else 0.0

    @cached_property
    def kill(self) -> SlurmKill | None:
        """Slurm's line in the log that it ended the job."""
        return logs.find_slurm_kill(self.log)

    @property
    def signs(self) -> Sign:
        """What the evidence shows, for the table of `kit.slurm.outcome`."""
        beat = self.newest(HeartbeatRecord)
        alive = any(
            sign is not None and abs(self.now - sign.time) < SILENT_AFTER for sign in (beat, self.newest(LogRecord))
        )
        shown = {
            Sign.FINAL: self.final is not None,
            Sign.NO_EXIT_CODE: self.final is not None and self.final.exit_code is None,
            Sign.LIVE: self.live_state is not None,
            Sign.RUNNING: self.live_state is JobState.RUNNING,
            Sign.GONE: self.gone,
            Sign.SILENT: Witness.QUEUE in self.latest,
            Sign.SUBMITTED: Witness.SUBMIT in self.latest,
            Sign.STARTED: Witness.START in self.latest,
            Sign.HEARTBEAT: alive,
            Sign.STALE: beat is not None and not alive and self.live_state is JobState.RUNNING,
            Sign.STALLED: self.stalled_s > 0,
            Sign.KILLED: self.kill is not None,
            Sign.OUT_OF_MEMORY: logs.was_oom_killed(self.log),
            Sign.CANCEL: Witness.CANCEL in self.latest,
        } | self._exit_signs()
        signs = Sign.NOTHING
        for sign, present in shown.items():
            signs |= sign if present else Sign.NOTHING
        return signs

    def _exit_signs(self) -> dict[Sign, bool]:
        if self.exit is None:
            return {}
        slurm_says_no_more = self.gone or Witness.QUEUE in self.latest
        code = self.exit.exit_code
        return {
            Sign.EXIT: True,
            Sign.ENDED: slurm_says_no_more and not self.exit.starts_again,
            Sign.NONZERO: code > 0,
            Sign.SIGNAL_CODE: code > 128,
            Sign.TRAP_ONLY: code == 0 and self.exit.signal is None,
        }


def _since_requeue(records: list[Record]) -> list[Record]:
    """Without what concerned the job before the user requeued it; records of its starts have the start's number."""
    requeued = max((index for index, record in enumerate(records) if isinstance(record, RequeueRecord)), default=-1)
    of_before = CancelRecord | GoneRecord | SacctRecord
    return [record for index, record in enumerate(records) if index > requeued or not isinstance(record, of_before)]
