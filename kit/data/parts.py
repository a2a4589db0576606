"""Part: a share of the rows, read, encoded and fitted to seq_len, in one Arrow file with its ledger."""

import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kit.config import models as model
from kit.config.recipe import Recipe
from kit.data.conversations import Conversation
from kit.data.encode import Encoded, Encoder, Messages, agrees_with_template
from kit.data.engine import Name
from kit.data.sources import Place, open_source
from kit.errors import KitError

# A change in any of these makes another dataset.
MAKERS = ("sources.py", "conversations.py", "oasst.py", "encode.py", "engine.py", "parts.py", "pack.py", "dataset.py")
CHECKED = 32  # conversations of a part compared with the tokenizer's own rendering
TOGETHER = 2**19  # characters encoded at a time
EXAMPLES = 5  # row ids told for each reason
OF_A_TOKENIZER = re.compile(r"token|vocab|merges|\.jinja$|\.model$")
# What is told of each document: its place, the keys of its messages and of its prompt, tokens of the template and of
# the loss.
COLUMNS: dict[str, Any] = dict.fromkeys(("id", "lang"), object) | dict.fromkeys(
    ("file", "row", "eval", "key", "prompt", "sub", "structure", "counted"), int
)
TOKENS = ["input_ids", "labels"]

Array = np.ndarray[Any, Any]


@dataclass
class Ledger:
    """Where every token and row went: read = kept + sum(dropped), checked before anything is written.

    Documents that `overlong = "split"` makes count as what was read: the head that the template repeats in each is in
    read_tokens, and told apart in repeated_tokens.
    """

    read_tokens: int = 0
    kept_tokens: int = 0
    repeated_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_rows: Counter[str] = field(default_factory=Counter)
    changed_rows: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, row: str, reason: str, tokens: int = 0) -> None:
        """Account for a row that is not trained on."""
        self.dropped[reason] += tokens
        self.dropped_rows[reason] += 1
        self._tell(reason, [row])

    def add(self, part: dict[str, Any]) -> None:
        """Account for a part's own ledger. The same examples stay, whatever the order of parts."""
        self.read_tokens += part["read_tokens"]
        self.repeated_tokens += part["repeated_tokens"]
        for name in ("dropped", "dropped_rows", "changed_rows"):
            getattr(self, name).update(part[name])
        for reason, rows in part["examples"].items():
            self._tell(reason, rows)

    def _tell(self, reason: str, rows: Iterable[str]) -> None:
        told = {*self.examples.get(reason, []), *rows}
        self.examples[reason] = sorted(told, key=lambda row: (len(row), row))[:EXAMPLES]

    def check(self) -> None:
        """Raises KitError if a token is unaccounted for."""
        if self.read_tokens != self.kept_tokens + sum(self.dropped.values()):
            raise KitError(f"The token ledger does not add up: {self}. This is a fault in the kit; please report it.")


def settings(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe shapes the rows."""
    data = {k: v for k, v in vars(recipe.data).items() if k not in ("tokens", "eval_tokens")}
    return {"model": recipe.model.name, "data": data, "seed": recipe.schedule.seed}


def inputs(recipe: Recipe) -> tuple[bytes, list[Path]]:
    """All that a dataset is made of: settings and file names as bytes, and the files whose bytes count."""
    tokenizer = Path(model.source(recipe.model.name))
    source = open_source(recipe.data.source, recipe.data.source_format)
    paths = [*source.files, *(p for p in sorted(tokenizer.iterdir()) if OF_A_TOKENIZER.search(p.name))]
    told = [settings(recipe) | {"model": ""}, source.names, source.splits]  # the tokenizer's files, not their place
    return json.dumps(told, sort_keys=True).encode(), paths + [Path(__file__).with_name(name) for name in MAKERS]


def stamp(recipe: Recipe) -> str:
    """As the dataset's digest, with sizes and times of the files instead of their bytes: cheap enough for each part."""
    told, paths = inputs(recipe)
    stats = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    return hashlib.sha256(told + json.dumps(stats).encode()).hexdigest()


def encode_part(recipe: Recipe, folder: Path, part: tuple[int, int] = (0, 1), engine: Name = "tokenizers") -> Path:
    """The i-th of n parts as FOLDER/part-<i>-of-<n>.arrow, such as by task i of a Slurm array; then `merge`.

    One row a document; a last batch without rows carries the ledger. Part 0 leaves the tokenizer beside it. Raises
    KitError where ids differ from the tokenizer's own rendering.
    """
    import pyarrow as pa

    path = folder / f"part-{part[0]:05d}-of-{part[1]:05d}.arrow"
    source = open_source(recipe.data.source, recipe.data.source_format)
    tokenizer, ledger = model.load_tokenizer(recipe.model.name), Ledger()
    folder.mkdir(parents=True, exist_ok=True)
    if part[0] == 0:
        tokenizer.save_pretrained(folder / "tokenizer")  # before the engine changes its settings
    encoder = Encoder(tokenizer, recipe.data.loss, engine)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{path.name}.") as scratch:
        unfinished = Path(scratch) / path.name
        empty = pa.record_batch([as_lists([]) for _ in TOKENS], TOKENS)
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, empty.schema) as writer:
            for rows in _together(source.read(recipe.data.lang, ledger.drop, part)):
                _write(writer, rows, encoder, recipe, ledger)
            told = {"part": part, "stamp": stamp(recipe), "format": source.reason, "ledger": vars(ledger)}
            writer.write_batch(empty, custom_metadata={"kit": json.dumps(told)})
        unfinished.replace(path)
    return path


