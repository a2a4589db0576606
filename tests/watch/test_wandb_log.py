"""The reader of W&B's transaction log, against files that the real wandb SDK writes and its own reader reads."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kit.errors import KitError
from kit.watch.wandb_log import BLOCK, READ, Tail, find_logs
from tests.conftest import until

# What W&B's clients log: numbers that JSON has no word for, nested names, values that are no numbers, long names.
WRITER = """
import math, sys, wandb
folder, rows, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
run = wandb.init(project="p", id="seg", mode="offline", dir=folder, config={"lr": 1e-4, "nest": {"a": 1}})
run.define_metric("train/loss", summary="min")
for i in range(rows):
    row = {"train/loss": 2.0 / (i + 1), "train/global_step": i + 1, "nest": {"a": {"b": i}}, "größe": -1e-9 * i}
    if i % 7 == 3:
        row |= {"nan": math.nan, "inf": -math.inf, "none": None, "flag": True, "big": 2**70, "text": 'a "b"\\n line'}
    if i % 11 == 5:
        row |= {"k" * 200: 1, "k" * 130: "v" * 130, "long": "v" * 20_000}
        row |= {"histogram": wandb.Histogram([1, 2, 3]), "list": [1, 2.5], 'odd "key"\\\\n': 3}
    run.log(row)
    if i == 60:
        run.summary["best"] = 3.5
        run.config.update({"later": True})
print("logged", flush=True)
if end == "sleep":
    import time
    time.sleep(60)
run.finish(exit_code=int(end))
"""


def write(folder: Path, rows: int, end: str = "0", **popen) -> subprocess.Popen:
    """A run of the SDK in a separate process, as in a job."""
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
    """Rows as values; wandb shuffles their names."""
    rows = [
        sorted(zip(r.values, map(json.loads, texts), strict=True))
        for r in records
        if r.kind == "history"
        for texts in zip(*r.values.values(), strict=True)
    ]
    return [dict(row) for row in rows]


def pieces(records):
    """What was written, one by one."""
    others = [repr(r) for r in records if r.kind != "history"]
    return Counter([repr(row) for row in history(records)] + others)


def as_leet(value):
    """leet's JSON has words where JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {k: as_leet(v) for k, v in value.items()}
    return [as_leet(v) for v in value] if isinstance(value, list) else value


def leet(log, *options):
    """What wandb's own reader of these files prints."""
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", *options, str(log)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_row_equals_what_wandbs_own_reader_shows(log):
    theirs = [json.loads(line) for line in leet(log).splitlines()]
    records, tail = read(log)
    assert [as_leet(row) for row in history(records)] == [
        t["history"]["item"] for t in theirs if t["type"] == "history"
    ]
    stats = [{k: as_leet(v) for k, v in r.values.items() if k != "_timestamp"} for r in records if r.kind == "stats"]
    assert stats == [t["stats"]["item"] for t in theirs if t["type"] == "stats"] != []
    (end,) = [r.values for r in records if r.kind == "exit"]
    assert end["exit_code"] == 3 == next(t["exit"]["exit_code"] for t in theirs if t["type"] == "exit")
    (run,) = [r.values for r in records if r.kind == "run"]
    assert (run["id"], run["project"]) == ("seg", "p")
    assert (tail.records, tail.damaged, tail.left) == (len(theirs), 0, 0)


def test_the_config_equals_what_wandbs_own_reader_shows(log):
    theirs = json.loads(leet(log, "--summary"))
    config = {}
    for record in read(log)[0]:
        if record.kind in ("run", "config"):
            config |= record.values.get("config", record.values)
    assert {key: value for key, value in config.items() if key != "_wandb"} == theirs["config"]


def test_a_file_that_grows_in_pieces_reads_the_same(log, tmp_path):
    everything, data, rng = read(log)[0], log.read_bytes(), random.Random(0)
    copy = tmp_path / log.name
    tail, records, size = Tail(copy), [], 0
    assert tail.poll() == []  # not there yet
    while size < len(data):
        size += rng.randint(1, 3000)
        copy.write_bytes(data[:size])
        records += tail.poll()
    assert repr(history(records)) == repr(history(everything))
    assert pieces(records) == pieces(everything)
    assert tail.damaged == 0


def test_every_truncated_log_gives_an_exact_prefix(log, tmp_path):
    everything, data, rng = repr(history(read(log)[0])), log.read_bytes(), random.Random(1)
    copy = tmp_path / log.name
    for size in [*range(12), *(rng.randrange(len(data)) for _ in range(150))]:
        copy.write_bytes(data[:size])
        records, tail = read(copy)
        assert everything.startswith(repr(history(records))[:-1])
        assert tail.damaged == 0


