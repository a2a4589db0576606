"""Dataset: a prepared folder of packed rows that every rank memory-maps; `prepare` builds it, once per content.

source rows -> documents with a ledger (documents.py, one part per worker or array task)
            -> packed rows and manifest in a published folder (publish.py)
"""

import fcntl
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kit import files
from kit.config.recipe import Recipe
from kit.data.documents import PartReport, encode_part
from kit.data.engine import EngineName
from kit.data.identity import dataset_digest, find_inputs, inputs_stamp, same_settings, settings
from kit.data.preview import Preview
from kit.data.publish import ROWS_FILE, publish
from kit.data.records import OnBytes
from kit.data.sources import ALL_ROWS, Part, Source, SourceFiles, detect_format
from kit.data.views import steps_with, token_flow
from kit.errors import InputError
from kit.figures import Figure
from kit.show import Answer, Result, Table, progress_bar
from kit.show import Part as ResultPart

SHOWN_LENGTHS = 8  # rows of the table of lengths


@dataclass(frozen=True)
class Dataset(Result):
    """A prepared folder: train/ and eval/ (Arrow: input_ids, labels, seq_lengths), tokenizer/, manifest.json.

    `Dataset(path)` opens any prepared folder, of older versions too.
    """

    path: Path
    recipe: Recipe | None = field(default=None, compare=False, repr=False)  # what it was prepared for

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Digest, settings, splits, ledger, dropped rows, languages, leaks and histogram of lengths."""
        return dict(files.read_json(self.path / "manifest.json"))

    @property
    def optimizer_steps(self) -> int | None:
        """Steps of the complete run; None for a folder that was opened without a recipe."""
        return self.recipe.optimizer_steps(self.manifest["splits"]["train"]["rows"]) if self.recipe else None

    def rows(self, split: str) -> Any:
        """The split as a memory-mapped datasets.Dataset."""
        import datasets

        return datasets.load_from_disk(str(self.path / split))

    def preview(self, row: int = 0, split: str = "train", tokens: int = 400) -> Preview:
        """The first tokens of one packed row: its documents, and what the loss counts. Raises InputError."""
        splits = self.manifest["splits"]
        if split not in splits:
            raise InputError(f"{self.path} has no split {split!r}; it has {' and '.join(splits)}.")
        if not 0 <= row < splits[split]["rows"]:
            raise InputError(f"Row {row} of {split}: choose one from 0 to {splits[split]['rows'] - 1}.")
        return Preview.read(self.path / split / ROWS_FILE, self.path / "tokenizer", row, tokens)

    @property
    def flow(self) -> Figure:
        """Where the tokens went, as a Sankey diagram."""
        return token_flow(self.manifest)

    def steps(
        self, seq_len: int = 0, longest: int = 0, epochs: float = 0.0, batch: int = 0, recipe: Recipe | None = None
    ) -> Answer:
        """The optimizer steps of other settings; 0 keeps the recipe's value. `longest` leaves out longer documents.

        Raises InputError for a folder that was opened without a recipe, where none is given, and as `steps_with` does.
        """
        job = recipe or self.recipe
        if job is None:
            raise InputError(f"{self.path} was opened without a recipe; give one.")
        import numpy as np

        lengths = np.concatenate([np.asarray(row, dtype=np.int64) for row in self.rows("train")["seq_lengths"]])
        length = seq_len or job.data.seq_len
        return steps_with(lengths, job, length, longest or length, epochs or job.schedule.epochs, batch or job.batch)

    def as_dict(self) -> dict[str, Any]:
        """What `kit prepare --json` prints."""
        return {"folder": str(self.path), **self.manifest, "optimizer_steps": self.optimizer_steps}

    def parts(self) -> Iterator[ResultPart]:
        """Sizes of the splits, where the tokens went, dropped rows, languages and lengths."""
        manifest = self.manifest
        engine = f"; engine {manifest['engine']}" if "engine" in manifest else ""
        yield f"{self.path}  ({manifest['format']}{engine})"
        yield Table.of([{"split": name, **sizes} for name, sizes in manifest["splits"].items()])
        yield _ledger_table(manifest)
        if manifest["dropped_rows"]:
            yield _dropped_table(manifest)
        if len(manifest["languages"]) > 1:
            yield Table.of([{"language": name, **sizes} for name, sizes in manifest["languages"].items()], "Languages")
        yield _lengths_table(manifest["lengths"])
        if manifest["leaks"]["prompts"]:
            examples = ", ".join(manifest["leaks"]["examples"])
            yield f"{manifest['leaks']['prompts']} prompts are in train and in eval, such as eval rows {examples}."
        if self.optimizer_steps is not None:
            yield f"{self.optimizer_steps:,} optimizer steps"


def _ledger_table(manifest: dict[str, Any]) -> Table:
    ledger, loss_tokens = manifest["ledger"], sum(split["loss_tokens"] for split in manifest["splits"].values())
    tokens = {
        "kept, in the loss": loss_tokens,
        "kept, context alone": ledger["kept_tokens"] - loss_tokens,
        **{f"dropped: {reason}": count for reason, count in ledger["dropped"].items()},
        "read": ledger["read_tokens"],
    }
    total = max(1, ledger["read_tokens"])
    rows = [(name, count, f"{count / total:.1%}") for name, count in tokens.items()]
    return Table(("tokens", "count", "share"), rows, "Where the tokens went")


def _dropped_table(manifest: dict[str, Any]) -> Table:
    examples = manifest["dropped_examples"]
    rows = [(reason, count, ", ".join(examples.get(reason, []))) for reason, count in manifest["dropped_rows"].items()]
    return Table(("reason", "rows", "for example"), rows, "Dropped rows")


def _lengths_table(histogram: dict[str, list[int]]) -> Table:
    """The manifest's bins, joined to SHOWN_LENGTHS rows."""
    joined = len(histogram["upto"]) // SHOWN_LENGTHS
    edges = histogram["upto"][joined - 1 :: joined]
    counts = [sum(histogram["documents"][start : start + joined]) for start in range(0, len(edges) * joined, joined)]
    total = sum(counts)
    rows = [(edge, count, f"{count / total:.1%}") for edge, count in zip(edges, counts, strict=True)]
    return Table(("up to tokens", "documents", "share"), rows, "Lengths")


