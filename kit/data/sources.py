"""Source: a file, a folder or a hub id as a stream of conversations, with its format and its splits."""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kit import files
from kit.data import oasst
from kit.data.conversations import FORMATS, Conversation, Rejected, convert, row_id
from kit.data.records import ARROW_FILE, Numbered, OnBytes, container, parse, read_errors, read_records
from kit.errors import InputError

Reject = Callable[[str, str], None]  # (row id, reason): called once for each row that is not used

DATA_FILE = re.compile(r"\.(jsonl|json|parquet|arrow|txt)(\.gz|\.zst)?$", re.IGNORECASE)
METADATA_FILES = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # of `datasets`
CONTAINERS_BY_SUFFIX = {
    ".gz": ("gzip",),
    ".zst": ("zstd",),
    ".parquet": ("parquet",),
    ".arrow": ("arrow", ARROW_FILE),
}
# As `datasets` finds splits in names: a keyword between characters that are neither letters nor digits.
SPLIT_WORD = re.compile(
    r"(?<![a-z0-9])(train|training|val|valid|validation|dev|test|testing|eval|evaluation)(?![a-z0-9])"
)
FORMAT_ROWS = 20  # rows of a file from which its format is found
CHECKED_ROWS = 1000  # first rows of a file, of which at most 1 in 20 may be unreadable


class Place(NamedTuple):
    """Where a row comes from. Places sort in the order of the source."""

    file: int  # index into Source.files
    row: int  # row or line number from 1; 0 for a file that is one document


@dataclass(frozen=True)
class Part:
    """Share `index` of `count` shares of a source, such as of one worker."""

    index: int
    count: int


ALL_ROWS = Part(0, 1)


@dataclass(frozen=True)
class SourceFiles:
    """The files of a source, with their names inside the source and their splits: "train", "eval" or empty.

    `not_read` are the names of a folder's other files.
    """

    files: tuple[Path, ...]
    names: tuple[str, ...]
    splits: tuple[str, ...]
    not_read: tuple[str, ...]


@dataclass(frozen=True)
class Source(SourceFiles):
    """Files whose rows are all of one format."""

    format: str  # a key of FORMATS
    reason: str  # how the format was found, for people

    def read(
        self, lang: str, reject: Reject, part: Part = ALL_ROWS, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[Place, Conversation]]:
        """The part's conversations with their places, streamed; each row is either yielded or rejected once.

        A part is complete files where there are at least as many files as parts, else every n-th row. Flat OASST
        messages are joined into trees first; then a part is every n-th tree. `on_bytes` is called with the bytes
        read, `bytes_of(part)` in all. Raises InputError for a file that is cut short, not UTF-8, or mostly not rows.
        """

        def reject_row(place: Place, row: Any, reason: str) -> None:
            why = str(row) if isinstance(row, Rejected) else reason  # an unreadable record has its reason already
            reject(row_id(row, self._row_name(place)), why)

        read_units = self._read_trees if self.format == "oasst_messages" else self._read_rows
        for place, row in read_units(part, reject_row, on_bytes):
            try:
                conversation = convert(row, self.format, self._row_name(place), lang, self.splits[place.file])
            except Rejected as error:
                reject_row(place, row, str(error))
            else:
                yield place, conversation

    def _row_name(self, place: Place) -> str:
        return f"{self.names[place.file]}:{place.row}" if place.row else self.names[place.file]

    def _read_trees(
        self, part: Part, reject: Callable[[Place, Any, str], None], on_bytes: OnBytes | None
    ) -> Iterator[tuple[Place, Any]]:
        """Every part reads and joins all messages; the first part alone rejects."""
        rows = self._read_rows(ALL_ROWS, reject, on_bytes)
        trees = oasst.join(rows, reject if part.index == 0 else lambda place, row, reason: None)
        return (unit for number, unit in enumerate(trees) if number % part.count == part.index)

    def _read_rows(
        self, part: Part, reject: Callable[[Place, Any, str], None], on_bytes: OnBytes | None
    ) -> Iterator[tuple[Place, Any]]:
        by_file = self._divides_by_file(part)
        for index, path in enumerate(self.files):
            if by_file and index % part.count != part.index:
                continue
            rows = _read_file(path, _is_document(path, self.format), ALL_ROWS if by_file else part, on_bytes)
            yield from ((Place(index, number), row) for number, row in rows)

    def _divides_by_file(self, part: Part) -> bool:
        return len(self.files) >= part.count and self.format != "oasst_messages"

    def bytes_of(self, part: Part) -> int:
        """The size of the files that this part reads."""
        read = self.files[part.index :: part.count] if self._divides_by_file(part) else self.files
        return sum(path.stat().st_size for path in read)


