"""Metrics of a run: rows of its W&B logs and samples of its nodes, merged into series that grow."""

import json
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from kit.wandb_log import NotAWandbFile, Record, Tail, find_logs

GIB = 1 << 30
Key = str | tuple[str, int | str, str]  # a logged name, or (host, GPU index or "cpu", "util", "mem_gib", ...)


class Series(NamedTuple):
    """One metric. Steps of a logged one are optimizer steps, those of a node's are unix times in seconds."""

    steps: "array[float]"
    values: "array[float]"


class Metrics:
    """Everything logged for the run in a folder. Call `poll` until it returns False, then now and then.

    Steps of logged series are `train/global_step`; a row without it counts for the last one seen, and if there is none,
    for W&B's own `_step`. A resumed run has a log for each segment. In a folder with several runs the newest is taken.
    Node samples come from nodes/<host>.jsonl, or else from the statistics in W&B's log.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.series: dict[Key, Series] = {}
        self.nodes: dict[str, float] = {}  # host: unix time of its newest sample
        self.first_sample = float("inf")  # unix time of the first sample of any node
        self.expected = _expected_nodes(self.folder)  # number of nodes, 0 if nobody said
        self.newest = 0.0  # unix time of the newest row that the training logged
        self.exit_code: int | None = None  # of the newest segment; None while it runs, or was killed
        self.problem = ""  # what cannot be read, in a sentence
        self.run_id = ""
        self._logs: dict[Path, Tail] = {}
        self._samples: dict[Path, _Lines] = {}
        self._host = ""
        self._step = 0.0
        self._fresh: set[str] = set()  # logged names that this segment has not brought yet

    @property
    def wandb_records(self) -> int:
        """Records read from the W&B logs, of any kind."""
        return sum(log.records for log in self._logs.values())

    @property
    def damaged(self) -> int:
        """Records and sample lines that could not be read."""
        return sum(log.damaged for log in self._logs.values()) + sum(one.damaged for one in self._samples.values())

    @property
    def source(self) -> str:
        """The newest log, relative to the folder; empty before there is one."""
        return str(list(self._logs)[-1].relative_to(self.folder)) if self._logs else ""

    def poll(self) -> bool:
        """Read what is there by now, a few MiB at most. True if there was anything new."""
        self._find()
        new = any(self._read(log) for log in self._logs.values())  # a segment is read to its end before the next
        for lines in self._samples.values():
            for sample in lines.poll():
                self._sample(sample)
                new = True
        return new

    def _read(self, log: Tail) -> bool:
        before = (log.records, log.damaged)
        try:
            for record in log.poll():
                self._take(record)
        except NotAWandbFile as problem:
            self.problem = str(problem)
        return before != (log.records, log.damaged)

    def _find(self) -> None:
        """Add logs of this run and files of nodes that are new."""
        logs = find_logs(self.folder)
        if logs and not self.run_id:
            self.run_id = logs[-1].stem.removeprefix("run-")
        for path in logs:
            if path.stem == f"run-{self.run_id}" and path not in self._logs:
                self._logs[path] = Tail(path)
        for path in self.folder.glob("nodes/*.jsonl"):
            if path not in self._samples:
                self._samples[path] = _Lines(path)

    def _take(self, record: Record) -> None:
        if record.kind == "history":
            self._row(record.values)
        elif record.kind == "stats" and not self._samples:
            self._statistics(record.values)
        elif record.kind == "run":
            self._host = record.values.get("host", "")
            self._fresh = {key for key in self.series if isinstance(key, str)}
            self.exit_code = None
        elif record.kind == "exit":
            self.exit_code = record.values["exit_code"]

    def _row(self, row: dict[str, Any]) -> None:
        """Add a row; lists, texts and histograms are not plotted."""
        if "train/global_step" in row:
            self._step = row["train/global_step"]
        step = self._step if "train/global_step" in self.series or "train/global_step" in row else row.get("_step", 0)
        self.newest = max(self.newest, row.get("_timestamp", 0.0))
        for key, value in row.items():
            if isinstance(value, int | float):
                if key in self._fresh:
                    self._cut(key, step)
                self._add(key, step, value)

    def _cut(self, key: str, step: float) -> None:
        """A resumed run starts again from a checkpoint: what the segment before it logged from there on is replaced."""
        self._fresh.discard(key)
        steps, values = self.series[key]
        while steps and steps[-1] >= step:
            steps.pop()
            values.pop()

    def _add(self, key: Key, step: float, value: float) -> None:
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = Series(array("d"), array("d"))
            if isinstance(key, tuple):
                self.first_sample = min(self.first_sample, step)
        series.steps.append(step)
        series.values.append(value)

    def _sample(self, sample: dict[str, Any]) -> None:
        """Add a line of kit.sampler; what a GPU does not tell has no point."""
        host, time = sample["host"], sample["t"]
        if not self.nodes:
            self.series = {key: series for key, series in self.series.items() if isinstance(key, str)}
        self.nodes[host] = time
        readings = {(host, "cpu", "util"): sample["cpu"], (host, "cpu", "mem_gib"): sample["ram_gib"]}
        for part in ("net_gb_s", "disk_gb_s"):
            readings |= {(host, "cpu", f"{part}_{way}"): rate for way, rate in (sample[part] or {}).items()}
        for gpu in sample["gpus"]:
            readings |= {(host, gpu["index"], name): gpu[name] for name in gpu if name not in ("index", "uuid")}
        for key, value in readings.items():
            if value is not None:
                self._add(key, time, value)

    def _statistics(self, statistics: dict[str, Any]) -> None:
        """Add the system metrics that wandb samples itself, on the one node that it runs on."""
        time = statistics["_timestamp"]
        for name, value in statistics.items():
            part = name.split(".")
            if name == "cpu":
                self._add((self._host, "cpu", "util"), time, value)
            elif name == "proc.memory.rssMB":
                self._add((self._host, "cpu", "mem_gib"), time, value / 1024)
            elif part[0] == "gpu" and part[1].isdigit() and part[2:] == ["gpu"]:
                self._add((self._host, int(part[1]), "util"), time, value)
            elif part[0] == "gpu" and part[1].isdigit() and part[2:] == ["memoryAllocatedBytes"]:
                self._add((self._host, int(part[1]), "mem_gib"), time, value / GIB)


class _Lines:
    """Reads the JSON lines appended to a file since the last poll."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._offset = 0

    def poll(self) -> list[dict[str, Any]]:
        """Whole lines; one that is still being written is waited for, one that is no JSON is counted as damaged."""
        with self.path.open("rb") as stream:
            stream.seek(self._offset)
            lines = stream.read().splitlines(keepends=True)
        found = []
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            try:
                found.append(json.loads(line))
            except ValueError:
                self.damaged += 1
        return found


def _expected_nodes(folder: Path) -> int:
    if not (folder / "run.json").is_file():
        return 0
    from kit.run import Run

    return Run(folder).recipe.parallel.nodes
