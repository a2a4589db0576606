"""Source: a file, a folder or a hub id as a stream of conversations, by what files hold rather than by their names."""

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from kit import files
from kit.data import oasst
from kit.data.conversations import COLUMNS, FORMATS, Conversation, Rejected, convert, row_id
from kit.errors import InputError

Reject = Callable[[str, str], None]  # (row id, reason): told once for each row that is not used
Place = tuple[int, int]  # (file index, row or line number from 1): parts merge back into one order
Part = tuple[int, int]  # (i, n): the i-th of n shares

NAMED = re.compile(r"\.(jsonl|json|parquet|arrow|txt)(\.gz|\.zst)?$", re.IGNORECASE)
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # datasets writes them
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet", b"\xff\xff\xff\xff": "arrow"}
BY_NAME = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet", ".arrow": "arrow"}
# As datasets finds splits in names: a keyword between characters that are neither letters nor digits.
SPLIT = re.compile(r"(?<![a-z0-9])(train|training|val|valid|validation|dev|test|testing|eval|evaluation)(?![a-z0-9])")
LOOK = 20  # rows of a file looked at for its format
HEAD = 1000  # rows of a file of which at most 1 in 20 may be bad
BATCH = 1000  # rows of a table decoded at a time
CHUNK = 1 << 16  # bytes or characters read at a time


@dataclass(frozen=True)
class Source:
    """Files of one format, with their names inside the source and their splits: "train", "eval" or empty."""

    files: tuple[Path, ...]
    names: tuple[str, ...]
    splits: tuple[str, ...]
    format: str
    reason: str  # how the format was seen

    def read(self, lang: str, reject: Reject, part: Part = (0, 1)) -> Iterator[tuple[Place, Conversation]]:
        """The part's conversations with their places, streamed; each row is yielded or rejected once.

        A part is whole files where there are enough, else every n-th row. OASST messages are joined into trees first:
        the unit is then the tree, and messages that belong to none are rejected one by one.
        Raises InputError for a file that is cut short, not UTF-8, or mostly not what its name says.
        """

        def tell(place: Place, row: Any, reason: str) -> None:
            reject(row_id(row, self._name(place)), str(row) if isinstance(row, Rejected) else reason)

        units = self._trees(part, tell) if self.format == "oasst_messages" else self._rows(part)
        for place, row in units:
            try:
                conversation = convert(row, self.format, self._name(place), lang, self.splits[place[0]])
            except Rejected as error:
                tell(place, row, str(error))
            else:
                yield place, conversation

    def _name(self, place: Place) -> str:
        return f"{self.names[place[0]]}:{place[1]}" if place[1] else self.names[place[0]]

    def _trees(self, part: Part, tell: Callable[[Place, Any, str], None]) -> Iterator[tuple[Place, Any]]:
        index, count = part
        trees = oasst.join(self._rows((0, 1)), tell if index == 0 else lambda place, row, reason: None)
        return (unit for number, unit in enumerate(trees) if number % count == index)

    def _rows(self, part: Part) -> Iterator[tuple[Place, Any]]:
        index, count = part
        whole = len(self.files) >= count
        for i, path in enumerate(self.files):
            if not whole or i % count == index:
                rows = _rows(path, _is_document(path, self.format), (0, 1) if whole else part)
                yield from (((i, number), row) for number, row in rows)


def open_source(source: str, source_format: str = "auto") -> Source:
    """Find the files and see what they hold.

    Files: .jsonl, .json, .parquet, .arrow, .txt (one document a file), each also as .gz or .zst; folders with all that
    lies below them; hub ids through datasets. Raises InputError that says what was looked for and where.
    """
    found = _find(source)
    formats = {path: _format(path, source_format) for path in found.values()}
    first = {seen: path for path, seen in reversed(formats.items()) if seen}  # of each format
    if not first:
        raise InputError(f"Data {source!r} holds no rows: {', '.join(list(found)[:5])} empty.")
    if len(first) > 1:
        pair = " and ".join(f"{path} has rows of {seen}" for path, seen in formats.items() if first.get(seen) == path)
        raise InputError(f"Data {source!r} mixes formats: {pair}. Point data.source at files of one format.")
    ((kept, path),), sides = first.items(), _sides(list(found))
    said = [f"{kept}: {'one document a file' if _is_document(path, kept) else f'rows have {FORMATS[kept].keys}'}"]
    held = {path: _container(path) for path, seen in formats.items() if seen}
    said += [f"{path.name} is {kind} inside" for path, kind in held.items() if kind != BY_NAME.get(path.suffix, "text")]
    said += [f"splits as the names say, {sides.count('eval')} of {len(sides)} files for eval"] if any(sides) else []
    return Source(tuple(found.values()), tuple(found), sides, kept, "; ".join(said))


