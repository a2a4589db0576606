"""Reader of W&B's transaction log, run-<id>.wandb, while it grows. Needs no wandb.

The format is that of wandb's core/internal/transactionlog and core/pkg/leveldb/record.go: seven bytes of file header,
then LevelDB's log framing in blocks of 32 KiB counted from byte 0. A chunk is crc32 (over type and payload) u32, length
u16, type u8, payload; less than seven bytes at the end of a block are padding. One or more chunks make a record, a
protobuf `wandb_internal.Record` (wandb/proto/wandb_internal.proto), of which only what is shown is decoded.
"""

import glob
import json
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kit import files
from kit.errors import KitError

BLOCK = 32768
READ = 32 * BLOCK  # bytes a poll: about 20 ms of work, so that the caller can do other things in between
MAGIC, VERSION = b":W&B\xe1\xbe", 0
RECORD_LIMIT = 16 << 20  # bytes; a longer record is damaged, so that a log cannot fill the memory
PART_OVERHEAD = 64  # bytes of memory of a part beyond its payload
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # chunk types
LONG_NAME = 512  # bytes; longer names of metrics are not kept
PATIENCE = 30.0  # seconds that zeros may be pages on their way
UNDECODABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_CHUNK_TYPE = re.compile(rb"[\x01-\x04]")
HOLE = bytes(64)  # NFS shows pages that have not arrived as zeros; records are text and never hold that many
_RUN_FOLDER = re.compile(r"(offline-)?run-\d{8}_\d{6}-")


class Kind(StrEnum):
    """The kinds of records that are decoded."""

    HISTORY = "history"  # logged rows
    CONFIG = "config"
    STATS = "stats"  # a sample of wandb's own system metrics
    METRIC = "metric"  # define_metric()
    RUN = "run"
    EXIT = "exit"


class Record(NamedTuple):
    """A decoded record. HISTORY is several rows of the same names, in order: a list of JSON texts for each name."""

    kind: Kind
    values: dict[str, Any]


def find_logs(place: Path) -> list[Path]:
    """The logs in a folder, its wandb/ or its wandb/wandb/, oldest first.

    For a log, or the folder of one segment of a run, these are all segments of that run.
    """
    log = _log_of(place)
    name = glob.escape(log.name) if log else "run-*.wandb"
    folder = place
    if log:
        folder = log.parent.parent if _RUN_FOLDER.match(log.parent.name) else log.parent
    parents = (folder, folder / "wandb", folder / "wandb" / "wandb")
    found = {log for parent in parents for run in (parent, *parent.glob("*run-*")) for log in run.glob(name)}
    # Run folders are named by start time.
    return sorted(found, key=lambda log: (log.parent.name.rpartition("run-")[2], log))


def _log_of(place: Path) -> Path | None:
    if place.is_file():
        return place
    return next(place.glob("run-*.wandb"), None) if _RUN_FOLDER.match(place.name) else None