def prepare(
    recipe: Recipe,
    out: Path = Path("prepared"),
    engine: EngineName = "auto",
    workers: int = 1,
    progress: bool = True,
) -> Dataset:
    """The recipe's dataset folder under `out`, built if no folder with the same digest is there.

    The rows do not depend on engine and workers (processes), to the byte. Raises InputError where the data, the
    tokenizer or the engine is not found, KitError where nothing is left to train on.
    """
    found = find_inputs(recipe)

    def encode(folder: Path) -> Sequence[Path]:
        source = detect_format(found, recipe.data.source, recipe.data.source_format)
        if not progress:
            return _encode(recipe, source, folder, engine, workers)
        size = sum(path.stat().st_size for path in source.files)
        with progress_bar(size, "prepare", "B", unit_scale=True) as bar:
            return _encode(recipe, source, folder, engine, workers, bar.update)

    return _build_once(recipe, found, out, encode)


def merge(recipe: Recipe, parts: Sequence[Path], out: Path = Path("prepared")) -> Dataset:
    """The dataset folder from the files that `encode_part` wrote, such as by the tasks of a Slurm array.

    Raises InputError where a part is missing or was made from other inputs.
    """
    found, reports = find_inputs(recipe), [PartReport.of(part) for part in parts]
    stamp = inputs_stamp(recipe, found)
    if other := [part.name for part, report in zip(parts, reports, strict=True) if report.stamp != stamp]:
        raise InputError(f"{', '.join(other)}: made from other inputs or settings than these; encode again.")
    indices, count = sorted(report.index for report in reports), reports[0].count if reports else 1
    if indices != list(range(count)):
        raise InputError(f"Parts {indices} of 0 to {count - 1} are here; each is needed once.")
    return _build_once(recipe, found, out, lambda folder: parts)