def _find(source: str) -> dict[str, Path]:
    """Files by their names inside the source; those of a hub id are its splits in datasets' cache."""
    path = files.locate(source)
    if path.is_file():
        return {path.name: path}
    if not path.is_dir():
        return _find_hub(source)
    inside = sorted((p.relative_to(path).as_posix(), p) for p in path.rglob("*") if NAMED.search(p.name))
    found = {n: p for n, p in inside if p.name not in METADATA and not re.search(r"(^|/)\.", n) and not p.is_dir()}
    if not found:
        raise InputError(f"Data {source!r}: the folder holds no .jsonl, .json, .parquet, .arrow or .txt file.")
    return found


def _find_hub(source: str) -> dict[str, Path]:
    import datasets

    try:
        loaded = datasets.load_dataset(source)
    except Exception as error:  # offline, no such data set, no licence accepted: the library's own words follow
        cache = datasets.config.HF_DATASETS_CACHE
        raise InputError(
            f"Data {source!r} not found: there is no such file or folder, and as a hub id it is neither in the cache "
            f"{cache} nor could it be fetched ({str(error).splitlines()[0]}). Set data.source to a file or folder, "
            "or HF_HOME to a cache that holds it."
        ) from None
    paths = [(split, Path(file["filename"])) for split, rows in loaded.items() for file in rows.cache_files]
    return {f"{split}/{path.name}": path for split, path in paths}


def _sides(names: list[str]) -> tuple[str, ...]:
    """The dataset's own splits where the names tell both sides; what no name tells is then for training."""
    words = [(SPLIT.findall(name.lower()) or [""])[-1] for name in names]
    sides = ["train" if not word or word.startswith("train") else "eval" for word in words]
    return tuple(sides if len(set(sides)) > 1 else [""] * len(sides))


def _format(path: Path, wanted: str) -> str:
    """The format that most of the first rows fit; empty for an empty file."""
    with _told(path):
        if _is_document(path, wanted):
            return "text" if _container(path) else ""
        head = [(number, _parse(raw)) for number, raw in islice(_records(path), LOOK)]
    rows = [row for _, row in head if isinstance(row, dict)]
    if head and not rows:
        raise _not_rows(path, head)
    formats = FORMATS if wanted == "auto" else {wanted: FORMATS[wanted]}
    fits = Counter(next((name for name, known in formats.items() if known.fits(row)), "") for row in rows)
    fits.pop("", None)
    if head and not fits:
        means = "; ".join(f"{name}: {known.keys}" for name, known in formats.items())
        raise InputError(f"{path}: rows have the keys {', '.join(rows[0]) or '(none)'}. Looked for {means}.")
    return fits.most_common(1)[0][0] if fits else ""


def _is_document(path: Path, source_format: str) -> bool:
    return ".txt" in path.suffixes[-2:] and source_format in ("auto", "text")


def _rows(path: Path, document: bool, part: Part) -> Iterator[tuple[int, Any]]:
    """Numbered rows of a file, those of the part; a Rejected in place of one that is none."""
    index, count = part
    with _told(path):
        records = _records(path, COLUMNS, document)
        head = [(number, _parse(raw)) for number, raw in islice(records, HEAD)]
        bad = sum(not isinstance(row, dict) for _, row in head)
        if head and (bad == len(head) or bad > max(1, len(head) / 20)):
            raise _not_rows(path, head)
        yield from (pair for pair in head or [(0, Rejected("empty file"))] if pair[0] % count == index)
        yield from ((number, _parse(raw)) for number, raw in records if number % count == index)


def _not_rows(path: Path, head: list[tuple[int, Any]]) -> InputError:
    bad = [number for number, row in head if not isinstance(row, dict)]
    return InputError(
        f"{path} is not what its name says: {len(bad)} of its first {len(head)} rows are no JSON objects, the first in "
        f"line or row {bad[0]}. Look at it, and write the file again or take it out of data.source."
    )


