"""Records of one data file: lines or an array of JSON, Parquet, Arrow or plain text, known by content, not by name."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kit.data.conversations import COLUMNS, Rejected
from kit.data.keys import MEDIA_LISTS, MEDIA_SINGLE
from kit.errors import InputError

Numbered = Iterator[tuple[int, Any]]  # (row or line number from 1, record); a document of a .txt file has number 0
OnBytes = Callable[[float], None]  # called with the bytes of the file that were read since the last call

ARROW_FILE = "arrow file"  # with a directory of its batches, as Feather; "arrow" is a stream, as `datasets` writes
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
    b"\xff\xff\xff\xff": "arrow",
    b"ARROW1": ARROW_FILE,
}
# Known by their first bytes, and not read.
OTHER_FORMATS = {
    **{b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)},
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"SQLite format 3": "an SQLite database",
    b"Obj\x01": "Avro",
    b"FEA1": "Feather version 1",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "HDF5",
    b"MMIDIDX": "an index of Megatron",
}
MEDIA = frozenset({*MEDIA_LISTS, *MEDIA_SINGLE})
BATCH_ROWS = 1000  # rows of a table decoded at a time
CHUNK = 1 << 16  # bytes or characters read at a time


def container(path: Path) -> str:
    """A value of MAGIC or "text", by the first bytes of the file. Raises InputError for OTHER_FORMATS."""
    with path.open("rb") as stream:
        magic = stream.read(16)
    for start, name in OTHER_FORMATS.items():
        if magic.startswith(start):
            raise InputError(f"{path} is {name} inside, which is not read. Write it as JSON lines, Parquet or Arrow.")
    return next((kind for start, kind in MAGIC.items() if magic.startswith(start)), "text")


def read_records(
    path: Path, one_document: bool = False, on_bytes: OnBytes | None = None, all_columns: bool = False
) -> Numbered:
    """Numbered records in the file's order: lines as bytes, elements of a JSON array, or table rows as dicts.

    Of tables only the columns in COLUMNS are read, unless there are none of them or `all_columns` is set. With
    `one_document` the text of the file is one record. Raises what `read_errors` turns into sentences.
    """
    kind, reported = container(path), 0
    with io.FileIO(path) as raw:
        stream = io.BufferedReader(raw, CHUNK)
        if kind in TABLES:
            batches = TABLES[kind](stream, all_columns)
            records: Numbered = enumerate((row for batch in batches for row in _rows(batch)), 1)
        else:
            records = _text_records(path, stream if kind == "text" else _decompressed(stream, kind), one_document)
        for record in records:
            yield record
            reached = 0 if raw.closed else raw.tell()
            if on_bytes and reached > reported:
                on_bytes(reached - reported)
                reported = reached
    if on_bytes:
        on_bytes(path.stat().st_size - reported)


def _rows(batch: Any) -> list[Any]:
    """The rows of a table's batch. Of images, videos and sounds they say that they are there, not what they hold."""
    import pyarrow

    media = [
        field.name
        for field in batch.schema
        if field.name in MEDIA and (pyarrow.types.is_nested(field.type) or pyarrow.types.is_binary(field.type))
    ]
    if not media or len(media) == batch.num_columns:
        return list(batch.to_pylist())
    rows: list[Any] = batch.drop_columns(media).to_pylist()
    for name in media:
        column = batch.column(name)
        present = column.value_lengths() if pyarrow.types.is_list(column.type) else column.is_valid()
        for row, is_there in zip(rows, present.to_pylist(), strict=True):
            row[name] = bool(is_there) or None
    return rows


def _text_records(path: Path, stream: Any, one_document: bool) -> Numbered:
    head = stream.peek(CHUNK)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or 0.25 < head.count(0) / (len(head) or 1) <= 0.75:
        raise InputError(f"{path} is UTF-16 or UTF-32, not UTF-8. Convert it: iconv -f UTF-16 -t UTF-8.")
    stream.read(3 if head.startswith(b"\xef\xbb\xbf") else 0)  # the byte order mark of UTF-8
    if one_document and head:
        yield 0, {"text": stream.read().decode()}
    elif _is_json_array(stream.peek(CHUNK)):
        yield from enumerate(_array_elements(stream), 1)
    else:
        yield from ((number, line) for number, line in enumerate(stream, 1) if not line.isspace())


