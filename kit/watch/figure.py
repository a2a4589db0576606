"""The board of a run that has ended as a plotly figure: hover, zoom, legends, log scale and smoothing, no kernel."""

import math
from collections.abc import Sequence
from typing import Any

from kit.figures.base import base_layout
from kit.figures.charts import Chart, DrawnLine
from kit.figures.line_plot import trace, typed
from kit.figures.palette import BAD, COLOUR_OF
from kit.figures.points import smoothed
from kit.figures.svg import GRID
from kit.watch.hardware import KINDS, MapPicture

PANEL, GAP, TOP = 190, 95, 130  # pixels: height of a panel's axes, room for titles and legend, room for the buttons
ROW = 12  # pixels of a row of a heat map
WIDTHS = ((0.0, 0.46), (0.54, 1.0))  # of the two columns of panels
SMOOTHING = 0.9
MAP_COLUMNS = 120  # of a heat map: 64 GPUs have 41 kB then


def plotly_dict(title: str, charts: Sequence[Chart], maps: Sequence[MapPicture]) -> dict[str, Any]:
    """The figure in plotly's JSON schema. Panels with the same x axis zoom together."""
    logged, machines = ([chart for chart in charts if chart.hardware is wanted] for wanted in (False, True))
    figure = _Figure(title, logged, machines, maps)
    return figure.as_dict()


