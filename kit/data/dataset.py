"""Dataset: a prepared folder of packed rows that every rank memory-maps; `prepare` builds it, once per content.

source rows -> documents with a ledger (documents.py, one part per worker or array task)
            -> packed rows and manifest in a published folder (publish.py)
"""

import fcntl
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kit import files
from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.documents import PartReport, encode_part
from kit.data.engine import EngineName
from kit.data.identity import dataset_digest, find_inputs, inputs_stamp, same_settings, settings
from kit.data.preview import Preview
from kit.data.publish import ROWS_FILE, publish
from kit.data.records import OnBytes
from kit.data.sources import Part, Source, SourceFiles, detect_format
from kit.data.views import length_histogram, steps_with, token_flow
from kit.errors import InputError
from kit.figures import Figure
from kit.show import Answer, Result, Table, progress_bar
from kit.show import Part as ResultPart

SHOWN_FILES = 20  # names of files that are not read


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

    def steps(self, seq_len: int = 0, longest: int = 0, epochs: float = 0.0, batch: int = 0) -> Answer:
        """The optimizer steps of other settings; 0 keeps the recipe's value. `longest` leaves out longer documents.

        Raises InputError for a folder that was opened without a recipe, and as `steps_with` does.
        """
        job = self.recipe
        if job is None:
            raise InputError(f"{self.path} was opened without a recipe; prepare it with one.")
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
        yield _splits_table(manifest)
        yield _ledger_table(manifest)
        if manifest["dropped_rows"]:
            yield _dropped_table(manifest)
        if manifest.get("unused_keys"):
            yield _unused_table(manifest["unused_keys"])
        yield from _warnings(manifest)
        if len(manifest["languages"]) > 1:
            yield Table.of([{"language": name, **sizes} for name, sizes in manifest["languages"].items()], "Languages")
        yield length_histogram(manifest)
        if manifest["leaks"]["prompts"]:
            examples = ", ".join(manifest["leaks"]["examples"])
            yield f"{manifest['leaks']['prompts']} prompts are in train and in eval, such as eval rows {examples}."
        if self.optimizer_steps is not None:
            yield f"{self.optimizer_steps:,} optimizer steps"


SIZES = {  # of a split, by their names in the manifest, in words
    "rows": "rows", "bound": "least possible rows", "conversations": "conversations", "documents": "documents",
    "tokens": "tokens", "loss_tokens": "in the loss", "fill": "full",
}  # fmt: skip


def _splits_table(manifest: dict[str, Any]) -> Table:
    def cell(key: str, value: Any) -> Any:
        return f"{value:.1%}" if key == "fill" else value

    splits = manifest["splits"].items()
    rows = [{"split": name} | {SIZES.get(k, k): cell(k, v) for k, v in sizes.items()} for name, sizes in splits]
    return Table.of(rows)


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


def _unused_table(unused: dict[str, int]) -> Table:
    rows = [(key.removeprefix("message."), "message" if "." in key else "row", n) for key, n in unused.items()]
    return Table(("key", "of", "rows"), rows, "Keys of the data that are not used")


def _warnings(manifest: dict[str, Any]) -> Iterator[str]:
    """What is not as the source has it. Folders of older versions do not say it."""
    if changes := manifest.get("changed_rows"):
        yield "Changed rows: " + ", ".join(f"{change} ({rows:,})" for change, rows in changes.items())
    for sentence, rows in manifest.get("warnings", {}).items():
        yield f"Warning: {sentence} ({rows:,} rows)"
    if others := manifest.get("files_not_read"):
        more = f" and {len(others) - SHOWN_FILES:,} more" if len(others) > SHOWN_FILES else ""
        yield f"Files that are not read: {', '.join(others[:SHOWN_FILES])}{more}"


def prepare(
    recipe: Recipe,
    out: Path = Path("prepared"),
    engine: EngineName = "auto",
    workers: int = 1,
    progress: bool = True,
    cluster: Cluster | None = None,
) -> Dataset:
    """The recipe's dataset folder under `out`, built if no folder with the same digest is there.

    The rows do not depend on engine and workers (processes), to the byte. Models and datasets of the hub are looked for
    in the cluster's paths.hf_home if it names one, else in HF_HOME. Raises InputError where the data, the tokenizer or
    the engine is not found, KitError where nothing is left to train on.
    """
    with _caches_of(cluster):
        return _prepare(recipe, out, engine, workers, progress)


def _prepare(recipe: Recipe, out: Path, engine: EngineName, workers: int, progress: bool) -> Dataset:
    found = find_inputs(recipe)

    def encode(folder: Path) -> Sequence[Path]:
        source = detect_format(found, recipe.data.source, recipe.data.source_format)
        size = source.bytes_of(Part(0, workers))
        with progress_bar(size, "prepare", "B", shown=progress, unit_scale=True) as bar:
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


def find_prepared(recipe: Recipe, out: Path = Path("prepared"), cluster: Cluster | None = None) -> Dataset | None:
    """The folder that `prepare` would return without building it, or None. Data are read only if they have changed."""
    wanted = settings(recipe)
    manifests = [path for path in out.glob("*/manifest.json") if not path.parent.name.startswith(".")]
    if not any(same_settings(files.read_json(path)["settings"], wanted) for path in manifests):
        return None
    try:
        with _caches_of(cluster):
            digest = dataset_digest(recipe, find_inputs(recipe), out)
    except InputError:  # the data or the tokenizer is gone: prepare would raise
        return None
    path = _folder_of_digest(out, digest)
    return Dataset(path, recipe) if path else None


def _caches_of(cluster: Cluster | None) -> AbstractContextManager[None]:
    return models.use_hf_home(cluster.paths.hf_home if cluster else "")


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
    recipe: Recipe, source: Source, folder: Path, engine: EngineName, workers: int, on_bytes: OnBytes
) -> Sequence[Path]:
    """The files of all parts. This process encodes the first part, and reports the bytes of that one."""
    parts = [Part(index, workers) for index in range(workers)]
    context = get_context("spawn")  # a forked process may hold locks of the parent's threads
    one_thread = ("TOKENIZERS_PARALLELISM", "false")
    with ProcessPoolExecutor(workers, context, os.putenv, one_thread) as pool:
        others = [pool.submit(encode_part, recipe, source, folder, part, engine) for part in parts[1:]]
        first = encode_part(recipe, source, folder, parts[0], engine, on_bytes)
        return [first, *(other.result() for other in others)]