def open_source(source: str, source_format: str = "auto") -> Source:
    """Find the source's files and the format of their rows.

    Files: .jsonl, .json, .parquet, .arrow, .txt (one document per file), each also as .gz or .zst; folders with all
    such files below them; hub ids through `datasets`. Raises InputError that says what was looked for and where.
    """
    return detect_format(find_files(source), source, source_format)


def detect_format(found: SourceFiles, source: str, source_format: str = "auto") -> Source:
    """The files with the format of their rows, from the first rows of each. Raises InputError."""
    formats = {path: _find_format(path, source_format) for path in found.files}
    first_of_format = {name: path for path, name in reversed(formats.items()) if name}
    if not first_of_format:
        raise InputError(f"Data {source!r} holds no rows: {', '.join(found.names[:5])} empty.")
    if len(first_of_format) > 1:
        rows = [f"{path} has rows of {name}" for path, name in formats.items() if first_of_format.get(name) == path]
        raise InputError(
            f"Data {source!r} mixes formats: {' and '.join(rows)}. Point data.source at files of one format."
        )
    ((name, first),) = first_of_format.items()
    reasons = [f"{name}: {'one document a file' if _is_document(first, name) else f'rows have {FORMATS[name].keys}'}"]
    kinds = {path: container(path) for path, format_name in formats.items() if format_name}
    unexpected = {
        path: kind for path, kind in kinds.items() if kind not in CONTAINERS_BY_SUFFIX.get(path.suffix, ("text",))
    }
    reasons += [f"{path.name} is {kind} inside" for path, kind in unexpected.items()]
    if any(found.splits):
        reasons.append(f"splits from file names, {found.splits.count('eval')} of {len(found.splits)} files for eval")
    return Source(found.files, found.names, found.splits, found.not_read, name, "; ".join(reasons))


def find_files(source: str) -> SourceFiles:
    """The source's files, without reading them. Names of a hub id's files start with their split in `datasets`."""
    path, not_read = files.locate(source), []
    if path.is_file():
        found = {path.name: path}
    elif path.is_dir():
        below = _files_below(path)
        found = {name: file for name, file in below.items() if DATA_FILE.search(name)}
        not_read = [name for name in below if name not in found]
    else:
        check_place(source)
        found = _hub_files(source)
    if not found:
        others = f"; it has {', '.join(not_read[:5])}" if not_read else ""
        raise InputError(f"Data {source!r}: the folder holds no .jsonl, .json, .parquet, .arrow or .txt file{others}.")
    return SourceFiles(tuple(found.values()), tuple(found), _splits_of_names(list(found)), tuple(not_read))


def check_place(source: str) -> None:
    """Raises InputError where the source is written as a path and nothing is there; a hub id is not looked up.

    Hub ids have one slash, or none and no dot.
    """
    path = files.locate(source)
    written_as_path = DATA_FILE.search(source) or source.startswith((".", "/", "~")) or source.count("/") > 1
    has_suffix = "/" not in source and "." in source
    if not (written_as_path or has_suffix) or path.exists():
        return
    folder = path.parent if path.parent.is_dir() else Path()
    close = difflib.get_close_matches(path.name, [file.name for file in folder.iterdir()], n=1)
    hint = f"did you mean {str(folder / close[0])!r}?" if close else f"a relative path begins at {Path.cwd()}."
    raise InputError(f"Data {source!r} not found: neither a file nor a folder has that name; {hint}")


