"""Time loading: every sample in fresh processes, every byte touched, cold or warm only with proof."""

import os
import statistics
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from kit import figures
from kit.checkpoints.formats.base import Weights, join_messages
from kit.checkpoints.load_sample import RankSample
from kit.checkpoints.loaders import left_out, loaders_for
from kit.checkpoints.processes import fresh_ranks
from kit.checkpoints.storage import PlainReads, mount
from kit.checkpoints.weights import read_headers
from kit.errors import InputError, KitError
from kit.show import Gigabytes, Part, Result, Table, progress_bar


class CacheState(StrEnum):
    """Where the bytes of a load came from.

    Client-cold means that this machine's page cache was empty; a file server or a hypervisor may still have held them.
    """

    COLD = "client-cold"
    WARM = "warm"
    PAST_THE_CACHE = "past the cache"  # read from the device although they were in memory (O_DIRECT)
    MIXED = "mixed"


def cache_state(residency: float, amplification: float) -> CacheState:
    """By both proofs: the part of the pages in memory before, and bytes from the device per wanted byte."""
    if amplification > 0.95 and residency < 0.01:
        return CacheState.COLD
    if amplification > 0.95 and residency > 0.99:
        return CacheState.PAST_THE_CACHE
    if amplification < 0.05 and residency > 0.99:  # pages of code count as well: 0.4 MB of 17 were seen
        return CacheState.WARM
    return CacheState.MIXED


@dataclass(frozen=True)
class LoadTime:
    """One method on one path with one number of ranks: medians over samples, ranges as (least, most).

    call_s ends when the last rank's call returns, touched_s when it has read a byte of every page (on a GPU, when the
    copies are done). Bytes are summed over ranks: wanted_gb of the tensors, asked_gb of read calls, device_gb from the
    device; amplification is the larger of the last two over the wanted bytes. gb_s counts wanted bytes to touched_s.
    of_reference is gb_s over that of plain reads of the same files, at the best queue depth that every round tries.
    """

    path: str
    mount: str
    method: str
    format: str
    ranks: int
    device: str
    label: CacheState
    samples: int
    call_s: float
    touched_s: float
    touched_range_s: tuple[float, float]
    wanted_gb: float
    asked_gb: float
    device_gb: float
    amplification: float
    residency_before: float
    gb_s: float
    gb_s_range: tuple[float, float]
    reference: str
    reference_gb_s: float
    reference_range: tuple[float, float]
    of_reference: float
    load_average: float


