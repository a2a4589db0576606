"""Sankey diagrams: amounts that flow from one node to the next."""

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from kit.figures.base import Figure, base_layout
from kit.figures.palette import colour_of
from kit.figures.svg import GRID, INK, WIDTH, Canvas
from kit.show import format_cell


@dataclass(frozen=True)
class Sankey(Figure):
    """Bands from node to node, as wide as the amounts that flow."""

    title: str
    unit: str
    flows: list[tuple[str, str, float]]

    @override
    def plotly_dict(self) -> dict[str, Any]:
        nodes = list(self._amounts())
        link = {
            "source": [nodes.index(source) for source, _, _ in self.flows],
            "target": [nodes.index(target) for _, target, _ in self.flows],
            "value": [amount for _, _, amount in self.flows],
            "color": GRID,
        }
        colours = [colour_of(name, index) for index, name in enumerate(nodes)]
        labels = [f"{name} {format_cell(float(amount))}" for name, amount in self._amounts().items()]
        node = {"label": labels, "color": colours, "pad": 18, "thickness": 16}
        data = [
            {
                "type": "sankey",
                "node": node,
                "link": link,
                "valuesuffix": f" {self.unit}",
                "valueformat": ",.0f",
                "textfont": {"color": INK, "shadow": "none"},
            }
        ]  # plotly's own shadow blurs them on a dark page
        return {"data": data, "layout": base_layout(self.title, "", "") | {"height": 320}}

    @override
    def svg(self) -> str:
        canvas = Canvas(self.title, 320)
        amounts, columns = self._amounts(), self._columns()
        last = max(columns.values(), default=0) or 1
        total = max((self._column_total(column) for column in range(last + 1)), default=1.0)
        crowd = max((list(columns.values()).count(column) for column in range(last + 1)), default=1)
        scale = (260 - 22 * crowd) / total
        tops: dict[str, float] = {}
        below = dict.fromkeys(range(last + 1), 44.0)
        for index, (name, column) in enumerate(columns.items()):
            tops[name] = below[column]
            x, high = (WIDTH - 180) * column / last, max(1.0, amounts[name] * scale)
            canvas.rectangle(x, tops[name], 14, high, colour_of(name, index))
            canvas.text(x + 20, tops[name] + high / 2 + 4, f"{name} {format_cell(float(amounts[name]))}")
            below[column] += high + 22
        leaving, arriving = dict(tops), dict(tops)
        for source, target, amount in self.flows:
            x0, x1 = ((WIDTH - 180) * columns[name] / last for name in (source, target))
            colour = colour_of(target, list(amounts).index(target))
            canvas.band(x0 + 14, leaving[source], x1, arriving[target], max(1.0, amount * scale), colour)
            leaving[source] += amount * scale
            arriving[target] += amount * scale
        return canvas.document()

    def __str__(self) -> str:
        rows = (f"  {source} -> {target}: {format_cell(float(amount))}" for source, target, amount in self.flows)
        return "\n".join([f"{self.title} ({self.unit})", *rows])

    def _amounts(self) -> dict[str, float]:
        """What passes through each node: the larger of what arrives and what leaves."""
        arriving: dict[str, float] = {}
        leaving: dict[str, float] = {}
        for source, target, amount in self.flows:
            leaving[source] = leaving.get(source, 0.0) + amount
            arriving[target] = arriving.get(target, 0.0) + amount
        names = dict.fromkeys(name for source, target, _ in self.flows for name in (source, target))
        return {name: max(arriving.get(name, 0.0), leaving.get(name, 0.0)) for name in names}

    def _columns(self) -> dict[str, int]:
        """The column of each node: one right of the rightmost node that flows into it."""
        columns = dict.fromkeys(self._amounts(), 0)
        for _ in columns:
            for source, target, _ in self.flows:
                columns[target] = max(columns[target], columns[source] + 1)
        return columns

    def _column_total(self, column: int) -> float:
        return sum(self._amounts()[name] for name, at in self._columns().items() if at == column) or 1.0
