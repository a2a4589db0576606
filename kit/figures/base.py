"""The base class of figures and the parts of plotly's JSON that all share."""

from abc import ABC, abstractmethod
from typing import Any

from kit.figures.png import img, static_picture
from kit.figures.svg import GRID, INK, LIMIT, WIDTH
from kit.show import format_cell

Limit = tuple[str, float]  # its name and value
PLOTLY = "application/vnd.plotly.v1+json"


class Figure(ABC):
    """A figure that shows itself in a notebook. The functions of kit.figures make them."""

    title: str

    @abstractmethod
    def plotly_dict(self) -> dict[str, Any]:
        """The figure in plotly's JSON schema: {"data": [...], "layout": {...}}."""

    @abstractmethod
    def svg(self) -> str:
        """The static picture as an SVG document."""

    @abstractmethod
    def __str__(self) -> str:
        """The figure's numbers as text."""

    def plotly(self) -> Any:
        """The figure as a `plotly.graph_objects.Figure`, to change it further."""
        import plotly.graph_objects

        return plotly.graph_objects.Figure(self.plotly_dict())

    def img(self) -> str:
        """An HTML <img> with the static picture, which also an untrusted notebook shows."""
        return img(self.svg(), self.title)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        picture, metadata = static_picture(self.svg(), WIDTH)
        return {PLOTLY: self.plotly_dict(), **picture, "text/plain": str(self)}, metadata


def limit_text(limit: Limit | None) -> str:
    """The name and value of a limit as a legend shows them, or an empty string."""
    return f"{limit[0]} {format_cell(float(limit[1]))}" if limit else ""


def base_layout(title: str, x_label: str, y_label: str) -> dict[str, Any]:
    """A clear background, one ink for both themes, and no template, which would add 7 kB to each figure."""
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": INK, "automargin": True}
    return {
        "title": {"text": title, "font": {"size": 14}},
        "font": {"color": INK, "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 60, "r": 30, "t": 50, "b": 50},
        "height": 340,
        "template": {},
        "xaxis": axis | {"title": {"text": x_label}},
        "yaxis": axis | {"title": {"text": y_label}},
    }


def with_limit(layout: dict[str, Any], limit: Limit | None) -> dict[str, Any]:
    """The layout with a dashed vertical line and its name at the limit."""
    if limit:
        line = {"color": LIMIT, "width": 2, "dash": "dash"}
        layout["shapes"] = [
            {"type": "line", "x0": limit[1], "x1": limit[1], "yref": "paper", "y0": 0, "y1": 1, "line": line}
        ]
        layout["annotations"] = [
            {
                "x": limit[1],
                "yref": "paper",
                "y": 1,
                "yanchor": "bottom",
                "showarrow": False,
                "text": limit_text(limit),
            }
        ]
    return layout
