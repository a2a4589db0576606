"""Collect evidence about runs: ask Slurm or the local runner, update the ledgers, and let outcome.py decide."""

import contextlib
import getpass
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.slurm import client, ledger, local, logs, outcome
from kit.slurm.client import JobRow, Queue
from kit.slurm.folder import LOCAL_PREFIX, RunFolder
from kit.slurm.outcome import RunState
from kit.slurm.states import (
    CancelRecord,
    Confidence,
    ExitRecord,
    GoneRecord,
    JobState,
    LogRecord,
    QueueRecord,
    Record,
    RequeueRecord,
    SacctRecord,
    SlurmRecord,
    StartRecord,
    SubmitRecord,
)

LOG_LINES = 10_000  # of the end of a job's log that are searched for the cause
SBATCH_S = 60  # seconds after which an sbatch has ended, by itself or by client.command
SACCT_PATIENCE = 600  # seconds after Slurm forgot a job in which sacct may still get its record
TASK_WAITS = 2**32 - 2  # NO_VAL: the number in the log's name of array tasks that have not started


@dataclass(frozen=True)
class News:
    """What `collect` found. silence: Slurm's words where it does not answer.

    unwritten: records that no ledger could take, for the reason `unwritable`: a full disk, or another user's run.
    """

    silence: str = ""
    unwritable: str = ""
    unwritten: tuple[Record, ...] = ()


def state_of(run: RunFolder) -> RunState:
    """The state of the run now, of an array that of all its tasks together."""
    tasks = task_states(run)
    return tasks.pop(None, None) or outcome.combine_tasks(run.name, run.job_id, tasks)


def task_states(run: RunFolder) -> dict[int | None, RunState]:
    """The state of each array task by index; of a plain job under None."""
    news = collect([run])
    records, job, now = ledger.read_records(run), run.job_id, time.time()
    if job is None:
        return {None: _without_job(run)}
    records += [record for record in news.unwritten if record.job_id == job]
    if news.silence:
        note = f"Slurm does not answer, and is asked again soon: {news.silence}"
        records.append(QueueRecord(time=now, job_id=job, note=note))
    found: dict[int | None, RunState] = {}
    task_logs = run.task_logs
    for task, own in ledger.by_task(records, task_logs).items():
        log = logs.last_lines(task_logs[task], LOG_LINES, _log_start(own)) if task_logs[task].is_file() else ""
        written = _log_record(run.logs() if task is None else [task_logs[task]])
        state = outcome.resolve(run.name, job, [*own, *written], log, now)
        found[task] = replace(state, evidence=[*state.evidence, news.unwritable]) if news.unwritable else state
    return found


def _log_record(paths: Iterable[Path]) -> list[Record]:
    """A list with one record of when the newest of these logs was written; empty without a log."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return [LogRecord(time=max(times))] if times else []


def _log_start(records: list[Record]) -> int:
    """Where in the log the present start begins: the starts before a requeue have written to the same log."""
    starts = [record for record in records if isinstance(record, StartRecord)]
    return max(starts, key=lambda record: record.restart or 0).log_bytes or 0 if starts else 0


def _without_job(run: RunFolder) -> RunState:
    """NOT SUBMITTED; SUBMITTING with low confidence where sbatch was started and its answer did not arrive.

    Once sbatch can no longer send the job, and Slurm does not have it, it was not submitted.
    """
    state = outcome.resolve(run.name, None, [], "", time.time())
    submitted = run.info.get("submitted")
    if not submitted:
        return state
    unheard, queue = "sbatch was started, but its answer did not arrive; Slurm", client.queue()
    if queue.time > submitted + SBATCH_S and not queue.trouble:
        evidence = [*state.evidence, f"{unheard} does not have the job, and no file of it exists"]
        return replace(state, confidence=Confidence.MEDIUM, evidence=evidence)
    evidence = [*state.evidence, f"{unheard} may have the job; Slurm is asked again"]
    return replace(state, state=JobState.SUBMITTING, confidence=Confidence.LOW, evidence=evidence)


def collect(runs: Iterable[RunFolder]) -> News:
    """Write what Slurm, or the local runner, says of each run now into its ledger; only what is new."""
    open_jobs = [job for run in runs for job in _jobs(run) if job.open]
    in_slurm = [job for job in open_jobs if not job.is_local]
    queue = client.queue(max(job.last_event for job in in_slurm)) if in_slurm else Queue()
    for job in open_jobs:
        _write_news(job, _ask(job, queue))
    _ask_sacct([job for job in in_slurm if job.gone], queue)
    unwritten = tuple(record for job in open_jobs for record in job.unwritten)
    return News(queue.trouble, next((job.unwritable for job in open_jobs if job.unwritable), ""), unwritten)


def is_settled(run: RunFolder) -> bool:
    """Whether neither Slurm nor its accounting can have news of the run's job."""
    return not any(job.open for job in _jobs(run))


