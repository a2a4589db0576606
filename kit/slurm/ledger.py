"""The ledger of a run: append records, and read the records of all witnesses about the run's present job."""

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kit.slurm.folder import RunFolder, ScriptFile
from kit.slurm.logs import read_end
from kit.slurm.states import (
    HeartbeatRecord,
    Phase,
    ProgressRecord,
    Record,
    SubmitRecord,
    Witness,
    parse_line,
    parse_record,
)

CLOCK_SKEW = 60  # seconds by which the clocks of nodes may differ
MOST_FILE_BYTES = 2**16  # of a start or exit file; the kit's own have about 200
MOST_LEDGER_BYTES = 2**25  # that are read of the end of the ledger; a run of a month has some 2**16


def append(run: RunFolder, record: Record) -> None:
    """Append a record to the ledger: one line, one write, so that lines of two processes do not mix.

    Raises OSError where it cannot be written. A full disk may have taken the beginning of a line, which then ends where
    the next one begins.
    """
    folder = run.state_folder
    folder.path.mkdir(0o755, exist_ok=True)
    handle = os.open(folder.ledger, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        line, size = record.as_line().encode(), os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.ledger))
    finally:
        os.close(handle)


def read_records(run: RunFolder) -> list[Record]:
    """The records about the run's present job: of the ledger, of the script's files, of heartbeats and of training.

    Lines of the ledger keep their order, which is true also where the clock of a host that wrote some was wrong. Lines
    and files that are damaged or of another shape are ignored.
    """
    info = run.info
    by_script = sorted((record for _, record in _script_records(run)), key=lambda record: record.restart or 0)
    found = [*_since_submission(list(_ledger_records(run)), info), *by_script, *_heartbeats(run), *_progress(run)]
    return [record for record in found if record.job_id == info["job_id"]]


def _since_submission(lines: list[Record], info: Mapping[str, Any]) -> list[Record]:
    """The lines since the last submission: Slurm gives job ids again once they wrap, so the id is not enough to tell.

    Runs that were submitted before submissions had a name in the ledger have their time only.
    """
    name = info.get("submission")
    for index, record in enumerate(lines):
        if name and isinstance(record, SubmitRecord) and record.submission == name:
            return lines[index:]
    return [record for record in lines if record.time >= (info.get("submitted") or 0) - CLOCK_SKEW]


def read_script_records(run: RunFolder) -> list[Record]:
    """What the script of the last job has left; `archive` moves the files of earlier jobs into the ledger."""
    return [record for _, record in _script_records(run)]


def read_all_records(run: RunFolder) -> list[Record]:
    """The records about every job of the run, oldest first."""
    found = [*(record for _, record in _script_records(run)), *_ledger_records(run), *_heartbeats(run)]
    return sorted(found, key=lambda record: record.time)


def by_task(records: Iterable[Record], tasks: Iterable[int | None]) -> dict[int | None, list[Record]]:
    """The records about each array task, by index; of a plain job under None. Some records are about every task."""
    found: dict[int | None, list[Record]] = {task: [] for task in tasks}
    for record in records:
        for task, own in found.items():
            if record.task is None or record.task == task:
                own.append(record)
    return found


def archive(run: RunFolder) -> None:
    """Before the next submission: move the records of the last job's script into the ledger, under its job id."""
    for file, record in list(_script_records(run)):
        append(run, record)
        file.path.unlink()
    for path, _ in list(run.state_folder.heartbeats()):
        path.unlink()


def _ledger_records(run: RunFolder) -> Iterator[Record]:
    path = run.state_folder.ledger
    for line in read_end(path, MOST_LEDGER_BYTES).splitlines() if path.is_file() else ():
        record = parse_line(line)
        if record is not None:
            yield record


def _script_records(run: RunFolder) -> Iterator[tuple[ScriptFile, Record]]:
    for file in run.state_folder.script_files():
        if not file.path.is_file():
            continue
        with contextlib.suppress(ValueError, RecursionError):  # not JSON
            facts = json.loads(read_end(file.path, MOST_FILE_BYTES))
            named = {"source": file.witness, "restart": file.restart, "task": file.task}
            record = parse_record(facts | named if isinstance(facts, dict) else None)
            if record is not None:
                yield file, record


def _heartbeats(run: RunFolder) -> Iterator[Record]:
    for path, task in run.state_folder.heartbeats():
        with contextlib.suppress(FileNotFoundError):
            yield HeartbeatRecord(time=path.stat().st_mtime, job_id=run.job_id, task=task)


def _progress(run: RunFolder) -> Iterator[Record]:
    """What training has written since the newest start. The times are those of the file system, as the heartbeat's."""
    folder = run.state_folder
    with contextlib.suppress(OSError):
        starts = (file.path for file in folder.script_files() if file.witness is Witness.START)
        began = max((path.stat().st_mtime for path in starts), default=0.0)
        written, phase = folder.phase.stat().st_mtime, folder.read_phase()
        if phase is None or written < began:
            return
        report, next_s, step = folder.read_report(), None, None
        if report is not None:
            reported = folder.progress.stat().st_mtime
            step = report.step if reported >= began else None
            next_s = report.next_s if phase.phase is Phase.TRAINING else None
            written = max(written, reported)
        yield ProgressRecord(time=written, job_id=run.job_id, phase=phase.phase.value, step=step, next_s=next_s)
