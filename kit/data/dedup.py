"""Near-duplicate documents found by MinHash and left out, by datatrove's steps, on this machine or as Slurm arrays."""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit import files
from kit.config.cluster import Cluster
from kit.data import tokenizer
from kit.data.conversations import Conversation
from kit.data.export import as_row
from kit.data.sources import Source
from kit.errors import InputError, KitError

# Five-word shingles, 14 bands of 8 hashes: datatrove's defaults, those of FineWeb (arXiv:2406.17557). A pair whose
# shingles overlap by s (Jaccard) is found with probability 1 - (1 - s^8)^14: 5% at 0.5, 56% at 0.7, 92% at 0.8.
SHINGLE, BANDS, HASHES = 5, 14, 8


def deduplicate(source: Source, out: Path, lang: str = "", tasks: int = 1) -> dict[str, Any]:
    """Keep one document of each cluster of near-duplicates, with `tasks` processes here; returns the report.

    OUT/kept/*.jsonl is a source again (ids, groups and splits stay), OUT/removed/*.jsonl the rest; documents of one
    cluster carry its number in both. OUT/report.json: {"documents", "kept", "removed", "rejected": {reason: rows}}.
    Documents under five words are always kept. Raises InputError if OUT exists, KitError if nothing can be read.
    """
    stages = _stages(source, work := _work_folder(out), out, lang, tasks)
    from datatrove.executor.local import LocalPipelineExecutor

    try:
        with _errors_in(work / "log.txt"):
            for name, steps, count in stages:
                logs = str(work / "logs" / name)
                LocalPipelineExecutor(steps, tasks=count, workers=min(count, tasks), logging_dir=logs).run()
    finally:
        shutil.rmtree(work)
    return dict(files.read_json(out / "report.json"))


def submit(source: Source, out: Path, cluster: Cluster, lang: str = "", tasks: int = 16) -> list[str]:
    """The same as five Slurm job arrays, each after the one before; returns their job ids.

    OUT appears when the last has ended well; logs and parts are in a hidden folder beside it. Raises InputError if
    OUT exists or the cluster names no partition or time.
    """
    slurm = cluster.slurm
    if not slurm.partition or not slurm.time:
        raise InputError(f"Cluster {cluster.name}: datatrove's job scripts need [slurm] partition and time; set both.")
    stages = _stages(source, work := _work_folder(out), out.absolute(), lang, tasks)
    from datatrove.executor.slurm import SlurmPipelineExecutor

    options = dict(option.lstrip("-").partition("=")[::2] for option in slurm.options)
    jobs: list[Any] = [None]
    for name, steps, count in stages:
        job = SlurmPipelineExecutor(
            steps,
            tasks=count,
            time=slurm.time,
            partition=slurm.partition,
            mem_per_cpu_gb=max(1, int(cluster.nodes.ram_gib / cluster.nodes.cpus)),
            job_name=f"dedup-{name}",
            qos="",  # datatrove's default is "normal", which not every cluster has
            env_command="\n".join([*slurm.setup, f'export PATH="{Path(sys.executable).parent}:$PATH"']),
            sbatch_args=options | ({"account": slurm.account} if slurm.account else {}),
            depends=jobs[-1],
            logging_dir=str(work / "logs" / name),
        )
        job.run()
        jobs.append(job)
    return [str(job.job_id) for job in jobs[1:]]


def _stages(source: Source, work: Path, out: Path, lang: str, tasks: int) -> list[tuple[str, list[Any], int]]:
    """Names, steps and numbers of tasks."""
    try:
        from datatrove.pipeline.dedup import minhash
        from datatrove.utils.hashing import HashConfig
        from datatrove.utils.text import TextNormConfig
        from datatrove.utils.word_tokenizers import WordTokenizer
    except ImportError:
        work.rmdir()
        raise InputError("Deduplication needs datatrove: pip install 'finetune-kit[dedup]'.") from None
    WordTokenizer.register(Words)
    norm = TextNormConfig(norm_numbers=False)  # in sums and tables numbers are the difference
    sha1 = HashConfig(hash_fc="sha1")  # datatrove 0.10 hands text to xxhash, which version 4 refuses
    config = minhash.MinhashConfig(SHINGLE, BANDS, HASHES, norm_config=norm, hash_config=sha1)
    signatures, pairs, clusters = (str(work / name) for name in ("signatures", "pairs", "clusters"))
    documents = Documents(source, lang)
    return [
        ("signatures", [documents, minhash.MinhashDedupSignature(signatures, config, Words())], tasks),
        ("pairs", [minhash.MinhashDedupBuckets(signatures, pairs, config=config)], BANDS),
        ("clusters", [minhash.MinhashDedupCluster(pairs, clusters, config, save_cluster_id=True)], 1),
        ("filter", [Filter(documents, work)], tasks),
        ("report", [Report(work, out)], 1),
    ]