def _decompressed(stream: BinaryIO, kind: str) -> Any:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), kind), CHUNK)


def parse(record: Any) -> Any:
    """The record as a dict, or a Rejected with the reason. Raises UnicodeDecodeError for other encodings than UTF-8."""
    if not isinstance(record, bytes):
        return record if isinstance(record, dict) else Rejected("not an object")
    try:
        row = json.loads(record.strip().decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError) and error.reason != "unexpected end of data":
            raise  # not a line that is cut inside a character, but a file in another encoding
        return Rejected("NUL character" if b"\0" in record else "not JSON")
    return row if isinstance(row, dict) else Rejected("not an object")


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading the file into InputErrors that name it."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(
            f"{path} is not UTF-8 (byte 0x{byte:02x}): Latin-1 or Windows-1252, or not text at all. If it is text, "
            "convert it: iconv -f WINDOWS-1252 -t UTF-8."
        ) from None
    except Exception as error:
        if not _is_read_error(error):
            raise
        why = str(error).splitlines()[0]
        raise InputError(f"{path} is cut short, damaged or unreadable ({why}). Fetch or write it again.") from None


def _is_read_error(error: Exception) -> bool:
    from pyarrow import ArrowException  # 0.2 s, so imported after an error only

    return isinstance(error, (OSError, EOFError, ArrowException, RecursionError))


def _kept_columns(names: list[str], all_columns: bool) -> list[str]:
    return names if all_columns else [name for name in names if name in COLUMNS] or names


def _parquet_batches(stream: BinaryIO, all_columns: bool) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(stream) as table:
        kept = _kept_columns(table.schema_arrow.names, all_columns)
        yield from table.iter_batches(BATCH_ROWS, columns=kept)


def _arrow_batches(stream: BinaryIO, all_columns: bool) -> Iterator[Any]:
    import pyarrow

    # Read, not memory-mapped, and validated: a damaged file that is mapped ends the process with a bus error.
    with pyarrow.ipc.open_stream(stream) as table:
        kept = _kept_columns(table.schema.names, all_columns)
        for batch in table:
            batch.validate(full=True)
            yield batch.select(kept)


def _arrow_file_batches(stream: BinaryIO, all_columns: bool) -> Iterator[Any]:
    import pyarrow

    with pyarrow.ipc.open_file(stream) as table:
        kept = _kept_columns(table.schema.names, all_columns)
        for number in range(table.num_record_batches):
            batch = table.get_batch(number)
            batch.validate(full=True)
            yield batch.select(kept)


TABLES = {"parquet": _parquet_batches, "arrow": _arrow_batches, ARROW_FILE: _arrow_file_batches}


def _is_json_array(head: bytes) -> bool:
    """True for a JSON array of rows; False for lines of JSON, even where the first line is an array."""
    first_line, _, rest = head.lstrip().partition(b"\n")
    if not first_line.startswith(b"["):
        return False
    return not (rest.strip() and _is_json(first_line))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return False
    return True


def _array_elements(stream: BinaryIO) -> Iterator[Any]:
    """The elements of a JSON array, held in memory one at a time. Raises EOFError where the array does not end."""
    decode = json.JSONDecoder().raw_decode
    position, read_size = 1, CHUNK  # after the opening bracket
    with io.TextIOWrapper(stream, "utf-8", "surrogatepass") as reader:
        text = reader.read(CHUNK).lstrip()
        while True:
            while text[position : position + 1] and text[position] in " \t\r\n,":
                position += 1
            if text[position : position + 1] == "]":
                break
            try:
                row, end = decode(text, position)
            except ValueError:
                end = len(text)
            if end < len(text):  # the character after it shows that the element is complete
                yield row
                position, read_size = end, CHUNK
                continue
            more = reader.read(read_size)
            if not more:
                raise EOFError(f"the JSON array has no end after character {len(text)} of its last part")
            text, position, read_size = text[position:] + more, 0, 2 * read_size
        if (text[position + 1 :] + reader.read(CHUNK)).strip():
            raise EOFError("text after the end of the JSON array")
