"""The reader of W&B's transaction log, against files that the real wandb SDK writes and its own reader reads."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.wandb_log import BLOCK, READ, NotAWandbFile, Tail, find_logs

# What W&B's clients log: numbers that JSON has no word for, nested names, values that are no numbers, long names.
WRITER = """
import math, sys, wandb
folder, rows, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
run = wandb.init(project="p", id="seg", mode="offline", dir=folder)
for i in range(rows):
    row = {"train/loss": 2.0 / (i + 1), "train/global_step": i + 1, "nest": {"a": {"b": i}}, "größe": -1e-9 * i}
    if i % 7 == 3:
        row |= {"nan": math.nan, "inf": -math.inf, "none": None, "flag": True, "big": 2**70, "text": 'a "b"\\n line'}
    if i % 11 == 5:
        row |= {"k" * 200: 1, "histogram": wandb.Histogram([1, 2, 3]), "list": [1, 2.5], 'odd "key"\\\\n': 3}
    run.log(row)
print("logged", flush=True)
if end == "sleep":
    import time
    time.sleep(60)
run.finish(exit_code=int(end))
"""


def write(folder: Path, rows: int, end: str = "0", **popen) -> subprocess.Popen:
    """A run of the SDK in a process of its own, as in a job."""
    folder.mkdir(exist_ok=True)
    env = os.environ | {"WANDB_SILENT": "true", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1"}
    command = [sys.executable, "-c", WRITER, str(folder), str(rows), end]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, **popen)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A finished run of 150 rows, about three blocks."""
    folder = tmp_path_factory.mktemp("run")
    process = write(folder, 150, "3")
    process.communicate()
    (found,) = find_logs(folder)
    assert found.stat().st_size > 2 * BLOCK
    return found


def read(path, **options):
    tail = Tail(path, **options)
    records = []
    while new := tail.poll():
        records += new
    return records, tail


def history(records):
    return [record.values for record in records if record.kind == "history"]


def as_leet(value):
    """leet's JSON has words where JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return [as_leet(v) for v in value] if isinstance(value, list) else value


def test_every_row_is_the_one_that_wandbs_own_reader_shows(log):
    wandb = Path(sys.executable).with_name("wandb")
    command = [wandb, "leet", "inspect", "--json", str(log)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = [json.loads(line) for line in said.splitlines()]
    records, tail = read(log)
    for kind in ("history", "stats"):
        ours = [(r.number, {k: as_leet(v) for k, v in r.values.items()}) for r in records if r.kind == kind]
        expected = [(t["num"], t[kind]["item"]) for t in theirs if t["type"] == kind]
        if kind == "stats":
            ours = [(n, {k: v for k, v in row.items() if k != "_timestamp"}) for n, row in ours]
        assert ours == expected
        assert expected
    (end,) = [r.values for r in records if r.kind == "exit"]
    assert end["exit_code"] == 3 == next(t["exit"]["exit_code"] for t in theirs if t["type"] == "exit")
    (run,) = [r.values for r in records if r.kind == "run"]
    assert run["run_id"] == "seg"
    assert (tail.records, tail.damaged) == (len(theirs), 0)


def test_a_file_that_grows_in_pieces_reads_the_same(log, tmp_path):
    whole, data, rng = read(log)[0], log.read_bytes(), random.Random(0)
    copy = tmp_path / log.name
    tail, records, size = Tail(copy), [], 0
    assert tail.poll() == []  # not there yet
    while size < len(data):
        size += rng.randint(1, 3000)
        copy.write_bytes(data[:size])
        records += tail.poll()
    assert repr(records) == repr(whole)
    assert tail.damaged == 0


def test_every_torn_tail_gives_an_exact_prefix(log, tmp_path):
    whole, data, rng = repr(history(read(log)[0])), log.read_bytes(), random.Random(1)
    copy = tmp_path / log.name
    for size in [*range(12), *(rng.randrange(len(data)) for _ in range(150))]:
        copy.write_bytes(data[:size])
        records, tail = read(copy)
        assert whole.startswith(repr(history(records))[:-1])
        assert tail.damaged == 0


def test_a_flipped_byte_costs_one_record_at_most(log, tmp_path):
    data, rng = log.read_bytes(), random.Random(2)
    whole = {record.number: repr(record) for record in read(log)[0]}
    copy = tmp_path / log.name
    for _ in range(150):
        at = rng.randrange(7, len(data))
        flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
        copy.write_bytes(data[:at] + flipped + data[at + 1 :])
        records, tail = read(copy)
        kept = {record.number: repr(record) for record in records}
        assert len(whole) - len(kept) <= 1
        assert tail.damaged <= 1
        assert kept.items() <= whole.items()


def test_a_hole_of_zeros_is_waited_for_and_given_up_in_the_end(log, tmp_path):
    data = log.read_bytes()
    copy = tmp_path / log.name
    copy.write_bytes(data[:40_000] + bytes(4096) + data[44_096:])
    tail = Tail(copy)
    before = tail.poll()
    assert tail.poll() == []  # NFS may still bring the page
    copy.write_bytes(data)
    assert repr(before + tail.poll()) == repr(read(log)[0])
    assert tail.damaged == 0

    copy.write_bytes(data[:40_000] + bytes(4096) + data[44_096:])
    long_ago = time.time() - 60
    os.utime(copy, (long_ago, long_ago))  # nobody writes it any more
    records, tail = read(copy)
    assert len(before) < len(records) < len(read(log)[0])
    assert tail.damaged == 1


def test_a_hole_longer_than_one_read_does_not_stop_the_reader(log, tmp_path):
    data = log.read_bytes()
    copy = tmp_path / log.name
    copy.write_bytes(data[:BLOCK] + bytes(READ + BLOCK) + data[BLOCK:])
    records, tail = [], Tail(copy, patience=0.0)
    for _ in range(4):
        records += tail.poll()
    assert len(history(records)) >= 149
    assert records[-1].kind == "exit"


@pytest.mark.parametrize("start", [b"PK\x03\x04zip", b":W&B\xe1\xbe\x01newer", bytes(8)])
def test_another_file_is_refused_by_name(start, tmp_path):
    path = tmp_path / "run-x.wandb"
    path.write_bytes(start)
    with pytest.raises(NotAWandbFile, match=r"run-x\.wandb starts with .*, not as a W&B log of version 0"):
        Tail(path).poll()


def test_a_killed_writer_keeps_its_rows(tmp_path):
    process = write(tmp_path / "run", 40, "sleep", start_new_session=True)
    assert process.stdout.readline() == b"logged\n"
    time.sleep(2.5)  # more than the flush interval of one second
    os.killpg(process.pid, signal.SIGKILL)  # the trainer and wandb's own process, as Slurm does
    process.communicate()
    records, tail = read(find_logs(tmp_path / "run")[0])
    assert len(history(records)) == 40
    assert "exit" not in {record.kind for record in records}
    assert tail.damaged == 0


def test_logs_are_found_from_the_run_folder_and_from_the_folders_within(log):
    run = log.parents[2]
    assert {find_logs(folder)[0] for folder in (run, run / "wandb", log.parent)} == {log}
    assert find_logs(run.parent / "nothing") == []
