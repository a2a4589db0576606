import json
import os
import time

import pytest

from kit.slurm import client
from kit.slurm.client import Queue, queue, shared_file, squeue
from kit.slurm.states import JobState

ROW = "7|RUNNING|0|1|1|None|2026-11-28T03:57:34|node1|/runs/x/job.sbatch   \n"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """How often squeue was started; it answers with one running job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, answer in (("squeue", ROW), ("scontrol", "MinJobAge = 300 sec\n")):
        (folder / f"{name}.answer").write_text(answer)
        (folder / name).write_text(f"#!/bin/sh\necho >> {folder}/{name}.asked\ncat {folder}/{name}.answer\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return lambda: (folder / "squeue.asked").read_text().count("\n")


def test_a_row_becomes_a_record(asked):
    record = queue().rows["7"].said
    assert (record.state, record.exit_code, record.signal, record.restart) == (JobState.RUNNING, 0, "", 1)
    assert (record.requeue, record.reason, record.nodes) == (True, "", "node1")


def test_squeues_answer_is_shared_until_it_expires(asked):
    first = queue()
    assert queue() == first and asked() == 1


@pytest.mark.parametrize("key", ["time", "asked", "config_read"])
def test_an_answer_from_the_future_counts_as_never_asked(asked, key):
    """The clock of a login node was an hour ahead once; nobody asked Slurm for that hour."""
    queue()
    path = shared_file("queue")
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {key: time.time() + 3600, "rows": {}}))
    found = queue()
    assert asked() == 2 and found.rows["7"].job_state is JobState.RUNNING and found.time <= time.time()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": {"7": 5}}', '{"rows": {}, "time": "x"}', '{"rows": [1]}'])
def test_a_damaged_answer_counts_as_never_asked(asked, text):
    path = shared_file("queue")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert list(queue().rows) == ["7"]


def test_keys_of_another_version_in_the_shared_answer_are_ignored(asked):
    queue()
    path = shared_file("queue")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "green"}))
    assert queue().rows and asked() == 1


def test_a_pending_job_that_disappears_is_remembered(asked, tmp_path):
    answer = tmp_path / "bin" / "squeue.answer"
    answer.write_text(ROW.replace("RUNNING", "PENDING"))
    queue()
    answer.write_text("")
    path = shared_file("queue")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"asked": 0.0}))
    assert list(queue().left) == ["7"]


def test_a_machine_without_slurm_and_one_whose_slurm_is_gone_belong_to_no_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    answer = squeue()
    assert answer.no_cluster and answer.rows == {} and "slurm.conf, which does not exist" in answer.trouble
    monkeypatch.delenv("SLURM_CONF")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = client.command("squeue")
    assert (done.returncode, done.stderr) == (client.NOT_INSTALLED, "squeue is not installed here")
    assert client.version() == "" and not client.available()


def test_a_program_that_does_not_answer_times_out(tmp_path, monkeypatch):
    (tmp_path / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = client.command("squeue", timeout=0.1)
    assert done.returncode == client.TIMED_OUT and "timed out" in done.stderr


def test_the_pause_grows_with_the_number_of_live_jobs_and_ends_before_slurm_forgets_one(asked):
    row = queue().rows["7"]
    many = Queue(rows={str(n): row for n in range(500)})
    assert (Queue().shortest_pause, many.shortest_pause, many.longest_pause) == (2.0, 30.0, 60.0)
    assert Queue(rows=many.rows, min_job_age=5.0).shortest_pause == pytest.approx(5 / 3)
    assert Queue(min_job_age=0.0).longest_pause == 60.0  # Slurm never forgets