def _parse(raw: Any) -> Any:
    """A line of JSON, or a row that is parsed already; a Rejected where it is no object."""
    try:
        row = json.loads(raw.strip().decode("utf-8", "surrogatepass")) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError) and error.reason != "unexpected end of data":
            raise  # not a line cut inside a character, but a file in another encoding
        return Rejected("NUL character" if b"\0" in raw else "not JSON")
    return row if isinstance(row, dict) else Rejected("not an object")


def _container(path: Path) -> str:
    with path.open("rb") as stream:
        magic = stream.read(4)
    return next((kind for start, kind in MAGIC.items() if magic.startswith(start)), "text")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What goes wrong in reading a file, as a sentence that names it."""
    from pyarrow import ArrowException

    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(
            f"{path} is not UTF-8 (byte 0x{byte:02x}): Latin-1 or Windows-1252, or not text at all. If it is text, "
            "convert it: iconv -f WINDOWS-1252 -t UTF-8."
        ) from None
    except (OSError, EOFError, ArrowException, RecursionError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"{path} is cut short, damaged or unreadable ({why}). Fetch or write it again.") from None


def _records(path: Path, columns: frozenset[str] = frozenset(), document: bool = False) -> Iterator[tuple[int, Any]]:
    """Numbered rows as they lie in the file: lines of JSON as bytes, else rows of these columns or all."""
    kind = _container(path)
    if kind in ("parquet", "arrow"):
        yield from enumerate(_table(path, kind, columns), 1)
        return
    with _stream(path, kind) as stream:
        head = stream.peek(CHUNK)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) or 0.25 < head.count(0) / (len(head) or 1) <= 0.75:
            raise InputError(f"{path} is UTF-16 or UTF-32, not UTF-8. Convert it: iconv -f UTF-16 -t UTF-8.")
        stream.read(3 if head.startswith(b"\xef\xbb\xbf") else 0)  # the byte order mark of UTF-8
        if document and head:
            yield 0, {"text": stream.read().decode()}
        elif _is_array(stream.peek(CHUNK)):
            yield from enumerate(_array(stream), 1)
        else:
            yield from ((number, line) for number, line in enumerate(stream, 1) if not line.isspace())


def _stream(path: Path, kind: str) -> Any:
    if kind == "text":
        return path.open("rb", buffering=CHUNK)
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), kind), CHUNK)


def _table(path: Path, kind: str, columns: frozenset[str]) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    if kind == "parquet":
        with parquet.ParquetFile(path) as table:
            kept = [name for name in table.schema_arrow.names if name in columns]
            for batch in table.iter_batches(BATCH, columns=kept or None):
                yield from batch.to_pylist()
    else:
        # Read, not mapped, and validated: a damaged file that is mapped ends the process with a bus error.
        with pyarrow.OSFile(str(path)) as opened, pyarrow.ipc.open_stream(opened) as table:
            kept = [name for name in table.schema.names if name in columns or not columns]
            for batch in table:
                batch.validate(full=True)
                yield from batch.select(kept).to_pylist()


def _is_array(head: bytes) -> bool:
    """A JSON array of rows, and not lines of which the first is an array."""
    first, _, rest = head.lstrip().partition(b"\n")
    return first.startswith(b"[") and not (rest.strip() and _parse(first).args == ("not an object",))


def _array(stream: BinaryIO) -> Iterator[Any]:
    """The elements of a JSON array, without holding it whole. Raises EOFError where it does not end well."""
    decode, at, size = json.JSONDecoder().raw_decode, 1, CHUNK
    with io.TextIOWrapper(stream, "utf-8", "surrogatepass") as reader:
        text = reader.read(CHUNK).lstrip()
        while True:
            while text[at : at + 1] and text[at] in " \t\r\n,":
                at += 1
            if text[at : at + 1] == "]":
                break
            try:
                row, end = decode(text, at)
            except ValueError:
                end = len(text)
            if end < len(text):  # what follows shows that the element is whole
                yield row
                at, size = end, CHUNK
            elif more := reader.read(size):
                text, at, size = text[at:] + more, 0, 2 * size
            else:
                raise EOFError(f"the JSON array has no end after character {len(text)} of its last part")
        if (text[at + 1 :] + reader.read(CHUNK)).strip():
            raise EOFError("text after the end of the JSON array")
