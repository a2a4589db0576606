"""Results that show themselves in a notebook, on a terminal and in a pipe.

A result class derives from `Result` and implements two methods: `as_dict()`, which `--json` prints, and `parts()`, the
texts, tables and figures that a person sees. Everything else follows from these: HTML for notebooks, colour and tables
for a terminal (rich), plain text for pipes.
"""

import html
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Mark = Literal["good", "warning", "bad"]
RICH_STYLES: dict[Mark, str] = {"good": "green", "warning": "yellow", "bad": "red"}
# Readable on white and on black; from the palette of figures.py.
HTML_COLOURS: dict[Mark, str] = {"good": "#059669", "warning": "#d97706", "bad": "#dc2626"}


@dataclass(frozen=True)
class Table:
    """Rows under column names. Numbers are aligned right; None is shown as an empty cell.

    `marks` gives the rows that deserve attention, by index.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    marks: Mapping[int, Mark] = field(default_factory=dict)

    @classmethod
    def of(
        cls, records: Sequence[Mapping[str, Any]], title: str = "", marks: Mapping[int, Mark] | None = None
    ) -> "Table":
        """A table of dictionaries; the columns are the keys of all records in order of appearance."""
        columns = list(dict.fromkeys(key for record in records for key in record))
        return cls(columns, [[record.get(c) for c in columns] for record in records], title, marks or {})

    def __str__(self) -> str:
        if not self.rows:
            return self.title or "no rows"
        cells = [[format_cell(value) for value in row] for row in self.rows]
        numeric = self._numeric_columns()
        widths = [max(len(text) for text in column) for column in zip(self.columns, *cells, strict=True)]
        lines = [
            "  ".join(
                text.rjust(width) if right else text.ljust(width)
                for text, width, right in zip(row, widths, numeric, strict=True)
            ).rstrip()
            for row in [list(self.columns), *cells]
        ]
        return "\n".join([self.title] * bool(self.title) + lines)

    def __rich__(self) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for name, right in zip(self.columns, self._numeric_columns(), strict=True):
            table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
        for index, row in enumerate(self.rows):
            style = RICH_STYLES[self.marks[index]] if index in self.marks else None
            table.add_row(*[Text(format_cell(value)) for value in row], style=style)
        return table

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": str(self)}

    def html(self) -> str:
        """The table as an HTML fragment that takes its colours from the page."""
        if not self.rows:
            return f"<p>{html.escape(self.title or 'no rows')}</p>"
        numeric = self._numeric_columns()
        head = "".join(_html_cell("th", name, right) for name, right in zip(self.columns, numeric, strict=True))
        body = "".join(self._html_row(index, row, numeric) for index, row in enumerate(self.rows))
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _html_row(self, index: int, row: Sequence[Any], numeric: Sequence[bool]) -> str:
        style = f' style="color:{HTML_COLOURS[self.marks[index]]}"' if index in self.marks else ""
        cells = (_html_cell("td", format_cell(value), right) for value, right in zip(row, numeric, strict=True))
        return f"<tr{style}>{''.join(cells)}</tr>"

    def _numeric_columns(self) -> list[bool]:
        columns = zip(*self.rows, strict=True) if self.rows else [() for _ in self.columns]
        return [
            any(is_number(value) for value in column) and all(is_number(value) or value is None for value in column)
            for column in columns
        ]


@runtime_checkable
class Picture(Protocol):
    """A figure, as `kit.figures.Figure` implements it."""

    def img(self) -> str:
        """An HTML <img> element that needs no script."""

    def __str__(self) -> str: ...


Part = str | Table | Picture


class Result:
    """Base class of everything that the functions of `kit` return for a person to see."""

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-ready values: what `--json` prints."""
        raise NotImplementedError

    def parts(self) -> Iterable[Part]:
        """The texts, tables and figures that a person sees, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(str(part) for part in self.parts())

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(*(part if isinstance(part, Table) else Text(str(part)) for part in self.parts()))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": "\n".join(_html_part(part) for part in self.parts()), "text/plain": str(self)}


def _html_part(part: Part) -> str:
    if isinstance(part, str):
        return f'<pre style="white-space:pre-wrap;margin:0.3em 0">{html.escape(part)}</pre>'
    return part.html() if isinstance(part, Table) else part.img()


def _html_cell(tag: str, text: str, right: bool) -> str:
    side = "right" if right else "left"
    return f'<{tag} style="text-align:{side};vertical-align:top;white-space:pre-wrap">{html.escape(text)}</{tag}>'


def is_number(value: Any) -> bool:
    """True for numbers, but not for truth values."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_cell(value: Any) -> str:
    """A value as people write it: thousands with commas, three significant digits below a thousand, yes and no."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_duration(seconds: float) -> str:
    """A duration in its two largest units, such as "1 h 53 min" or "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def in_lab() -> str:
    """The id of the running cell in JupyterLab; empty in any other front end, headless and outside of a kernel.

    JupyterLab sends the id with each request. papermill and nbclient do not, and must not get a widget, since nothing
    can draw it later.
    """
    if "IPython" not in sys.modules:
        return ""
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return str(kernel.get_parent().get("metadata", {}).get("cellId", "")) if kernel else ""


def progress_bar(total: float | None, description: str, unit: str = "it", shown: bool = True, **options: Any) -> Any:
    """A tqdm bar in JupyterLab or on a terminal; nothing in pipes and headless. A context manager with `update(n)`."""
    if shown and in_lab():
        from tqdm.notebook import tqdm as notebook_bar

        return notebook_bar(total=total, desc=description, unit=unit, **options)
    from tqdm import tqdm

    disable = None if shown else True  # None: disabled where stderr is not a terminal
    return tqdm(total=total, desc=description, unit=unit, disable=disable, dynamic_ncols=True, **options)


class Answer(Result):
    """A result made of ready values and parts, for what needs no class."""

    def __init__(self, values: dict[str, Any], *parts: Part) -> None:
        self._values, self._parts = values, parts

    def as_dict(self) -> dict[str, Any]:
        """The given values."""
        return self._values

    def parts(self) -> Iterable[Part]:
        """The given parts."""
        return self._parts
