"""Line plots, and lines in plotly's JSON schema. Numbers are float32 in base64, 5.3 bytes each."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from kit.figures.base import Figure, base_layout
from kit.figures.charts import Chart, DrawnLine
from kit.figures.points import Floats
from kit.figures.svg import WIDTH
from kit.show import format_cell

POINTS = 600  # of all lines of a figure together, which is about 8 kB of JSON


@dataclass(frozen=True)
class Lines(Figure):
    """Curves of y over x."""

    chart: Chart

    @property
    @override
    def title(self) -> str:  # type: ignore[override]
        return self.chart.title

    @override
    def plotly_dict(self) -> dict[str, Any]:
        data = [trace(line, crowded=False) for line in self.chart.drawn()]
        return {"data": data, "layout": base_layout(self.title, self.chart.x_title, self.chart.y_title)}

    @override
    def svg(self) -> str:
        return self.chart.svg(WIDTH, 300)

    def __str__(self) -> str:
        last = (
            f"  {line.line.name}: {format_cell(float(line.y[-1]))} at {format_cell(float(line.x[-1]))}"
            for line in self.chart.drawn()
        )
        return "\n".join([f"{self.title} ({self.chart.y_title}; last value, {self.chart.x_title})", *last])


def trace(line: DrawnLine, crowded: bool) -> dict[str, Any]:
    """A line in plotly's JSON schema; one of a crowd is thin and pale."""
    label = line.line.label or line.line.name
    pen: dict[str, Any] = {"color": line.colour, "width": 1 if crowded else 1.6}
    if line.dash:
        pen["dash"] = line.dash.replace(" ", "px,") + "px"
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(line.x) <= 24 and not line.line.limit else "lines",
        "name": line.line.name,
        **_places(line.x),
        "y": typed(line.y),
        "line": pen,
        "opacity": 0.6 if crowded else 1,
        "hovertemplate": f"{label} %{{y:.5~g}} at %{{x:.6~g}}<extra></extra>",
    }


def _places(x: Floats) -> dict[str, Any]:
    """The x of a trace: its start and step where all steps are the same, which takes fewer bytes."""
    steps = np.diff(x)
    if len(steps) > 1 and steps[0] > 0 and np.allclose(steps, steps[0], rtol=1e-6):
        return {"x0": float(x[0]), "dx": float(steps[0])}
    return {"x": typed(x)}


def typed(values: Any) -> dict[str, str]:
    """Numbers as plotly takes them in base64; those that are not finite are NaN, which leaves a gap."""
    numbers = np.array(values, np.float32)
    numbers[~np.isfinite(numbers)] = np.nan
    return {"dtype": "f4", "bdata": base64.b64encode(numbers.tobytes()).decode()}
