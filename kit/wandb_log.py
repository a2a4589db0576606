"""Reader of W&B's transaction log, run-<id>.wandb, while it grows. Needs no wandb.

The format is that of wandb's core/internal/transactionlog and core/pkg/leveldb/record.go: seven bytes of file header,
then LevelDB's log framing in blocks of 32 KiB counted from byte 0. A chunk is crc32 (over type and payload) u32, length
u16, type u8, payload; less than seven bytes at a block's end are padding. One or more chunks make a record, a protobuf
`wandb_internal.Record` (wandb/proto/wandb_internal.proto), of which only what is plotted is decoded.
"""

import json
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kit.errors import KitError

BLOCK = 32768
READ = 128 * BLOCK  # bytes per poll: a tenth of a second of work, so that a long log is drawn while it is still read
MAGIC = b":W&B\xe1\xbe\x00"  # the last byte is the version
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
_CHUNK_KIND = re.compile(rb"[\x01-\x04]")
HOLE = bytes(64)  # NFS shows pages that have not arrived as zeros; records are text and never hold that many


class NotAWandbFile(KitError):  # noqa: N818 - it reads as what it says
    """The file does not start like a transaction log, or is of a version that this reader does not know."""


class Record(NamedTuple):
    """One record: its number in the file, its kind (history, stats, run or exit) and what it says."""

    number: int
    kind: str
    values: dict[str, Any]


def find_logs(folder: Path) -> list[Path]:
    """Logs in the folder, its wandb/ or its wandb/wandb/, oldest first: the folders of runs are named by start time."""
    places = [folder, folder / "wandb", folder / "wandb" / "wandb"]
    found = [log for place in places for one in (place, *place.glob("*run-*")) for log in one.glob("run-*.wandb")]
    return sorted(found, key=lambda log: (log.parent.name.rpartition("run-")[2], log))


class Tail:
    """Reads what was appended since the last poll. Counts `records` seen and `damaged` ones.

    A chunk cut off by the end of the file is waited for. A damaged one is passed over as soon as a whole chunk is found
    behind it; if zeros lie between, they may be pages on their way, so that takes `patience` seconds.
    """

    def __init__(self, path: str | Path, patience: float = 30.0) -> None:
        self.path = Path(path)
        self.records = 0
        self.damaged = 0
        self.patience = patience
        self._offset = 0
        self._parts: list[bytes] = []
        self._hole = (-1, 0.0)  # where zeros are waited for, and since when

    def poll(self) -> list[Record]:
        """The next records, of at most READ bytes; none when nothing new is whole. Raises NotAWandbFile."""
        base, data, age = self._read()
        if len(data) < 7:
            return []
        if self._offset == 0:
            if data[:7] != MAGIC:
                raise NotAWandbFile(f"{self.path} starts with {data[:7]!r}, not as a W&B log of version 0 does.")
            self._offset = 7
        found: list[Record] = []
        at = self._offset - base
        while True:
            if BLOCK - at % BLOCK < 7:
                at += BLOCK - at % BLOCK
            end = _chunk_end(data, at)
            if end > len(data):
                break
            if end:
                self._take(data[at + 6], data[at + 7 : end], found)
            elif end := self._next_chunk(data, at, base, age):
                self.damaged += 1
                self._parts = []
            else:
                break
            at = end
        self._offset = base + at
        return found

    def _read(self) -> tuple[int, bytes, float]:
        """(offset of the first byte, which starts a block; the bytes; seconds since the file was written)."""
        try:
            with self.path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_size <= self._offset:
                    return 0, b"", 0.0
                base = self._offset - self._offset % BLOCK
                stream.seek(base)
                return base, stream.read(READ), time.time() - status.st_mtime
        except FileNotFoundError:
            return 0, b"", 0.0

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

    def _take(self, kind: int, payload: bytes, found: list[Record]) -> None:
        """Add a chunk to its record, and the record to `found` once it is whole."""
        if kind in (FULL, FIRST):
            self._parts = []
        elif not self._parts:
            return  # its beginning was lost with a damaged chunk
        self._parts.append(payload)
        if kind in (FULL, LAST):
            payload, self._parts = b"".join(self._parts), []
            self.records += 1
            try:
                found.extend(decode(payload))
            except (ValueError, LookupError):
                self.damaged += 1