def _together(rows: Iterator[tuple[Place, Conversation]]) -> Iterator[list[tuple[Place, Conversation]]]:
    batch, size = [], 0
    for place, found in rows:
        batch.append((place, found))
        size += sum(len(m["content"]) for m in found.messages)
        if size >= TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write(
    writer: Any, rows: Sequence[tuple[Place, Conversation]], encoder: Encoder, recipe: Recipe, ledger: Ledger
) -> None:
    """A batch of the part: the documents' tokens as lists, all else that is known of them in its metadata."""
    import pyarrow as pa

    encoded = encoder([found.messages for _, found in rows])
    if not ledger.read_tokens:
        _check_encoding(encoder, [found for _, found in rows[:CHECKED]], encoded)
    documents: list[Encoded] = []
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for ((file, row), found), whole in zip(rows, encoded, strict=True):
        key = _key("".join(f"{m['role']}\0{m['content']}\0" for m in found.messages))
        same = found.id, found.lang, file, row, _is_eval(found, recipe), key, int(found.prompt_key()[:15], 16)
        for sub, document in enumerate(_fitted(found, whole, encoder, recipe, ledger)):
            documents.append(document)
            counted = int(np.count_nonzero(document.counts[1:]))
            for values, value in zip(columns.values(), (*same, sub, document.structure, counted), strict=True):
                values.append(value)
    lists = [as_lists([d.ids for d in documents]), as_lists([d.labels for d in documents])]
    writer.write_batch(pa.record_batch(lists, TOKENS), custom_metadata={"kit": json.dumps(columns)})


def _check_encoding(encoder: Encoder, sample: Sequence[Conversation], encoded: Sequence[Encoded]) -> None:
    for found, whole in zip(sample, encoded, strict=False):
        if not agrees_with_template(encoder, found.messages, whole):
            raise KitError(
                f"Conversation {found.id}: piecewise ids differ from the tokenizer's own rendering, so this tokenizer "
                "joins text across control tokens; its loss mask would not be exact."
            )


def _key(text: str) -> int:
    """60 bits: among 10^7 rows, two that differ share one with a probability of 4 in 100,000."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 4


def _is_eval(found: Conversation, recipe: Recipe) -> bool:
    """The dataset's own split, else by a hash of the group: stable when rows are added or reordered."""
    share = int.from_bytes(hashlib.sha256(f"split:{found.group}".encode()).digest()[:8], "big") / 2**64
    return found.split == "eval" if found.split else share < recipe.data.eval_fraction


def _fitted(found: Conversation, whole: Encoded, encoder: Encoder, recipe: Recipe, ledger: Ledger) -> Iterator[Encoded]:
    """The documents of a conversation that can be trained on, none longer than seq_len."""
    size, documents = recipe.data.seq_len, [whole]
    if whole.refused:
        ledger.drop(found.id, whole.refused)
        return
    if len(whole.ids) > size and recipe.data.overlong == "split":
        documents = _split(found, whole, encoder, size)
        ledger.changed_rows["split"] += len(documents) > 1
        ledger.repeated_tokens += sum(len(d.ids) for d in documents) - len(whole.ids)
    for document in documents:
        length = len(document.ids)
        ledger.read_tokens += length
        if length > size and recipe.data.overlong == "drop":
            ledger.drop(found.id, "longer than seq_len", length)
            continue
        kept = _cut(document, size) if length > size else document
        if not kept.counts[1 : size - 1 if length > size else size].any():
            ledger.drop(found.id, "no reply inside seq_len", length)
            continue
        if length > size:
            ledger.dropped["cut at seq_len"] += length - size
            ledger.changed_rows["cut at seq_len"] += 1
        yield kept