class Words:
    """Words without a language model: those that fertility counts. datatrove's own ask for spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        """As datatrove's WordTokenizer."""
        return tokenizer.words(text)


@dataclass(frozen=True)
class Documents:
    """A task's part of the source, the same each time."""

    source: Source
    lang: str

    def read(self, part: tuple[int, int], rejected: Counter[str]) -> Iterator[Conversation]:
        """Conversations in order, rejected rows counted by reason."""
        rows = self.source.read(self.lang, lambda _, reason: rejected.update([reason]), part)
        return (found for _, found in rows)

    def __call__(self, data: None, rank: int, world_size: int) -> Iterator[Any]:
        """datatrove Documents: what was said, without system prompts, which many conversations share."""
        from datatrove.data import Document

        for found in self.read((rank, world_size), Counter()):
            yield Document("\n".join(m["content"] for m in found.messages if m["role"] != "system"), found.id)


@dataclass(frozen=True)
class Filter:
    """Writes each document to kept/ or removed/, a file for each split and task, and the task's counts."""

    documents: Documents
    work: Path

    def __call__(self, data: None, rank: int, world_size: int) -> None:
        """As a datatrove step. The .remove and .clusters files hold uint32 document numbers of this task."""
        remove = set(self._numbers(rank, "remove").tolist())
        cluster = dict(self._numbers(rank, "clusters").reshape(-1, 2).tolist())
        counts: Counter[str] = Counter()
        rejected: Counter[str] = Counter()
        streams: dict[str, Any] = {}
        with ExitStack() as stack:
            for number, found in enumerate(self.documents.read((rank, world_size), rejected)):
                side = "removed" if number in remove else "kept"
                name = f"{side}/{found.split or 'part'}-{rank:05d}.jsonl"
                if name not in streams:
                    path = self.work / "result" / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    streams[name] = stack.enter_context(path.open("w", encoding="utf-8"))
                row = as_row(found) | ({"cluster": cluster[number]} if number in cluster else {})
                streams[name].write(json.dumps(row, ensure_ascii=False) + "\n")
                counts[side] += 1
        files.write_json(self.work / f"counts-{rank}.json", {"rows": counts, "rejected": rejected})

    def _numbers(self, rank: int, kind: str) -> np.ndarray[Any, Any]:
        path = self.work / "clusters" / f"{rank:06d}.{kind}"
        return np.fromfile(path, "<u4") if path.exists() else np.empty(0, "<u4")


@dataclass(frozen=True)
class Report:
    """The end: adds up the counts and gives the result its name."""

    work: Path
    out: Path

    def __call__(self, data: None, rank: int, world_size: int) -> None:
        """As a datatrove step."""
        counts = [files.read_json(path) for path in self.work.glob("counts-*.json")]
        rows, rejected = (sum((Counter(c[key]) for c in counts), Counter[str]()) for key in ("rows", "rejected"))
        if not rows:
            raise KitError(f"There is no document to keep; rows rejected: {dict(rejected)}.")
        report = {"documents": rows.total(), "kept": rows["kept"], "removed": rows["removed"]}
        files.write_json(self.work / "result" / "report.json", report | {"rejected": dict(rejected)})
        (self.work / "result").rename(self.out)


def _work_folder(out: Path) -> Path:
    """A hidden folder beside OUT, on the same file system."""
    if out.exists():
        raise InputError(f"{out} exists already and is left as it is; choose another name.")
    out.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}."))


@contextmanager
def _errors_in(path: Path) -> Iterator[None]:
    """Standard error of this process and its workers goes to a file: datatrove tells every step there."""
    kept = os.dup(2)
    with path.open("w") as stream, redirect_stderr(stream):
        os.dup2(stream.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