def note_job(run: RunFolder, job_id: str) -> None:
    """Record the run's job id; of a user's own script also its array tasks, and where its log is."""
    facts: dict[str, Any] = {}
    if not run.trains:
        rows = client.squeue("-j", job_id).rows
        facts["tasks"] = sorted(row.task for row in rows.values() if row.task is not None)
        log = _log_pattern(client.job_records([job_id]).get(job_id, ""))
        if log:
            facts["log"] = str(log.relative_to(run.path) if log.is_relative_to(run.path) else log)
    submission = str(run.info.get("submission") or "")
    ledger.append(run, SubmitRecord(time=time.time(), job_id=job_id, submission=submission))
    run.note(job_id=job_id, **facts)  # last: from now on others ask about the job


def _log_pattern(record: str) -> Path | None:
    """The path of the log from `scontrol show job`, with %a in place of the array index."""
    log = re.search(r" StdOut=(.*?) \w+=", record)
    if not log:
        return None
    task = re.search(r" ArrayTaskId=(\d+) ", record)
    index = task[1] if task else TASK_WAITS
    return Path(re.sub(rf"(?<=_){index}(?=\.)", "%a", log[1]))


# -------------------------------------------------------------------------------------------------- one job at a time


@dataclass
class _Job:
    """A job or an array task, and what is recorded of it. gone: Slurm does not know it any more.

    unwritten: new records that the ledger could not take, for the reason `unwritable`.
    """

    run: RunFolder
    info: dict[str, Any]
    task: int | None
    records: list[Record]
    gone: bool = False
    unwritten: list[Record] = field(default_factory=list)
    unwritable: str = ""

    @property
    def id(self) -> str:
        """The id as Slurm writes it, such as 12 or 12_3."""
        job: str = self.info["job_id"]
        return job if self.task is None else f"{job}_{self.task}"

    @property
    def is_local(self) -> bool:
        return self.id.startswith(LOCAL_PREFIX)

    @property
    def script(self) -> str | None:
        return self.info.get("script")

    def newest(self, *kinds: type[Record]) -> Record | None:
        """The newest record of one of these kinds."""
        return next((record for record in reversed(self.records) if isinstance(record, kinds)), None)

    def time_of(self, *kinds: type[Record]) -> float:
        """When the newest record of one of these kinds was written; 0 where there is none."""
        record = self.newest(*kinds)
        return record.time if record else 0.0

    @property
    def has_started(self) -> bool:
        """Whether the job's script has left a record, or Slurm has said that it runs or ran."""
        said = {record.state for record in self.records if isinstance(record, SlurmRecord)}
        return bool(self.newest(StartRecord, ExitRecord) or said - {None, JobState.PENDING})

    @property
    def last_event(self) -> float:
        """When something last happened to the job that Slurm has news about."""
        return self.time_of(SubmitRecord, StartRecord, ExitRecord, CancelRecord, RequeueRecord)

    @property
    def open(self) -> bool:
        """Whether Slurm, or sacct, which gets its records later, may still have news."""
        word = self.newest(SlurmRecord, GoneRecord, SacctRecord, RequeueRecord)
        if isinstance(word, GoneRecord | SacctRecord):
            known = isinstance(word, SacctRecord) and word.state is not None and word.state.final
            return not known and time.time() - self.time_of(GoneRecord) < SACCT_PATIENCE
        if not isinstance(word, SlurmRecord) or word.state is None or not word.state.final:
            return True
        if word.restart is not None and max(record.restart or 0 for record in self.records) > word.restart:
            return True  # it starts again; two processes that ask at once may record the earlier end after that
        # A record without the key `requeue` does not say whether the job may start again.
        return word.state.may_restart and word.requeue is not False and not word.again

    def append(self, record: Record) -> None:
        """Write a record about this job into the ledger, or keep it in `unwritten`."""
        record = replace(record, job_id=self.info["job_id"], task=self.task)
        try:
            ledger.append(self.run, record)
        except OSError as error:
            self.unwritten.append(record)
            self.unwritable = f"what Slurm says cannot be written into the ledger: {error.strerror}"


def _jobs(run: RunFolder) -> Iterator[_Job]:
    """The run's job, or each task of its array; nothing before Slurm has the job."""
    info = run.info
    if info["job_id"] is None and info.get("submitted"):
        _find_unheard_job(run, info, client.queue(info["submitted"]).rows.values())
        info = run.info
    if info["job_id"] is not None:
        for task, records in ledger.by_task(ledger.read_records(run), info.get("tasks") or [None]).items():
            yield _Job(run, info, task, records)


