"""Runs that have ended are remembered; whatever can change their state is still seen."""

import os
import time

import pytest

from kit import files
from kit.slurm import evidence
from kit.slurm.run import Run
from kit.slurm.runs import runs
from kit.slurm.states import JobState, SlurmRecord
from tests.conftest import add_record


@pytest.fixture
def ended(local):
    """A run of a script whose job completed."""
    run = Run.create_for_script("#!/bin/bash\n", local, "own")
    now = time.time()
    run.note(job_id="7", submitted=now - 100)
    files.write_json(run.path / "state" / "start.0.json", {"job_id": "7", "time": now - 90, "nodes": "n"})
    end = {"job_id": "7", "time": now - 80, "exit_code": 0, "signal": ""}
    files.write_json(run.path / "state" / "exit.0.json", end)
    add_record(run, SlurmRecord, state=JobState.COMPLETED, exit_code=0, time=now - 70)
    return run


def remembered() -> dict[str, object]:
    path = files.state_home() / "ended.json"
    return files.read_json(path) if path.exists() else {}


def test_the_remembered_state_is_the_one_that_was_judged(ended):
    judged = evidence.state_of(ended)
    first, second = runs(), runs()
    assert list(remembered()) == [str(ended.path)]
    assert first.states == second.states == {ended: judged}
    assert first.as_dict() == second.as_dict()


def test_a_remembered_run_is_not_judged_again(ended):
    runs()
    kept = remembered()
    kept[str(ended.path)]["state"]["cause"] = "this is from the memory"
    files.write_json(files.state_home() / "ended.json", kept)
    assert [state.cause for state in runs().states.values()] == ["this is from the memory"]


def test_a_run_that_starts_again_is_judged_again(ended):
    runs()
    again = {"job_id": "7", "time": time.time(), "nodes": "n"}
    files.write_json(ended.path / "state" / "start.1.json", again)
    (state,) = runs().states.values()
    assert any("restart 1" in line for line in state.evidence)


def test_a_new_record_of_slurm_counts(ended):
    runs()
    add_record(ended, SlurmRecord, state=JobState.FAILED, exit_code=3, time=time.time())
    assert [state.state for state in runs().states.values()] == [JobState.FAILED]


def test_a_run_that_waits_or_runs_is_not_remembered(local):
    run = Run.create_for_script("#!/bin/bash\n", local, "own")
    runs()
    run.note(job_id="8", submitted=time.time())
    add_record(run, SlurmRecord, state=JobState.RUNNING)
    runs()
    assert remembered() == {}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"x": 1}', '{"PATH": []}', '{"PATH": {"files": 5}}', '{"PATH": {"files": FILES, "state": 7}}'],
)
def test_a_damaged_memory_is_no_memory(ended, content):
    runs()
    judged = evidence.state_of(ended)
    signature = remembered()[str(ended.path)]["files"]
    text = content.replace("PATH", str(ended.path)).replace("FILES", str(signature))
    (files.state_home() / "ended.json").write_text(text)
    assert runs().states == {ended: judged}


def test_a_memory_that_cannot_be_written_does_not_hide_the_runs(ended):
    path = files.state_home() / "ended.json"
    path.mkdir(parents=True)
    assert [state.state for state in runs().states.values()] == [JobState.COMPLETED]
    path.rmdir()
    os.mkfifo(path)
    assert [state.state for state in runs().states.values()] == [JobState.COMPLETED]
