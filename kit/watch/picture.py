"""The board as a static picture (SVG), as a table for terminals, and as JSON for the live widget."""

import base64
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from kit.figures.charts import Chart, DrawnLine, number
from kit.figures.palette import BAD, COLOUR_OF
from kit.figures.points import Floats, thin
from kit.figures.svg import GRID, INK, ticks
from kit.show import Table
from kit.watch.hardware import KINDS, MapPicture
from kit.watch.panels import Header
from kit.watch.view import MINUTES

WIDTH, COLUMN, PANEL = 820, 420, 230  # pixels; so wide is a cell in a window of 1,000 pixels
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_POINTS = 32


def svg(
    headers: Sequence[Header],
    warnings: Sequence[str],
    charts: Sequence[Chart],
    maps: Sequence[MapPicture] = (),
    note: str = "",
) -> str:
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
        for line in textwrap.wrap(head.status, 125) + textwrap.wrap(head.verdict, 125):
            y += 18
            body += f'<text y="{y}" fill="{INK}">{escape(line)}</text>'
        y += 10
        for width, fill in ((WIDTH, GRID), (WIDTH * head.done, head.colour)):
            body += f'<rect y="{y}" width="{width:.0f}" height="4" rx="2" fill="{fill}"/>'
        y += 28
    for warning in warnings:
        body += f'<path d="M1 {y - 1}h10l-5 -9z" fill="{BAD}"/>'
        for line in textwrap.wrap(warning, 120):
            body += f'<text x="18" y="{y}" fill="{BAD}">{escape(line)}</text>'
            y += 18
    y -= 4
    logged, machines = ([chart for chart in charts if chart.hardware is wanted] for wanted in (False, True))
    drawn, y = _panels(logged, y)
    body += drawn
    for one in maps:
        drawn, height = _map(one)
        body += f'<g transform="translate(0 {y})">{drawn}</g>'
        y += height
    drawn, y = _panels(machines, y)
    return (
        f'<svg style="max-width:100%;height:auto" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="12" fill="{INK}">'
        f"{body}{drawn}</svg>"
    )


def _panels(charts: Sequence[Chart], top: int) -> tuple[str, int]:
    """The panels in two columns, and where they end."""
    body = ""
    for index, chart in enumerate(charts):
        row, column = divmod(index, 2)
        place = f"translate({column * COLUMN} {top + row * PANEL})"
        body += f'<g transform="{place}">{chart.svg(COLUMN - 20, PANEL - 10)}</g>'
    return body, top + PANEL * math.ceil(len(charts) / 2)


def _map(one: MapPicture) -> tuple[str, int]:
    """A heat map with the names of its rows, as far as there is room, and its height."""
    rows = len(one.labels)
    high = 14 if rows <= 20 else 7
    left, right, top = 130, WIDTH - 20, 24
    bottom = top + rows * high
    title = f"{one.title}, {number(one.low)} (pale) to {number(one.high)} {one.unit}"
    body = f'<text y="13" font-size="11" font-weight="600">{escape(title)}</text>'
    data = base64.b64encode(one.png()).decode()
    size = f'x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"'
    scaling = 'preserveAspectRatio="none" image-rendering="optimizeSpeed"'
    body += f'<image {size} {scaling} href="data:image/png;base64,{data}"/>'
    free = -math.inf  # where the next label has room
    for row, label in enumerate(one.labels):
        y = top + (row + 0.5) * high + 4
        if y >= free:
            style = f'fill="{BAD}" font-weight="600"' if row in one.marked else ""
            style += f' x="{left - 6}" y="{y:.0f}" text-anchor="end" font-size="10"'
            body += f"<text {style}>{escape(label[-20:])}</text>"
            free = y + 11
    end = one.start + one.width * len(one.levels) / rows
    for value in ticks(one.start, end):
        x = left + (value - one.start) / (end - one.start) * (right - left)
        body += f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle" font-size="11">{number(value)}</text>'
    body += f'<text x="{(left + right) / 2}" y="{bottom + 29}" text-anchor="middle" font-size="11">{MINUTES}</text>'
    return body, bottom + 44


def table(charts: Sequence[Chart]) -> Table:
    """Of each line its course as a sparkline, and its newest value."""
    rows = []
    for chart in charts:
        if chart.hardware:
            continue  # see kit.watch.gpu_table
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


