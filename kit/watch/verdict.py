"""What the GPUs of a run wait for, from the waits that training logs (kit.train.pace) and the GPUs' utilisation.

Communication is not measured: collectives overlap with compute on the GPU, and NVML counts their kernels as busy. So
its seconds are those of the forecast, and at most those in which the host waited for its GPU.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kit.watch.samples import CPU
from kit.watch.status import RunStatus

STEPS = 10  # newest rows, of which medians count
SHARE = 0.05  # of a step, above which a wait is mentioned
BUSY = 90.0  # % of utilisation above which GPUs count as busy


class Cause(StrEnum):
    """What a step waits for."""

    DATA = "data"
    HOST = "the host, which starts kernels more slowly than the GPUs run them"
    RANK = "the slowest rank"
    LINKS = "communication, as forecast"


@dataclass(frozen=True)
class Verdict:
    """Seconds of a step, and those in which it waited; `rank` is the slowest one. `busy`: % of the GPUs, or NaN."""

    step_s: float
    waits: dict[Cause, float]
    rank: int = -1
    busy: float = math.nan

    def __str__(self) -> str:
        found = {cause: seconds for cause, seconds in self.waits.items() if seconds > SHARE * self.step_s}
        parts = []
        for cause, seconds in sorted(found.items(), key=lambda item: -item[1]):
            which = f" (rank {self.rank})" if cause is Cause.RANK and self.rank >= 0 else ""
            parts.append(f"{seconds:.2g} s for {cause.value}{which}")
        if parts:
            return f"of each step of {self.step_s:.3g} s, {', '.join(parts)}: waiting"
        if self.busy < BUSY:
            return f"GPUs are busy {self.busy:.0f} % of the time; the logged waits do not explain the rest"
        return ""


def verdict(run: RunStatus) -> Verdict | None:
    """What the newest steps waited for; None where the run logs no waits."""
    step_s, data = _newest(run, "step_s"), _newest(run, "wait_data_s")
    if step_s is None or data is None:
        return None
    busy = _busy(run)
    gpu, ranks, slowest = (_newest(run, name) for name in ("wait_gpu_s", "wait_ranks_s", "slowest_rank"))
    waits = {Cause.DATA: data, Cause.RANK: ranks or 0.0}
    if links_s := run.forecast.links_s:
        waits[Cause.LINKS] = links_s if gpu is None else min(links_s, gpu)
    if gpu is not None and gpu < SHARE * step_s and busy < BUSY:
        waits[Cause.HOST] = max(0.0, (1 - busy / 100) * step_s - data)
    return Verdict(step_s, waits, -1 if slowest is None else int(slowest), busy)


def _newest(run: RunStatus, name: str) -> float | None:
    """The median of the newest values."""
    series = run.metrics.series.get(f"train/{name}")
    values = [value for value in series.values[-STEPS:] if math.isfinite(value)] if series else []
    return float(np.median(values)) if values else None


def _busy(run: RunStatus) -> float:
    """The mean utilisation of the GPUs lately, in %; NaN without GPUs."""
    heat_map = run.maps.maps["util"]
    if not heat_map.devices:
        return math.nan
    levels = heat_map.lately()
    known = [
        levels[row] for (_, device), row in heat_map.devices.items() if device != CPU and math.isfinite(levels[row])
    ]
    return float(np.mean(known)) if known else math.nan
