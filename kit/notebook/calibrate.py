"""Calibration: what a finished run took beside its forecast, and what that says of its links, GPUs or hosts."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset
from kit.errors import KitError
from kit.forecast.timing import LAUNCH_US, predict, rates, slowest_link
from kit.slurm.run import Run
from kit.watch.metrics import Metrics

CLEAR = 2.0  # times the next longest part of a step, from where on the step tells the rate of its longest


@dataclass(frozen=True)
class Calibration:
    """Forecast and measured by name; a sentence; the profile's keys that explain the step, none if it cannot tell."""

    rows: dict[str, tuple[float | None, float]]
    says: str
    change: dict[str, float]


def calibrate_run(run: Run) -> Calibration:
    """From what a run left. Raises KitError where no step of it was timed."""
    path, metrics = run.path / "state" / "result.json", Metrics(run.path)
    left = files.read_json(path) if path.exists() else {}
    if not left.get("step_s"):
        raise KitError(f"{run.path.name} left no time of a step in {path}; calibrate from a run that ended well.")
    while metrics.poll():
        pass
    measured = {key: left[key] for key in ("step_s", "peak_gib") if left.get(key)}
    for key, name in (("tokens_per_s", "train/tokens_per_s"), ("evaluation_s", "eval/runtime")):
        if name in metrics.series:
            measured[key] = statistics.median(metrics.series[name].values)
    return calibrate(run.recipe, run.cluster, measured, Dataset(Path(run.info["dataset"])).manifest)


def calibrate(
    recipe: Recipe, cluster: Cluster, measured: dict[str, float], manifest: dict[str, Any] | None = None
) -> Calibration:
    """measured: step_s, and what is known of tokens_per_s (all ranks), evaluation_s and peak_gib. Raises KitError.

    Links, GPU and host overlap in part, so the longest took between the step less the others and all of the step. Its
    rate is told only where it is the longest by far, by forecast and by measurement.
    """
    found = predict(recipe, cluster, manifest)
    t = found.time
    if t.step_s is None or t.compute_s is None or t.host_s is None or t.communication_s is None:
        raise KitError(f"{cluster.name} gives no nodes.gpu_bf16_tflops, so there is no forecast to calibrate.")
    each = (t.tokens_per_s_per_gpu or 0.0) * recipe.world_size
    forecast = {"step_s": t.step_s, "tokens_per_s": each, "evaluation_s": t.evaluation_s}
    forecast["peak_gib"] = found.memory.allocated_gib
    rows = {key: (forecast[key], value) for key, value in measured.items()}
    parts = {"links": t.communication_s, "GPU": t.compute_s, "host": t.host_s}
    longest = max(parts, key=lambda part: parts[part])
    rest = sorted(value for part, value in parts.items() if part != longest)
    took = measured["step_s"] - t.step_s + math.hypot(*parts.values())
    listed = ", ".join(f"{part} {value:.3g} s" for part, value in parts.items())
    begin = f"The step took {measured['step_s']:.3g} s where {t.step_s:.3g} were forecast ({listed}): "
    if min(parts[longest], took) < CLEAR * rest[-1] or took <= sum(rest):
        return Calibration(
            rows, f"{begin}nothing stands out, so it cannot tell the rate of any. Run kit.check.probe.", {}
        )
    middle, *span = (
        parts[longest] / x for x in (math.sqrt(took**2 - rest[0] ** 2 - rest[1] ** 2), took, took - sum(rest))
    )
    old = _rates(longest, recipe, cluster)
    new, low, high = ({key: _times(key, value, factor) for key, value in old.items()} for factor in (middle, *span))
    told = [f"{key} = {new[key]} ({low[key]} to {high[key]}) instead of {value:.3g}" for key, value in old.items()]
    if any(key.endswith("efficiency") and value > 1 for key, value in low.items()):
        return Calibration(rows, f"{begin}{told[0]} is impossible: profile or recipe are not those of this run.", {})
    return Calibration(rows, f"{begin}{' and '.join(told)} would explain it.", new)


def _rates(part: str, recipe: Recipe, cluster: Cluster) -> dict[str, float]:
    """The profile's keys that this part of a step depends on, and their values."""
    nodes, (matmul, moved, _) = cluster.nodes, rates(cluster)
    if part == "links":
        across = 1 if recipe.parallel.sharding == "hybrid" else recipe.parallel.nodes
        found = slowest_link(recipe.world_size, across, cluster)
        return {f"links.{found[0]}.efficiency": found[1].efficiency} if found else {}
    if part == "host":
        return {"nodes.launch_us": nodes.launch_us or LAUNCH_US}
    if not nodes.gpus:
        return {"nodes.gpu_bf16_tflops": nodes.gpu_bf16_tflops}
    return {"nodes.gpu_efficiency": matmul / nodes.gpu_bf16_tflops / 1e12, "nodes.gpu_memory_gb_s": moved / 1e9}


def _times(key: str, value: float, factor: float) -> float:
    """Three digits of the value at a rate `factor` times as high; launch_us is no rate but its inverse."""
    return float(f"{value / factor if key.endswith('_us') else value * factor:.3g}")
