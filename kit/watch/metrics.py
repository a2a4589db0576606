"""Metrics of a run: rows of its W&B logs and samples of its nodes, merged into series that grow."""

import difflib
import math
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit.errors import InputError, KitError
from kit.watch.samples import CHUNK, Reading, SampleFile, parse_sample, parse_wandb_sample
from kit.watch.series import Floats, Series
from kit.watch.wandb_log import READ, Tail, find_logs

WINDOW = READ  # the newest bytes of a long log, which are known before the rest is read
LOOK = 5.0  # seconds between looks for new files while there is much to read: a folder may hold many runs
Key = str | Reading  # a logged name, or a node's reading
_WORDS = {b"true": 1.0, b"false": 0.0}


class Store:
    """What is known of one run. Others may read it while one thread adds to it.

    Steps of logged series are the values of `step_name`; a row without it counts for the last one seen. In a run that
    never logs it they are W&B's own steps; those begin at 0 again when an offline run is resumed, but go on here.
    """

    def __init__(self, step_name: str = "train/global_step", skip: bool = False) -> None:
        self.series: dict[Key, Series] = {}
        self.step_name = step_name  # until the run makes another one the step of all its metrics
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.nodes: dict[str, float] = {}  # host: unix time of its newest sample
        self.first_sample = math.inf  # unix time of the first sample of any node
        self.newest = 0.0  # unix time of the newest row that the training logged
        self.exit_code: int | None = None  # None while it runs, or was killed
        self.problem = ""  # what cannot be read, in a sentence
        self._skip = skip  # rows that come before the first step is known
        self._step = 0.0
        self._shift: float | None = 0.0  # from W&B's own steps to ours; None before the first row of a segment
        self._fresh: set[Key] = set()  # logged names that this segment has not brought yet
        self._totals: dict[Reading, tuple[float, float]] = {}  # unix time and GB

    def line(self, key: Key, points: int) -> tuple[Floats, Floats]:
        """Steps and values of about `points` points, every extreme among them. An unknown key is an InputError."""
        if key in self.series:
            return self.series[key].thin(points)
        known = sorted(name for name in list(self.series) if isinstance(name, str))
        near = "".join(f" Did you mean {name!r}?" for name in difflib.get_close_matches(str(key), known, 1))
        raise InputError(f"No metric {key!r}.{near} Logged so far: {', '.join(known) or 'nothing'}.")

    def last(self, key: Key) -> float | None:
        """The newest value, None where there is none."""
        values = self.series[key].values[-1:] if key in self.series else None
        return values[0] if values else None

    def begin(self) -> None:
        """A segment begins: what it brings replaces what was logged for the same steps before."""
        self._fresh = {key for key in self.series if isinstance(key, str)}
        self._shift = None

    def rows(self, columns: dict[str, list[bytes]]) -> None:
        """Add rows of the same names, each value a JSON text; lists, texts and histograms are not plotted."""
        self._skip = self._skip and self.step_name not in columns
        if self._skip or not columns:
            return
        steps = self._steps(columns)
        for name, texts in columns.items():
            try:
                self._add(name, steps, array("d", map(float, texts)))
            except ValueError:
                known = [(step, n) for step, text in zip(steps, texts, strict=True) if (n := _number(text)) is not None]
                self._add(name, array("d", [step for step, _ in known]), array("d", [n for _, n in known]))
        self.newest = max(self.newest, self.last("_timestamp") or 0.0)

    def _steps(self, columns: dict[str, list[bytes]]) -> "array[float]":
        count = len(next(iter(columns.values())))
        if self.step_name in columns:
            numbers = map(_number, columns[self.step_name])
            steps = array("d", [self._step if n is None else n for n in numbers])
        elif self.step_name in self.series:
            steps = array("d", [self._step]) * count
        else:
            own = [_number(text) or 0.0 for text in columns.get("_step", [b"0"] * count)]
            if self._shift is None:
                self._shift = self._step + 1 if self._fresh and own[0] == 0 else 0.0
            steps = array("d", [step + self._shift for step in own])
        self._step = steps[-1]
        return steps

    def _add(self, key: Key, steps: "array[float]", values: "array[float]") -> None:
        if not values:
            return
        series = self.series.get(key, Series.empty())
        if isinstance(key, tuple):
            self.first_sample = min(self.first_sample, steps[0])
        elif key in self._fresh:
            self._fresh.discard(key)
            series.cut(steps[0])
        series.extend(steps, values)
        self.series[key] = series

    def samples(self, lines: Iterable[Any]) -> int:
        """Add lines of kit.train.sampler; how many of them were none. What a GPU does not tell has no point."""
        found: dict[Reading, tuple[list[float], list[float]]] = {}
        damaged = 0
        for line in lines:
            try:
                host, moment, told = line["host"], float(line["t"]), parse_sample(line)
            except (LookupError, TypeError, ValueError, AttributeError):
                damaged += 1
                continue
            if not self.nodes:  # what wandb sampled itself stood in until now
                self.series = {key: series for key, series in self.series.items() if isinstance(key, str)}
                self.first_sample = math.inf
            self.nodes[host] = max(moment, self.nodes.get(host, 0.0))
            for key, value in told.items():
                steps, values = found.setdefault(key, ([], []))
                steps.append(moment)
                values.append(value)
        for key, (steps, values) in found.items():
            self._add(key, array("d", steps), array("d", values))
        return damaged

    def statistics(self, host: str, told: dict[str, Any]) -> None:
        """Add what wandb samples itself; of totals their rate since the sample before."""
        moment, (levels, totals) = told["_timestamp"], parse_wandb_sample(host, told)
        for key, level in levels.items():
            self._add(key, array("d", [moment]), array("d", [level]))
        for key, total in totals.items():
            before, self._totals[key] = self._totals.get(key), (moment, total)
            if before and moment > before[0]:
                self._add(key, array("d", [moment]), array("d", [(total - before[1]) / (moment - before[0])]))