def find_prepared(recipe: Recipe, out: Path = Path("prepared")) -> Dataset | None:
    """The folder that `prepare` would return without building it, or None. Data are read only if they have changed."""
    wanted = settings(recipe)
    manifests = [path for path in out.glob("*/manifest.json") if not path.parent.name.startswith(".")]
    if not any(same_settings(files.read_json(path)["settings"], wanted) for path in manifests):
        return None
    try:
        digest = dataset_digest(recipe, find_inputs(recipe), out)
    except InputError:  # the data or the tokenizer is gone: prepare would raise
        return None
    path = _folder_of_digest(out, digest)
    return Dataset(path, recipe) if path else None


def _folder_of_digest(out: Path, digest: str) -> Path | None:
    manifests = sorted(out.glob(f"*-{digest[:12]}/manifest.json"))
    return next((path.parent for path in manifests if not path.parent.name.startswith(".")), None)


def _build_once(recipe: Recipe, found: SourceFiles, out: Path, encode: Callable[[Path], Sequence[Path]]) -> Dataset:
    out.mkdir(parents=True, exist_ok=True)
    digest = dataset_digest(recipe, found, out)
    path = _folder_of_digest(out, digest)
    if path:
        return Dataset(path, recipe)
    with _dataset_lock(out, digest):
        path = _folder_of_digest(out, digest)  # another process may have built it in the meantime
        if not path:
            path = out / f"{recipe.name}-{digest[:12]}"
            with tempfile.TemporaryDirectory(dir=out, prefix=f".{path.name}.parts.") as folder:
                parts = encode(Path(folder))
                try:
                    publish(recipe, digest, parts, path)
                except InputError:
                    if not (path / "manifest.json").is_file():  # else another was faster, where there are no locks
                        raise
    return Dataset(path, recipe)


@contextmanager
def _dataset_lock(out: Path, digest: str) -> Iterator[None]:
    """Hold the lock of this digest: of many processes that start at once, one builds and the others wait.

    Where the file system has no locks (NFS without lockd), several may build. The result is the same, since the first
    to finish gives the folder its name.
    """
    with (out / f".{digest[:12]}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            warnings.warn(
                f"No file locks in {out} ({error.strerror}): other processes that start now build the same dataset.",
                RuntimeWarning,
                stacklevel=2,
            )
        yield


def _encode(
    recipe: Recipe, source: Source, folder: Path, engine: EngineName, workers: int, on_bytes: OnBytes | None = None
) -> Sequence[Path]:
    if workers == 1:
        return [encode_part(recipe, source, folder, ALL_ROWS, engine, on_bytes)]
    context = get_context("spawn")  # a forked process may hold locks of the parent's threads
    bytes_read = context.Value("d", 0.0)
    with ProcessPoolExecutor(workers, context, _start_worker, (bytes_read,)) as pool:
        parts = [Part(index, workers) for index in range(workers)]
        futures = [pool.submit(_encode_in_worker, recipe, source, folder, part, engine) for part in parts]
        pending, reported = set(futures), 0.0
        while pending:
            _, pending = wait(pending, timeout=0.2)
            if on_bytes:
                on_bytes(bytes_read.value - reported)
                reported = bytes_read.value
        return [future.result() for future in futures]


_bytes_read: Any = None  # in a worker: the counter that all workers share


def _start_worker(bytes_read: Any) -> None:
    global _bytes_read
    _bytes_read = bytes_read
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each worker


def _encode_in_worker(recipe: Recipe, source: Source, folder: Path, part: Part, engine: EngineName) -> Path:
    return encode_part(recipe, source, folder, part, engine, _count_bytes)


def _count_bytes(count: float) -> None:
    with _bytes_read.get_lock():
        _bytes_read.value += count
