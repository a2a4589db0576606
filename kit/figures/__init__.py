"""Still figures: lines, stacked bars, ranges, histograms, heat maps and Sankey diagrams.

One description gives two drawings in one output bundle: plotly's JSON, which JupyterLab shows with hover and zoom, also
in a notebook that it does not trust; and a static PNG for nbconvert, code hosts, print and mail. Backgrounds are clear
and the ink is a middle grey, so that both are readable on white and on black. The JSON is written here and not by the
plotly package, which takes a second to import; `Figure.plotly()` returns the package's own object.

The live board of a run draws the charts of this package with JavaScript: see kit/watch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kit.figures.bar_chart import Bars, Range, Ranges
from kit.figures.base import Figure, Limit
from kit.figures.heat_map import Heat
from kit.figures.histogram import Histogram
from kit.figures.sankey_diagram import Sankey

__all__ = ["Figure", "bars", "heat", "histogram", "lines", "ranges", "sankey"]


def lines(
    title: str,
    x_label: str,
    y_label: str,
    curves: Mapping[str, tuple[Any, Any]],
    colours: Mapping[str, str] | None = None,
) -> Figure:
    """A line plot. `curves` maps a name to its x and y values; values that are not finite leave a gap."""
    from kit.figures.charts import Chart, Line  # they import numpy, which most figures do not need
    from kit.figures.line_plot import POINTS, Lines
    from kit.figures.points import thin

    share, colours = POINTS // max(1, len(curves)), colours or {}
    thinned = {name: thin(*curve, share) for name, curve in curves.items()}
    return Lines(
        Chart(title, x_label, y_label, [Line(name, *xy, colour=colours.get(name, "")) for name, xy in thinned.items()])
    )


def bars(title: str, unit: str, rows: Mapping[str, Mapping[str, float]], limit: Limit | None = None) -> Figure:
    """Horizontal stacked bars: `rows` maps a label to its named parts. `limit` is a dashed line with a name."""
    return Bars(title, unit, rows, limit)


def ranges(title: str, unit: str, rows: Mapping[str, Range], limit: Limit | None = None) -> Figure:
    """Horizontal bars of (lowest, median, highest) with their range. `limit` is a dashed line with a name."""
    return Ranges(title, unit, rows, limit)


def histogram(title: str, x_label: str, y_label: str, edges: Sequence[float], counts: Sequence[float]) -> Figure:
    """A histogram: bin i ends at edges[i], and begins where the one before ends, the first one at 0."""
    return Histogram(title, x_label, y_label, list(edges), list(counts))


def heat(
    title: str,
    x_label: str,
    y_label: str,
    xs: Sequence[Any],
    ys: Sequence[Any],
    values: Sequence[Sequence[float]],
    limit: float,
    here: tuple[Any, Any] | None = None,
) -> Figure:
    """A heat map: values[i][j] belongs to ys[i] and xs[j]. Cells above `limit` are red, and a dashed edge runs between.

    `here` is the (x, y) of the cell to mark, such as the present settings.
    """
    return Heat(title, x_label, y_label, list(xs), list(ys), values, limit, here)


def sankey(title: str, unit: str, flows: Sequence[tuple[str, str, float]]) -> Figure:
    """A Sankey diagram of (from, to, amount) flows without cycles. Flows of zero are left out."""
    return Sankey(title, unit, [flow for flow in flows if flow[2] > 0])
