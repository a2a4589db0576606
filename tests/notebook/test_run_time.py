"""The hours of a run are the sum of all its starts."""

import json

import pytest

from kit import files
from kit.notebook.run_time import seconds_run
from kit.slurm.run import Run

HOUR = 3600.0
NOW = 1_800_000_000.0


@pytest.fixture
def run(local):
    run = Run.create_for_script("#!/bin/sh\n", local, "job")
    run.note(job_id="7")
    return run


def script_file(run, witness, restart, hours_ago, task="", job_id="7", **facts):
    value = {"job_id": job_id, "time": NOW - hours_ago * HOUR, **facts}
    files.write_json(run.path / "state" / f"{witness}.{restart}{task}.json", value)


def ledger(run, source, hours_ago, job_id="7", **facts):
    with (run.path / "state" / "ledger.jsonl").open("a") as stream:
        stream.write(json.dumps({"source": source, "time": NOW - hours_ago * HOUR, "job_id": job_id, **facts}) + "\n")


def hours(run, ended=True):
    seconds = seconds_run(run, ended, NOW)
    return None if seconds is None else seconds / HOUR


def test_a_run_that_has_not_started_has_no_hours(run):
    assert hours(run) is None
    ledger(run, "submit", 1)
    assert hours(run, ended=False) is None


def test_a_requeued_run_counts_every_start_and_not_the_queue_between(run):
    script_file(run, "start", 0, 10)
    script_file(run, "exit", 0, 9.5, exit_code=75)
    script_file(run, "start", 1, 5)
    script_file(run, "exit", 1, 3, exit_code=0)
    ledger(run, "slurm", 2.9, state="COMPLETED")
    assert hours(run) == pytest.approx(2.5)


def test_the_last_start_of_a_live_run_lasts_until_now(run):
    script_file(run, "start", 0, 10)
    script_file(run, "exit", 0, 9.5, exit_code=75)
    script_file(run, "start", 1, 2)
    assert hours(run, ended=False) == pytest.approx(2.5)


def test_a_start_without_an_exit_record_ends_at_slurms_state_or_the_last_record(run):
    script_file(run, "start", 0, 10)
    ledger(run, "slurm", 8, state="NODE_FAIL", requeue=True)
    script_file(run, "start", 1, 6)
    ledger(run, "slurm", 5, state="RUNNING")
    assert hours(run) == pytest.approx(2 + 1)


def test_earlier_jobs_of_the_run_count_too(run):
    ledger(run, "start", 20, job_id="6", restart=0)
    ledger(run, "exit", 19, job_id="6", restart=0, exit_code=75)
    script_file(run, "start", 0, 3)
    script_file(run, "exit", 0, 1, exit_code=0)
    assert hours(run) == pytest.approx(3)


def test_the_tasks_of_an_array_are_added_up(run):
    for task in (0, 1):
        script_file(run, "start", 0, 5, task=f".{task}")
        script_file(run, "exit", 0, 4 - task, task=f".{task}", exit_code=0)
    assert hours(run) == pytest.approx(1 + 2)


def test_foreign_and_damaged_files_are_ignored(run):
    script_file(run, "start", 0, 2)
    script_file(run, "exit", 0, 1, exit_code=0)
    (run.path / "state" / "exit.0.copy.json").write_text("{}")
    (run.path / "state" / "exit.1.json").write_text("{")
    (run.path / "state" / "ledger.jsonl").write_text('{"source": "sta')
    assert hours(run) == pytest.approx(1)