@dataclass(frozen=True)
class LoadTimes(Result):
    """Load times by path, method and number of ranks; a note says why the list is empty.

    left_out: the methods that this machine cannot use, with the reason.
    """

    methods: tuple[LoadTime, ...]
    note: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The object that `kit checkpoint time --json` prints."""
        return {
            "methods": [asdict(time) for time in self.methods],
            "separable": self.separable(),
            "left_out": dict(self.left_out),
        }

    def parts(self) -> Iterable[Part]:
        """A figure of medians and ranges, a table, and which methods the ranges separate."""
        if not self.methods:
            yield self.note
            return
        yield self.figure()
        yield Table.of([self._row(name, time) for name, time in self.names().items()])
        yield from self.separable()
        yield from (f"{name}: {reason}." for name, reason in self.left_out.items())

    def _row(self, name: str, time: LoadTime) -> dict[str, Any]:
        low, high = time.gb_s_range
        return {
            "method": name,
            "GB/s": time.gb_s,
            "range": f"{low:.3g} to {high:.3g}",
            "page cache": time.label.value,
            "call, s": time.call_s,
            "every page touched, s": time.touched_s,
            "size": Gigabytes(time.wanted_gb),
            "bytes read per wanted byte": time.amplification,
            "of plain reads": f"{time.of_reference:.0%}",
            "storage": time.mount,
        }

    def names(self) -> dict[str, LoadTime]:
        """The times by method, with path and ranks in the name where these differ."""
        several_paths = len({time.path for time in self.methods}) > 1
        several_ranks = len({time.ranks for time in self.methods}) > 1
        found = {}
        for time in self.methods:
            path = f" on {time.path}" if several_paths else ""
            ranks = f", {time.ranks} rank{'s' if time.ranks > 1 else ''}" if several_ranks else ""
            found[f"{time.method}{path}{ranks}"] = time
        return found

    def figure(self) -> figures.Figure:
        """Medians with their ranges; of one path also, dashed, the rate of plain reads of the same files."""
        states = ", ".join(sorted({time.label for time in self.methods}))
        rows = {name: (time.gb_s_range[0], time.gb_s, time.gb_s_range[1]) for name, time in self.names().items()}
        first = self.methods[0]
        limit = (f"plain reads ({first.reference})", first.reference_gb_s)
        one_path = len({time.path for time in self.methods}) == 1
        return figures.ranges(f"Loading, {states}", "GB/s", rows, limit if one_path else None)

    def separable(self) -> list[str]:
        """A sentence for each cache state: how much faster the fastest is, and whose ranges overlap with its."""
        named = sorted(self.names().items(), key=lambda item: (item[1].label, -item[1].gb_s))
        sentences = []
        for state, group in groupby(named, key=lambda item: item[1].label):
            (name, best), *others = group
            if others:
                sentences.append(f"{state}: {_comparison(name, best, others)}.")
        return sentences


def _comparison(name: str, best: LoadTime, others: list[tuple[str, LoadTime]]) -> str:
    tied = [other for other, time in others if time.gb_s_range[1] >= best.gb_s_range[0] or time.samples == 1]
    slower = [(other, time) for other, time in others if other not in tied]
    clauses = []
    if tied:
        several = " and ".join([name, *tied])
        clauses.append(f"{several} are not separable: their ranges overlap over {best.samples} samples")
    if slower:
        other, time = slower[0]
        clauses.append(f"{name} is {best.gb_s / time.gb_s:.2f} times as fast as {other}")
    return "; ".join(clauses)


class NotColdError(KitError):
    """Pages were in memory although they were evicted before the load."""


class _Case(NamedTuple):
    path: Path
    method: str
    ranks: int


def time_load(
    path: Path | Sequence[Path],
    methods: Sequence[str] | None = None,
    cold: bool = False,
    repeats: int = 3,
    ranks: Sequence[int] = (1,),
    device: str = "cpu",
    progress: bool = False,
) -> LoadTimes:
    """Load one or more paths by the named methods, or by all that are installed; methods and ranks take turns.

    Raises NotColdError where cold was asked and cannot be proven, KitError where a load fails, InputError for an
    unknown method, or for fewer GPUs than ranks.
    """
    if device == "cuda":
        _check_gpus(max(ranks))
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    weights = {one: _readable(one) for one in paths}
    cases = [
        _Case(one, loader.name, world)
        for one in paths
        for loader in loaders_for(weights[one].format, methods, device)
        for world in ranks
    ]
    samples: dict[_Case, list[list[RankSample]]] = {case: [] for case in cases}
    references = {one: PlainReads(weights[one].files, cold) for one in paths}
    with (
        fresh_ranks("kit.checkpoints.load_sample") as run_sample,
        progress_bar(repeats * (len(paths) + len(cases)), "loads", shown=progress) as bar,
    ):
        for _ in range(repeats):
            for reference in references.values():
                reference.measure()
                bar.update()
            for case in cases:
                words = (case.method, str(case.path.absolute()), "cold" if cold else "warm", device)
                rows = [RankSample(**row) for row in run_sample(case.ranks, *words)]
                if cold:
                    _check_cold(case.path, rows, weights[case.path].bytes)
                samples[case].append(rows)
                bar.update()
    return LoadTimes(
        tuple(
            summarize(weights[case.path], case.path, case.method, device, taken, references[case.path])
            for case, taken in samples.items()
        ),
        left_out={} if methods else ChainMap(*(left_out(weights[one].format, device) for one in paths)),
    )


def _check_gpus(ranks: int) -> None:
    import torch

    if ranks > (found := torch.cuda.device_count()):
        raise InputError(f"Loading to cuda takes a GPU for each rank: {ranks} asked for, {found} here; or load to cpu.")


def _readable(path: Path) -> Weights:
    weights = read_headers(path)
    if weights.problems or not weights.tensors:
        reason = join_messages(weights.problems) or "it holds no tensors."
        raise KitError(f"{path} cannot be timed: {reason}")
    return weights


def _check_cold(path: Path, rows: Sequence[RankSample], payload: int) -> None:
    if _state_of(rows, payload) is CacheState.COLD:
        return
    resident = max(row.residency for row in rows)
    raise NotColdError(
        f"No cold figure for {path}: {resident:.0%} of its pages were in memory after eviction, or the device gave too "
        "few bytes. Another process may have it mapped, it may be in memory (tmpfs), or you may not own it; time a "
        "copy on the storage in question."
    )


def _state_of(rows: Sequence[RankSample], payload: int) -> CacheState:
    """Of the ranks' loads together: device bytes count over those that any rank wanted."""
    distinct = min(sum(row.wanted for row in rows), payload)
    return cache_state(max(row.residency for row in rows), sum(row.device for row in rows) / distinct)


def summarize(
    weights: Weights,
    path: Path,
    method: str,
    device: str,
    samples: Sequence[Sequence[RankSample]],
    reference: PlainReads,
) -> LoadTime:
    """Statistics over samples, each of which has a row for every rank."""

    def median(value: Callable[[Sequence[RankSample]], float]) -> float:
        return statistics.median(value(rows) for rows in samples)

    touched = [max(row.touched_s for row in rows) for rows in samples]
    wanted = median(lambda rows: sum(row.wanted for row in rows))
    asked = median(lambda rows: sum(row.asked for row in rows))
    from_device = median(lambda rows: sum(row.device for row in rows))
    states = {_state_of(rows, weights.bytes) for rows in samples}
    rate, plain_rate = wanted / 1e9 / statistics.median(touched), statistics.median(reference.best_rates)
    return LoadTime(
        path=str(path),
        mount=mount(path),
        method=method,
        format=weights.format,
        ranks=len(samples[0]),
        device=device,
        label=states.pop() if len(states) == 1 else CacheState.MIXED,
        samples=len(samples),
        call_s=median(lambda rows: max(row.call_s for row in rows)),
        touched_s=statistics.median(touched),
        touched_range_s=(min(touched), max(touched)),
        wanted_gb=wanted / 1e9,
        asked_gb=asked / 1e9,
        device_gb=from_device / 1e9,
        amplification=max(asked, from_device) / wanted,
        residency_before=median(lambda rows: max(row.residency for row in rows)),
        gb_s=rate,
        gb_s_range=(wanted / 1e9 / max(touched), wanted / 1e9 / min(touched)),
        reference=reference.description,
        reference_gb_s=plain_rate,
        reference_range=(min(reference.best_rates), max(reference.best_rates)),
        of_reference=rate / plain_rate,
        load_average=os.getloadavg()[0],
    )