class _Figure:
    def __init__(
        self, title: str, logged: Sequence[Chart], machines: Sequence[Chart], maps: Sequence[MapPicture]
    ) -> None:
        self.data: list[dict[str, Any]] = []
        self.layout = base_layout(title, "", "")
        self.axis_style = {**self.layout.pop("xaxis"), "title": None}
        self.layout.pop("yaxis")
        map_heights = [max(60, ROW * len(one.labels)) for one in maps]
        rows = [PANEL] * math.ceil(len(logged) / 2) + map_heights + [PANEL] * math.ceil(len(machines) / 2)
        self.height = TOP + sum(rows) + GAP * len(rows)
        # Paper is all of the height; plotly would shrink the panels to make room for legends and buttons.
        margin = {"l": 100, "r": 80, "t": 0, "b": 0, "autoexpand": False}
        self.layout |= {"height": self.height, "margin": margin, "annotations": []}
        self.layout["title"] |= {"y": 1 - 14 / self.height, "yanchor": "top", "x": 0.01, "xanchor": "left"}
        self.axes = 0
        self.first_axis: dict[str, str] = {}  # of each title of an x axis: the name of the first such axis
        self.noisy: list[tuple[int, DrawnLine]] = []  # traces that are smoothed, by index
        self.levels: list[str] = []  # y axes that can be logarithmic
        top = float(TOP)
        for index, chart in enumerate(logged):
            self._panel(chart, top + (PANEL + GAP) * (index // 2), index % 2)
        top += (PANEL + GAP) * math.ceil(len(logged) / 2)
        for one, height in zip(maps, map_heights, strict=True):
            self._map(one, top, height)
            top += height + GAP
        for index, chart in enumerate(machines):
            self._panel(chart, top + (PANEL + GAP) * (index // 2), index % 2)

    def as_dict(self) -> dict[str, Any]:
        """Data and layout with the buttons."""
        self.layout["updatemenus"] = [menu for menu in (self._log_menu(), self._smoothing_menu()) if menu]
        return {"data": self.data, "layout": self.layout}

    def _domain(self, top: float, height: float) -> list[float]:
        return [round(1 - (top + height) / self.height, 5), round(1 - top / self.height, 5)]

    def _new_axes(self, x_title: str, x_domain: Sequence[float], y_domain: Sequence[float]) -> tuple[str, str]:
        """Add a pair of axes; their names as traces use them, such as x2 and y2."""
        self.axes += 1
        number = str(self.axes) if self.axes > 1 else ""
        x, y = f"x{number}", f"y{number}"
        matches = self.first_axis.setdefault(x_title, x)
        linked = {} if matches == x else {"matches": matches}
        small = {"text": x_title, "standoff": 4, "font": {"size": 11}}
        self.layout[f"xaxis{number}"] = self.axis_style | linked | {"title": small, "domain": x_domain, "anchor": y}
        self.layout[f"yaxis{number}"] = self.axis_style | {"domain": y_domain, "anchor": x}
        return x, y

    def _heading(self, text: str, x: float, top: float) -> None:
        place = {"x": x, "y": round(1 - (top - 38) / self.height, 5), "xref": "paper", "yref": "paper"}
        style = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 13}}
        self.layout["annotations"].append({"text": f"<b>{text}</b>", **place, **style})

    def _panel(self, chart: Chart, top: float, column: int) -> None:
        domain = self._domain(top, PANEL)
        x, y = self._new_axes(chart.x_title, WIDTHS[column], domain)
        bounds = {"rangemode": "tozero"} if chart.low == 0 else {}
        unit = {"text": chart.y_title, "standoff": 4, "font": {"size": 11}}
        self.layout[f"yaxis{y[1:]}"] |= bounds | {"title": unit, "type": "log" if chart.log else "linear"}
        count = f' <span style="color:{BAD}">NaN or infinite: {chart.not_finite:,}</span>' if chart.not_finite else ""
        self._heading(chart.title + count, WIDTHS[column][0], top)
        legend = f"legend{self.axes}" if self.axes > 1 else "legend"
        place = {"x": WIDTHS[column][0], "y": round(1 - (top - 36) / self.height, 5), "yanchor": "top"}
        self.layout[legend] = {"orientation": "h", "font": {"size": 11}, "bgcolor": "rgba(0,0,0,0)", **place}
        seen: set[str] = set()
        lines = chart.drawn()
        for line in lines:
            if chart.noisy and not chart.hardware:
                self.noisy.append((len(self.data), line))
            first = line.line.name not in seen
            seen.add(line.line.name)
            own = {"xaxis": x, "yaxis": y, "legend": legend, "legendgroup": line.line.name, "showlegend": first}
            self.data.append(trace(line, crowded=len(lines) > 6) | own)
        if not chart.hardware:
            self.levels.append(f"yaxis{y[1:]}")

    def _map(self, one: MapPicture, top: float, height: float) -> None:
        x, y = self._new_axes("minutes since the start", [0.0, 1.0], self._domain(top, height))
        every = max(1, math.ceil(13 * len(one.labels) / height))
        self.layout[f"yaxis{y[1:]}"] |= {
            "autorange": "reversed",
            "type": "category",
            "dtick": every,
            "tickfont": {"size": 10},
        }
        self._heading(one.title, 0.0, top)
        values, width = one.values(MAP_COLUMNS)
        colour = COLOUR_OF[KINDS[one.name].title]
        self.data.append(
            {
                "type": "heatmap",
                "z": typed(values) | {"shape": f"{len(one.labels)}, {values.shape[1]}"},
                "x0": one.start + width / 2,
                "dx": width,
                "y": one.labels,
                "zmin": one.low,
                "zmax": one.high,
                "colorscale": [[0, f"{colour}10"], [1, colour]],
                "colorbar": {"thickness": 8, "len": height / self.height, "y": sum(self._domain(top, height)) / 2,
                             "outlinewidth": 0, "title": {"text": one.unit}},
                "hovertemplate": f"%{{y}}<br>%{{z:.4~g}} {one.unit} at %{{x:.4~g}} min<extra></extra>",
                "xaxis": x,
                "yaxis": y,
            }
        )  # fmt: skip

    def _log_menu(self) -> dict[str, Any] | None:
        buttons = [
            {"label": f"{kind} scale", "method": "relayout", "args": [{f"{axis}.type": kind for axis in self.levels}]}
            for kind in ("linear", "log")
        ]
        return self._menu(buttons, 0.0) if self.levels else None

    def _smoothing_menu(self) -> dict[str, Any] | None:
        if not self.noisy:
            return None
        indices = [index for index, _ in self.noisy]
        versions = {
            "as logged": [typed(line.y) for _, line in self.noisy],
            "smoothed": [typed(smoothed(line.y, SMOOTHING)) for _, line in self.noisy],
        }
        buttons = [{"label": name, "method": "restyle", "args": [{"y": ys}, indices]} for name, ys in versions.items()]
        return self._menu(buttons, 0.25)

    def _menu(self, buttons: list[dict[str, Any]], x: float) -> dict[str, Any]:
        style = {"type": "buttons", "direction": "right", "bgcolor": "rgba(0,0,0,0)", "bordercolor": GRID}
        place = {"x": x, "xanchor": "left", "y": 1 - 40 / self.height, "yanchor": "top", "pad": {"t": 0, "l": 0}}
        return style | place | {"buttons": buttons, "font": {"size": 11}}
