"""Dataset: conversations to a folder of packed rows that every rank memory-maps, with an exact account of tokens."""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from kit import files
from kit.config.recipe import Recipe
from kit.data.engine import Name
from kit.data.pack import lower_bound, pack
from kit.data.parts import EXAMPLES, TOKENS, Array, Documents, Ledger, as_lists, encode_part, inputs, settings, stamp
from kit.errors import InputError, KitError

IN_A_BATCH = 2**24  # tokens of one Arrow batch: lists have int32 offsets, so a long table is many batches
STEADY_S = 2.0  # a file that changed less than this ago may change again under the same time stamp

ARROW = "data-00000-of-00001.arrow"
STATE: dict[str, Any] = {
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """A prepared folder: train/ and eval/ (Arrow; input_ids, labels, seq_lengths), tokenizer/, manifest.json."""

    path: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Digest, splits, ledger, dropped rows, languages, leaks and length histogram."""
        return dict(files.read_json(self.path / "manifest.json"))

    def rows(self, split: str) -> Any:
        """The split as a memory-mapped datasets.Dataset."""
        import datasets

        return datasets.load_from_disk(str(self.path / split))

    def as_dict(self, recipe: Recipe) -> dict[str, Any]:
        """What `kit prepare --json` prints."""
        steps = recipe.optimizer_steps(self.manifest["splits"]["train"]["rows"])
        return {"folder": str(self.path), **self.manifest, "optimizer_steps": steps}


def prepare(
    recipe: Recipe,
    out: Path = Path("prepared"),
    progress: Progress | None = None,
    engine: Name = "tokenizers",
    workers: int = 1,
) -> Dataset:
    """The recipe's dataset folder under `out`, built once: the same inputs give the same folder, byte for byte.

    Neither engine nor workers (processes) changes it. Raises InputError where the data, the tokenizer or the engine is
    not found, KitError where nothing is left to train on.
    """
    return _once(recipe, out, progress, lambda folder: _encode_all(recipe, folder, engine, workers))


def merge(recipe: Recipe, parts: Sequence[Path], out: Path = Path("prepared"), progress: Any = None) -> Dataset:
    """The dataset folder from the files that `encode_part` made, such as by the tasks of a Slurm array.

    Raises InputError where a part is missing or was made from other inputs.
    """
    made, marks = stamp(recipe), Documents(parts).marks
    if other := [path.name for path, mark in zip(parts, marks, strict=True) if mark["stamp"] != made]:
        raise InputError(f"{', '.join(other)}: made from other inputs or settings than these; encode again.")
    shares, count = [mark["part"][0] for mark in marks], marks[0]["part"][1] if marks else 1
    if sorted(shares) != list(range(count)):
        raise InputError(f"Parts {sorted(shares)} of 0 to {count - 1} are here; each is needed once.")
    return _once(recipe, out, progress, lambda folder: parts)


def find_prepared(recipe: Recipe, out: Path = Path("prepared")) -> Dataset | None:
    """The newest folder prepared with these settings, found without reading the data or loading a tokenizer."""
    manifests = [p for p in out.glob("*/manifest.json") if not p.parent.name.startswith(".")]
    found = [p for p in manifests if files.read_json(p)["settings"] == settings(recipe)]
    return Dataset(max(found, key=lambda p: p.stat().st_mtime).parent) if found else None


def _whole(path: Path) -> bool:
    return (path / "manifest.json").is_file()  # written last, before the folder gets its name


def _once(recipe: Recipe, out: Path, progress: Progress | None, encode: Callable[[Path], Sequence[Path]]) -> Dataset:
    out.mkdir(parents=True, exist_ok=True)
    digest, say = _digest(recipe, out), progress or (lambda text: None)
    path = out / f"{recipe.name}-{digest[:12]}"
    with _one_builder(path, say) as first:
        if first:
            with tempfile.TemporaryDirectory(dir=out, prefix=f".{path.name}.parts.") as folder:
                _publish(recipe, digest, encode(Path(folder)), path, say)
    return Dataset(path)


@contextmanager
def _one_builder(path: Path, say: Progress) -> Iterator[bool]:
    """Whether the folder is still to build. Many may start at once; one builds, the others wait and find it done.

    Where the file system has no locks (NFS without lockd), more than one may build: the work is double, the result is
    not, since the first to finish gives the folder its name.
    """
    if _whole(path):
        yield False
        return
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            say(f"No file locks in {path.parent} ({error.strerror}): others that start now will build {path} too.")
        yield not _whole(path)


def _digest(recipe: Recipe, out: Path) -> str:
    """sha256 over the input bytes, the settings that shape rows, the tokenizer's files and the code that makes them.

    Digests of files are kept in `out`/.digests.json by path, size and time, so that large inputs are read once.
    """
    told, paths = inputs(recipe)
    kept_in, total = out / ".digests.json", hashlib.sha256(told)
    known = files.read_json(kept_in) if kept_in.is_file() else {}
    new = {}
    for path in paths:
        found = path.stat()
        key = f"{path.absolute()} {found.st_size} {found.st_mtime_ns}"
        if not (value := known.get(key)):
            with path.open("rb") as stream:
                value = hashlib.file_digest(stream, "sha256").hexdigest()
            if time.time() - found.st_mtime > STEADY_S:
                new[key] = value
        total.update(value.encode())
    if new:
        files.write_json(kept_in, known | new)
    return total.hexdigest()


def _encode_all(recipe: Recipe, folder: Path, engine: Name, workers: int) -> list[Path]:
    if workers == 1:
        return [encode_part(recipe, folder, engine=engine)]
    shares = [(i, workers) for i in range(workers)]
    # Fresh processes: a forked one may hold locks of the parent's threads. One thread each, as many as workers.
    with ProcessPoolExecutor(workers, get_context("spawn"), _one_thread) as pool:
        return list(pool.map(partial(encode_part, recipe, folder, engine=engine), shares))


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _publish(recipe: Recipe, digest: str, parts: Sequence[Path], path: Path, say: Progress) -> None:
    """Merge, pack and write; the folder gets its name when all is in it."""
    documents, ledger = Documents(parts), Ledger()
    for mark in documents.marks:
        ledger.add(mark["ledger"])
    reason = documents.marks[0]["format"]
    say(f"{ledger.read_tokens:,} tokens encoded ({reason})")
    splits = _splits(documents.columns, ledger)
    if not len(splits["train"]):
        raise KitError(f"Nothing is left to train on from {recipe.data.source}: {dict(ledger.dropped_rows)}.")
    ledger.kept_tokens = sum(_sizes(documents.columns, which)["tokens"] for which in splits.values())
    ledger.check()
    try:
        with files.new_folder(path) as folder:
            shutil.copytree(parts[0].parent / "tokenizer", folder / "tokenizer")
            sizes = {
                k: _write(folder / k, documents, which, recipe, digest) for k, which in splits.items() if which.size
            }
            told = {"digest": digest, "format": reason, "splits": sizes, "settings": settings(recipe)}
            files.write_json(folder / "manifest.json", told | _account(documents.columns, splits, ledger))
    except InputError:
        if not _whole(path):  # else another was faster, where there are no locks
            raise
    say(f"{len(splits['train'])} documents for training, {len(splits['eval'])} for evaluation")


def _splits(columns: dict[str, Array], ledger: Ledger) -> dict[str, Array]:
    """The documents of train and of eval, without those of a conversation that came before, word for word."""
    _, first, group = np.unique(columns["key"], return_index=True, return_inverse=True)
    again = columns["conversation"] != columns["conversation"][first[group]]
    for name, tokens in zip(columns["id"][again], columns["length"][again].tolist(), strict=True):
        ledger.drop(name, "duplicate", tokens)
    return {name: np.flatnonzero(~again & (columns["eval"] == side)) for side, name in enumerate(("train", "eval"))}


def _sizes(columns: dict[str, Array], which: Array) -> dict[str, int]:
    return {
        "conversations": len(np.unique(columns["conversation"][which])),
        "documents": len(which),
        "tokens": int(columns["length"][which].sum()),
        "loss_tokens": int(columns["counted"][which].sum()),
    }


def _write(path: Path, documents: Documents, which: Array, recipe: Recipe, digest: str) -> dict[str, Any]:
    """One split, packed, as datasets.save_to_disk lays it out; returns its sizes."""
    import pyarrow as pa

    size, lengths = recipe.data.seq_len, documents.columns["length"][which]
    order, starts = np.arange(len(which)), np.arange(len(which) + 1)
    if recipe.data.packing:
        order, starts = pack(lengths, size, recipe.schedule.seed)
    path.mkdir()
    names, rows, step = [*TOKENS, "seq_lengths"], len(starts) - 1, max(1, IN_A_BATCH // size)
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in names])
    with pa.OSFile(str(path / ARROW), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for at in range(0, rows, step):
            bounds = starts[at : at + step + 1]
            chosen, bounds = order[bounds[0] : bounds[-1]], bounds - bounds[0]
            in_tokens = np.r_[0, np.cumsum(lengths[chosen])][bounds]
            columns = [as_lists(documents.tokens(name, which[chosen]), in_tokens) for name in TOKENS]
            writer.write_batch(pa.record_batch([*columns, as_lists([lengths[chosen]], bounds)], schema))
    kind = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"}
    files.write_json(path / "dataset_info.json", {"features": dict.fromkeys(names, kind)})
    mark = hashlib.sha256(f"{digest} {path.name}".encode()).hexdigest()[:16]
    files.write_json(path / "state.json", STATE | {"_data_files": [{"filename": ARROW}], "_fingerprint": mark})
    fill, bound = int(lengths.sum()) / (rows * size), lower_bound(lengths, size) if recipe.data.packing else rows
    return {"rows": rows, **_sizes(documents.columns, which), "fill": round(fill, 6), "bound": bound}


def _account(columns: dict[str, Array], splits: dict[str, Array], ledger: Ledger) -> dict[str, Any]:
    """Where rows and tokens went, and what the kept ones are."""
    kept = np.concatenate(list(splits.values()))
    asked = {name: columns["prompt"][which] for name, which in splits.items()}
    both = np.intersect1d(asked["train"], asked["eval"])
    langs = columns["lang"][kept]
    tokens = {k: v for k, v in vars(ledger).items() if k.endswith("_tokens")}
    return {
        "ledger": tokens | {"dropped": dict(sorted((+ledger.dropped).items()))},
        "dropped_rows": dict(sorted(ledger.dropped_rows.items())),
        "dropped_examples": dict(sorted(ledger.examples.items())),
        "changed_rows": dict(sorted((+ledger.changed_rows).items())),
        "template_tokens": round(float(columns["structure"][kept].mean()), 1),
        "languages": {lang or "unknown": _sizes(columns, kept[langs == lang]) for lang in sorted(set(langs))},
        "leaks": {
            "prompts": len(both),
            "examples": columns["id"][splits["eval"][np.isin(asked["eval"], both)]][:EXAMPLES].tolist(),
        },
        "lengths": _histogram(columns["length"][kept]),
    }


def _histogram(lengths: Array, bins: int = 24) -> dict[str, list[int]]:
    """Documents by length in tokens, in equal bins: {"upto": right edges, "documents": counts}."""
    width = max(1, -(-int(lengths.max()) // bins))
    counts = np.bincount((lengths - 1) // width, minlength=bins)
    return {"upto": [width * (i + 1) for i in range(bins)], "documents": counts.tolist()}