def _cut(document: Encoded, size: int) -> Encoded:
    """The first tokens and the one that ends the last reply, without which long replies would never stop."""
    end = np.flatnonzero(document.counts)[-1:]
    return Encoded(
        np.r_[document.ids[: size - 1], document.ids[end]], np.r_[document.counts[: size - 1], True], document.structure
    )


def _split(found: Conversation, whole: Encoded, encoder: Encoder, size: int) -> list[Encoded]:
    """Documents of as many whole turns as fit, each with the system message; of plain text, pieces of `size` tokens."""
    if found.messages[0]["role"] == "text":
        bounds = range(0, len(whole.ids), size)
        return [Encoded(whole.ids[at : at + size], whole.counts[at : at + size]) for at in bounds]
    asked = [i for i, message in enumerate(found.messages) if message["role"] == "user"]
    head, turns = found.messages[: asked[0]], [found.messages[a:b] for a, b in pairwise([*asked, len(found.messages)])]
    if len(turns) < 2:
        return [whole]
    alone = [len(encoded.ids) for encoded in encoder([head + turn for turn in turns])]
    begin = (sum(alone) - len(whole.ids)) // (len(turns) - 1)  # tokens of the head, which `whole` has once
    groups: list[Messages] = []
    room = 0
    for turn, length in zip(turns, alone, strict=True):
        if not groups or length - begin > room:
            groups, room = [*groups, head], size - begin
        groups[-1] = [*groups[-1], *turn]
        room -= length - begin
    return encoder(groups)


class Documents:
    """The documents of all parts in the order of the source, memory-mapped; `columns` holds arrays of one value each.

    Beside what a part tells: length (tokens), and conversation, a number that those that were split off share.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        import pyarrow as pa

        self.marks: list[dict[str, Any]] = []
        batches, told = [], []
        for path in paths:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            found = [reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)]
            notes = [json.loads(each.custom_metadata["kit"]) for each in found]
            self.marks.append(notes.pop())
            batches += [each.batch for each in found[:-1]]
            told += notes
        columns: dict[str, Array] = {
            name: np.array([v for note in told for v in note[name]], kind) for name, kind in COLUMNS.items()
        }
        bounds = [np.from_dlpack(batch["input_ids"].offsets).astype(np.int64) for batch in batches]
        columns["length"] = np.concatenate([np.zeros(0, np.int64), *map(np.diff, bounds)])
        columns["at"] = np.concatenate([np.zeros(0, np.int64), *(b[:-1] for b in bounds)])
        columns["batch"] = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        order = np.lexsort([columns[name] for name in ("sub", "row", "file")])
        self.columns = {name: values[order] for name, values in columns.items()}
        moved = [np.diff(self.columns[name], prepend=-1) != 0 for name in ("file", "row")]
        self.columns["conversation"] = np.logical_or(*moved).cumsum()
        self.values = {name: [np.from_dlpack(batch[name].values) for batch in batches] for name in TOKENS}

    def tokens(self, name: str, which: Array) -> list[Array]:
        """input_ids or labels of these documents."""
        places = zip(*(self.columns[c][which].tolist() for c in ("batch", "at", "length")), strict=True)
        return [self.values[name][batch][at : at + length] for batch, at, length in places]


def as_lists(arrays: Sequence[Array], bounds: Array | None = None) -> Any:
    """Arrays of integers, end to end, as an Arrow array of int32 lists: one an array, or cut at these bounds.

    Made from buffers, since pa.array would import pandas: a second and 40 MB.
    """
    import pyarrow as pa

    bounds = np.cumsum([0, *map(len, arrays)]) if bounds is None else bounds
    both = [a.astype(np.int32, copy=False) for a in (bounds, np.concatenate([np.zeros(0, np.int32), *arrays]))]
    starts, values = (pa.Array.from_buffers(pa.int32(), len(a), [None, pa.py_buffer(a)]) for a in both)
    return pa.ListArray.from_arrays(starts, values)
