"""Documents: a part of the source encoded and fitted to seq_len, as one Arrow file with a report of its ledger.

A part is the share of one worker or of one task of a Slurm array. `encode_part` writes it, `Documents` reads all parts
back in the order of the source.
"""

import hashlib
import json
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit import files
from kit.config import models
from kit.config.recipe import Recipe
from kit.data import arrow
from kit.data.arrow import Array
from kit.data.conversations import Conversation
from kit.data.encode import Encoded, Encoder, agrees_with_template
from kit.data.engine import EngineName
from kit.data.fit import fit
from kit.data.identity import inputs_stamp
from kit.data.ledger import Ledger
from kit.data.records import OnBytes
from kit.data.sources import ALL_ROWS, Part, Place, Source

COMPARED_CONVERSATIONS = 32  # of each part, compared with the tokenizer's own rendering
BATCH_CHARACTERS = 2**19  # encoded at a time
BATCH_DOCUMENTS = 2**12  # whose tokens are copied at a time; each has its own pages, of which Linux maps 64 KiB at once


@dataclass(frozen=True)
class PartReport:
    """What is known of a part in addition to its documents: PART.json, written after PART.arrow."""

    index: int
    count: int
    stamp: str  # of its inputs; parts of one dataset have the same
    source_format: str  # how the format was found
    engine: str
    ledger: dict[str, Any]
    files_not_read: tuple[str, ...] = ()  # of the source's folder

    @classmethod
    def of(cls, part: Path) -> "PartReport":
        """The report of a part's Arrow file. Raises InputError where the part is not finished."""
        return cls(**files.read_json(part.with_suffix(".json")))


@dataclass(frozen=True, slots=True)
class Document:
    """A sequence of at most seq_len tokens: a conversation, or a piece of one that was split."""

    conversation: Conversation
    place: Place
    piece: int
    encoded: Encoded


def part_path(folder: Path, part: Part) -> Path:
    """The Arrow file of a part."""
    return folder / f"part-{part.index:05d}-of-{part.count:05d}.arrow"


def encode_part(
    recipe: Recipe,
    source: Source,
    folder: Path,
    part: Part = ALL_ROWS,
    engine: EngineName = "tokenizers",
    on_bytes: OnBytes | None = None,
) -> Path:
    """Write the part's documents and report into the folder, part 0 the tokenizer as well; returns the Arrow file."""
    import pyarrow as pa

    path = part_path(folder, part)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = models.load_tokenizer(recipe.model.name)
    if part.index == 0:
        tokenizer.save_pretrained(folder / "tokenizer")  # before the engine changes its settings
    encoder, ledger = Encoder(tokenizer, recipe.data.loss, engine), Ledger()
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{path.name}.") as scratch:
        unfinished = Path(scratch) / path.name
        schema = _record_batch([], recipe).schema
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for rows in _batches(source.read(recipe.data.lang, ledger.drop, part, on_bytes)):
                encoded = _encode(encoder, rows)
                if not ledger.read_tokens and not _agree(encoder, rows[:COMPARED_CONVERSATIONS], encoded):
                    encoder.is_piecewise = False
                    encoded = _encode(encoder, rows)
                for (_, conversation), made in zip(rows, encoded, strict=True):
                    ledger.note(conversation, made)
                documents = [
                    Document(conversation, place, piece, document)
                    for (place, conversation), whole in zip(rows, encoded, strict=True)
                    for piece, document in enumerate(fit(conversation, whole, encoder, recipe.data, ledger))
                ]
                writer.write_batch(_record_batch(documents, recipe))
        unfinished.replace(path)
    stamp = inputs_stamp(recipe, source)
    report = PartReport(
        part.index, part.count, stamp, source.reason, encoder.engine.name, ledger.as_json(), source.not_read
    )
    files.write_json(path.with_suffix(".json"), vars(report))
    return path


def _batches(rows: Iterator[tuple[Place, Conversation]]) -> Iterator[list[tuple[Place, Conversation]]]:
    batch, characters = [], 0
    for place, conversation in rows:
        batch.append((place, conversation))
        characters += sum(len(message["content"]) for message in conversation.messages)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(encoder: Encoder, rows: Sequence[tuple[Place, Conversation]]) -> list[Encoded]:
    conversations = [conversation for _, conversation in rows]
    tools = [conversation.tools for conversation in conversations]
    return encoder([conversation.messages for conversation in conversations], tools if any(tools) else ())


def _agree(encoder: Encoder, rows: Sequence[tuple[Place, Conversation]], encoded: Sequence[Encoded]) -> bool:
    """Whether the ids are those of the tokenizer's own rendering. The texts are compared for every row."""
    return all(
        agrees_with_template(encoder, conversation.messages, made, conversation.tools)
        for (_, conversation), made in zip(rows, encoded, strict=False)
    )


