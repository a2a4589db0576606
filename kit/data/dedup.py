"""Near-duplicate documents found by MinHash, in datatrove's steps, and left out: `kit data dedup`."""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit import files
from kit.data.conversations import Conversation
from kit.data.export import as_row
from kit.data.sources import Part, Source
from kit.data.words import words
from kit.errors import InputError, KitError
from kit.show import Part as ResultPart
from kit.show import Result, Table

# Five-word shingles, 14 bands of 8 hashes: datatrove's defaults, those of FineWeb (arXiv:2406.17557). A pair whose
# shingles overlap by s (Jaccard) is found with probability 1 - (1 - s^8)^14: 5% at 0.5, 56% at 0.7, 92% at 0.8.
SHINGLE, BANDS, HASHES = 5, 14, 8


@dataclass(frozen=True)
class Deduplication(Result):
    """Counts of documents; OUT/report.json holds the same."""

    documents: int
    kept: int
    removed: int
    rejected: dict[str, int]  # rows by reason

    def as_dict(self) -> dict[str, Any]:
        """{"documents", "kept", "removed", "rejected": {reason: rows}}."""
        return asdict(self)

    def parts(self) -> Iterator[ResultPart]:
        """One line, and a table of rejected rows."""
        yield f"{self.documents:,} documents: {self.kept:,} kept, {self.removed:,} near-duplicates removed"
        if self.rejected:
            yield Table(("reason", "rows"), list(self.rejected.items()), "Rejected rows")


def deduplicate(source: Source, out: Path, lang: str = "", tasks: int = 1) -> Deduplication:
    """Keep one document of each cluster of near-duplicates; `tasks` processes compute the signatures.

    OUT/kept/*.jsonl is a source again (ids, groups and splits stay), OUT/removed/*.jsonl has the rest; documents of one
    cluster have its number in both. Documents of fewer than five words are always kept. Raises InputError if OUT
    exists, KitError if nothing can be read.
    """
    if out.exists():
        raise InputError(f"{out} exists already and is left as it is; choose another name.")
    minhash = _import_minhash()
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}."))  # on the same file system
    try:
        with _stderr_in(work / "log.txt"):
            _find_clusters(minhash, source, work, lang, tasks)
        with files.new_folder(out) as folder:
            report = _write_rows(source, work / "clusters", folder, lang, tasks)
            files.write_json(folder / "report.json", report.as_dict())
    finally:
        shutil.rmtree(work)
    return report


def _import_minhash() -> Any:
    try:
        from datatrove.pipeline.dedup import minhash
    except ImportError:
        raise InputError("Deduplication needs datatrove: pip install 'finetune-kit[dedup]'.") from None
    return minhash


def _find_clusters(minhash: Any, source: Source, work: Path, lang: str, tasks: int) -> None:
    """Leave the clusters of each task's documents in WORK/clusters."""
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
        (tasks, [Documents(source, lang), minhash.MinhashDedupSignature(signatures, config, Words())]),
        (BANDS, [minhash.MinhashDedupBuckets(signatures, pairs, config=config)]),
        (1, [minhash.MinhashDedupCluster(pairs, clusters, config, save_cluster_id=True)]),
    ]
    for number, (count, steps) in enumerate(stages):
        logs = str(work / "logs" / str(number))
        LocalPipelineExecutor(steps, tasks=count, workers=min(count, tasks), logging_dir=logs).run()


class Words:
    """Words without a language model; datatrove's tokenizers need spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        """As datatrove's WordTokenizer."""
        return words(text)


@dataclass(frozen=True)
class Documents:
    """The first step: a task's part of the source as datatrove documents."""

    source: Source
    lang: str

    def __call__(self, data: None, rank: int, world_size: int) -> Iterator[Any]:
        """The messages' text, without system prompts, which many conversations share."""
        from datatrove.data import Document

        for conversation in _read(self.source, self.lang, Part(rank, world_size), Counter()):
            said = [message["content"] for message in conversation.messages if message["role"] != "system"]
            yield Document("\n".join(said), conversation.id)


def _read(source: Source, lang: str, part: Part, rejected: Counter[str]) -> Iterator[Conversation]:
    """Conversations in an order that does not change, so that numbers of documents stay; rejected rows by reason."""
    rows = source.read(lang, lambda row, reason: rejected.update([reason]), part)
    return (conversation for _, conversation in rows)


def _write_rows(source: Source, clusters: Path, folder: Path, lang: str, tasks: int) -> Deduplication:
    """Write each document to kept/ or removed/, one file for each split and task."""
    counts: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for rank in range(tasks):
        removed = set(_numbers(clusters / f"{rank:06d}.remove").tolist())
        cluster_of = dict(_numbers(clusters / f"{rank:06d}.clusters").reshape(-1, 2).tolist())
        streams: dict[str, Any] = {}
        with ExitStack() as stack:
            for number, conversation in enumerate(_read(source, lang, Part(rank, tasks), rejected)):
                side = "removed" if number in removed else "kept"
                name = f"{side}/{conversation.split or 'part'}-{rank:05d}.jsonl"
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
    return Deduplication(counts.total(), counts["kept"], counts["removed"], dict(rejected))


def _numbers(path: Path) -> np.ndarray[Any, Any]:
    """uint32 numbers of documents within their task, as datatrove writes them; none if there is no file."""
    return np.fromfile(path, "<u4") if path.exists() else np.empty(0, "<u4")


@contextmanager
def _stderr_in(path: Path) -> Iterator[None]:
    """Write standard error of this process and its workers to a file: datatrove logs every step there."""
    kept = os.dup(2)
    with path.open("w") as stream, redirect_stderr(stream):
        os.dup2(stream.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