class Tail:
    """Reads what was appended to a log since the last poll. Counts `records` seen and `damaged` ones.

    It starts at the first block that begins at the byte `start` or behind it. A chunk that is cut off by the end of the
    file is left for later. A damaged chunk is skipped as soon as a complete one is found behind it; zeros in between
    may be pages that NFS has not brought yet, so then only after `patience` seconds.
    """

    def __init__(self, path: str | Path, start: int = 0, patience: float = PATIENCE) -> None:
        self.path = Path(path)
        self.records = 0
        self.damaged = 0
        self.left = self.path.stat().st_size if self.path.exists() else 0  # bytes not read, at the last poll
        self.patience = patience
        self._offset = -(-max(0, start) // BLOCK) * BLOCK
        self._parts: list[bytes] = []  # payloads of a record that is not complete
        self._size = 0  # bytes of memory that they take
        self._hole = -1  # offset of the zeros that are waited for
        self._hole_since = 0.0

    @property
    def position(self) -> int:
        """The byte up to which the log has been read."""
        return self._offset

    def poll(self, size: int = READ) -> list[Record]:
        """The records in the next `size` bytes. Raises KitError if the file is not a W&B log, OSError if unreadable."""
        base, data, age = self._read(size)
        if len(data) < 7:
            return []
        if self._offset == 0:
            self._offset = self._check_header(data)
        at, records = self._offset - base, []
        while True:
            if at % BLOCK > BLOCK - 7:
                at += -at % BLOCK  # padding
            if at + 7 > len(data):
                break
            end = _chunk_end(data, at)
            if not 0 < end <= len(data):
                end = self._next_chunk(data, at, base, age, size)
                if not end:
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

    def _read(self, size: int) -> tuple[int, bytes, float]:
        """(offset of the first byte, which starts a block; the bytes; seconds since the file was written)."""
        try:
            with files.open_regular(self.path) as stream:
                status = os.fstat(stream.fileno())
                self.left = max(0, status.st_size - self._offset)
                base = self._offset - self._offset % BLOCK
                stream.seek(base)
                return base, stream.read(size) if self.left else b"", time.time() - status.st_mtime
        except FileNotFoundError:
            return 0, b"", 0.0

    def _check_header(self, data: bytes) -> int:
        """The size of the file header."""
        if not data.startswith(MAGIC):
            raise KitError(f"{self.path} is not a W&B log: it starts with {data[:7]!r} instead of {MAGIC!r}.")
        if data[6] != VERSION:
            raise KitError(f"{self.path} is a W&B log of version {data[6]}; only version {VERSION} can be read.")
        return 7

    def _next_chunk(self, data: bytes, at: int, base: int, age: float, size: int) -> int:
        """Where the first complete chunk behind the damage at `at` starts; 0 to wait for more."""
        starts = (match.start() - 6 for match in _CHUNK_TYPE.finditer(data, at + 7))
        complete = (start for start in starts if 0 < _chunk_end(data, start) <= len(data))
        found = next(complete, size if len(data) == size else 0)
        if found and HOLE in data[at:found]:
            if self._hole != base + at:
                self._hole, self._hole_since = base + at, time.monotonic()
            if max(age, time.monotonic() - self._hole_since) < self.patience:
                return 0
        return found

    def _join(self, chunk_type: int, payload: bytes) -> list[bytes]:
        """The record that this chunk completes, if it does."""
        if chunk_type == FIRST:
            self._parts, self._size = [], 0
        elif not self._parts:
            return []  # its beginning was lost with a damaged chunk
        self._parts.append(payload)
        self._size += len(payload) + PART_OVERHEAD
        if self._size > RECORD_LIMIT:
            self.damaged += 1
            self._parts = []
        if chunk_type != LAST:
            return []
        record, self._parts = b"".join(self._parts), []
        return [record]

    def _decode(self, records: list[bytes]) -> list[Record]:
        self.records += len(records)
        found: list[Record] = []
        for record in records:
            try:
                _add(found, record)
            except UNDECODABLE:
                self.damaged += 1
        return found


def _add(found: list[Record], record: bytes) -> None:
    """Decode one record; a row joins the rows before it that have the same names.

    Raises one of UNDECODABLE if it is damaged.
    """
    head = _ROW.match(record)
    if head is None:
        found += _decode(record)
        return
    row = _items(record, head)
    if found and found[-1].kind == Kind.HISTORY and found[-1].values.keys() == row.keys():
        for name, text in row.items():
            found[-1].values[name].append(text)
    else:
        found.append(Record(Kind.HISTORY, {name: [text] for name, text in row.items()}))


def _chunk_end(data: bytes, at: int) -> int:
    """Where the chunk ends: past the data if it is not complete, 0 if it is damaged. `data` starts a block."""
    if at + 7 > len(data):
        return at + 7
    crc, size, chunk_type = HEADER.unpack_from(data, at)
    end: int = at + 7 + size
    fits = FULL <= chunk_type <= LAST and end <= at - at % BLOCK + BLOCK
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
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


# A row: Record.num, then Record.history, field 2, and its size.
_ROW = re.compile(rb"\x08[\x80-\xff]*[\x00-\x7f](\x12)[\x80-\xff]*[\x00-\x7f]")
# An item: a key, field 1, or the parts of a nested one, fields 2, and its JSON text, field 16, whose tag ends the key.
# No JSON holds control characters, so there are as many items as tags, unless sizes take three bytes or look like one.
_SIZE = rb"[\x80-\xff]?[\x00-\x7f]"
_ITEM = re.compile(rb"\x0a%b([\x0a\x12][^\x82]+)\x82\x01%b([^\x00-\x1f]*)" % (_SIZE, _SIZE))


def _items(record: bytes, head: "re.Match[bytes]") -> dict[str, bytes]:
    """Names and JSON texts of the row behind that head, in the order of the log: wandb shuffles them."""
    found = _ITEM.findall(record, head.end())
    if len(found) == record.count(b"\x82\x01", head.end()):  # the fast way, taken by nearly all rows
        return {_name(key): text for key, text in found}
    size, start = _varint(record, head.end(1))
    return dict(_pairs(record[start : start + size], 1))


def _name(item: bytes) -> str:
    """The parts of a nested key are joined by dots, as the W&B app shows them."""
    return _short_name(item) if len(item) < LONG_NAME else _joined(item)


@lru_cache(4096)
def _short_name(item: bytes) -> str:
    return _joined(item)


def _joined(item: bytes) -> str:
    return b".".join(part for field, part in _fields(item) if field in (1, 2)).decode(errors="replace")


def _pairs(message: bytes, number: int) -> Iterator[tuple[str, bytes]]:
    """(name, JSON text) of the items in the field of that number."""
    for item in (item for field, item in _fields(message) if field == number):
        yield _joined(item), dict(_fields(item)).get(16, b"null")


def _parse_values(pairs: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in pairs}


def _time(message: bytes) -> float:
    """Unix time of field 2, a google.protobuf.Timestamp."""
    parts = dict(_fields(dict(_fields(message))[2]))
    return float(parts.get(1, 0) + parts.get(2, 0) * 1e-9)


def _texts(message: bytes, names: dict[int, str]) -> dict[str, Any]:
    return {names[field]: text.decode(errors="replace") for field, text in _fields(message) if field in names}


def _config(message: bytes) -> dict[str, Any]:
    return {"config": _parse_values(_pairs(dict(_fields(message)).get(4, b""), 1))}


def _exit(message: bytes) -> dict[str, Any]:
    code: int = dict(_fields(message)).get(1, 0)
    return {"exit_code": code - (1 << 64) if code >> 63 else code}


_KINDS: dict[int, tuple[Kind, Callable[[bytes], dict[str, Any]]]] = {
    2: (Kind.HISTORY, lambda message: {name: [text] for name, text in _pairs(message, 1)}),
    5: (Kind.CONFIG, lambda message: _parse_values(_pairs(message, 1))),
    7: (Kind.STATS, lambda message: {"_timestamp": _time(message)} | _parse_values(_pairs(message, 3))),
    12: (Kind.METRIC, lambda message: _texts(message, {2: "glob", 4: "step"})),
    17: (Kind.RUN, lambda message: _texts(message, {1: "id", 3: "project", 13: "host"}) | _config(message)),
    18: (Kind.EXIT, _exit),
}


def _decode(record: bytes) -> list[Record]:
    """The record, if it is of a kind that is read here."""
    known = [(*_KINDS[field], message) for field, message in _fields(record) if field in _KINDS]
    return [Record(kind, read(message)) for kind, read, message in known]
