"""Metrics of a run: rows of its W&B logs and samples of its nodes, merged into series that grow while the run does."""

import difflib
import math
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kit.errors import InputError, KitError
from kit.figures.points import Floats
from kit.watch.columns import Columns, parse_lines
from kit.watch.samples import SMALLEST, Reading, SampleFile, chunk_of, parse_wandb_sample
from kit.watch.series import Series
from kit.watch.wandb_log import BLOCK, READ, Kind, Tail, find_logs

NEWEST = READ  # bytes; while more than these are unread, the end of each file is read separately
FIRST = 4 * BLOCK  # bytes of a log that the first look reads, about 8 ms of work, ...
END = 8 * BLOCK  # ... and of its end
SEARCH = 5.0  # seconds between searches for new files while there is much to read: a folder may hold many runs
Key = str | Reading  # name of a logged metric, or a node's reading
_TRUTH_VALUES = {b"true": 1.0, b"false": 0.0}


class Store:
    """What is known of one run. One thread adds to it while others may read it.

    The step of a row is its value of `step_name`; a row without it has the step of the row before. In a run that never
    logs `step_name` the steps are W&B's own; these begin at 0 again when an offline run is resumed, but go on here.
    """

    def __init__(self, step_name: str = "train/global_step", skip_until_step: bool = False) -> None:
        self.series: dict[Key, Series] = {}
        self.step_name = step_name  # define_metric("*", step_metric=...) in the run changes it
        self.config: dict[str, Any] = {}
        self.nodes: dict[str, float] = {}  # host: unix time of its newest sample
        self.first_sample = math.inf  # unix time of the first sample of any node
        self.newest = 0.0  # unix time of the newest row that the training logged
        self.exit_code: int | None = None  # None while the run goes on, or where it was killed
        self.problem = ""  # what cannot be read, as a sentence
        self._skip = skip_until_step  # ignore the rows before the first step is known
        self._step = 0.0
        self._shift: float | None = 0.0  # from W&B's own steps to ours; None before the first row of a segment
        self._replaced: set[Key] = set()  # logged names that the present segment has not logged yet
        self._totals: dict[Reading, tuple[float, float]] = {}  # (unix time, GB) of wandb's last sample

    def line(self, key: Key, points: int) -> tuple[Floats, Floats]:
        """Steps and values of about `points` points, with every extreme."""
        return self.series[key].thin(points)

    def suggestion(self, name: str) -> str:
        """What to say of a name that is not logged: the nearest one that is, and all of them."""
        known = sorted(key for key in list(self.series) if isinstance(key, str))
        nearest = "".join(f" Did you mean {found!r}?" for found in difflib.get_close_matches(name, known, 1))
        return f"No metric {name!r}.{nearest} Logged so far: {', '.join(known) or 'nothing'}."

    def last(self, key: Key) -> float | None:
        """The newest value, or None."""
        values = self.series[key].values[-1:] if key in self.series else None
        return values[0] if values else None

    def begin_segment(self) -> None:
        """From here on rows belong to the next segment: they replace what was logged for the same steps before."""
        self._replaced = {key for key in self.series if isinstance(key, str)}
        self._shift = None

    def add_rows(self, columns: dict[str, list[bytes]]) -> None:
        """Add rows of the same names, each value a JSON text; lists, texts and histograms are ignored."""
        self._skip = self._skip and self.step_name not in columns
        if self._skip or not columns:
            return
        steps = self._steps(columns)
        for name, texts in columns.items():
            try:
                self._add(name, steps, array("d", map(float, texts)))
            except ValueError:
                pairs = [(step, _number(text)) for step, text in zip(steps, texts, strict=True)]
                known = [(step, value) for step, value in pairs if value is not None]
                self._add(name, array("d", [step for step, _ in known]), array("d", [value for _, value in known]))
        self.newest = max(self.newest, self.last("_timestamp") or 0.0)

    def _steps(self, columns: dict[str, list[bytes]]) -> "array[float]":
        count = len(next(iter(columns.values())))
        if self.step_name in columns:
            steps = array("d", [_finite(text, self._step) for text in columns[self.step_name]])
        elif self.step_name in self.series:
            steps = array("d", [self._step]) * count
        else:
            own = [_number(text) or 0.0 for text in columns.get("_step", [b"0"] * count)]
            if self._shift is None:
                self._shift = self._step + 1 if self._replaced and own[0] == 0 else 0.0
            steps = array("d", [step + self._shift for step in own])
        self._step = steps[-1]
        return steps

    def _add(self, key: Key, steps: "array[float]", values: "array[float]") -> None:
        if not values:
            return
        series = self.series.get(key, Series.empty())
        if isinstance(key, Reading):
            self.first_sample = min(self.first_sample, steps[0])
        elif key in self._replaced:
            self._replaced.discard(key)
            series.cut(steps[0])
        series.extend(steps, values)
        self.series[key] = series

    def add_samples(self, columns: Columns) -> None:
        """Add samples of kit.train.sampler."""
        if columns.newest and not self.nodes:
            self._drop_wandb_samples()
        for host, moment in columns.newest.items():
            self.nodes[host] = max(moment, self.nodes.get(host, 0.0))
        for reading, (times, values) in columns.readings.items():
            self._add(reading, times, values)

    def _drop_wandb_samples(self) -> None:
        self.series = {key: series for key, series in self.series.items() if isinstance(key, str)}
        self.first_sample = math.inf

    def add_wandb_sample(self, host: str, values: dict[str, Any]) -> None:
        """Add a sample of wandb's own system metrics, with its `_timestamp`; of totals the rate since the last one."""
        moment, sample = values["_timestamp"], parse_wandb_sample(host, values)
        if not isinstance(moment, int | float) or not math.isfinite(moment):
            return
        for reading, level in sample.levels.items():
            self._add(reading, array("d", [moment]), array("d", [level]))
        for reading, total in sample.totals.items():
            last_moment, last_total = self._totals.get(reading, (math.inf, 0.0))
            self._totals[reading] = (moment, total)
            if moment > last_moment:
                rate = (total - last_total) / (moment - last_moment)
                self._add(reading, array("d", [moment]), array("d", [rate]))


