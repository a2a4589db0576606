"""Publish: all parts become one folder of packed splits, tokenizer and manifest, which gets its name when complete."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kit import files
from kit.config.recipe import Recipe
from kit.data import arrow
from kit.data.arrow import Array
from kit.data.documents import Documents, PartReport
from kit.data.identity import FORMAT_VERSION, settings
from kit.data.ledger import EXAMPLES, Ledger
from kit.data.pack import lower_bound, pack
from kit.errors import KitError

BATCH_TOKENS = 2**24  # of one Arrow batch: lists have int32 offsets, so a long table is many batches
HISTOGRAM_BINS = 24
ROWS_FILE = "data-00000-of-00001.arrow"
COLUMNS = ("input_ids", "labels", "seq_lengths")
# state.json as datasets.save_to_disk writes it.
DATASETS_STATE: dict[str, Any] = {
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}


def _reasons(ledger: Ledger) -> str:
    """Why rows were dropped, each with the number of rows and one of them."""
    dropped = (
        f"{reason} ({count:,} {'row' if count == 1 else 'rows'}, such as {ledger.examples[reason][0]})"
        for reason, count in ledger.dropped_rows.items()
    )
    return "; ".join(dropped) or "it has no rows"


def publish(recipe: Recipe, digest: str, parts: Sequence[Path], path: Path) -> None:
    """Write the dataset of these parts. Raises KitError if nothing is left to train on, InputError if PATH exists."""
    documents, reports, ledger = Documents(parts), [PartReport.of(part) for part in parts], Ledger()
    for report in reports:
        ledger.add(report.ledger)
    splits = _splits(documents, ledger)
    if not splits["train"].size:
        raise KitError(f"No row of {recipe.data.source} can be trained on: {_reasons(ledger)}.")
    ledger.close(sum(_sizes(documents, chosen)["tokens"] for chosen in splits.values()))
    with files.new_folder(path) as folder:
        shutil.copytree(parts[0].parent / "tokenizer", folder / "tokenizer")
        sizes = {
            name: write_split(folder / name, documents, chosen, recipe, digest)
            for name, chosen in splits.items()
            if chosen.size
        }
        manifest = {
            "digest": digest,
            "format_version": FORMAT_VERSION,
            "format": reports[0].source_format,
            "engine": "+".join(sorted({report.engine for report in reports})),
            "files_not_read": reports[0].files_not_read,
            "splits": sizes,
            "settings": settings(recipe),
        }
        # Written last: a folder with a manifest is complete.
        files.write_json(folder / "manifest.json", manifest | ledger.as_json() | _contents(documents, splits))


def _splits(documents: Documents, ledger: Ledger) -> dict[str, Array]:
    """Indices of the documents of train and eval, without exact copies of an earlier conversation."""
    _, first, group = np.unique(documents.content_key, return_index=True, return_inverse=True)
    is_copy = documents.conversation != documents.conversation[first[group]]
    for row, tokens in zip(documents.id[is_copy], documents.length[is_copy].tolist(), strict=True):
        ledger.drop(row, "duplicate", tokens)
    return {
        "train": np.flatnonzero(~is_copy & ~documents.is_eval),
        "eval": np.flatnonzero(~is_copy & documents.is_eval),
    }


def _sizes(documents: Documents, chosen: Array) -> dict[str, int]:
    return {
        "conversations": len(np.unique(documents.conversation[chosen])),
        "documents": len(chosen),
        "tokens": int(documents.length[chosen].sum()),
        "loss_tokens": int(documents.loss_tokens[chosen].sum()),
    }


def write_split(path: Path, documents: Documents, chosen: Array, recipe: Recipe, digest: str) -> dict[str, Any]:
    """One split as datasets.save_to_disk lays it out, packed where the recipe says so; returns its sizes.

    Columns are lists of int32: input_ids, labels, and seq_lengths, the lengths of the documents in each row.
    """
    import pyarrow as pa

    seq_len, lengths = recipe.data.seq_len, documents.length[chosen]
    order, starts = np.arange(len(chosen)), np.arange(len(chosen) + 1)  # one document per row
    if recipe.data.packing:
        order, starts = pack(lengths, seq_len, recipe.schedule.seed)
    rows, batch_rows = len(starts) - 1, max(1, BATCH_TOKENS // seq_len)
    path.mkdir()
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in COLUMNS])
    with pa.OSFile(str(path / ROWS_FILE), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for first in range(0, rows, batch_rows):
            bounds = starts[first : first + batch_rows + 1]
            members = order[bounds[0] : bounds[-1]]
            bounds = bounds - bounds[0]
            token_bounds = np.r_[0, np.cumsum(lengths[members])][bounds]
            columns = [
                arrow.lists([documents.joined_tokens("input_ids", chosen[members])], token_bounds),
                arrow.lists([documents.joined_tokens("labels", chosen[members])], token_bounds),
                arrow.lists([lengths[members]], bounds),
            ]
            writer.write_batch(pa.record_batch(columns, schema))
    feature = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"}
    files.write_json(path / "dataset_info.json", {"features": dict.fromkeys(COLUMNS, feature)})
    fingerprint = hashlib.sha256(f"{digest} {path.name}".encode()).hexdigest()[:16]
    state = DATASETS_STATE | {"_data_files": [{"filename": ROWS_FILE}], "_fingerprint": fingerprint}
    files.write_json(path / "state.json", state)
    return {
        "rows": rows,
        **_sizes(documents, chosen),
        "fill": round(int(lengths.sum()) / (rows * seq_len), 6),
        "bound": lower_bound(lengths, seq_len) if recipe.data.packing else rows,
    }


def _contents(documents: Documents, splits: dict[str, Array]) -> dict[str, Any]:
    """What the kept documents are."""
    kept = np.concatenate(list(splits.values()))
    languages = documents.lang[kept]
    return {
        "template_tokens": round(float(documents.template_tokens[kept].mean()), 1),  # per document
        "languages": {
            language or "unknown": _sizes(documents, kept[languages == language]) for language in sorted(set(languages))
        },
        "leaks": _leaks(documents, splits),
        "lengths": _histogram(documents.length[kept]),
    }


def _leaks(documents: Documents, splits: dict[str, Array]) -> dict[str, Any]:
    """Prompts that are in train and in eval, with ids of their eval rows."""
    eval_prompts = documents.prompt_key[splits["eval"]]
    shared = np.intersect1d(documents.prompt_key[splits["train"]], eval_prompts)
    rows = documents.id[splits["eval"][np.isin(eval_prompts, shared)]]
    return {"prompts": len(shared), "examples": rows[:EXAMPLES].tolist()}


def _histogram(lengths: Array) -> dict[str, list[int]]:
    """Documents by length in tokens, in equal bins: {"upto": right edges, "documents": counts}."""
    width = max(1, -(-int(lengths.max()) // HISTOGRAM_BINS))
    counts = np.bincount((lengths - 1) // width, minlength=HISTOGRAM_BINS)
    edges = [width * (index + 1) for index in range(HISTOGRAM_BINS)]
    return {"upto": edges, "documents": counts.tolist()}
