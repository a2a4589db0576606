"""Alerts: what is wrong with a run now (loss, idle GPUs, silent nodes, full disk), and the user's command for them."""

import math
import subprocess
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import NamedTuple, TypeGuard

from kit.watch.metrics import Key
from kit.watch.samples import CPU, Reading
from kit.watch.status import NO_ANSWER, BoardState, RunStatus, coarse_duration

LOSSES = ("train/loss", "eval/loss")
RECENT = 10  # newest losses, in which a spike is looked for
BASELINE = 50  # losses before these, which a spike is compared with
SPIKE_DEVIATIONS, SPIKE_FACTOR = 10.0, 1.2  # a spike is above the median by so many median deviations and this factor
GPU_WINDOW = 120.0  # seconds over which a GPU is judged: an evaluation or a save takes seconds
IDLE = 5.0  # % of utilisation
DIFFERENT = 0.25  # a GPU that differs so much from the median of the others is slower than they are, or waits
SILENT_ALERT = 30.0  # seconds without a sample of a node
NO_ROW, NO_ROW_FACTOR = 300.0, 10.0  # seconds without a row, and how many times the usual interval
FREE_SHARE, FREE_BYTES = 0.02, 5e9  # of a disk, below which it is nearly full; quotas are not seen
COMMAND_TIMEOUT = 60.0  # seconds


class Alert(NamedTuple):
    """`key` stays the same while the condition lasts; `text` is a sentence that may change."""

    key: str
    text: str


def find_alerts(status: RunStatus) -> list[Alert]:
    """What is wrong with the run now. Of a run that is over only the losses are judged."""
    checks = [_losses] if status.over else [_losses, _rows, _nodes, _gpus, _disk]
    return [Alert(f"{status.title} {alert.key}", alert.text) for check in checks for alert in check(status)]


def run_command(command: Sequence[str], text: str) -> str:
    """Run the command with the text as its last argument, without a shell; returns what went wrong, or ""."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        done = subprocess.run(
            [*command, text], stdin=null, stdout=null, stderr=pipe, text=True, timeout=COMMAND_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the alert command {command[0]} failed: {error}"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
    return f"the alert command {command[0]} ended with exit code {done.returncode}: {last}"


def _losses(status: RunStatus) -> Iterator[Alert]:
    for name in LOSSES:
        series = status.metrics.series.get(name)
        if series is None:
            continue
        if series.not_finite:
            first, count = series.not_finite[0], len(series.not_finite)
            yield Alert(f"{name} finite", f"{name} is not finite since step {first:,.0f} ({count:,} times)")
        if len(series.values) < BASELINE // 2 + RECENT:
            continue
        baseline = [value for value in series.values[-BASELINE - RECENT : -RECENT] if math.isfinite(value)]
        step_of = dict(zip(series.values[-RECENT:], series.steps[-RECENT:], strict=False))
        highest = max((value for value in step_of if math.isfinite(value)), default=-math.inf)
        usual = median(baseline) if baseline else math.inf
        if highest > usual * SPIKE_FACTOR and highest > usual + SPIKE_DEVIATIONS * _deviation(baseline, usual):
            rise = f"{name} rose to {highest:.3g} at step {step_of[highest]:,.0f}"
            yield Alert(f"{name} spike", f"{rise}, from about {usual:.3g}")


def _deviation(values: Sequence[float], centre: float) -> float:
    """The median absolute deviation."""
    return median(abs(value - centre) for value in values)


def _rows(status: RunStatus) -> Iterator[Alert]:
    times = status.metrics.series.get("_timestamp")
    if not times or status.state != BoardState.RUNNING:
        return
    values = times.values[-BASELINE:]
    usual = (values[-1] - values[0]) / max(1, len(values) - 1)
    age = time.time() - status.metrics.newest
    if age > max(NO_ROW, NO_ROW_FACTOR * usual):
        before = f"before, one came every {coarse_duration(usual)}"
        yield Alert("rows", f"no new row for {coarse_duration(age)}; {before}")


def _nodes(status: RunStatus) -> Iterator[Alert]:
    for node, age in status.silent_nodes().items():
        if age > SILENT_ALERT:
            yield Alert(f"{node} silent", f"{node} has been silent for {coarse_duration(age)}")


def _gpus(status: RunStatus) -> Iterator[Alert]:
    """Idle GPUs, and GPUs that differ: ranks wait for the slowest, so with equal work all GPUs look alike."""
    recent = {key: _recent(status, key) for key in list(status.metrics.series) if _is_gpu(key)}
    recent = {key: values for key, values in recent.items() if values}
    idle: dict[str, list[str]] = defaultdict(list)
    for key, values in recent.items():
        if key.name == "util" and max(values) < IDLE:
            idle[key.host].append(str(key.device))
    for host, gpus in idle.items():
        text = f"{host}: GPU {', '.join(gpus)} idle for {coarse_duration(GPU_WINDOW)} or longer"
        yield Alert(f"{host} idle", text)
    for name, unit in (("util", "%"), ("power_w", "W")):
        means = {key: mean(values) for key, values in recent.items() if key.name == name}
        for key, level in means.items():
            others = median([other for place, other in means.items() if place != key] or [level])
            different = others > IDLE and abs(level - others) > DIFFERENT * others
            if different and str(key.device) not in idle[key.host]:
                levels = f"{key.host} GPU {key.device} is at {level:.0f} {unit}, the others at {others:.0f} {unit}"
                yield Alert(f"{key.host} GPU {key.device} {name}", f"{levels}: one rank is slower")


def _is_gpu(key: Key) -> TypeGuard[Reading]:
    return isinstance(key, Reading) and key.device != CPU and key.name in ("util", "power_w")


def _recent(status: RunStatus, key: Reading) -> list[float]:
    """The readings of the last GPU_WINDOW seconds; none where there are not so many yet, or no longer any."""
    steps, values = status.metrics.series[key][:2]
    start = time.time() - GPU_WINDOW
    known = steps[0] <= start and steps[-1] >= time.time() - SILENT_ALERT
    return list(values[bisect_left(steps, start) :]) if known else []


def _disk(status: RunStatus) -> Iterator[Alert]:
    if status.disk is None:
        return
    if status.disk.waiting > NO_ANSWER:
        silence = coarse_duration(status.disk.waiting)
        yield Alert("disk answer", f"the file system of {status.folder} has not answered for {silence}")
    usage = status.disk.value
    if usage and usage.free < max(FREE_SHARE * usage.total, FREE_BYTES):
        left = f"{usage.free / 1e9:.1f} GB left of {usage.total / 1e9:,.0f} GB"
        yield Alert("disk", f"the file system of {status.folder} has {left}")
