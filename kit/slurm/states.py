"""Job states, and the records of how a job went: one vocabulary for all modules and job scripts.

A *witness* is a source of evidence about a job. Each witness writes *records*: lines of `state/ledger.jsonl`, or small
JSON files that the job's script leaves (`start.<restart>.json`, `exit.<restart>.json`). Records are read by
`parse_record`, which checks their shape, so a damaged or foreign record never hides another one. `kit.slurm.outcome`
judges them.

The job scripts are written in bash and use the same names; a test compares them with this module. The names of the
files are in `kit.slurm.folder`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, StrictBool, TypeAdapter, ValidationError

RECORD_VERSION = 1  # of the records' keys; records without the key `version` were written before it existed


class JobState(StrEnum):
    """Slurm's job states as squeue prints them (squeue(1), JOB STATE CODES), and four that the kit adds."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STAGE_OUT = "STAGE_OUT"
    COMPLETING = "COMPLETING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    REVOKED = "REVOKED"

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"

    LOST = "LOST"  # the job is gone and nothing recorded how it ended
    NOT_SUBMITTED = "NOT SUBMITTED"  # the run has no job
    SUBMITTING = "SUBMITTING"  # sbatch was started, and it is not known whether Slurm has the job
    UNKNOWN = "UNKNOWN"  # a state of a newer Slurm

    @classmethod
    def parse(cls, text: str) -> "JobState":
        """The state from squeue's or sacct's text, such as "RUNNING" or "CANCELLED by 1000"; else UNKNOWN."""
        words = text.split()
        name = words[0].rstrip("+") if words else ""
        return cls(name) if name in cls.__members__ else cls.UNKNOWN

    @property
    def final(self) -> bool:
        """Whether a job in this state has ended; see `may_restart` for PREEMPTED and NODE_FAIL."""
        return self in FINAL_STATES

    @property
    def may_restart(self) -> bool:
        """Whether Slurm may start the same job again after this state, where the job has Requeue=1."""
        return self in PROVISIONAL_STATES


# In order of precedence: an array has the first of these states that one of its tasks has (COMPLETED last).
FINAL_STATES = (
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.NODE_FAIL,
    JobState.PREEMPTED,
    JobState.OUT_OF_MEMORY,
    JobState.BOOT_FAIL,
    JobState.DEADLINE,
    JobState.LOST,
    JobState.COMPLETED,
)
PROVISIONAL_STATES = (JobState.PREEMPTED, JobState.NODE_FAIL)


class Confidence(StrEnum):
    """How well the records prove a state."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Witness(StrEnum):
    """The sources of evidence about a job."""

    SLURM = "slurm"  # squeue has a row of the job
    GONE = "gone"  # squeue answered and has no row of the job
    QUEUE = "queue"  # squeue did not answer
    SACCT = "sacct"  # the accounting database, asked once Slurm had forgotten the job
    SUBMIT = "submit"  # sbatch returned the job id
    START = "start"  # the job's script has started
    EXIT = "exit"  # the job's script has ended
    CANCEL = "cancel"  # the user cancelled it with the kit
    REQUEUE = "requeue"  # the user requeued it with the kit
    HEARTBEAT = "heartbeat"  # the file that the job's script touches every 10 s
    LOG = "log"  # the job's log, or that of one of its ranks
    PROGRESS = "progress"  # what training has written about itself: its phase and its newest step


class ScriptEnd(StrEnum):
    """Why the job's script ended: the key `end` of an exit record, written by the kit's own job script."""

    FINISHED = "finished"  # training came to its last step
    FAILED = "failed"  # the training step ended with an error, or without a result
    NO_PROGRESS = "no_progress"  # three starts without a new checkpoint
    PREEMPTED = "preempted"  # Slurm preempted the job
    TIME_LIMIT = "time_limit"  # Slurm warned that the time limit is near; training saved and stopped
    STOP_REQUESTED = "stop_requested"  # the file state/stop was written; training saved and stopped
    SIGNAL = "signal"  # SIGTERM or SIGINT: scancel, the time limit, or a requeue by Slurm


# ---------------------------------------------------------------------------------------------------------- records


# A number or truth value in a string, or a number in place of a truth value, makes a record unreadable.
Seconds = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0)]
# A state or reason of a newer version does not make a record unreadable.
ReadState = Annotated[JobState | None, BeforeValidator(lambda it: JobState.parse(it) if isinstance(it, str) else it)]
ReadEnd = Annotated[ScriptEnd | None, BeforeValidator(lambda it: ScriptEnd(it) if it in list(ScriptEnd) else None)]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one witness said at one time. A fact that the witness did not give is None or empty.

    time: seconds since the epoch; by the clock of the node for start, exit and heartbeat.
    task: index of the array task; None for a plain job, or for all tasks of an array.
    restart: how many times Slurm had restarted the job (SLURM_RESTART_COUNT).
    """

    witness: ClassVar[Witness]
    types: ClassVar[dict[str, "type[Record]"]] = {}  # by the value of the witness
    time: Seconds
    job_id: str | None = None
    task: Count | None = None
    restart: Count | None = None

    def __init_subclass__(cls, witness: Witness | None = None) -> None:
        if witness:
            cls.witness = witness
            cls.types[witness] = cls

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON-ready values, without the facts that are not known."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        head = {"version": RECORD_VERSION, "time": self.time, "source": str(self.witness), "job_id": self.job_id}
        return head | {name: value for name, value in facts.items() if value not in (None, "") and name not in head}

    def as_line(self) -> str:
        """The record as a line of the ledger."""
        return json.dumps(self.as_dict()) + "\n"