def as_json(
    headers: Sequence[Header], warnings: Sequence[str], charts: Sequence[Chart], maps: Sequence[MapPicture] = ()
) -> dict[str, Any]:
    """All that the widget draws."""
    return {
        "runs": [asdict(head) for head in headers],
        "warnings": list(warnings),
        "panels": [chart_as_json(chart) for chart in charts],
        "maps": [asdict(one) | {"colour": COLOUR_OF[KINDS[one.name].title]} for one in maps],
        "readings": {name: kind.title for name, kind in KINDS.items()},
    }


def chart_as_json(chart: Chart) -> dict[str, Any]:
    """A chart; null for a value that is not finite, and for no bound."""
    low, high = _numbers([chart.low, chart.high])
    return {
        "title": chart.title,
        "x_title": chart.x_title,
        "y_title": chart.y_title,
        "not_finite": chart.not_finite,
        "noisy": chart.noisy,
        "hardware": chart.hardware,
        "low": low,
        "high": high,
        "lines": [_line_as_json(drawn, 4 if chart.hardware else 5) for drawn in chart.drawn()],
    }


def _line_as_json(drawn: DrawnLine, digits: int) -> dict[str, Any]:
    rare = {"limit": drawn.line.limit, "dash": drawn.dash, "label": drawn.line.label}  # left out where empty
    return {
        "name": drawn.line.name,
        "colour": drawn.colour,
        "x": _numbers(drawn.x, 7),  # a day of seconds in minutes has as many
        "y": _numbers(drawn.y, digits),
    } | {name: value for name, value in rare.items() if value}


def _numbers(values: Any, digits: int = 5) -> list[float | None]:
    """The values with so many significant digits, as JSON has them; whole numbers are shorter without a point."""
    known = np.asarray(values, float)
    finite = np.isfinite(known)
    level = np.where(finite & (known != 0), np.abs(known), 1.0)
    places = digits - 1 - np.floor(np.log10(level))
    power = 10.0 ** np.abs(places)
    rounded = np.where(places >= 0, np.rint(known * power) / power, np.rint(known / power) * power)
    if finite.all() and (rounded == np.rint(rounded)).all() and (level < 1e15).all():
        return list(rounded.astype(int).tolist())
    return [value if known else None for value, known in zip(rounded.tolist(), finite.tolist(), strict=True)]


def delta(before: Mapping[str, Any], now: Mapping[str, Any], complete: int = -1) -> dict[str, Any]:
    """What the widget needs for `now` when it has `before`: of each line how many points to keep, and the new ones.

    The panel of index `complete` is sent with all its points. A line without x has that of the line before it: GPUs of
    a node are sampled together. The bytes of maps are base64.
    """
    panels = []
    for index, panel in enumerate(now["panels"]):
        old = before.get("panels", [])
        known = old[index]["lines"] if index < len(old) and index != complete else []
        lines: list[dict[str, Any]] = []
        for place, line in enumerate(panel["lines"]):
            keep = _common(known[place], line) if place < len(known) else 0
            shared = place > 0 and keep == lines[-1]["keep"] and line["x"] == panel["lines"][place - 1]["x"]
            lines.append(line | {"keep": keep, "x": None if shared else line["x"][keep:], "y": line["y"][keep:]})
        panels.append(panel | {"lines": lines})
    maps = [_map_delta(before.get("maps", []), index, one) for index, one in enumerate(now.get("maps", []))]
    return {**now, "panels": panels, "maps": maps}


def _common(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """How many points at the start are equal."""
    size = len(before["x"])
    if before["x"] == now["x"][:size] and before["y"] == now["y"][:size]:  # the usual case, and faster
        return size
    old, new = zip(before["x"], before["y"], strict=True), zip(now["x"], now["y"], strict=True)
    length = min(len(before["x"]), len(now["x"]))
    return next((index for index, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), length)


def _map_delta(before: Sequence[Mapping[str, Any]], index: int, now: Mapping[str, Any]) -> dict[str, Any]:
    """The map with the columns from the first one on that differs, and how many are kept before it."""
    rows, keep = len(now["labels"]), 0
    if index < len(before) and all(before[index][name] == now[name] for name in ("run", "name", "labels")):
        old = np.frombuffer(before[index]["levels"], np.uint8).reshape(-1, rows)
        new = np.frombuffer(now["levels"], np.uint8).reshape(-1, rows)[: len(old)]
        different = np.flatnonzero((old[: len(new)] != new).any(1))
        keep = int(different[0]) if len(different) else len(new)
    return {**now, "keep": keep, "levels": base64.b64encode(now["levels"][keep * rows :]).decode()}
