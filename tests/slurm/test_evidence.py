import json
import os
import resource
import subprocess
import time
from types import SimpleNamespace

import pytest

from kit.errors import InputError
from kit.slurm import evidence, submit, watcher
from kit.slurm.folder import RunFolder
from kit.slurm.ledger import archive, read_records
from kit.slurm.run import Run
from kit.slurm.runs import runs
from kit.slurm.states import (
    ExitRecord,
    JobState,
    QueueRecord,
    RequeueRecord,
    ScriptEnd,
    SlurmRecord,
    StartRecord,
    SubmitRecord,
    parse_record,
)
from tests.conftest import add_record


@pytest.fixture
def run(local):
    """A run whose script has ended with exit code 3. No Slurm answers."""
    made = Run.create_for_script("#!/bin/sh\n", local, "own")
    made.note(job_id="7", submitted=time.time())
    add_record(made, SubmitRecord)
    left = {"job_id": "7", "time": time.time(), "exit_code": 3, "signal": ""}
    (made.state_folder.path / "exit.0.json").write_text(json.dumps(left))
    return made


def test_without_slurm_the_records_of_the_script_count(run):
    state = run.state
    assert (state.state, state.exit_code, state.confidence) == ("FAILED", 3, "high")
    assert any("Slurm does not answer, and is asked again soon" in line for line in state.evidence)


FOREIGN = {
    "exit.0.copy.json": '{"job_id": "7", "time": 9e9, "exit_code": 0}',
    "exit.x.json": '{"exit_code": 0}',
    "foo.bar.json": "{}",
    "exit.1.json": "[]",
    "exit.2.json": '{"job_id": "7", "time": 9e9}',
    "exit.3.json": '{"job_id": "7", "time": "now", "exit_code": 0}',
    "exit.4.json": "{",
    "start.9.json": '{"job_id": "7", "time": null}',
    "heartbeat.x": "",
    "heartbeat.copy": "",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_or_damaged_file_among_the_state_files_is_ignored(run, name):
    (run.state_folder.path / name).write_text(FOREIGN[name])
    state = run.state
    assert (state.state, state.exit_code) == ("FAILED", 3)
    archive(run)  # before the run is submitted again
    assert (run.state_folder.path / name).exists()


@pytest.mark.parametrize(
    "line", ["5", "{}", "[]", '"x"', '{"source": "slurm", "time": "1", "job_id": "7"}', '{"source": "exit"', "\x00\xff"]
)
def test_a_damaged_line_of_the_ledger_does_not_affect_other_lines(run, line):
    with run.state_folder.ledger.open("a") as ledger:
        ledger.write(f"{line}\n")
    add_record(run, SlurmRecord, state=JobState.TIMEOUT, exit_code=0)
    assert run.state.state == "TIMEOUT"


def test_a_state_file_that_is_not_a_regular_file_is_not_read(run):
    os.mkfifo(run.state_folder.path / "exit.1.json")
    (run.state_folder.path / "start.2.json").mkdir()
    assert run.state.exit_code == 3


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "{", '{"job_id": 12}', '"x"', '{"job_id": "7", "tasks": 5}', '{"job_id": null, "submitted": "now"}'],
)
def test_a_run_with_a_damaged_run_json_is_named_and_other_runs_are_listed(run, local, text):
    bad = Run.create_for_script("#!/bin/sh\n", local, "bad")
    (bad.path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"bad-.*run\.json"):
        evidence.state_of(bad)
    assert [row["run"] for row in runs().as_dict()["runs"]] == [str(run.path)]


def test_an_unreadable_ledger_is_shown_in_the_table_and_other_runs_are_listed(run, local, monkeypatch):
    other = Run.create_for_script("#!/bin/sh\n", local, "other")
    read = evidence.state_of

    def state_of(one):
        if one.path == other.path:
            raise PermissionError(13, "Permission denied", str(other.state_folder.ledger))
        return read(one)

    monkeypatch.setattr(evidence, "state_of", state_of)
    states = {row["run"]: row["state"] for row in runs().as_dict()["runs"]}
    assert states == {str(run.path): "FAILED", str(other.path): "UNKNOWN"}


def test_records_of_the_first_version_are_read(run):
    """Written before records had a version, an end and the key `requeued`."""
    lines = [
        {"time": time.time(), "source": "slurm", "job_id": "7", "state": "RUNNING", "reason": "", "restart": 0,
         "requeue": True, "nodes": "node1", "exit_code": 0, "signal": "", "verbatim": "", "task": None},
        {"time": time.time(), "source": "sacct", "job_id": "7", "task": None},
    ]  # fmt: skip
    run.state_folder.ledger.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    reason = {"reason": "time limit near, saved checkpoint-40, requeued"}
    old = {"job_id": "7", "time": time.time(), "exit_code": 75, "signal": "USR2"} | reason
    (run.state_folder.path / "exit.0.json").write_text(json.dumps(old))
    kinds = [type(record) for record in read_records(run)]
    assert sorted(kind.__name__ for kind in kinds) == ["ExitRecord", "SacctRecord", "SlurmRecord"]
    assert run.state.state == "COMPLETING"  # the same job starts again


def test_a_job_that_requeued_itself_has_not_ended_whatever_its_reason_says(run):
    left = ExitRecord(
        time=time.time(), job_id="7", exit_code=75, signal="USR2", end=ScriptEnd.TIME_LIMIT, requeued=True, reason="bye"
    )
    (run.state_folder.path / "exit.0.json").write_text(json.dumps(left.as_dict()))
    assert not run.state.ended
    (run.state_folder.path / "exit.0.json").write_text(
        json.dumps(left.as_dict() | {"requeued": False, "reason": "requeued"})
    )
    assert run.state.state == "FAILED"


