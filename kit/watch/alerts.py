"""Alerts: what a person who watches a run should look at now, and a command of their choice that is told."""

import math
import shutil
import subprocess
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from kit.watch.metrics import Key
from kit.watch.status import Standing, duration

LOSSES = ("train/loss", "eval/loss")
RECENT, BEFORE = 10, 50  # logged losses: those in which a spike is looked for, and those that say what is usual
SPIKE, RISE = 10.0, 1.2  # a spike is so many median deviations above the median, and so many times the median
WINDOW = 120.0  # seconds over which a GPU is judged: an evaluation or a save of seconds is nobody's fault
IDLE = 5.0  # % of utilisation
ODD = 0.25  # a GPU so far from the median of the others is slower than they are, or they wait for it
QUIET = 30.0  # seconds of silence of a node, 30 samples
NO_ROW, USUAL = 300.0, 10.0  # seconds without a row, and how many times the usual interval
FREE, ROOM = 0.02, 5e9  # share and bytes of a disk below which it is nearly full; quotas are not seen
TIMEOUT = 60.0  # seconds for the command of the user's choice


class Alert(NamedTuple):
    """`key` stays the same while the matter lasts; `text` is a sentence that may change."""

    key: str
    text: str


def alerts(standing: Standing) -> list[Alert]:
    """What is wrong with the run now. Of a run that is over only its losses are judged."""
    checks = [_loss] if standing.over else [_loss, _rows, _nodes, _gpus, _disk]
    return [Alert(f"{standing.title} {key}", text) for check in checks for key, text in check(standing)]


def tell(command: Sequence[str], text: str, trouble: Callable[[str], None]) -> None:
    """Run the command with the text as its last argument, without a shell. Waits for it; what went wrong is told."""
    try:
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        done = subprocess.run([*command, text], stdin=none, stdout=none, stderr=pipe, text=True, timeout=TIMEOUT)
        words = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        problem = f"ended with exit code {done.returncode}: {words[0]}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"did not run: {error}"
    if problem:
        trouble(f"the alert command {command[0]} {problem}")


def _loss(standing: Standing) -> Iterator[tuple[str, str]]:
    for name in LOSSES:
        series = standing.metrics.series.get(name)
        if series and series.not_finite:
            yield (
                f"{name} finite",
                f"{name} is not finite since step {series.not_finite[0]:,.0f} ({len(series.not_finite):,} times)",
            )
        if not series or len(series.values) < BEFORE // 2 + RECENT:
            continue
        usual = [v for v in series.values[-BEFORE - RECENT : -RECENT] if math.isfinite(v)]
        steps = dict(zip(series.values[-RECENT:], series.steps[-RECENT:], strict=False))
        highest = max((v for v in steps if math.isfinite(v)), default=-math.inf)
        middle = median(usual) if usual else math.inf
        if highest > middle * RISE and highest > middle + SPIKE * median(abs(v - middle) for v in usual):
            told = f"{name} rose to {highest:.3g} at step {steps[highest]:,.0f}"
            yield f"{name} spike", f"{told}, from about {middle:.3g}"


def _rows(standing: Standing) -> Iterator[tuple[str, str]]:
    times = standing.metrics.series.get("_timestamp")
    if times and standing.state == "RUNNING":
        values = times.values[-BEFORE:]
        usual = (values[-1] - values[0]) / max(1, len(values) - 1)
        age = time.time() - standing.metrics.newest
        if age > max(NO_ROW, USUAL * usual):
            yield "rows", f"no new row for {duration(age)}; before, one came every {duration(usual)}"


def _nodes(standing: Standing) -> Iterator[tuple[str, str]]:
    for node, age in standing.silent().items():
        if age > QUIET:
            yield f"{node} silent", f"{node} is silent for {duration(age)}"


def _gpus(standing: Standing) -> Iterator[tuple[str, str]]:
    """Idle ones, and ones that differ: ranks wait for the slowest, so at equal work all GPUs look alike."""
    readings: dict[str, dict[tuple[str, int | str], float]] = {"util": {}, "power_w": {}}
    idle: dict[str, list[str]] = defaultdict(list)
    for key in list(standing.metrics.series):
        if isinstance(key, tuple) and key[1] != "cpu" and key[2] in readings:
            values = _recent(standing, key)
            if values:
                readings[key[2]][key[:2]] = sum(values) / len(values)
                if key[2] == "util" and max(values) < IDLE:
                    idle[key[0]].append(str(key[1]))
    for node, gpus in idle.items():
        yield f"{node} idle", f"{node}: GPU {', '.join(gpus)} idle for {duration(WINDOW)} or longer"
    for reading, unit in (("util", "%"), ("power_w", "W")):
        means = readings[reading]
        for (node, gpu), mean in means.items():
            others = median([other for place, other in means.items() if place != (node, gpu)] or [mean])
            if str(gpu) not in idle[node] and others > IDLE and abs(mean - others) > ODD * others:
                told = f"{node} GPU {gpu} is at {mean:.0f} {unit}, the others at {others:.0f} {unit}"
                yield f"{node} GPU {gpu} {reading}", f"{told}: one rank is slower"


def _recent(standing: Standing, key: Key) -> list[float]:
    """The readings of the last minutes, if the GPU is known for so long and still told of."""
    steps, values = standing.metrics.series[key][:2]
    start = time.time() - WINDOW
    known = steps[0] <= start and steps[-1] >= time.time() - QUIET
    return list(values[bisect_left(steps, start) :]) if known else []


def _disk(standing: Standing) -> Iterator[tuple[str, str]]:
    if standing.folder:
        total, _, free = shutil.disk_usage(standing.folder)
        if free < max(FREE * total, ROOM):
            yield "disk", f"the disk of {standing.folder} has {free / 1e9:.1f} GB left of {total / 1e9:,.0f} GB"
