"""Dataset: conversations to a folder of packed rows that every rank memory-maps, with an exact account of tokens."""

import fcntl
import hashlib
import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from kit import files, model
from kit.conversations import Conversation, read, source_files
from kit.encode import IGNORE, Encoded, Encoder, agrees_with_template
from kit.errors import KitError
from kit.pack import pack
from kit.recipe import Recipe

MAKERS = ("data.py", "conversations.py", "encode.py", "pack.py")  # a change in any makes another dataset
CHECKED = 32  # conversations compared with the tokenizer's own rendering


@dataclass(frozen=True)
class Dataset:
    """A prepared folder: train/ and eval/ (Arrow; input_ids, labels, seq_lengths), tokenizer/, manifest.json."""

    path: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Digest, splits, ledger, dropped rows and length histogram."""
        return dict(files.read_json(self.path / "manifest.json"))

    def rows(self, split: str) -> Any:
        """The split as a memory-mapped datasets.Dataset."""
        import datasets

        return datasets.load_from_disk(str(self.path / split))

    def as_dict(self, recipe: Recipe) -> dict[str, Any]:
        """What `kit prepare --json` prints."""
        steps = recipe.optimizer_steps(self.manifest["splits"]["train"]["rows"])
        return {"folder": str(self.path), **self.manifest, "optimizer_steps": steps}


@dataclass
class Ledger:
    """Where every token and row went: read = kept + sum(dropped), checked before anything is written."""

    read_tokens: int = 0
    kept_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_rows: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, tokens: int = 0, rows: int = 1) -> None:
        """Account for tokens that are not trained on."""
        self.dropped[reason] += tokens
        self.dropped_rows[reason] += rows

    def check(self) -> None:
        """Raises KitError if a token is unaccounted for."""
        if self.read_tokens != self.kept_tokens + sum(self.dropped.values()):
            raise KitError(f"The token ledger does not add up: {self}. This is a fault in the kit; please report it.")


def prepare(recipe: Recipe, out: Path = Path("prepared"), progress: Any = None) -> Dataset:
    """The recipe's dataset folder under `out`, built once: the same inputs give the same folder.

    Raises InputError where the data or the tokenizer is not found, KitError where nothing is left to train on.
    """
    digest = _digest(recipe)
    path = out / f"{recipe.name}-{digest[:12]}"
    with _one_builder(path):
        if not path.is_dir():
            _build(recipe, digest, path, progress or (lambda text: None))
    return Dataset(path)


def find_prepared(recipe: Recipe, out: Path = Path("prepared")) -> Dataset | None:
    """The newest folder prepared with these settings, found without reading the data or loading a tokenizer."""
    found = [p for p in out.glob("*/manifest.json") if files.read_json(p)["settings"] == _settings(recipe)]
    return Dataset(max(found, key=lambda p: p.stat().st_mtime).parent) if found else None


def _settings(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe shapes the rows."""
    data = {k: v for k, v in vars(recipe.data).items() if k not in ("tokens", "eval_tokens")}
    return {"model": recipe.model.name, "data": data, "seed": recipe.schedule.seed}


@contextmanager
def _one_builder(path: Path) -> Iterator[None]:
    """Many may start at once; one builds, the others wait and find it done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(recipe: Recipe) -> str:
    """sha256 over the input bytes, the settings that shape rows, the tokenizer's files and the code that makes them."""
    settings = _settings(recipe) | {"model": ""}  # the tokenizer's files count, not their place
    total = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    tokenizer = Path(model.source(recipe.model.name))
    inputs = source_files(recipe.data.source)
    inputs += [p for p in sorted(tokenizer.iterdir()) if "token" in p.name or p.suffix == ".jinja"]
    inputs += [Path(__file__).with_name(name) for name in MAKERS]
    for path in inputs:
        with path.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _build(recipe: Recipe, digest: str, path: Path, progress: Any) -> None:
    found, reason = read(recipe.data.source, recipe.data.lang)
    progress(f"{len(found)} conversations ({reason})")
    tokenizer = model.load_tokenizer(recipe.model.name)
    encoder, ledger = Encoder(tokenizer, recipe.data.loss), Ledger()
    splits: dict[str, list[Encoded]] = {"train": [], "eval": []}
    kept = [c for c in found if _acceptable(c, ledger)]
    for conversation, encoded in zip(kept, encoder(c.messages for c in kept), strict=True):
        if fitted := _fit(encoded, recipe, ledger):
            splits[_side(conversation, recipe)].append(fitted)
    progress(f"{ledger.read_tokens:,} tokens encoded")
    _check_encoding(encoder, kept[:CHECKED])
    if not splits["train"]:
        raise KitError(f"Nothing is left to train on from {recipe.data.source}: {dict(ledger.dropped_rows)}.")
    ledger.check()
    with files.new_folder(path) as folder:
        sizes = {name: _write(folder / name, docs, recipe) for name, docs in splits.items() if docs}
        tokenizer.save_pretrained(folder / "tokenizer")
        files.write_json(
            folder / "manifest.json", _manifest(digest, reason, sizes, ledger, splits) | {"settings": _settings(recipe)}
        )
    progress(f"{sizes['train']['rows']} rows for training")


