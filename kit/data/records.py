"""Records of one data file: lines or an array of JSON, Parquet, Arrow or plain text, known by content, not by name."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kit.data.conversations import COLUMNS, Rejected
from kit.errors import InputError

Numbered = Iterator[tuple[int, Any]]  # (row or line number from 1, record); a document of a .txt file has number 0
OnBytes = Callable[[float], None]  # called with the bytes of the file that were read since the last call

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet", b"\xff\xff\xff\xff": "arrow"}
BATCH_ROWS = 1000  # rows of a table decoded at a time
CHUNK = 1 << 16  # bytes or characters read at a time


def container(path: Path) -> str:
    """ "gzip", "zstd", "parquet", "arrow" or "text", by the first bytes of the file."""
    with path.open("rb") as stream:
        magic = stream.read(4)
    return next((kind for start, kind in MAGIC.items() if magic.startswith(start)), "text")


def read_records(
    path: Path, one_document: bool = False, on_bytes: OnBytes | None = None, all_columns: bool = False
) -> Numbered:
    """Numbered records in the file's order: lines as bytes, elements of a JSON array, or table rows as dicts.

    Of tables only the columns in COLUMNS are read, unless there are none of them or `all_columns` is set. With
    `one_document` the text of the file is one record. Raises what `read_errors` turns into sentences.
    """
    kind = container(path)
    if kind in ("parquet", "arrow"):
        batches = _parquet_batches if kind == "parquet" else _arrow_batches
        yield from enumerate(_table_rows(path, batches(path, all_columns), on_bytes), 1)
        return
    with _open_bytes(path, kind, on_bytes) as stream:
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


class _CountedFile(io.FileIO):
    """A file that reports the bytes read from it."""

    def __init__(self, path: Path, on_bytes: OnBytes) -> None:
        super().__init__(path)
        self.on_bytes = on_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        self.on_bytes(len(data))
        return data

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        self.on_bytes(count)
        return count


@contextmanager
def _open_bytes(path: Path, kind: str, on_bytes: OnBytes | None) -> Iterator[Any]:
    with _CountedFile(path, on_bytes) if on_bytes else io.FileIO(path) as raw:
        if kind == "text":
            yield io.BufferedReader(raw, CHUNK)
            return
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), kind) as plain:
            yield io.BufferedReader(plain, CHUNK)


def _table_rows(path: Path, batches: Iterator[tuple[Any, float]], on_bytes: OnBytes | None) -> Iterator[Any]:
    for batch, share in batches:
        yield from batch.to_pylist()
        if on_bytes:
            on_bytes(share * path.stat().st_size)


def _kept_columns(names: list[str], all_columns: bool) -> list[str]:
    return names if all_columns else [name for name in names if name in COLUMNS] or names


def _parquet_batches(path: Path, all_columns: bool) -> Iterator[tuple[Any, float]]:
    """Batches, each with its share of the file."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        kept = _kept_columns(table.schema_arrow.names, all_columns)
        for batch in table.iter_batches(BATCH_ROWS, columns=kept):
            yield batch, len(batch) / table.metadata.num_rows


def _arrow_batches(path: Path, all_columns: bool) -> Iterator[tuple[Any, float]]:
    import pyarrow

    size = path.stat().st_size
    # Read, not memory-mapped, and validated: a damaged file that is mapped ends the process with a bus error.
    with pyarrow.OSFile(str(path)) as opened, pyarrow.ipc.open_stream(opened) as table:
        kept = _kept_columns(table.schema.names, all_columns)
        before = 0
        for batch in table:
            batch.validate(full=True)
            position = opened.tell()
            yield batch.select(kept), (position - before) / size
            before = position


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
