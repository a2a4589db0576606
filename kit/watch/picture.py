"""The board as a static picture (SVG), as a table for terminals, and as JSON for the live widget."""

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from kit.show import Table
from kit.watch.charts import BAD, GRID, INK, MUTED, Chart, DrawnLine, number
from kit.watch.panels import STEP, Header
from kit.watch.series import Floats, thin

WIDTH, COLUMN, PANEL = 960, 490, 230  # pixels
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_POINTS = 32


def svg(headers: Sequence[Header], warnings: Sequence[str], charts: Sequence[Chart], note: str = "") -> str:
    """The picture, with the time at which it was drawn and a note."""
    drawn_at = f"as of {time.strftime('%Y-%m-%d %H:%M:%S')}"
    y = 18
    body = f'<text x="{WIDTH}" y="{y}" text-anchor="end">{drawn_at}</text>'
    if note:
        y += 18
        body += f'<text x="{WIDTH}" y="{y}" text-anchor="end">{escape(note)}</text>'
    for head in headers:
        body += f'<circle cx="6" cy="{y - 5}" r="5" fill="{head.colour}"/>'
        body += f'<text x="18" y="{y}" font-size="15" font-weight="600" fill="{INK}">{escape(head.title)}</text>'
        for line in textwrap.wrap(head.status, 150):
            y += 18
            body += f'<text y="{y}" fill="{INK}">{escape(line)}</text>'
        y += 10
        for width, fill in ((WIDTH, GRID), (WIDTH * head.done, head.colour)):
            body += f'<rect y="{y}" width="{width:.0f}" height="4" rx="2" fill="{fill}"/>'
        y += 28
    for warning in warnings:
        body += f'<path d="M1 {y - 1}h10l-5 -9z" fill="{BAD}"/>'
        for line in textwrap.wrap(warning, 140):
            body += f'<text x="18" y="{y}" fill="{BAD}">{escape(line)}</text>'
            y += 18
    top = y - 4
    for index, chart in enumerate(charts):
        row, column = divmod(index, 2)
        place = f"translate({column * COLUMN} {top + row * PANEL})"
        body += f'<g transform="{place}">{chart.svg(height=PANEL - 10)}</g>'
    height = top + PANEL * math.ceil(len(charts) / 2)
    return (
        f'<svg style="max-width:100%;height:auto" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12" fill="{MUTED}">'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>'
    )


def table(charts: Sequence[Chart]) -> Table:
    """Of each line its course as a sparkline, and its newest value."""
    rows = []
    for chart in charts:
        lines = {drawn.line.name: drawn for drawn in chart.drawn() if not drawn.line.limit}
        for name, drawn in lines.items():
            metric = chart.title if name.lower() == chart.title.lower() else f"{chart.title}, {name}"
            rows.append((metric, sparkline(drawn.x, drawn.y), number(drawn.y[-1]), chart.y_title))
    return Table(("metric", "course", "newest", "unit"), rows)


def sparkline(x: Floats, y: Floats) -> str:
    """A line of block characters, from the lowest to the highest value; x where a value is not finite."""
    _, y = thin(x, y, SPARK_POINTS)
    known = y[np.isfinite(y)]
    if not len(known):
        return "x" * len(y[-SPARK_POINTS:])
    low, height = known.min(), np.ptp(known) or 1.0
    return "".join(
        SPARKS[int((len(SPARKS) - 1) * (value - low) / height)] if math.isfinite(value) else "x"
        for value in y[-SPARK_POINTS:]
    )


def as_json(headers: Sequence[Header], warnings: Sequence[str], charts: Sequence[Chart]) -> dict[str, Any]:
    """All that the widget draws."""
    return {
        "runs": [asdict(head) for head in headers],
        "warnings": list(warnings),
        "panels": [chart_as_json(chart) for chart in charts],
    }


def chart_as_json(chart: Chart) -> dict[str, Any]:
    """A chart with thinned lines; null for a value that is not finite, and for no bound."""
    low, high = _numbers([chart.low, chart.high])
    return {
        "title": chart.title,
        "x_title": chart.x_title,
        "y_title": chart.y_title,
        "not_finite": chart.count_not_finite(),
        "noisy": chart.noisy,
        "low": low,
        "high": high,
        "lines": [_line_as_json(drawn, 7 if chart.x_title == STEP else 5) for drawn in chart.drawn()],
    }


def _line_as_json(drawn: DrawnLine, x_digits: int) -> dict[str, Any]:
    return {
        "name": drawn.line.name,
        "label": drawn.line.label or drawn.line.name,
        "limit": drawn.line.limit,
        "colour": drawn.colour,
        "dash": drawn.dash,
        "x": _numbers(drawn.x, x_digits),
        "y": _numbers(drawn.y),
    }


def _numbers(values: Any, digits: int = 5) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def delta(before: Mapping[str, Any], now: Mapping[str, Any], complete: int = -1) -> dict[str, Any]:
    """What the widget needs for `now` when it has `before`: of each line how many points to keep, and the new ones.

    The panel of index `complete` is sent with all its points.
    """
    panels = []
    for index, panel in enumerate(now["panels"]):
        known = before["panels"][index]["lines"] if index < len(before["panels"]) and index != complete else []
        lines = []
        for place, line in enumerate(panel["lines"]):
            keep = _common(known[place], line) if place < len(known) else 0
            lines.append(line | {"keep": keep, "x": line["x"][keep:], "y": line["y"][keep:]})
        panels.append(panel | {"lines": lines})
    return {**now, "panels": panels}


def _common(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """How many points at the start are equal."""
    old, new = zip(before["x"], before["y"], strict=True), zip(now["x"], now["y"], strict=True)
    length = min(len(before["x"]), len(now["x"]))
    return next((index for index, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), length)
