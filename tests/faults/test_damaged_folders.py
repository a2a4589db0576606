"""Damaged run folders: each has a state or an error that names the file, and never affects another run."""

import json
import os
import shutil
import time

import pytest

from kit.errors import KitError
from kit.slurm import evidence, watcher
from kit.slurm.run import Run
from kit.slurm.runs import runs
from kit.slurm.states import SubmitRecord
from kit.watch.board import watch
from tests.conftest import add_record

RECORD = {"version": 1, "job_id": "local-7", "source": "slurm", "state": "COMPLETED", "exit_code": 0}


def replaced(name, content):
    """Another content of a file; bytes, text or a JSON value."""
    text = content if isinstance(content, bytes | str) else json.dumps(content)
    return lambda run: (run.path / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def removed(name):
    def remove(run):
        path = run.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def cut(name):
    return lambda run: os.truncate(run.path / name, (run.path / name).stat().st_size // 2)


def a_folder(name):
    return lambda run: (removed(name)(run) if (run.path / name).exists() else None, (run.path / name).mkdir())


def a_fifo(name):
    return lambda run: (removed(name)(run) if (run.path / name).exists() else None, os.mkfifo(run.path / name))


def a_loop(name):
    return lambda run: (removed(name)(run), (run.path / name).symlink_to(name.rpartition("/")[2]))


def line(record):
    def append(run):
        with run.state_folder.ledger.open("ab") as stream:
            stream.write(record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n")

    return append


# What is done to the folder of a run whose script ended with exit code 3.
DAMAGES = {
    "run.json is a list": replaced("run.json", []),
    "run.json is an empty object": replaced("run.json", {}),
    "run.json with a number as job id": replaced("run.json", {"job_id": 12}),
    "run.json with an option as job id": replaced("run.json", {"job_id": "--me"}),
    "run.json is a folder": a_folder("run.json"),
    "run.json is a FIFO": a_fifo("run.json"),
    "run.json is a link to itself": a_loop("run.json"),
    "run.json is empty": replaced("run.json", ""),
    "run.json is cut": cut("run.json"),
    "run.json is nested deeply": replaced("run.json", "[" * 100_000),
    "run.json is not text": replaced("run.json", bytes(range(128, 256))),
    "run.json is gone": removed("run.json"),
    "the ledger has a number": line(5),
    "the ledger has an empty object": line({}),
    "the ledger has a time in words": line(RECORD | {"time": "now"}),
    "the ledger has an exit code in words": line(RECORD | {"time": 1.0, "exit_code": "zero"}),
    "the ledger has a torn line": line(b'{"version": 1, "job_id": "local-7", "time": 9e9, "sour'),
    "the ledger is not text": line(bytes(range(128, 256)) + b"\n"),
    "the ledger is a folder": a_folder("state/ledger.jsonl"),
    "the ledger is gone": removed("state/ledger.jsonl"),
    "the exit file is a list": replaced("state/exit.0.json", []),
    "an exit file without its exit code": replaced("state/exit.1.json", {"job_id": "local-7", "time": 9e9}),
    "an exit file with another name": replaced("state/exit.x.json", {"job_id": "local-7", "time": 9e9, "exit_code": 0}),
    "a foreign file among the state files": replaced("state/foo.bar.json", {}),
    "a heartbeat with another name": replaced("state/heartbeat.x", ""),
    "the start file is a FIFO": a_fifo("state/start.0.json"),
    "the folder of state files is gone": removed("state"),
    "the folder of logs is gone": removed("logs"),
    "the log is a folder": a_folder("logs/slurm-7.out"),
    "the log is not text": replaced("logs/slurm-7.out", bytes(range(256)) * 64),
    "the recipe is cut": cut("recipe.toml"),
    "the progress file is a list": replaced("state/progress.json", []),
}
WORDS_OF_NO_END = {"FAILED", "LOST", "UNKNOWN", "COMPLETING", "RUNNING", "PENDING"}


def ended(run):
    """As a job of the local runner that ended with exit code 3 has left it."""
    now = time.time()
    run.note(job_id="local-7", submitted=now - 100, script=str(run.path / "job.sbatch"))
    add_record(run, SubmitRecord, time=now - 100)
    (run.state_folder.path / "start.0.json").write_text(
        json.dumps({"job_id": "local-7", "time": now - 90, "nodes": "n"})
    )
    left = {"job_id": "local-7", "time": now - 80, "exit_code": 3, "signal": ""}
    (run.state_folder.path / "exit.0.json").write_text(json.dumps(left))
    run.log.write_text("step 1\n")
    return run


def answer_of(act):
    """What a command prints, or the words of its error; every other exception fails the test."""
    try:
        return str(act())
    except KitError as error:
        return str(error)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_has_a_state_or_an_error_and_affects_no_other_run(recipe, local, tmp_path, name):
    damaged, other = (ended(Run.create(recipe, local, tmp_path, "digest")) for _ in range(2))
    DAMAGES[name](damaged)
    state = answer_of(lambda: evidence.state_of(damaged).state)
    assert state in WORDS_OF_NO_END or str(damaged.path) in state, state
    for act in (damaged.tail, lambda: damaged.state, lambda: watch(str(damaged.path)).status()):
        assert "Traceback" not in answer_of(act)
    now = evidence.state_of(other)
    assert damaged.path.exists() and (now.state, now.exit_code, now.confidence) == ("FAILED", 3, "high")
    rows = {row["run"]: row["state"] for row in runs().as_dict()["runs"]}
    assert rows[str(other.path)] == "FAILED" and rows.get(str(damaged.path), "FAILED") in WORDS_OF_NO_END
    watcher._update(damaged.path, 0)  # does not end the watcher
    assert watcher._update(other.path, 0) is False