def _number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return _TRUTH_VALUES.get(text)


def _finite(text: bytes, otherwise: float) -> float:
    """The number in a JSON text, or `otherwise` if it is not a finite number."""
    number = _number(text)
    return otherwise if number is None or not math.isfinite(number) else number


@dataclass
class _Log:
    """One W&B log, and what it has said of its segment."""

    tail: Tail
    host: str = ""
    exit_code: int | None = None
    begun: bool = False
    has_rows: bool = False


class _FileReader:
    """Reads the logs and the sample files of a run into a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.logs: dict[Path, _Log] = {}
        self.nodes: dict[Path, SampleFile] = {}
        self._problem = ""

    @property
    def files(self) -> list[Tail | SampleFile]:
        """All that is read."""
        return [*(log.tail for log in self.logs.values()), *self.nodes.values()]

    def poll(self, quick: bool = False) -> bool:
        """Read a part of one log and of each sample file, a small one if `quick`. True if there was anything new."""
        self._problem = ""
        size = FIRST if quick else READ
        new = any(self._read_log(log, size) for log in self.logs.values())  # a segment to its end before the next
        size = SMALLEST if quick else chunk_of(len(self.nodes))
        for node in self.nodes.values():
            new = self._read_samples(node, size) or new
        # Where several nodes write logs, those without rows do not tell how the training ended.
        telling = [log for log in self.logs.values() if log.has_rows or log.tail.left] or list(self.logs.values())
        self.store.exit_code = telling[-1].exit_code if telling else None
        self.store.problem = self._problem  # assigned once, as other threads read it meanwhile
        return new

    def _read_samples(self, node: SampleFile, size: int) -> bool:
        before = node.position
        try:
            columns = parse_lines(node.poll(size))
        except (KitError, OSError) as problem:
            self._problem = str(problem)
            return False
        node.damaged += columns.damaged
        self.store.add_samples(columns)
        return before != node.position

    def _read_log(self, log: _Log, size: int) -> bool:
        before = log.tail.position  # a record may be longer than one poll
        try:
            for kind, values in log.tail.poll(size):
                self._take(log, kind, values)
        except (KitError, OSError) as problem:
            self._problem = str(problem)
        return before != log.tail.position

    def _take(self, log: _Log, kind: Kind, values: dict[str, Any]) -> None:
        store = self.store
        match kind:
            case Kind.HISTORY:
                log.has_rows = True
                store.add_rows(values)
            case Kind.STATS if not self.nodes:
                store.add_wandb_sample(log.host, values)
            case Kind.CONFIG:
                store.config |= values
            case Kind.METRIC if values.get("glob") == "*":
                store.step_name = values.get("step", store.step_name)
            case Kind.RUN:
                store.config |= values["config"]
                if not log.begun:  # a new name or tag writes this record again
                    log.begun, log.host = True, values.get("host", "")
                    store.begin_segment()
            case Kind.EXIT:
                log.exit_code = values["exit_code"]


class Metrics(Store):
    """All that was logged for the run in a folder. Call `poll` until it returns False, then every now and then.

    A resumed run has a log for each segment; a run whose nodes all write has one for each node. In a folder with
    several runs the newest is read; a log, or its folder, names its run. Node samples are read from
    nodes/<host>.jsonl; without these files, from wandb's system metrics.

    The first look reads a little of the beginning and of the end of each file, so that `line`, `last`, `nodes` and
    `exit_code` are up to date at once, while `series` fill from the beginning. Raises InputError where the folder
    or file does not exist.
    """

    def __init__(self, place: str | Path) -> None:
        super().__init__()
        self.place = Path(place)
        if not self.place.exists():
            raise InputError(f"{place} does not exist; expected a run folder, a folder with W&B logs, or a W&B log.")
        self.run_id = ""
        self._all = _FileReader(self)
        self._newest = _FileReader(Store())  # without files, unless there is much to read
        self._searched = -math.inf

    @property
    def damaged(self) -> int:
        """Records and samples that cannot be read."""
        return sum(file.damaged for file in self._all.files)

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        return sum(file.left for file in self._all.files)

    @property
    def end(self) -> Store | None:
        """What was read of the ends of long files, until all of them is read."""
        return self._newest.store if self._newest.files else None

    @property
    def source(self) -> str:
        """The newest log, relative to the folder; empty before there is one."""
        newest = next(reversed(self._all.logs), Path())
        return str(newest.relative_to(self.place)) if self.place in newest.parents else newest.name

    def poll(self) -> bool:
        """Read what is new, a few MiB and some tens of milliseconds at most. True if there was anything."""
        first = not self._all.files
        if time.monotonic() - self._searched > SEARCH:
            self._searched = time.monotonic()
            self._find_files()
        new = self._all.poll(quick=first)
        if first and self.left:
            self._newest = self._reader_of_the_end()
        if self._newest.files:
            new = self._poll_newest() or new
            if not (new and self.left):
                self._newest = _FileReader(Store())  # everything is read
        if not new:
            self._searched = -math.inf
        return new

    def _poll_newest(self) -> bool:
        new, newest = self._newest.poll(), self._newest.store
        self.newest = max(self.newest, newest.newest)
        self.exit_code = self.exit_code if newest.exit_code is None else newest.exit_code
        self.nodes |= newest.nodes
        return new

    def line(self, key: Key, points: int) -> tuple[Floats, Floats]:
        """Steps and values of about `points` points, with every extreme."""
        newest = self._newest.store.series.get(key)
        if newest is None:
            return super().line(key, points)
        x, y = newest.thin(points)
        old_x, old_y = self.series.get(key, newest).thin(points)
        old = old_x < x.min(initial=np.inf)
        return np.concatenate([old_x[old], x]), np.concatenate([old_y[old], y])

    def last(self, key: Key) -> float | None:
        """The newest value, or None."""
        newest = self._newest.store.last(key)
        return super().last(key) if newest is None else newest

    def _find_files(self) -> None:
        """Add new logs of this run and new sample files."""
        logs = find_logs(self.place)
        if logs and not self.run_id:
            self.run_id = logs[-1].stem.removeprefix("run-")
        for path in logs:
            if path.stem == f"run-{self.run_id}" and path not in self._all.logs:
                self._all.logs[path] = _Log(Tail(path))
        for path in self.place.glob("nodes/*.jsonl"):
            if path not in self._all.nodes:
                self._all.nodes[path] = SampleFile(path)

    def _reader_of_the_end(self) -> _FileReader:
        """A reader of the end of the newest log and of each sample file, into a separate store."""
        steps_are_logged = self.step_name in self.series
        reader = _FileReader(Store(self.step_name, skip_until_step=steps_are_logged))
        if steps_are_logged or len(self._all.logs) == 1:  # W&B's own steps of a later segment are not known yet
            for path, log in list(self._all.logs.items())[-1:]:
                reader.logs[path] = _Log(Tail(path, path.stat().st_size - END), log.host)
        for path in self._all.nodes:
            reader.nodes[path] = SampleFile(path, path.stat().st_size - SMALLEST)
        return reader