def _acceptable(conversation: Conversation, ledger: Ledger) -> bool:
    roles = [m["role"] for m in conversation.messages]
    if any(not m["content"].strip() for m in conversation.messages):
        ledger.drop("empty message")
    elif "assistant" not in roles:
        ledger.drop("no reply")
    elif any(role not in ("system", "user", "assistant") for role in roles):
        ledger.drop("unknown role")
    elif any(a == b for a, b in pairwise(roles)):
        ledger.drop("two messages of one role in a row")
    else:
        return True
    return False


def _fit(encoded: Encoded, recipe: Recipe, ledger: Ledger) -> Encoded | None:
    """The document as it goes into a row; None where nothing of it can be trained on."""
    size, length = recipe.data.seq_len, len(encoded.ids)
    ledger.read_tokens += length
    if length > size and recipe.data.overlong == "drop":
        ledger.drop("longer than seq_len", length)
        return None
    if length > size:
        # The end token stays, else the model learns that long replies never stop.
        encoded = Encoded([*encoded.ids[: size - 1], _end(encoded)], [*encoded.counts[: size - 1], True])
    if not any(encoded.counts[1:-1]):
        ledger.drop("no reply inside seq_len", length)
        return None
    if length > size:
        ledger.drop("cut at seq_len", length - size, rows=0)
    ledger.kept_tokens += len(encoded.ids)
    return encoded


def _end(encoded: Encoded) -> int:
    """The last token that the loss counts: the one that ends the last reply."""
    return next(t for t, c in zip(reversed(encoded.ids), reversed(encoded.counts), strict=True) if c)


def _side(conversation: Conversation, recipe: Recipe) -> str:
    """The dataset's own split, else by a hash of the group: stable when rows are added or reordered."""
    if conversation.split:
        return conversation.split
    share = int.from_bytes(hashlib.sha256(f"split:{conversation.group}".encode()).digest()[:8], "big") / 2**64
    return "eval" if share < recipe.data.eval_fraction else "train"


def _check_encoding(encoder: Encoder, sample: list[Conversation]) -> None:
    for conversation, encoded in zip(sample, encoder(c.messages for c in sample), strict=True):
        if not agrees_with_template(encoder, conversation.messages, encoded):
            raise KitError(
                f"Conversation {conversation.id}: piecewise ids differ from the tokenizer's own rendering, so this "
                "tokenizer joins text across control tokens; its loss mask would not be exact."
            )


def _write(path: Path, documents: list[Encoded], recipe: Recipe) -> dict[str, int]:
    """One split as Arrow; returns its sizes."""
    import datasets

    size, lengths = recipe.data.seq_len, [len(d.ids) for d in documents]
    rows = pack(lengths, size, recipe.schedule.seed) if recipe.data.packing else [[i] for i in range(len(lengths))]
    kind = datasets.Sequence(datasets.Value("int32"))
    table = datasets.Dataset.from_dict(
        {
            "input_ids": [[t for i in row for t in documents[i].ids] for row in rows],
            "labels": [[t for i in row for t in documents[i].labels] for row in rows],
            "seq_lengths": [[lengths[i] for i in row] for row in rows],
        },
        features=datasets.Features({"input_ids": kind, "labels": kind, "seq_lengths": kind}),
    )
    with _quiet_progress():
        table.save_to_disk(str(path))
    counted = sum(label != IGNORE for d in documents for label in d.labels)
    return {"conversations": len(documents), "rows": len(rows), "tokens": sum(lengths), "loss_tokens": counted}


@contextmanager
def _quiet_progress() -> Iterator[None]:
    import datasets

    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _manifest(
    digest: str, reason: str, sizes: dict[str, Any], ledger: Ledger, splits: dict[str, list[Encoded]]
) -> dict[str, Any]:
    return {
        "digest": digest,
        "format": reason,
        "splits": sizes,
        "ledger": {
            "read_tokens": ledger.read_tokens,
            "kept_tokens": ledger.kept_tokens,
            "dropped": dict(ledger.dropped),
        },
        "dropped_rows": {k: v for k, v in ledger.dropped_rows.items() if v},
        "lengths": _histogram(len(d.ids) for docs in splits.values() for d in docs),
    }


def _histogram(lengths: Iterable[int], bins: int = 24) -> dict[str, list[int]]:
    """Documents by length in tokens, in equal bins: {"upto": right edges, "documents": counts}."""
    values = list(lengths)
    width = max(1, math.ceil(max(values) / bins))
    counts = Counter((v - 1) // width for v in values)
    return {"upto": [width * (i + 1) for i in range(bins)], "documents": [counts[i] for i in range(bins)]}


def preview(dataset: Dataset, split: str = "train", row: int = 0, tokens: int = 400) -> str:
    """The head of one row as HTML: what the loss counts in blue on light blue, document borders as bars."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(dataset.path / "tokenizer")
    values = dataset.rows(split)[row]
    starts = {sum(values["seq_lengths"][:i]) for i in range(1, len(values["seq_lengths"]))}
    parts = []
    for i, (token, label) in enumerate(zip(values["input_ids"][:tokens], values["labels"], strict=False)):
        style = ' style="background:#dbeafe;color:#1d4ed8"' if label != IGNORE else ""
        bar = '<hr style="border:0;border-top:2px dashed #334155">' if i in starts else ""
        parts.append(f"{bar}<span{style}>{html.escape(tokenizer.decode([token]))}</span>")
    return f'<div style="white-space:pre-wrap;font-family:monospace;font-size:12px">{"".join(parts)}</div>'