def _chunk_end(data: bytes, at: int) -> int:
    """Where the chunk ends: past the data if its rest is not there yet, 0 if it is damaged. `data` starts a block."""
    if at + 7 > len(data):
        return at + 7
    crc, size, kind = HEADER.unpack_from(data, at)
    end: int = at + 7 + size
    fits = FULL <= kind <= LAST and end <= at - at % BLOCK + BLOCK
    return end if fits and (end > len(data) or zlib.crc32(data[at + 6 : end]) == crc) else 0


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
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


def decode(record: bytes) -> Iterator[Record]:
    """The record, if it is of a kind that is read here; most are not, so its first bytes are looked at first."""
    number = 0
    for field, value in fields(record) if _WANTED.match(record) else ():
        if field == 1:
            number = value
        elif field in _KINDS:
            kind, read = _KINDS[field]
            yield Record(number, kind, read(value))


# An item as wandb writes it in rows: under 128 bytes, a key (field 1, or 2 if it may be nested) and its JSON text,
# field 16. Neither holds control characters, so matches that touch each other from the first byte on are the items.
_ITEM = re.compile(rb"\x0a[\x00-\x7f][\x0a\x12][\x00-\x7f]([^\x00-\x1f]*?)\x82\x01[\x00-\x7f]([^\x00-\x1f]*)")


def _history(message: bytes) -> dict[str, Any]:
    """A row. Rows of short items, nearly all, take the fast way: one split and one JSON array."""
    parts = _ITEM.split(message)  # between, key, value, between, key, value, ..., the step
    if not any(parts[:-1:3]) and not parts[-1].startswith(b"\x0a"):
        try:
            values = json.loads(b"[" + b",".join(parts[2::3]) + b"]")
            return dict(zip(map(bytes.decode, parts[1::3]), values, strict=True))
        except ValueError:
            pass
    return _items(message, 1)


def _items(message: bytes, number: int) -> dict[str, Any]:
    """Items of a history or stats record; the parts of a nested key are joined by dots, as the W&B app shows them."""
    row = {}
    for item in (item for field, item in fields(message) if field == number):
        parts = list(fields(item))
        key = b".".join(part for field, part in parts if field in (1, 2)).decode(errors="replace")
        row[key] = json.loads(dict(parts).get(16, b"null"))
    return row


def _stats(message: bytes) -> dict[str, Any]:
    return {"_timestamp": _time(dict(fields(message))[2])} | _items(message, 3)


def _time(message: bytes) -> float:
    """Unix time of a google.protobuf.Timestamp."""
    parts = dict(fields(message))
    return float(parts.get(1, 0) + parts.get(2, 0) * 1e-9)


def _run(message: bytes) -> dict[str, Any]:
    names = {1: "run_id", 2: "entity", 3: "project", 8: "name", 13: "host"}
    facts = dict(fields(message))
    known = {name: facts[field].decode(errors="replace") for field, name in names.items() if field in facts}
    return known | {"start_time": _time(facts[17])}


def _exit(message: bytes) -> dict[str, Any]:
    code: int = dict(fields(message)).get(1, 0)
    return {"exit_code": code - (1 << 64) if code >> 63 else code}


_KINDS: dict[int, tuple[str, Callable[[bytes], dict[str, Any]]]]
_KINDS = {2: ("history", _history), 7: ("stats", _stats), 17: ("run", _run), 18: ("exit", _exit)}
# Record.num, then the tag of field 2, 7, 17 or 18, or of 16, control, which may come before the last two.
_WANTED = re.compile(rb"\x08[\x80-\xff]*[\x00-\x7f](?:\x12|\x3a|[\x82\x8a\x92]\x01)")