def _find_unheard_job(run: RunFolder, info: dict[str, Any], rows: Iterable[JobRow]) -> None:
    """Find a job that Slurm took though sbatch's answer did not arrive: by its script, or by the file that it left."""
    in_slurm = [row.array_job for row in rows if row.command == info.get("script")]
    started = [record.job_id for record in ledger.read_script_records(run) if isinstance(record, StartRecord)]
    for job in [*in_slurm, *started]:
        if job:
            note_job(run, job)
            return


def settle_submission(run: RunFolder) -> None:
    """Find the job of a submission whose answer did not arrive: by squeue, or by what the job has left.

    Raises KitError while Slurm does not answer: the job may exist, and a second one must not start in the folder.
    """
    info = run.info
    if info["job_id"] is not None or not info.get("submitted"):
        return
    answer = client.squeue("-u", str(os.getuid()))
    if answer.trouble:
        raise KitError(
            f"It is not known whether Slurm has a job of {run.name}, since sbatch's answer did not arrive and Slurm "
            f"does not answer now ({answer.trouble}). Try again when `scontrol ping` says UP."
        )
    _find_unheard_job(run, info, answer.rows.values())


def rows_in_slurm(run: RunFolder) -> list[JobRow]:
    """Slurm's rows of the run's job or array tasks now, past the shared answer; empty where it does not know the job.

    Ended jobs are among them until Slurm forgets them. Raises KitError where Slurm does not answer.
    """
    info = run.info
    if info["job_id"] is None or run.is_local:
        return []
    answer = client.squeue("-j", info["job_id"])
    if answer.trouble and not answer.no_cluster and not client.is_forgotten(answer):
        raise KitError(f"It is not known whether job {run.job_id} of {run.name} has ended: {answer.trouble}.")
    return [row for row in answer.rows.values() if row.command == info.get("script")]


def _ask(job: _Job, queue: Queue) -> SlurmRecord | GoneRecord | None:
    """What Slurm, or the local runner, says of the job; None where Slurm was not asked since it was submitted."""
    now = time.time()
    if job.is_local:
        alive = local.is_running(job.run)
        return SlurmRecord(time=now, state=JobState.RUNNING) if alive else GoneRecord(time=now)
    submitted, requeued = job.time_of(SubmitRecord), job.time_of(RequeueRecord)
    # Then it is not known whether the shared answer is a later one.
    clock_was_ahead = max(submitted, requeued) > now + ledger.CLOCK_SKEW
    asked, answer = queue.time, queue
    if clock_was_ahead or job.info.get("user") != getpass.getuser():  # the shared answer is about this user's jobs
        asked, answer = now, client.squeue("-j", job.id)
    row = answer.rows.get(job.id)
    if not clock_was_ahead and asked < requeued:
        return None
    if row and row.command == (job.script or row.command):  # else another job has the id by now
        return replace(row.said, time=now, job_id=job.info["job_id"], task=job.task)
    if (not clock_was_ahead and asked < submitted) or (answer.trouble and not client.is_forgotten(answer)):
        return None
    # A job that started and ended since it was submitted would still be remembered; one cancelled while pending is not.
    remembered = not clock_was_ahead and asked < submitted + (queue.min_job_age or math.inf)
    if job.id in queue.left or (not job.has_started and remembered and not row):
        return SlurmRecord(time=now, state=JobState.CANCELLED, reason="it left the queue before it started")
    return GoneRecord(time=now)


def _write_news(job: _Job, said: SlurmRecord | GoneRecord | None) -> None:
    if said is None:
        return
    if isinstance(said, GoneRecord):
        job.gone = True
        if not isinstance(job.newest(SlurmRecord, GoneRecord), GoneRecord):
            job.append(said)
        return
    last = job.newest(SlurmRecord)
    if not isinstance(last, SlurmRecord) or not _same(last, said):
        job.append(said)
    elif said.state and said.state.may_restart and not last.again:  # a second answer, and nothing has changed
        job.append(replace(said, again=True))


def _same(last: SlurmRecord, said: SlurmRecord) -> bool:
    """Whether two answers differ in nothing but their time."""
    return replace(last, time=said.time, job_id=said.job_id, task=said.task, again=said.again) == said


def _ask_sacct(gone: list[_Job], queue: Queue) -> None:
    """Ask the accounting database about jobs that Slurm has forgotten since it was asked last."""
    if not queue.accounting:
        return
    asked = [job for job in gone if job.time_of(SacctRecord) < queue.time]
    answers = client.sacct([job.id for job in asked], time.time())
    for job in asked:
        answer = answers.get(job.id)
        ours = answer is not None and str(job.script) in answer.command  # else another job had the id
        job.append(answer if answer and ours else SacctRecord(time=time.time()))