def test_a_flipped_byte_costs_one_record_at_most(log, tmp_path):
    data, rng = log.read_bytes(), random.Random(2)
    everything = pieces(read(log)[0])
    copy = tmp_path / log.name
    last_block = len(data) - len(data) % BLOCK
    spots = [rng.randrange(7, len(data)) for _ in range(150)] + [
        rng.randrange(last_block, len(data)) for _ in range(50)
    ]
    for at in spots:
        flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
        copy.write_bytes(data[:at] + flipped + data[at + 1 :])
        records, tail = read(copy)
        kept = pieces(records)
        assert kept <= everything
        assert (everything - kept).total() <= 1
        assert tail.damaged <= 1


def test_a_damaged_chunk_size_does_not_hide_what_follows(log, tmp_path):
    data = bytearray(log.read_bytes())
    at = len(data) // BLOCK * BLOCK  # the header of the last block's first chunk: crc u32, size u16, type u8
    size = int.from_bytes(data[at + 4 : at + 6], "little")
    assert at + 7 + size < len(data)
    data[at + 4 : at + 6] = (len(data) - at + 100).to_bytes(2, "little")
    copy = tmp_path / log.name
    copy.write_bytes(data)
    records, tail = read(copy)
    assert (pieces(read(log)[0]) - pieces(records)).total() <= 1
    assert tail.damaged == 1


def test_reading_from_the_middle_gives_the_last_rows(log):
    everything = history(read(log)[0])
    rows = history(read(log, start=BLOCK + 1)[0])
    assert 0 < len(rows) < len(everything)
    assert repr(rows) == repr(everything[-len(rows) :])


def test_zeros_are_waited_for_and_skipped_after_the_patience(log, tmp_path):
    data = log.read_bytes()
    copy = tmp_path / log.name
    copy.write_bytes(data[:40_000] + bytes(4096) + data[44_096:])
    tail = Tail(copy)
    before = tail.poll()
    assert tail.poll() == []  # NFS may still bring the page
    copy.write_bytes(data)
    assert pieces(before + tail.poll()) == pieces(read(log)[0])
    assert tail.damaged == 0

    copy.write_bytes(data[:40_000] + bytes(4096) + data[44_096:])
    long_ago = time.time() - 60
    os.utime(copy, (long_ago, long_ago))  # it is no longer written
    records, tail = read(copy)
    assert pieces(before) < pieces(records) < pieces(read(log)[0])
    assert tail.damaged == 1


def test_zeros_longer_than_one_read_do_not_stop_the_reader(log, tmp_path):
    data = log.read_bytes()
    copy = tmp_path / log.name
    copy.write_bytes(data[:BLOCK] + bytes(READ + BLOCK) + data[BLOCK:])
    records, tail = [], Tail(copy, patience=0.0)
    for _ in range(4):
        records += tail.poll()
    assert len(history(records)) >= 149
    assert "exit" in {record.kind for record in records}


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"PK\x03\x04zip", r"is not a W&B log: it starts with b'PK.*' instead of"),
        (b":W&B\xe1\xbe\x01newer", "is a W&B log of version 1; only version 0 can be read"),
        (bytes(8), r"is not a W&B log: it starts with b'\\x00.*' instead of"),
    ],
)
def test_a_file_of_another_format_is_refused(start, said, tmp_path):
    path = tmp_path / "run-x.wandb"
    path.write_bytes(start)
    with pytest.raises(KitError, match=rf"run-x\.wandb {said}"):
        Tail(path).poll()


def test_a_killed_writer_keeps_its_rows(tmp_path):
    process = write(tmp_path / "run", 40, "sleep", start_new_session=True)
    assert process.stdout.readline() == b"logged\n"
    until(lambda: sum(len(history(read(log)[0])) for log in find_logs(tmp_path / "run")) == 40)  # flushed each second
    os.killpg(process.pid, signal.SIGKILL)  # the trainer and wandb's own process, as Slurm does
    process.communicate()
    records, tail = read(find_logs(tmp_path / "run")[0])
    assert len(history(records)) == 40
    assert "exit" not in {record.kind for record in records}
    assert tail.damaged == 0


def test_logs_are_found_from_the_run_folder_its_subfolders_and_by_path(log):
    run = log.parents[2]
    assert {find_logs(place)[0] for place in (run, run / "wandb", log.parent, log)} == {log}
    assert find_logs(run.parent / "nothing") == []


def test_a_log_finds_all_segments_of_its_run(log, tmp_path):
    names = ["offline-run-20260101_000000-seg", "offline-run-20260102_000000-seg", "run-20260103_000000-seg"]
    for name in names:
        (tmp_path / "wandb" / name).mkdir(parents=True)
        shutil.copy(log, tmp_path / "wandb" / name)
    other = tmp_path / "wandb" / "offline-run-20260104_000000-other"
    other.mkdir()
    (other / "run-other.wandb").write_bytes(log.read_bytes())
    segments = [tmp_path / "wandb" / name / log.name for name in names]
    assert find_logs(segments[1]) == find_logs(segments[1].parent) == segments
    assert find_logs(tmp_path) == [*segments, other / "run-other.wandb"]
