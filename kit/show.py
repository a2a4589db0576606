"""Results that show themselves in a notebook, on a terminal and in a pipe.

A result class derives from `Result`. It implements `parts()`, the texts, tables and figures that a person sees, and
`as_dict()`, which `--json` prints, where that is more than the fields of its dataclass. Everything else follows from
these: HTML for notebooks, colour and tables for a terminal (rich), plain text for pipes.
"""

import html
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol, runtime_checkable

Mark = Literal["good", "warning", "bad"]
RICH_STYLES: dict[Mark, str] = {"good": "green", "warning": "yellow", "bad": "red"}
# Readable as text on white and on black. kit.figures.palette has all other colours.
HTML_COLOURS: dict[Mark, str] = {"good": "#009e73", "warning": "#a67c00", "bad": "#d55e00"}
# On paper nothing scrolls: the widest table, that of kit tune, fits A4 with letters of this size.
PRINT_STYLE = "@media print{.kit-table{font-size:7pt!important}.kit-table :is(th,td){padding:2px 4px!important}}"
# Classes of results that have buttons in JupyterLab, by name -> module and function that make them; the face sets it.
CONTROLS: dict[str, tuple[str, str]] = {}


@dataclass(frozen=True)
class LabCell:
    """A cell of JupyterLab: its id, and the header of the message that ran it, which its outputs are addressed to."""

    id: str
    header: Mapping[str, Any] = field(default_factory=dict)


# The cell that a callback of its widgets belongs to: the message that starts a callback has no id of a cell.
_callback_cell: ContextVar[LabCell | None] = ContextVar("callback_cell", default=None)


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

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """A table, or a paragraph for each row where the terminal is too narrow for the words of the columns."""
        needed = sum(widths := self._word_widths()) + 3 * len(widths) - 1  # columns are three blanks apart
        yield self._rich_table(widths) if needed <= options.max_width else self._rich_paragraphs()

    def _word_widths(self) -> list[int]:
        """The length of the longest word of each column."""
        cells = [[format_cell(value) for value in row] for row in self.rows]
        columns = zip(self.columns, *cells, strict=True)
        return [max((len(word) for text in column for word in text.split()), default=1) for column in columns]

    def _rich_table(self, widths: Sequence[int]) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for name, right, width in zip(self.columns, self._numeric_columns(), widths, strict=True):
            table.add_column(Text(name), justify="right" if right else "left", overflow="fold", min_width=width)
        for index, row in enumerate(self.rows):
            table.add_row(*[Text(format_cell(value)) for value in row], style=self._rich_style(index))
        return table

    def _rich_paragraphs(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(self.title, style="bold")] if self.title else []
        for index, row in enumerate(self.rows):
            first, *others = zip(self.columns, map(format_cell, row), strict=True)
            rest = "; ".join(f"{name} {text}" for name, text in others if text)
            style = self._rich_style(index) or ""
            lines.append(Text.assemble((first[1], f"bold {style}"), (f"  {rest}", style)))
        return Group(*lines)

    def _rich_style(self, row: int) -> str | None:
        return RICH_STYLES[self.marks[row]] if row in self.marks else None

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
        rows = f"{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f'<style>{PRINT_STYLE}</style><table class="mathjax_ignore kit-table">{rows}</table>'

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
        """The result as JSON-ready values: what `--json` prints. Here the fields of a dataclass."""
        from pydantic_core import to_jsonable_python

        return dict(to_jsonable_python(self))

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
        return _bundle(list(self.parts()))

    def _ipython_display_(self) -> None:
        """In a notebook, show each figure in a separate output, as a front end draws one MIME type of an output.

        In JupyterLab the buttons of its class follow. Raises NotImplementedError where there are neither figures nor
        buttons, and outside of notebooks: IPython then shows the MIME bundle.
        """
        parts, controls = list(self.parts()), self.controls()
        only_text = all(isinstance(part, str | Table) for part in parts)
        if not in_kernel() or (only_text and controls is None):
            raise NotImplementedError
        from IPython.display import display

        for is_text, group in groupby(parts, key=lambda part: isinstance(part, str | Table)):
            shown = list(group)
            if is_text:
                display(_bundle(shown), raw=True)
            else:
                display(*shown)
        if controls is not None:
            display(controls)

    def controls(self) -> Any:
        """The widget with the buttons of this result in JupyterLab; None elsewhere."""
        if type(self).__name__ not in CONTROLS or not has_widgets():
            return None
        module, function = CONTROLS[type(self).__name__]
        return getattr(importlib.import_module(module), function)(self)