class GoneRecord(Record, witness=Witness.GONE):
    """Slurm answered, and does not know the job any more."""


@dataclass(frozen=True, kw_only=True)
class SubmitRecord(Record, witness=Witness.SUBMIT):
    """sbatch returned the job id. `submission` is that of run.json at that time, which each submission changes."""

    submission: str = ""


class CancelRecord(Record, witness=Witness.CANCEL):
    """The user cancelled the job with the kit."""


class RequeueRecord(Record, witness=Witness.REQUEUE):
    """The user requeued the job with the kit. `restart` is that of the start which follows."""


class HeartbeatRecord(Record, witness=Witness.HEARTBEAT):
    """The modification time of `heartbeat[.<task>]`."""


class LogRecord(Record, witness=Witness.LOG):
    """The newest modification time of the logs."""


@dataclass(frozen=True, kw_only=True)
class ProgressRecord(Record, witness=Witness.PROGRESS):
    """`phase.json` and `progress.json` of the present start; `time` is the later modification time.

    next_s: seconds between two lines of training, as it reported; None where it does not train now, or has not
    reported.
    """

    phase: str = ""
    step: Count | None = None
    next_s: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class QueueRecord(Record, witness=Witness.QUEUE):
    """Slurm did not answer; `note` has its words."""

    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _StateRecord(Record):
    state: ReadState = None
    exit_code: Count | None = None
    signal: str | None = None  # the number of the signal that ended the job; empty: no signal


@dataclass(frozen=True, kw_only=True)
class SlurmRecord(_StateRecord, witness=Witness.SLURM):
    """A row of squeue, or what the local runner says in its place."""

    reason: str = ""
    requeue: StrictBool | None = None  # whether Slurm may start the job again after preemption or the failure of a node
    nodes: str = ""
    verbatim: str = ""  # the line of `scontrol show job -d -o`, of a job that has ended
    again: StrictBool = False  # a later answer was the same: a provisional state is settled
    runner: str = ""  # "local" for the local runner


@dataclass(frozen=True, kw_only=True)
class SacctRecord(_StateRecord, witness=Witness.SACCT):
    """What sacct said. `state` is None where sacct does not know the job."""

    command: str = ""


@dataclass(frozen=True, kw_only=True)
class StartRecord(Record, witness=Witness.START):
    """`start.<restart>[.<task>].json`, written by the job's script before anything else."""

    nodes: str = ""
    checkpoint: str = ""  # the step of the newest checkpoint at that time; empty: none
    log_bytes: Count | None = None  # size of the job's log at that time: what earlier starts have written


class Phase(StrEnum):
    """What a training job does, as it writes it to state/phase.json."""

    STARTING = "starting"  # imports, and the checks before training
    LOADING = "loading"  # the base model
    FIRST_STEP = "first step"  # which compiles where the recipe says so
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"


@dataclass(frozen=True)
class PhaseRecord:
    """The content of state/phase.json: what training does since when (unix time), and whether it compiles."""

    phase: Phase
    since: float
    compiles: bool = False


@dataclass(frozen=True)
class StepReport:
    """The content of state/progress.json: the newest step that training has logged.

    eta_s: seconds that are left. time: unix time. next_s: seconds between two reports.
    """

    step: Count
    max_steps: Count
    eta_s: Seconds
    time: Seconds = 0.0
    next_s: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class ExitRecord(Record, witness=Witness.EXIT):
    """`exit.<restart>[.<task>].json`, written by an EXIT trap of the job's script.

    A job script of the kit writes every key. The trap in a user's own script (witness.sh) writes `exit_code` only: bash
    runs an EXIT trap also when a signal ends it, and the trap then sees the exit code of the command before.
    """

    exit_code: Count
    signal: str | None = None  # "TERM", "INT" or "USR2" where the script caught one, else empty; None: not observed
    end: ReadEnd = None
    requeued: StrictBool | None = None  # whether Slurm accepted `scontrol requeue`: the same job will start again
    reason: str = ""  # a sentence for people

    @property
    def starts_again(self) -> bool:
        """Whether the same job will start again after this end.

        Records from before version 1 do not have the key `requeued`. Their job script composed `reason` and wrote the
        word "requeued" into it when Slurm had accepted the requeue.
        """
        return self.requeued if self.requeued is not None else "requeued" in self.reason


_READERS = {witness: TypeAdapter(kind) for witness, kind in Record.types.items()}


def parse_record(value: object) -> Record | None:
    """A record from JSON values; None for anything that is not a record of a known witness in the right shape.

    Keys that this version does not know are ignored, so records of a newer version are read as far as they go.
    """
    source = value.get("source") if isinstance(value, Mapping) else None
    if not isinstance(source, str) or source not in _READERS:
        return None
    try:
        return _READERS[source].validate_python(value)
    except ValidationError:
        return None


def parse_line(line: str) -> Record | None:
    """A record from a line of the ledger; None for a line that is torn or not a record."""
    try:
        return parse_record(json.loads(line))
    except (ValueError, RecursionError):
        return None
