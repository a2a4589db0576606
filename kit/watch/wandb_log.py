"""Reader of W&B's transaction log, run-<id>.wandb, while it grows. Needs no wandb.

The format is that of wandb's core/internal/transactionlog and core/pkg/leveldb/record.go: seven bytes of file header,
then LevelDB's log framing in blocks of 32 KiB counted from byte 0. A chunk is crc32 (over type and payload) u32, length
u16, type u8, payload; less than seven bytes at a block's end are padding. One or more chunks make a record, a protobuf
`wandb_internal.Record` (wandb/proto/wandb_internal.proto), of which only what is shown is decoded.
"""

import glob
import json
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kit.errors import KitError

BLOCK = 32768
READ = 32 * BLOCK  # bytes a poll: some 20 ms of work, so that whoever polls can do other things in between
MAGIC, VERSION = b":W&B\xe1\xbe", 0
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
_CHUNK_KIND = re.compile(rb"[\x01-\x04]")
HOLE = bytes(64)  # NFS shows pages that have not arrived as zeros; records are text and never hold that many
_SEGMENT = re.compile(r"(offline-)?run-\d{8}_\d{6}-")


class Record(NamedTuple):
    """What a record says, by its kind: summary, config, stats, metric, run or exit.

    "history" is many: logged rows of the same names, in order, as each name's values in JSON texts.
    """

    kind: str
    values: dict[str, Any]


def find_logs(place: Path) -> list[Path]:
    """Logs in a folder, its wandb/ or its wandb/wandb/, oldest first: the folders of runs are named by start time.

    A log itself, or the folder of one segment of a run, stands for all segments of that run.
    """
    log = place if place.is_file() else next(place.glob("run-*.wandb"), None) if _SEGMENT.match(place.name) else None
    name = glob.escape(log.name) if log else "run-*.wandb"
    folder = log.parent.parent if log and _SEGMENT.match(log.parent.name) else log.parent if log else place
    places = (folder, folder / "wandb", folder / "wandb" / "wandb")
    found = {log for one in places for run in (one, *one.glob("*run-*")) for log in run.glob(name)}
    return sorted(found, key=lambda log: (log.parent.name.rpartition("run-")[2], log))