def _number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return _WORDS.get(text)


@dataclass
class _Log:
    """One W&B log, and what it said of itself."""

    tail: Tail
    host: str = ""
    exit_code: int | None = None
    begun: bool = False
    rows: bool = False


class _Reader:
    """Reads the files of a run into a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.logs: dict[Path, _Log] = {}
        self.nodes: dict[Path, SampleFile] = {}
        self._problem = ""

    @property
    def tails(self) -> list[Tail | SampleFile]:
        return [*(log.tail for log in self.logs.values()), *self.nodes.values()]

    def poll(self) -> bool:
        self._problem = ""
        new = any(self._read(log) for log in self.logs.values())  # a segment is read to its end before the next
        for lines in self.nodes.values():
            try:
                found = lines.poll()
            except OSError as problem:
                self._problem = str(problem)
                continue
            lines.damaged += self.store.samples(found)
            new = new or bool(found)
        logs = [log for log in self.logs.values() if log.rows or log.tail.left] or list(self.logs.values())
        self.store.exit_code = logs[-1].exit_code if logs else None
        self.store.problem = self._problem  # only now: others read it meanwhile
        return new

    def _read(self, log: _Log) -> bool:
        before = (log.tail.records, log.tail.damaged)
        try:
            for kind, values in log.tail.poll():
                self._take(log, kind, values)
        except (KitError, OSError) as problem:
            self._problem = str(problem)
        return before != (log.tail.records, log.tail.damaged)

    def _take(self, log: _Log, kind: str, values: dict[str, Any]) -> None:
        store = self.store
        if kind == "history":
            log.rows = True
            store.rows(values)
        elif kind == "stats" and not self.nodes:
            store.statistics(log.host, values)
        elif kind in ("summary", "config"):
            getattr(store, kind).update(values)
        elif kind == "metric" and values.get("glob") == "*":
            store.step_name = values.get("step", store.step_name)
        elif kind == "run":
            store.config |= values["config"]
            if not log.begun:  # a new name or tag brings the record again
                log.begun, log.host = True, values.get("host", "")
                store.begin()
        elif kind == "exit":
            log.exit_code = values["exit_code"]


class Metrics(Store):
    """Everything logged for the run in a folder. Call `poll` until it returns False, then now and then.

    A resumed run has a log for each segment, and one whose nodes all write has one for each. In a folder with several
    runs the newest is taken; a log, or the folder of one, stands for its run. Of what is long the newest part is read
    first: `line`, `last` and the facts know it at once, while `series` fill from the beginning. Node samples come from
    nodes/<host>.jsonl, or else from the statistics in W&B's log. Raises InputError where there is nothing.
    """

    def __init__(self, place: str | Path) -> None:
        super().__init__()
        self.place = Path(place)
        if not self.place.exists():
            raise InputError(f"{place} is neither a folder nor a W&B log: there is nothing.")
        self.expected = _expected_nodes(self.place)  # number of nodes, 0 if nobody said
        self.run_id = ""
        self._all, self._ahead = _Reader(self), _Reader(Store())
        self._looked = -math.inf

    @property
    def damaged(self) -> int:
        """Records and sample lines that could not be read."""
        return sum(tail.damaged for tail in self._all.tails)

    @property
    def left(self) -> int:
        """Bytes to read until everything is known."""
        return sum(tail.left for tail in self._all.tails)

    @property
    def source(self) -> str:
        """The newest log, relative to the folder; empty before there is one."""
        newest = next(reversed(self._all.logs), Path())
        return str(newest.relative_to(self.place)) if self.place in newest.parents else newest.name

    def poll(self) -> bool:
        """Read what is there by now, a few MiB and some tens of milliseconds at most. True if anything was new."""
        first = not self._all.tails
        if time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            self._find()
        new = self._all.poll()
        if first and self.left > WINDOW:
            self._look_ahead()
        if self._ahead.tails:
            ahead = self._ahead.store
            new = self._ahead.poll() or new
            self.newest = max(self.newest, ahead.newest)
            self.exit_code = self.exit_code if ahead.exit_code is None else ahead.exit_code
            self.nodes |= ahead.nodes
            self.summary |= ahead.summary
            if not (new and self.left):
                self._ahead = _Reader(Store())
        if not new:
            self._looked = -math.inf
        return new

    def line(self, key: Key, points: int) -> tuple[Floats, Floats]:
        """Steps and values of about `points` points, every extreme among them. Raises InputError as a Store does."""
        ahead = self._ahead.store.series.get(key)
        if ahead is None:
            return super().line(key, points)
        x, y = ahead.thin(points)
        before, known = self.series.get(key, ahead).thin(points)
        behind = before < x.min(initial=np.inf)
        return np.concatenate([before[behind], x]), np.concatenate([known[behind], y])

    def last(self, key: Key) -> float | None:
        """The newest value, None where there is none."""
        ahead = self._ahead.store.last(key)
        return super().last(key) if ahead is None else ahead

    def _find(self) -> None:
        """Add logs of this run and files of nodes that are new."""
        logs = find_logs(self.place)
        if logs and not self.run_id:
            self.run_id = logs[-1].stem.removeprefix("run-")
        for path in logs:
            if path.stem == f"run-{self.run_id}" and path not in self._all.logs:
                self._all.logs[path] = _Log(Tail(path))
        for path in self.place.glob("nodes/*.jsonl"):
            if path not in self._all.nodes:
                self._all.nodes[path] = SampleFile(path)

    def _look_ahead(self) -> None:
        """Read the newest part of the newest log and of the samples, too, until everything else is read."""
        stepped = self.step_name in self.series
        self._ahead = _Reader(Store(self.step_name, skip=stepped))
        for path, log in list(self._all.logs.items())[-1:] if stepped or len(self._all.logs) == 1 else ():
            self._ahead.logs[path] = _Log(Tail(path, path.stat().st_size - WINDOW), log.host)
        for path in self._all.nodes:
            self._ahead.nodes[path] = SampleFile(path, path.stat().st_size - CHUNK)


def _expected_nodes(folder: Path) -> int:
    if not (folder / "run.json").is_file():
        return 0
    from kit.slurm.run import Run

    run = Run(folder)
    return run.recipe.parallel.nodes if run.trains else 0
