"""Collect evidence about runs: ask Slurm or the local runner, update the ledgers, and let outcome.py decide."""

import getpass
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit.slurm import client, ledger, local, logs, outcome
from kit.slurm.client import Queue
from kit.slurm.folder import LOCAL_PREFIX, RunFolder
from kit.slurm.outcome import RunState
from kit.slurm.states import (
    CancelRecord,
    Confidence,
    ExitRecord,
    GoneRecord,
    JobState,
    QueueRecord,
    Record,
    RequeueRecord,
    SacctRecord,
    SlurmRecord,
    StartRecord,
    SubmitRecord,
)

LOG_LINES = 10_000  # of the end of a job's log that are searched for the cause
SACCT_PATIENCE = 600  # seconds after Slurm forgot a job in which sacct may still get its record
TASK_WAITS = 2**32 - 2  # NO_VAL: the number in the log's name of array tasks that have not started


def state_of(run: RunFolder) -> RunState:
    """The state of the run now, of an array that of all its tasks together."""
    tasks = task_states(run)
    return tasks.pop(None, None) or outcome.combine_tasks(run.name, run.job_id, tasks)


def task_states(run: RunFolder) -> dict[int | None, RunState]:
    """The state of each array task by index; of a plain job under None."""
    trouble = collect([run])
    records, job, now = ledger.read_records(run), run.job_id, time.time()
    if job is None:
        return {None: _without_job(run)}
    if trouble:
        records.append(QueueRecord(time=now, job_id=job, note=trouble))
    found: dict[int | None, RunState] = {}
    task_logs = run.task_logs
    for task, own in ledger.by_task(records, task_logs).items():
        log = logs.last_lines(task_logs[task], LOG_LINES) if task_logs[task].is_file() else ""
        found[task] = outcome.resolve(run.name, job, own, log, now)
    return found


def _without_job(run: RunFolder) -> RunState:
    """NOT SUBMITTED; with low confidence where sbatch was started and its answer did not arrive."""
    state = outcome.resolve(run.name, None, [], "", time.time())
    if not run.info.get("submitted"):
        return state
    unheard = "sbatch was started, but its answer did not arrive; Slurm may have the job, and is asked for it"
    return replace(state, confidence=Confidence.LOW, evidence=[*state.evidence, unheard])


def collect(runs: Iterable[RunFolder]) -> str:
    """Write what Slurm, or the local runner, says of each run now into its ledger; only what is new.

    Returns why it could not: Slurm's words where it does not answer, a ledger that cannot be written.
    """
    open_jobs = [job for run in runs for job in _jobs(run) if job.open]
    in_slurm = [job for job in open_jobs if not job.is_local]
    queue = client.queue(max(job.last_event for job in in_slurm)) if in_slurm else Queue()
    try:
        for job in open_jobs:
            _write_news(job, _ask(job, queue))
        _ask_sacct([job for job in in_slurm if job.gone], queue)
    except OSError as error:
        return f"the ledger cannot be written: {error.strerror}"
    return f"Slurm does not answer, and is asked again soon: {queue.trouble}" if queue.trouble else ""


def note_job(run: RunFolder, job_id: str) -> None:
    """Record the run's job id; of a user's own script also its array tasks, and where its log is."""
    facts: dict[str, Any] = {}
    if not run.trains:
        rows = client.squeue("-j", job_id).rows
        facts["tasks"] = sorted(int(job.partition("_")[2]) for job in rows if "_" in job)
        log = _log_pattern(client.job_records([job_id]).get(job_id, ""))
        if log:
            facts["log"] = str(log.relative_to(run.path) if log.is_relative_to(run.path) else log)
    ledger.append(run, SubmitRecord(time=time.time(), job_id=job_id))
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
    """A job or an array task, and what is recorded of it. gone: Slurm does not know it any more."""

    run: RunFolder
    info: dict[str, Any]
    task: int | None
    records: list[Record]
    gone: bool = False

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
        start = self.newest(StartRecord)
        if start and word.restart is not None and (start.restart or 0) > word.restart:
            return True  # it has started again; two processes that ask at once may record the earlier end after that
        # A record without the key `requeue` does not say whether the job may start again.
        return word.state.may_restart and word.requeue is not False and not word.again

    def append(self, record: Record) -> None:
        """Write a record about this job into the ledger."""
        ledger.append(self.run, replace(record, job_id=self.info["job_id"], task=self.task))


def _jobs(run: RunFolder) -> Iterator[_Job]:
    """The run's job, or each task of its array; nothing before Slurm has the job."""
    info = run.info
    if info["job_id"] is None and info.get("submitted"):
        _find_unheard_job(run, info)
        info = run.info
    if info["job_id"] is not None:
        for task, records in ledger.by_task(ledger.read_records(run), info.get("tasks") or [None]).items():
            yield _Job(run, info, task, records)


def _find_unheard_job(run: RunFolder, info: dict[str, Any]) -> None:
    """Find the job by its script, where sbatch's answer did not arrive but Slurm may have taken the job."""
    for row in client.queue(info["submitted"]).rows.values():
        if row.command == info.get("script"):
            note_job(run, row.array_job)
            return


def _ask(job: _Job, queue: Queue) -> SlurmRecord | GoneRecord | None:
    """What Slurm, or the local runner, says of the job; None where Slurm was not asked since it was submitted."""
    now = time.time()
    if job.is_local:
        alive = local.is_running(job.run)
        return SlurmRecord(time=now, state=JobState.RUNNING) if alive else GoneRecord(time=now)
    rows, trouble = queue.rows, queue.trouble
    if job.info.get("user") != getpass.getuser():  # not among this user's jobs
        rows, trouble, _ = client.squeue("-j", job.id)
        trouble = "" if "Invalid job id" in trouble else trouble  # slurm_errno.c: squeue's answer for a forgotten job
    elif queue.time < job.time_of(RequeueRecord):  # an answer from before it was requeued
        return None
    row = rows.get(job.id)
    if row and row.command == (job.script or row.command):  # else another job has the id by now
        return row.as_record(now, job.info["job_id"], job.task)
    submitted = job.time_of(SubmitRecord)
    if trouble or queue.time < submitted:
        return None
    never_started = not job.newest(StartRecord, ExitRecord)
    # A job that started and ended since it was submitted would still be remembered; one cancelled while pending is not.
    remembered = queue.time < submitted + (queue.min_job_age or math.inf)
    if job.id in queue.left or (never_started and remembered and not row):
        return SlurmRecord(time=now, state=JobState.CANCELLED, reason="it left the queue before it started")
    return GoneRecord(time=now)


def _write_news(job: _Job, said: SlurmRecord | GoneRecord | None) -> None:
    if said is None:
        return
    if isinstance(said, GoneRecord):
        job.gone = True
        if job.time_of(GoneRecord) <= job.time_of(SlurmRecord):
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