class Tail:
    """Reads what was appended since the last poll. Counts `records` seen and `damaged` ones.

    It starts at the first block that begins at the byte `start` or behind it. A chunk cut off by the end of the file is
    waited for. A damaged one is passed over as soon as a whole chunk is found behind it; if zeros lie between, they may
    be pages on their way, so that takes `patience` seconds.
    """

    def __init__(self, path: str | Path, start: int = 0, patience: float = 30.0) -> None:
        self.path = Path(path)
        self.records = 0
        self.damaged = 0
        self.left = self.path.stat().st_size if self.path.exists() else 0  # bytes not read, at the last look
        self.patience = patience
        self._offset = -(-max(0, start) // BLOCK) * BLOCK
        self._parts: list[bytes] = []
        self._hole = (-1, 0.0)  # where zeros are waited for, and since when

    def poll(self) -> list[Record]:
        """What the next READ bytes hold; nothing when nothing new is whole. Raises KitError if it is no log, OSError.

        wandb writes summaries with every row; what they come to is one record at the end.
        """
        base, data, age = self._read()
        if len(data) < 7:
            return []
        if self._offset == 0:
            self._offset = self._begin(data)
        at, records = self._offset - base, []
        while True:
            if at % BLOCK > BLOCK - 7:
                at += -at % BLOCK  # padding
            if at + 7 > len(data):
                break
            end = _chunk_end(data, at)
            if not 0 < end <= len(data):
                if not (end := self._next_chunk(data, at, base, age)):
                    break
                self.damaged += 1
                self._parts = []
            elif data[at + 6] == FULL:
                self._parts = []
                records.append(data[at + 7 : end])
            else:
                records += self._join(data[at + 6], data[at + 7 : end])
            at = end
        self.left -= base + at - self._offset
        self._offset = base + at
        return self._decode(records)

    def _read(self) -> tuple[int, bytes, float]:
        """(offset of the first byte, which starts a block; the bytes; seconds since the file was written)."""
        try:
            with self.path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                self.left = max(0, status.st_size - self._offset)
                base = self._offset - self._offset % BLOCK
                stream.seek(base)
                return base, stream.read(READ) if self.left else b"", time.time() - status.st_mtime
        except FileNotFoundError:
            return 0, b"", 0.0

    def _begin(self, data: bytes) -> int:
        if not data.startswith(MAGIC):
            raise KitError(f"{self.path} starts with {data[:7]!r}, not as a W&B log does.")
        if data[6] != VERSION:
            raise KitError(f"{self.path} is a W&B log of version {data[6]}; only version {VERSION} is known here.")
        return 7

    def _next_chunk(self, data: bytes, at: int, base: int, age: float) -> int:
        """Where the first whole chunk behind the damage at `at` starts; 0 to wait for more."""
        starts = (match.start() - 6 for match in _CHUNK_KIND.finditer(data, at + 7))
        whole = (start for start in starts if 0 < _chunk_end(data, start) <= len(data))
        found = next(whole, READ if len(data) == READ else 0)
        if found and HOLE in data[at:found]:
            if self._hole[0] != base + at:
                self._hole = (base + at, time.monotonic())
            if max(age, time.monotonic() - self._hole[1]) < self.patience:
                return 0
        return found

    def _join(self, kind: int, payload: bytes) -> list[bytes]:
        """The record of several chunks, if this one completes it."""
        if kind == FIRST:
            self._parts = []
        elif not self._parts:
            return []  # its beginning was lost with a damaged chunk
        self._parts.append(payload)
        if kind != LAST:
            return []
        record, self._parts = b"".join(self._parts), []
        return [record]

    def _decode(self, records: list[bytes]) -> list[Record]:
        """Rows of the same names together, and the summary that all of these records make."""
        self.records += len(records)
        found: list[Record] = []
        columns: dict[str, list[bytes]] = {}
        summary: dict[str, bytes] = {}
        last = coming = b""  # a summary comes before the row that it mirrors; of rows of the same names the last counts
        for record in records:
            try:
                head = _ROW.match(record)
                if head is None:
                    for other in decode(record):
                        if other.kind == "summary":
                            summary |= _summary(last) | other.values
                            last = b""
                        else:
                            found.append(other)
                            columns = {}
                elif head[1] == b"\x12":
                    row = _items(record, head)
                    if row.keys() == columns.keys():
                        for name, text in row.items():
                            columns[name].append(text)
                    else:
                        columns = {name: [text] for name, text in row.items()}
                        found.append(Record("history", columns))
                        summary |= _summary(last)
                    last = coming
                elif b"_step\x82\x01" in record:
                    coming = record
                elif b"\x06_wandb" not in record:  # the seconds since the start, with every row
                    summary |= _summary(record)
            except (ValueError, LookupError, TypeError, AttributeError):
                self.damaged += 1
        summary |= _summary(last) | _summary(coming)
        return [*found, Record("summary", _values(summary.items()))] if summary else found


def _chunk_end(data: bytes, at: int) -> int:
    """Where the chunk ends: past the data if its rest is not there yet, 0 if it is damaged. `data` starts a block."""
    if at + 7 > len(data):
        return at + 7
    crc, size, kind = HEADER.unpack_from(data, at)
    end: int = at + 7 + size
    fits = FULL <= kind <= LAST and end <= at - at % BLOCK + BLOCK
    return end if fits and (end > len(data) or zlib.crc32(data[at + 6 : end]) == crc) else 0


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message: an int, or the bytes of any other wire type."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        size, at = _varint(message, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := message[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


# A row or its summary, nearly all of a log: Record.num, then field 2 or 3 and its size. (Others may begin with more.)
_ROW = re.compile(rb"\x08[\x80-\xff]*[\x00-\x7f]([\x12\x1a])[\x80-\xff]*[\x00-\x7f]")
# An item: a key, field 1, or the parts of a nested one, fields 2, and its JSON text, field 16, whose tag ends the key.
# No JSON holds control characters, so there are as many items as tags, unless sizes take three bytes or look like one.
_SIZE = rb"[\x80-\xff]?[\x00-\x7f]"
_ITEM = re.compile(rb"\x0a%b([\x0a\x12][^\x82]+)\x82\x01%b([^\x00-\x1f]*)" % (_SIZE, _SIZE))


def _items(record: bytes, head: "re.Match[bytes]") -> dict[str, bytes]:
    """Names and JSON texts of the row behind that head; wandb shuffles them. Nearly all rows go the fast way."""
    found = _ITEM.findall(record, head.end())
    if len(found) == record.count(b"\x82\x01", head.end()):
        return {_name(key): text for key, text in found}
    size, start = _varint(record, head.end(1))
    return dict(_pairs(record[start : start + size], 1))


def _summary(record: bytes) -> dict[str, bytes]:
    return _items(record, head) if (head := _ROW.match(record)) else {}


@lru_cache(4096)
def _name(item: bytes) -> str:
    """The parts of a nested key are joined by dots, as the W&B app shows them."""
    return b".".join(part for field, part in _fields(item) if field in (1, 2)).decode(errors="replace")


def _pairs(message: bytes, number: int) -> Iterator[tuple[str, bytes]]:
    """(name, JSON text) of the items in the field of that number."""
    for item in (item for field, item in _fields(message) if field == number):
        yield _name.__wrapped__(item), dict(_fields(item)).get(16, b"null")


def _values(pairs: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in pairs}


def _time(message: bytes) -> float:
    """Unix time of field 2, a google.protobuf.Timestamp."""
    parts = dict(_fields(dict(_fields(message))[2]))
    return float(parts.get(1, 0) + parts.get(2, 0) * 1e-9)


def _texts(message: bytes, names: dict[int, str]) -> dict[str, Any]:
    return {names[field]: text.decode(errors="replace") for field, text in _fields(message) if field in names}


def _config(message: bytes) -> dict[str, Any]:
    return {"config": _values(_pairs(dict(_fields(message)).get(4, b""), 1))}


def _exit(message: bytes) -> dict[str, Any]:
    code: int = dict(_fields(message)).get(1, 0)
    return {"exit_code": code - (1 << 64) if code >> 63 else code}


_KINDS: dict[int, tuple[str, Callable[[bytes], dict[str, Any]]]] = {
    2: ("history", lambda message: {name: [text] for name, text in _pairs(message, 1)}),
    3: ("summary", lambda message: dict(_pairs(message, 1))),
    5: ("config", lambda message: _values(_pairs(message, 1))),
    7: ("stats", lambda message: {"_timestamp": _time(message)} | _values(_pairs(message, 3))),
    12: ("metric", lambda message: _texts(message, {2: "glob", 4: "step"})),
    17: ("run", lambda message: _texts(message, {1: "id", 2: "entity", 3: "project", 13: "host"}) | _config(message)),
    18: ("exit", _exit),
}


def decode(record: bytes) -> list[Record]:
    """The record, if it is of a kind that is read here; a summary still as JSON texts."""
    known = [(*_KINDS[field], message) for field, message in _fields(record) if field in _KINDS]
    return [Record(kind, read(message)) for kind, read, message in known]