def _bundle(parts: Sequence[Part]) -> dict[str, str]:
    return {"text/html": "\n".join(map(_html_part, parts)), "text/plain": "\n".join(map(str, parts))}


def _html_part(part: Part) -> str:
    if isinstance(part, str):
        return html_text(part)
    return part.html() if isinstance(part, Table) else part.img()


def html_text(text: str) -> str:
    """Text as an HTML fragment, whose lines end between words; the style of <pre> in notebooks ends them anywhere."""
    style = "white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;margin:0.3em 0"
    return f'<pre style="{style}">{html.escape(text)}</pre>'


def _html_cell(tag: str, text: str, right: bool) -> str:
    side, space = ("right", "nowrap" if tag == "td" else "normal") if right else ("left", "pre-wrap")
    return f'<{tag} style="text-align:{side};vertical-align:top;white-space:{space}">{html.escape(text)}</{tag}>'


def is_number(value: Any) -> bool:
    """True for numbers, but not for truth values."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class Hours(float):
    """A number of hours that tables show as a duration, such as "1 h 53 min"."""


class Gigabytes(float):
    """A number of GB (1e9 bytes) that tables show in a unit that fits, such as "57.3 kB"."""


def format_cell(value: Any) -> str:
    """A value as people write it: thousands with commas, three significant digits below a thousand, yes and no."""
    if value is None:
        return ""
    if isinstance(value, Hours):
        return format_duration(3600 * value)
    if isinstance(value, Gigabytes):
        return format_bytes(1e9 * value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_count(number: float) -> str:
    """A large number in three digits, such as "7.37 M" or "70.6 B"; below ten thousand as it is."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size and number >= 10_000:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def format_bytes(size: float) -> str:
    """A size in three digits, such as "57.3 kB" or "4.86 GB"."""
    for unit, unit_size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= unit_size:
            return f"{size / unit_size:.3g} {unit}"
    return f"{size:.0f} B"


def count(number: int, noun: str) -> str:
    """A number with its noun, which gets an "s" where there is not one, such as "1 document" or "2,000 rows"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


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


def in_kernel() -> bool:
    """Whether this process is the kernel of a notebook; IPython is not imported for it."""
    return "IPython" in sys.modules and hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def in_lab() -> str:
    """The id of the running cell in JupyterLab; empty in any other front end, headless and outside of a kernel.

    JupyterLab sends the id with each request. papermill and nbclient do not, and must not get a widget, since nothing
    can draw it later.
    """
    cell = lab_cell()
    return cell.id if cell else ""


def lab_cell() -> LabCell | None:
    """The running cell in JupyterLab, or the one of the running callback; None elsewhere."""
    if cell := _callback_cell.get():
        return cell
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    parent = kernel.get_parent() if kernel else {}
    cell_id = parent.get("metadata", {}).get("cellId")
    return LabCell(str(cell_id), parent["header"]) if cell_id else None


def has_widgets() -> bool:
    """Whether a cell in JupyterLab is running and ipywidgets is installed."""
    return bool(in_lab()) and importlib.util.find_spec("ipywidgets") is not None


@contextmanager
def callback_of(cell: LabCell | None) -> Iterator[None]:
    """Within it, `lab_cell` returns this cell: for callbacks of its widgets."""
    token = _callback_cell.set(cell)
    try:
        yield
    finally:
        _callback_cell.reset(token)


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
