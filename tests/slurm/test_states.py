import json

import pytest

from kit.slurm.folder import StateFolder
from kit.slurm.states import (
    FINAL_STATES,
    ExitRecord,
    JobState,
    ScriptEnd,
    SlurmRecord,
    StartRecord,
    Witness,
    parse_line,
    parse_record,
)


def test_a_record_is_read_back_from_its_own_line():
    record = SlurmRecord(time=5.5, job_id="7", task=3, restart=1, state=JobState.FAILED, exit_code=0, requeue=False)
    assert parse_line(record.as_line()) == record
    assert json.loads(record.as_line())["version"] == 1


def test_a_record_without_a_version_is_read():
    line = '{"time": 1.0, "source": "slurm", "job_id": "7", "state": "CANCELLED", "task": null, "verbatim": "JobId=7"}'
    assert parse_line(line) == SlurmRecord(time=1.0, job_id="7", state=JobState.CANCELLED, verbatim="JobId=7")


def test_keys_of_a_newer_version_are_ignored():
    value = {"version": 9, "source": "start", "time": 1, "job_id": "7", "restart": 0, "colour": ["green"]}
    assert parse_record(value) == StartRecord(time=1.0, job_id="7", restart=0)


@pytest.mark.parametrize(
    "value",
    [
        5, None, [], {}, "exit", {"source": "weather", "time": 1, "job_id": "7"}, {"source": [], "time": 1},
        {"source": "gone", "job_id": "7"}, {"source": "gone", "time": "1", "job_id": "7"},
        {"source": "gone", "time": float("nan"), "job_id": "7"}, {"source": "gone", "time": True, "job_id": "7"},
        {"source": "gone", "time": 1, "job_id": 7}, {"source": "exit", "time": 1, "job_id": "7"},
        {"source": "exit", "time": 1, "job_id": "7", "exit_code": "3"},
        {"source": "exit", "time": 1, "job_id": "7", "exit_code": -3},
        {"source": "slurm", "time": 1, "job_id": "7", "state": 5},
        {"source": "slurm", "time": 1, "job_id": "7", "restart": 1.5},
    ],
)  # fmt: skip
def test_a_value_of_another_shape_is_not_a_record(value):
    assert parse_record(value) is None


@pytest.mark.parametrize("line", ["", '{"time": 1, "source": "slu', "[" * 100_000])
def test_a_torn_line_is_not_a_record(line):
    assert parse_line(line) is None


def test_a_requeue_is_read_from_its_key_and_in_older_records_from_the_reason():
    new = ExitRecord(time=1, exit_code=75, end=ScriptEnd.TIME_LIMIT, requeued=False, reason="was not requeued")
    old = ExitRecord(time=1, exit_code=75, reason="time limit near, saved checkpoint-40, requeued")
    assert (new.starts_again, old.starts_again, ExitRecord(time=1, exit_code=1).starts_again) == (False, True, False)


def test_states_are_parsed_from_the_texts_of_squeue_and_sacct():
    texts = ("CANCELLED by 1000", "CANCELLED+", "OUT_OF_MEMORY", "EXPEDITING", "")
    assert [str(JobState.parse(text)) for text in texts] == [
        "CANCELLED", "CANCELLED", "OUT_OF_MEMORY", "UNKNOWN", "UNKNOWN",
    ]  # fmt: skip
    assert JobState.PREEMPTED.final and JobState.PREEMPTED.may_restart and not JobState.COMPLETING.final
    assert len(set(FINAL_STATES)) == len(FINAL_STATES)


def test_files_with_foreign_names_in_the_state_folder_are_ignored(tmp_path):
    names = ("exit.0.json", "exit.0.copy.json", "exit.x.json", "foo.bar.json", ".exit.1.json", "start.2.13.json",
             "exit.٣.json", "heartbeat", "heartbeat.4", "heartbeat.x")  # fmt: skip
    for name in names:
        (tmp_path / name).touch()
    folder = StateFolder(tmp_path)
    assert [file[1:] for file in folder.script_files()] == [(Witness.EXIT, 0, None), (Witness.START, 2, 13)]
    assert [task for _, task in folder.heartbeats()] == [None, 4]
