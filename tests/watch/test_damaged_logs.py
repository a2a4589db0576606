"""W&B logs and node samples with odd records: the sound ones are read, in bounded memory, and nothing is raised."""

import json
import os
import zlib
from pathlib import Path

import pytest

from kit.watch.metrics import Metrics
from kit.watch.samples import CHUNK
from kit.watch.wandb_log import BLOCK, HEADER, RECORD_LIMIT, Tail

LENGTH_DELIMITED = 2


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def message(number: int, content: bytes) -> bytes:
    """A field of a protobuf message."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(len(content)) + content


def integer(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def items(values: dict[bytes, bytes]) -> bytes:
    return b"".join(message(1, message(1, name) + message(16, text)) for name, text in values.items())


def row(values: dict[bytes, bytes]) -> bytes:
    return b"\x08\x05" + message(2, items(values))


def record(number: int, content: bytes) -> bytes:
    return b"\x08\x05" + message(number, content)


def statistics(values: dict[bytes, bytes], time: bytes = b"\x08\x64") -> bytes:
    parts = b"".join(message(3, message(1, name) + message(16, text)) for name, text in values.items())
    return record(7, message(2, time) + parts)


def chunks(payload: bytes, at: int) -> bytes:
    """The chunks of one record that begins at this byte of a log."""
    found, first = bytearray(), True
    while first or payload:
        room = BLOCK - (at + len(found)) % BLOCK
        if room < 7:
            found += bytes(room)
            continue
        part, payload = payload[: room - 7], payload[room - 7 :]
        kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not payload]
        found += HEADER.pack(zlib.crc32(bytes([kind]) + part), len(part), kind) + part
        first = False
    return bytes(found)


def write_log(path: Path, *records: bytes) -> None:
    data = bytearray(b":W&B\xe1\xbe\0")
    for one in records:
        data += chunks(one, len(data))
    path.write_bytes(data)


SOUND = row({b"train/global_step": b"1", b"train/loss": b"2.0"})
ODD = {
    "a config of deep JSON": record(5, items({b"a": b"[" * 100_000})),
    "a row of deep JSON": row({b"a": b"[" * 100_000}),
    "100,000 digits": row({b"a": b"1" * 100_000}),
    "a step of 100,000 digits": row({b"train/global_step": b"1" * 100_000}),
    "a step that is a list": row({b"train/global_step": b"[1]", b"train/loss": b"3"}),
    "a step that is NaN": row({b"train/global_step": b"NaN", b"train/loss": b"3"}),
    "a step that is infinite": row({b"train/global_step": b"-Infinity", b"train/loss": b"3"}),
    "a number of 3 MB": b"\x08" + b"\xff" * 3_000_000 + b"\x01" + message(2, b""),
    "a number of 3 MB in a record that is no row": integer(1, 5) + b"\x1a" + b"\xff" * 3_000_000,
    "a size of 2^62": b"\x08\x05\x12" + varint(1 << 62),
    "a name of 3 MB": row({b"n" * 3_000_000: b"1"}),
    "a record of 5 MB": record(99, bytes(5_000_000)),
    "10,000 names": row({b"n%d" % number: b"1" for number in range(10_000)}),
    "statistics that are text": statistics({b"cpu": b'"a"'}),
    "statistics that are null": statistics({b"cpu": b"null", b"disk.sda.out": b"null", b"network.sent": b"null"}),
    "statistics that are lists": statistics({b"cpu": b"[1]", b"network.sent": b"{}"}),
    "statistics that are truth values": statistics({b"cpu": b"true"}),
    "statistics of 400 digits": statistics({b"cpu": b"1" * 400, b"disk.in": b"1" * 400}),
    "statistics of deep JSON": statistics({b"cpu": b"[" * 100_000}),
    "a GPU of 10,000 digits": statistics({b"gpu." + b"9" * 10_000 + b".gpu": b"1"}),
    "a GPU with an exponent": statistics({"gpu.\u00b2.gpu".encode(): b"1"}),
    "names without parts": statistics({b"gpu": b"1", b"": b"1", b"disk": b"1", b".": b"1"}),
    "a time that is text": record(7, message(2, b"\x0a\x01a")),
    "a time that is replaced by text": statistics({b"_timestamp": b'"x"', b"cpu": b"1"}),
    "a time that is NaN": statistics({b"_timestamp": b"NaN", b"cpu": b"1"}),
    "a time of 2^63 seconds": statistics({b"cpu": b"1"}, integer(1, 1 << 63)),
    "no time": record(7, message(3, items({b"cpu": b"1"}))),
    "a config that is not JSON": record(17, message(4, items({b"a": b"{"}))),
    "a host that is not text": record(17, message(13, b"\xff\xfe")),
    "an exit code that is text": record(18, message(1, b"abc")),
    **{f"a number in the place of field {field}": b"\x08\x05" + integer(field, 5) for field in (2, 5, 7, 12, 17, 18)},
    "an item without text": record(2, message(1, message(1, b"a"))),
    "an item that is a number": record(2, integer(1, 5)),
    "no bytes": b"",
    "a group": b"\x0b\x0c",
    "unknown wire type": b"\x08\x05\x17",
}


def read_all(place: Path) -> Metrics:
    metrics = Metrics(place)
    while metrics.poll():
        pass
    return metrics


@pytest.mark.parametrize("name", ODD)
def test_an_odd_record_does_not_hide_the_rows_before_and_behind_it(tmp_path, name):
    before = row({b"train/global_step": b"0", b"train/loss": b"9.0"})
    write_log(tmp_path / "run-x.wandb", before, ODD[name], SOUND)
    metrics = read_all(tmp_path)
    steps, values = metrics.series["train/loss"][:2]
    assert (steps[0], values[0]) == (0.0, 9.0) and (steps[-1], values[-1]) == (1.0, 2.0)
    assert metrics.problem == "" and metrics.left == 0


def test_a_record_longer_than_any_is_damaged_and_takes_no_more_memory(tmp_path):
    import tracemalloc

    write_log(tmp_path / "run-x.wandb", record(99, bytes(3 * RECORD_LIMIT)), SOUND)
    tracemalloc.start()
    metrics = read_all(tmp_path)
    highest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert metrics.last("train/loss") == 2.0 and metrics.damaged == 1
    assert highest < 2 * RECORD_LIMIT


@pytest.mark.parametrize("name", ["run-x.wandb", "nodes/node1.jsonl"])
@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_what_is_not_a_regular_file_is_a_problem_and_is_not_opened_for_ever(tmp_path, name, kind):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    metrics = Metrics(tmp_path)
    assert not metrics.poll() and "is not a regular file" in metrics.problem


SAMPLE = {"t": 1.0, "host": "n", "cpu": 1.0, "ram_gib": 1.0, "net_gb_s": None, "disk_gb_s": None, "gpus": []}
ODD_LINES = {
    "deep JSON": "[" * 100_000,
    "a list": "[1]",
    "a time that is NaN": json.dumps(SAMPLE | {"t": float("nan")}),
    "a time of 400 digits": json.dumps(SAMPLE | {"t": 10**400}),
    "a value of 400 digits": json.dumps(SAMPLE | {"cpu": 10**400}),
    "a host that is a list": json.dumps(SAMPLE | {"host": ["n"]}),
    "a host that is a number": json.dumps(SAMPLE | {"host": 5}),
    "GPUs that are text": json.dumps(SAMPLE | {"gpus": "a"}),
    "traffic that is a list": json.dumps(SAMPLE | {"net_gb_s": [1]}),
    "a line of 1 MB": '"' + "a" * (4 * CHUNK) + '"',
}


@pytest.mark.parametrize("name", ODD_LINES)
def test_an_odd_line_of_samples_is_counted_and_the_others_are_read(tmp_path, name):
    (tmp_path / "nodes").mkdir()
    lines = [json.dumps(SAMPLE), ODD_LINES[name], json.dumps(SAMPLE | {"t": 2.0, "cpu": 7.0})]
    (tmp_path / "nodes" / "n.jsonl").write_text("\n".join(lines) + "\n")
    metrics = Metrics(tmp_path)
    for _ in range(20):
        metrics.poll()
    assert metrics.last(("n", "cpu", "util")) == 7.0
    assert metrics.damaged == 1 and metrics.left == 0


def test_a_log_that_is_a_link_to_itself_is_no_log(tmp_path):
    (tmp_path / "run-x.wandb").symlink_to("run-x.wandb")
    tail = Tail(tmp_path / "run-x.wandb")
    with pytest.raises(OSError, match="symbolic links"):
        tail.poll()
    metrics = Metrics(tmp_path)
    assert not metrics.poll() and "symbolic links" in metrics.problem
