"""Compare a finished run with its forecast, and name the rate of the cluster profile that explains the difference."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.timing import LAUNCH_US, Time, predict, rates, slowest_link

# The longest part of a step (links, GPU, host) must take this many times as long as the second longest before the step
# says anything about its rate.
CLEAR = 2.0


class Quantity(NamedTuple):
    """One figure of a run; None if it is not known."""

    forecast: float | None
    actual: float | None

    @property
    def off(self) -> float | None:
        """How far the forecast is from the actual value, relative to it."""
        return abs(self.forecast / self.actual - 1) if self.forecast and self.actual else None


@dataclass(frozen=True)
class Correction:
    """Values of profile keys that explain the measured step, and why; no values if the step does not tell."""

    advice: str
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ForecastError:
    """Forecast and actual seconds a step, hours of the job and GiB allocated at the peak."""

    step_s: Quantity
    hours: Quantity
    peak_gib: Quantity
    correction: Correction | None  # None if no step was timed or forecast


def forecast_error(
    recipe: Recipe,
    cluster: Cluster,
    manifest: dict[str, Any] | None = None,
    step_s: float | None = None,
    hours: float | None = None,
    peak_gib: float | None = None,
) -> ForecastError:
    """The measured figures of a run and their forecast. Raises InputError where the model cannot be forecast.

    `manifest` is that of the dataset; without it the recipe's own sizes count.
    """
    forecast = predict(recipe, cluster, manifest)
    return ForecastError(
        Quantity(forecast.time.step_s, step_s),
        Quantity(forecast.time.wall_h, hours),
        Quantity(forecast.memory.allocated_gib, peak_gib),
        _correction(recipe, cluster, forecast.time, step_s) if step_s else None,
    )


def _correction(recipe: Recipe, cluster: Cluster, forecast: Time, step_s: float) -> Correction | None:
    """Explain a measured step by the rate of its longest part, if one part is clearly the longest.

    Links, GPU and host overlap partly. So the longest part took at most the complete step, and at least the step less
    the other parts; the best estimate is the one that the forecast itself uses, the root of the sum of squares.
    """
    forecast_s, links_s = forecast.step_s, forecast.communication_s
    if forecast_s is None or links_s is None or forecast.compute_s is None or forecast.host_s is None:
        return None
    parts = {"links": links_s, "GPU": forecast.compute_s, "host": forecast.host_s}
    longest = max(parts, key=lambda part: parts[part])
    others = [seconds for part, seconds in parts.items() if part != longest]
    took = step_s - (forecast_s - math.hypot(*parts.values()))  # without what a step needs besides these parts
    listed = ", ".join(f"{part} {seconds:.3g} s" for part, seconds in parts.items())
    begin = f"The step took {step_s:.3g} s; the forecast is {forecast_s:.3g} s ({listed})."
    if min(parts[longest], took) < CLEAR * max(others) or took <= sum(others):
        return Correction(f"{begin} No part is clearly the longest: measure the rates with `kit check --probe`.")
    best, fastest, slowest = (
        _scaled(longest, recipe, cluster, parts[longest] / seconds)
        for seconds in (math.sqrt(took**2 - others[0] ** 2 - others[1] ** 2), took - sum(others), took)
    )
    present = _profile_rates(longest, recipe, cluster)
    texts = [
        f"{key} = {best[key]:g} ({slowest[key]:g} to {fastest[key]:g}) instead of {value:.3g}"
        for key, value in present.items()
    ]
    if any(key.endswith("efficiency") and value > 1 for key, value in slowest.items()):
        return Correction(f"{begin} {texts[0]} is impossible: profile or recipe are not those of this run.")
    return Correction(f"{begin} {' and '.join(texts)} in the cluster profile would explain it.", best)


def _profile_rates(part: str, recipe: Recipe, cluster: Cluster) -> dict[str, float]:
    """The profile's keys that this part of a step depends on, and their present values."""
    nodes, (matmul, memory, _) = cluster.nodes, rates(cluster)
    if part == "links":
        nodes_of_a_group = 1 if recipe.parallel.sharding == "hybrid" else recipe.parallel.nodes
        found = slowest_link(recipe.world_size, nodes_of_a_group, cluster)
        return {f"links.{found[0]}.efficiency": found[1].efficiency} if found else {}
    if part == "host":
        return {"nodes.launch_us": nodes.launch_us or LAUNCH_US}
    if not nodes.gpus:
        return {"nodes.gpu_bf16_tflops": nodes.gpu_bf16_tflops}
    return {"nodes.gpu_efficiency": matmul / nodes.gpu_bf16_tflops / 1e12, "nodes.gpu_memory_gb_s": memory / 1e9}


def _scaled(part: str, recipe: Recipe, cluster: Cluster, speed: float) -> dict[str, float]:
    """The profile's values if this part were `speed` times as fast, to three digits; launch_us is a time."""
    present = _profile_rates(part, recipe, cluster)
    scaled = {key: value / speed if key.endswith("_us") else value * speed for key, value in present.items()}
    return {key: float(f"{value:.3g}") for key, value in scaled.items()}
