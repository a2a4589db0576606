"""Near-duplicate documents found by MinHash, in datatrove's steps, and left out: `kit data dedup`."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit import files
from kit.data.export import as_row
from kit.data.sources import Source
from kit.data.words import words
from kit.errors import InputError, KitError
from kit.show import Answer, Table

# Five-word shingles, 14 bands of 8 hashes: datatrove's defaults, those of FineWeb (arXiv:2406.17557). A pair whose
# shingles overlap by s (Jaccard) is found with probability 1 - (1 - s^8)^14: 5% at 0.5, 56% at 0.7, 92% at 0.8.
SHINGLE, BANDS, HASHES = 5, 14, 8


def deduplicate(source: Source, out: Path, lang: str = "") -> Answer:
    """Keep one document of each cluster of near-duplicates; returns {"documents", "kept", "removed", "rejected"}.

    OUT/kept/*.jsonl is a source again (ids, groups and splits stay), OUT/removed/*.jsonl has the rest; documents of one
    cluster have its number in both. OUT/report.json has the counts. Documents of fewer than five words are always kept.
    Raises InputError if OUT exists, KitError if nothing can be read.
    """
    if out.exists():
        raise InputError(f"{out} exists already and is left as it is; choose another name.")
    minhash = _import_minhash()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as scratch:
        work = Path(scratch)
        with _stderr_in(work / "log.txt"):
            _find_clusters(minhash, source, work, lang)
        with files.new_folder(out) as folder:
            counts, rejected = _write_rows(source, work / "clusters", folder, lang)
            sizes = {"documents": counts.total(), "kept": counts["kept"], "removed": counts["removed"]}
            report = {**sizes, "rejected": dict(rejected)}
            files.write_json(folder / "report.json", report)
    line = f"{counts.total():,} documents: {counts['kept']:,} kept, {counts['removed']:,} near-duplicates removed"
    return Answer(report, line, *_rejected_table(rejected))


def _rejected_table(rejected: Counter[str]) -> list[Table]:
    return [Table(("reason", "rows"), list(rejected.items()), "Rejected rows")] if rejected else []


def _import_minhash() -> Any:
    try:
        from datatrove.pipeline.dedup import minhash
    except ImportError:
        raise InputError("Deduplication needs datatrove: pip install 'finetune-kit[dedup]'.") from None
    return minhash


def _find_clusters(minhash: Any, source: Source, work: Path, lang: str) -> None:
    """Leave the clusters of the documents in WORK/clusters."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.text import TextNormConfig
    from datatrove.utils.word_tokenizers import WordTokenizer

    WordTokenizer.register(Words)
    norm = TextNormConfig(norm_numbers=False)  # in sums and tables the numbers are the difference
    sha1 = HashConfig(hash_fc="sha1")  # datatrove 0.10 gives text to xxhash, which version 4 refuses
    config = minhash.MinhashConfig(SHINGLE, BANDS, HASHES, norm_config=norm, hash_config=sha1)
    signatures, pairs, clusters = (str(work / name) for name in ("signatures", "pairs", "clusters"))
    stages: list[tuple[int, list[Any]]] = [
        (1, [Documents(source, lang), minhash.MinhashDedupSignature(signatures, config, Words())]),
        (BANDS, [minhash.MinhashDedupBuckets(signatures, pairs, config=config)]),
        (1, [minhash.MinhashDedupCluster(pairs, clusters, config, save_cluster_id=True)]),
    ]
    for number, (tasks, steps) in enumerate(stages):
        LocalPipelineExecutor(steps, tasks=tasks, logging_dir=str(work / "logs" / str(number))).run()


class Words:
    """Words without a language model; datatrove's tokenizers need spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        """As datatrove's WordTokenizer."""
        return words(text)


@dataclass(frozen=True)
class Documents:
    """The first step: the source as datatrove documents."""

    source: Source
    lang: str

    def __call__(self, data: None, rank: int, world_size: int) -> Iterator[Any]:
        """The messages' text, without system prompts, which many conversations share."""
        from datatrove.data import Document

        for _, conversation in self.source.read(self.lang, lambda row, reason: None):
            said = [message["content"] for message in conversation.messages if message["role"] != "system"]
            yield Document("\n".join(said), conversation.id)


def _write_rows(source: Source, clusters: Path, folder: Path, lang: str) -> tuple[Counter[str], Counter[str]]:
    """Write each document to kept/ or removed/, one file for each split; counts of these, and of rejected rows.

    Documents are read again, in the same order, so that numbers of documents stay.
    """
    removed = set(_numbers(clusters / "000000.remove").tolist())
    cluster_of = dict(_numbers(clusters / "000000.clusters").reshape(-1, 2).tolist())
    counts: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    streams: dict[str, Any] = {}
    with ExitStack() as stack:
        rows = source.read(lang, lambda row, reason: rejected.update([reason]))
        for number, (_, conversation) in enumerate(rows):
            side = "removed" if number in removed else "kept"
            name = f"{side}/{conversation.split or 'part'}-00000.jsonl"
            if name not in streams:
                (folder / side).mkdir(exist_ok=True)
                streams[name] = stack.enter_context((folder / name).open("w", encoding="utf-8"))
            row = as_row(conversation)
            if number in cluster_of:
                row["cluster"] = cluster_of[number]
            streams[name].write(json.dumps(row, ensure_ascii=False) + "\n")
            counts[side] += 1
    if not counts:
        raise KitError(f"There is no document to keep; rows rejected: {dict(rejected)}.")
    return counts, rejected


def _numbers(path: Path) -> np.ndarray[Any, Any]:
    """uint32 numbers of documents, as datatrove writes them; empty for a missing file."""
    return np.fromfile(path, "<u4") if path.exists() else np.empty(0, "<u4")


@contextmanager
def _stderr_in(path: Path) -> Iterator[None]:
    """Write standard error of this process to a file: datatrove logs every step there."""
    kept = os.dup(2)
    with path.open("w") as stream, redirect_stderr(stream):
        os.dup2(stream.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
