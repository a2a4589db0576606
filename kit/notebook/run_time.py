"""How long a run has run: every start of its jobs counts, also those that were interrupted and requeued."""

from collections.abc import Sequence

from kit.slurm.ledger import read_all_records
from kit.slurm.run import Run
from kit.slurm.states import ExitRecord, Record, SacctRecord, SlurmRecord, StartRecord


def seconds_run(run: Run, ended: bool, now: float) -> float | None:
    """The sum over all starts of all jobs and tasks of this run; None if none has started. `now`: seconds since 1970.

    A start ends with its exit record; without one, when Slurm gave a final state; without that, at the last record
    of it. The last start of a run that has not ended lasts until now.
    """
    records = read_all_records(run)
    starts = [record for record in records if isinstance(record, StartRecord)]
    if not starts:
        return None
    return sum(_end(start, starts, records, None if ended else now) - start.time for start in starts)


def _end(start: StartRecord, starts: Sequence[StartRecord], records: Sequence[Record], now: float | None) -> float:
    """When this start ended; `now` if it is the last one of its task, and nothing says that it has ended."""
    later = [other.time for other in starts if other.task == start.task and other.time > start.time]
    until = min(later, default=float("inf"))
    signs = [
        record
        for record in records
        if record.job_id == start.job_id and record.task in (None, start.task) and start.time <= record.time < until
    ]
    ends = [record.time for record in signs if _is_end(record, start)]
    if ends:
        return min(ends)
    if now is not None and not later:
        return now
    return max(record.time for record in signs)


def _is_end(record: Record, start: StartRecord) -> bool:
    if isinstance(record, ExitRecord):
        return record.restart == start.restart
    return isinstance(record, SlurmRecord | SacctRecord) and record.state is not None and record.state.final