def _record_batch(documents: Sequence[Document], recipe: Recipe) -> Any:
    """One row per document; the columns are the fields of `Documents` and the tokens."""
    import pyarrow as pa

    def integers(kind: type[np.integer[Any]], values: list[int]) -> Any:
        return arrow.integers(np.array(values, kind))

    columns = {
        "id": arrow.strings([document.conversation.id for document in documents]),
        "lang": arrow.strings([document.conversation.lang for document in documents]),
        "file": integers(np.int32, [document.place.file for document in documents]),
        "row": integers(np.int64, [document.place.row for document in documents]),
        "piece": integers(np.int32, [document.piece for document in documents]),
        "is_eval": integers(np.int8, [is_eval(document.conversation, recipe) for document in documents]),
        "content_key": integers(np.int64, [_content_key(document.conversation) for document in documents]),
        "prompt_key": integers(np.int64, [_prompt_key(document.conversation) for document in documents]),
        "template_tokens": integers(np.int32, [document.encoded.template_tokens for document in documents]),
        "loss_tokens": integers(np.int32, [document.encoded.loss_tokens for document in documents]),
        "input_ids": arrow.lists([document.encoded.ids for document in documents]),
        "labels": arrow.lists([document.encoded.labels for document in documents]),
    }
    return pa.record_batch(list(columns.values()), list(columns))


def is_eval(conversation: Conversation, recipe: Recipe) -> bool:
    """The dataset's own split, else by a hash of the group: it stays when rows are added or reordered."""
    if conversation.split:
        return conversation.split == "eval"
    digest = hashlib.sha256(f"split:{conversation.group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < recipe.data.eval_fraction


def _content_key(conversation: Conversation) -> int:
    """60 bits that are equal for equal messages: two of 10^7 rows collide with a probability of 4 in 100,000."""
    text = "".join(f"{message['role']}\0{message['content']}\0" for message in conversation.messages)
    if conversation.tools or any(len(message) > 2 for message in conversation.messages):
        text += json.dumps([conversation.tools, conversation.messages], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 4


def _prompt_key(conversation: Conversation) -> int:
    return int(conversation.prompt_key()[:15], 16)


class Documents:
    """The documents of all parts in the order of the source. Attributes are arrays of one value per document.

    Tokens stay in the memory-mapped files; `tokens` returns views of them, `joined_tokens` a copy.
    """

    def __init__(self, parts: Sequence[Path]) -> None:
        self._mapped = [_map(path) for path in parts]
        batches = [batch for mapped in self._mapped for batch in _batches_of(mapped)]
        self._values = {name: [_flat(batch[name]) for batch in batches] for name in ("input_ids", "labels")}
        offsets = [np.from_dlpack(batch["input_ids"].offsets).astype(np.int64) for batch in batches]
        starts, batch_index = _joined([each[:-1] for each in offsets]), np.arange(len(batches))
        lengths = _joined([np.diff(each) for each in offsets])
        batch_of = np.repeat(batch_index, [len(batch) for batch in batches])
        file, row, piece = (self._read(batches, name) for name in ("file", "row", "piece"))
        order = np.lexsort([piece, row, file])

        self.id = self._read_text(batches, "id")[order]
        self.lang = self._read_text(batches, "lang")[order]
        self.length = lengths[order]  # tokens
        self.is_eval = self._read(batches, "is_eval")[order].astype(bool)
        self.content_key = self._read(batches, "content_key")[order]
        self.prompt_key = self._read(batches, "prompt_key")[order]
        self.template_tokens = self._read(batches, "template_tokens")[order]
        self.loss_tokens = self._read(batches, "loss_tokens")[order]
        starts_conversation = (np.diff(file[order], prepend=-1) != 0) | (np.diff(row[order], prepend=-1) != 0)
        self.conversation = starts_conversation.cumsum()  # a number that the pieces of one conversation share
        self._batch, self._start = batch_of[order], starts[order]

    def tokens(self, name: str, documents: Array) -> list[Array]:
        """ "input_ids" or "labels" of these documents, by index."""
        columns = (self._batch, self._start, self.length)
        places = zip(*(column[documents].tolist() for column in columns), strict=True)
        return [self._values[name][batch][start : start + length] for batch, start, length in places]

    def joined_tokens(self, name: str, documents: Array) -> Array:
        """ "input_ids" or "labels" of these documents, one after the other in one array.

        The files may be larger than memory, so their pages are unmapped again.
        """
        found, end = np.empty(self.length[documents].sum(), np.int32), 0
        for first in range(0, len(documents), BATCH_DOCUMENTS):
            chosen = documents[first : first + BATCH_DOCUMENTS]
            start, end = end, end + int(self.length[chosen].sum())
            np.concatenate(self.tokens(name, chosen), out=found[start:end])
            for mapped in self._mapped:
                mapped.madvise(mmap.MADV_DONTNEED)
        return found

    @staticmethod
    def _read(batches: Sequence[Any], name: str) -> Array:
        return _joined([np.from_dlpack(batch[name]) for batch in batches])

    @staticmethod
    def _read_text(batches: Sequence[Any], name: str) -> Array:
        return np.array([value for batch in batches for value in batch[name].to_pylist()], object)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _batches_of(mapped: mmap.mmap) -> list[Any]:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped)))
    return [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _flat(column: Any) -> Array:
    return np.from_dlpack(column.values)


def _joined(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