def _files_below(folder: Path) -> dict[str, Path]:
    """All files by name, without hidden ones and the metadata of `datasets`."""
    named = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    return {
        name: path
        for name, path in sorted(named.items())
        if path.name not in METADATA_FILES and not re.search(r"(^|/)\.", name)
    }


def _hub_files(source: str) -> dict[str, Path]:
    import datasets

    try:
        loaded = datasets.load_dataset(source)
    except Exception as error:  # offline, no such dataset, licence not accepted: the library says which
        cache = datasets.config.HF_DATASETS_CACHE
        raise InputError(
            f"Data {source!r} not found: neither a file nor a folder has that name, and as a hub id it is neither in "
            f"the cache {cache} nor could it be fetched ({str(error).splitlines()[0]}). Set data.source to a file or "
            "folder, or HF_HOME to a cache that holds it."
        ) from None
    paths = [(split, Path(file["filename"])) for split, rows in loaded.items() for file in rows.cache_files]
    return {f"{split}/{path.name}": path for split, path in paths}


def _splits_of_names(names: list[str]) -> tuple[str, ...]:
    """The dataset's own splits, where names say both train and eval; a name that says neither is then train."""
    words = [(SPLIT_WORD.findall(name.lower()) or [""])[-1] for name in names]
    splits = ["train" if not word or word.startswith("train") else "eval" for word in words]
    return tuple(splits if len(set(splits)) > 1 else [""] * len(splits))


def _find_format(path: Path, wanted: str) -> str:
    """The format that most of the first rows fit; empty for an empty file."""
    with read_errors(path):
        if _is_document(path, wanted):
            return "text"
        records = read_records(path, all_columns=True)  # so that an error can name them
        head = [(number, parse(record)) for number, record in islice(records, FORMAT_ROWS)]
    rows = [row for _, row in head if isinstance(row, dict)]
    if not head:
        return ""
    if not rows:
        raise _not_rows(path, head)
    formats = FORMATS if wanted == "auto" else {wanted: FORMATS[wanted]}
    fits = Counter(next((name for name, known in formats.items() if known.fits(row)), "") for row in rows)
    fits.pop("", None)
    if not fits:
        expected = "; ".join(f"{name}: {known.keys}" for name, known in formats.items())
        pairs = " Preference pairs are not trained on." if {"chosen", "rejected"} & rows[0].keys() else ""
        raise InputError(f"{path}: rows have the keys {', '.join(rows[0]) or '(none)'}.{pairs} Looked for {expected}.")
    return fits.most_common(1)[0][0]


def _is_document(path: Path, source_format: str) -> bool:
    return ".txt" in path.suffixes[-2:] and source_format in ("auto", "text")


def _read_file(path: Path, one_document: bool, part: Part, on_bytes: OnBytes | None) -> Numbered:
    """Numbered rows of the part; a Rejected in place of a record that is not a JSON object."""
    with read_errors(path):
        records = read_records(path, one_document, on_bytes)
        head = [(number, parse(record)) for number, record in islice(records, CHECKED_ROWS)]
        unreadable = sum(not isinstance(row, dict) for _, row in head)
        if head and (unreadable == len(head) or unreadable > max(1, len(head) / 20)):
            raise _not_rows(path, head)
        rows = head or [(0, Rejected("empty file"))]
        yield from (pair for pair in rows if pair[0] % part.count == part.index)
        yield from ((number, parse(record)) for number, record in records if number % part.count == part.index)


def _not_rows(path: Path, head: list[tuple[int, Any]]) -> InputError:
    unreadable = [number for number, row in head if not isinstance(row, dict)]
    what = f"{path} is not what its name says" if DATA_FILE.search(path.name) else f"{path} is not read"
    return InputError(
        f"{what}: {len(unreadable)} of its first {len(head)} rows are not JSON objects, the first is line or row "
        f"{unreadable[0]}. Write it as JSON lines, Parquet or Arrow, or take it out of data.source."
    )