def test_archived_records_keep_their_job_id(run):
    archive(run)
    assert not (run.state_folder.path / "exit.0.json").exists()
    assert [record.exit_code for record in read_records(run) if isinstance(record, ExitRecord)] == [3]
    run.note(job_id="8", submitted=time.time())
    assert read_records(run) == []


def test_a_run_whose_answer_of_sbatch_did_not_arrive_may_have_been_submitted(local):
    run = Run.create_for_script("#!/bin/sh\n", local, "own")
    assert (run.state.state, run.state.confidence) == ("NOT SUBMITTED", "high")
    run.note(submitted=time.time(), script=str(run.path / "job.sbatch"))
    assert (run.state.state, run.state.confidence) == ("SUBMITTING", "low")
    assert "Slurm may have the job" in str(run.state)


def stand_in_for_squeue(folder, monkeypatch, row):
    folder.mkdir(exist_ok=True)
    (folder / "squeue").write_text(f"#!/bin/sh\necho '{row}'\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_an_end_that_is_recorded_after_the_job_started_again_does_not_hide_the_later_one(run, monkeypatch, tmp_path):
    """Two processes ask Slurm: one requeues the job while the other one still records how it ended before."""
    add_record(run, RequeueRecord)
    add_record(run, SlurmRecord, state=JobState.FAILED, exit_code=3, restart=0, requeue=True)
    (run.state_folder.path / "start.1.json").write_text(json.dumps({"job_id": "7", "time": time.time()}))
    stand_in_for_squeue(tmp_path / "bin", monkeypatch, "7|COMPLETED|0|1|1|None|N/A|node1|job.sbatch")
    assert (run.state.state, run.state.exit_code) == ("COMPLETED", 0)


def test_an_answer_older_than_a_requeue_is_ignored(run, monkeypatch, tmp_path):
    stand_in_for_squeue(tmp_path / "bin", monkeypatch, "7|FAILED|768|0|1|None|N/A|node1|job.sbatch")
    assert run.state.state == "FAILED"  # from now on this answer is shared for some seconds
    add_record(run, RequeueRecord, time=time.time() + 1)
    assert evidence.collect([run]) == evidence.News()
    kinds = [record for record in read_records(run) if isinstance(record, SlurmRecord | RequeueRecord)]
    assert isinstance(kinds[-1], RequeueRecord)


def test_what_slurm_says_counts_where_the_ledger_cannot_be_written(run, monkeypatch, tmp_path):
    stand_in_for_squeue(tmp_path / "bin", monkeypatch, "7|FAILED|1024|0|1|NonZeroExitCode|N/A|node1|job.sbatch")
    (run.state_folder.path / "exit.0.json").unlink()
    run.state_folder.ledger.unlink()
    run.state_folder.ledger.mkdir()
    assert (run.state.state, run.state.exit_code, run.state.confidence) == ("FAILED", 4, "high")
    assert any("cannot be written into the ledger" in line for line in run.state.evidence)
    assert watcher._update(run.path, 0) is True  # goes on until it is written
    run.state_folder.ledger.rmdir()
    assert watcher._update(run.path, 0) is False
    assert [record.exit_code for record in read_records(run) if isinstance(record, SlurmRecord)] == [4]


def test_a_line_that_a_full_disk_has_cut_is_an_error_and_hides_no_later_line(run):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run.state_folder.ledger.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            add_record(run, RequeueRecord)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not run.state_folder.ledger.read_text().endswith("\n")
    add_record(run, SlurmRecord, state=JobState.FAILED, exit_code=6)
    assert [record.exit_code for record in read_records(run) if isinstance(record, SlurmRecord)] == [6]


def test_a_damaged_run_does_not_stop_the_watcher_and_is_removed_from_its_list(run, local, monkeypatch, tmp_path):
    stand_in_for_squeue(tmp_path / "bin", monkeypatch, "7|FAILED|1024|0|1|NonZeroExitCode|N/A|node1|job.sbatch")
    bad = Run.create_for_script("#!/bin/sh\n", local, "bad")
    (bad.path / "run.json").write_text("[]")
    nothing = SimpleNamespace(run=lambda *_, **__: None, DEVNULL=None)  # the watcher is this process
    monkeypatch.setattr(watcher, "subprocess", nothing)
    monkeypatch.setattr(watcher.time, "sleep", lambda _: None)
    for one in (bad, run):
        watcher.enlist(one)
    watcher.watch()
    assert [record.exit_code for record in read_records(run) if isinstance(record, SlurmRecord)] == [4]
    with watcher._watched() as left:
        assert left == []


def test_a_squeue_failure_is_not_recorded_in_the_ledger(run):
    assert not any(isinstance(record, QueueRecord) for record in read_records(run))


def test_the_files_of_witness_sh_are_read_as_records(run, tmp_path):
    """Bash reads witness.sh before a user's own script, as Slurm starts it."""
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\nexit 5\n")
    environment = submit._environment(RunFolder(run.path)) | {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2",
    }  # fmt: skip
    subprocess.run(["bash", script], env=environment, check=False)
    folder = run.state_folder
    start = parse_record(json.loads((folder.path / "start.0.2.json").read_text()) | {"source": "start"})
    end = parse_record(json.loads((folder.path / "exit.0.2.json").read_text()) | {"source": "exit"})
    assert isinstance(start, StartRecord) and (start.job_id, start.nodes) == ("6", "node1")
    assert isinstance(end, ExitRecord) and (end.exit_code, end.signal) == (5, None)
