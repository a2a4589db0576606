"""The board on a terminal: a full-screen view with keys, by rich."""

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kit.figures.charts import Chart, number
from kit.figures.palette import BAD, ORANGE
from kit.watch.braille import AXIS, TextChart, text_chart
from kit.watch.gpu_table import GpuRow, gpu_rows, spark

if TYPE_CHECKING:
    from kit.watch.board import Board

INTERVAL = 1.0  # seconds between pictures
BAR = "▏▎▍▌▋▊▉█"
KEYS = "q leave   ← → run   ↑ ↓ scroll GPUs"
LEAVE = ("q", "\x03", "\x1b")  # also Ctrl-C and Escape
RUNS = {"\x1b[C": 1, "n": 1, "\t": 1, "\x1b[D": -1, "p": -1}  # arrow right and left; runs to move by
ROWS = {"\x1b[A": -4, "\x1b[B": 4}  # arrow up and down; GPUs to scroll by


def show(board: "Board") -> None:
    """Fill the terminal with the board until the runs have ended or a key leaves it."""
    console = Console()
    place = top = 0
    with keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(board, place, top, console.width, console.height), refresh=True)
            key = pressed(INTERVAL)
            if key in LEAVE:
                return
            place = (place + RUNS.get(key, 0)) % len(board.runs)
            top = max(0, top + ROWS.get(key, 0))


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """A function that returns the key that is pressed within so many seconds, or an empty string."""
    stream = sys.stdin.fileno()
    before = termios.tcgetattr(stream)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([stream], [], [], seconds)
        return os.read(stream, 8).decode(errors="replace") if ready else ""

    tty.setcbreak(stream)
    try:
        yield pressed
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)


def screen(board: "Board", place: int, top: int, width: int, height: int) -> RenderableType:
    """The view of one run of the board on a terminal of that size; GPUs from the `top`-th on."""
    run = board.runs[place]
    head = board.header_of(place)
    parts = [_title(head.title, head.colour, place, len(board.runs)), Text(head.status), _progress(head.done, width)]
    parts += [Text(head.verdict, style=ORANGE)] if head.verdict else []
    parts += [Text(f"▲ {warning}", style=BAD) for warning in board.warnings()]
    used = sum(len(text.wrap(Console(width=width), width)) for text in parts) + 1
    rows = gpu_rows(run)
    room = height - used - 1
    of_gpus = min(len(rows) + 1, max(4, room // 2)) if rows else 0
    parts += _charts(board.charts_of(place), width, room - of_gpus)
    parts += _gpus(rows, width, of_gpus, top)
    return Group(*parts, Text(KEYS, style="dim"))


def _title(name: str, colour: str, place: int, runs: int) -> Text:
    several = f"   run {place + 1} of {runs}" if runs > 1 else ""
    return Text.assemble(("● ", colour), (name, "bold"), (several, "dim"))


def _progress(done: float, width: int) -> Text:
    filled = round(done * (width - 6))
    return Text.assemble(("━" * filled, "green"), ("━" * (width - 6 - filled), "dim"), f" {done:4.0%}")


def _charts(charts: Sequence[Chart], width: int, height: int) -> list[Text]:
    """The loss above all, and the throughput next to it where there is room."""
    if height < 5:
        return []
    shown = [chart for chart in charts if not chart.hardware][:2]
    count = len(shown) if width >= 100 else min(1, len(shown))
    each = (width - 2 * (count - 1)) // max(1, count)
    columns = [_chart_rows(chart, each, height) for chart in shown[:count]]
    return [_side_by_side(row, each) for row in zip(*columns, strict=True)]


def _side_by_side(row: Sequence[Text], width: int) -> Text:
    line = Text()
    for index, text in enumerate(row):
        text.truncate(width, pad=index + 1 < len(row))
        line += text
        line.append("  " if index + 1 < len(row) else "")
    return line


def _chart_rows(chart: Chart, width: int, height: int) -> list[Text]:
    """Exactly `height` rows: title with the newest values, the chart, its x axis."""
    drawn = [line for line in chart.drawn() if not line.line.limit]
    title = Text.assemble((chart.title, "bold"), f" ({chart.y_title})")
    for line in drawn:
        title.append(f"  {line.line.name} {number(line.y[-1])}", style=line.colour)
    if chart.not_finite:
        title.append(f"  NaN or infinite: {chart.not_finite:,}", style=f"bold {BAD}")
    body = text_chart(drawn, width, height - 1)
    rows = [
        title,
        *(_body_rows(body, [line.colour for line in drawn], chart.x_title) if body else [Text("nothing logged yet")]),
    ]
    return [*rows, *(Text() for _ in range(height - len(rows)))][:height]


def _body_rows(body: TextChart, colours: Sequence[str], x_title: str) -> list[Text]:
    rows = []
    for row, label in enumerate(body.labels):
        text = Text(f"{label:>{AXIS - 2}} │", style="dim")
        for dots, line in zip(body.canvas.dots[row], body.canvas.line[row], strict=True):
            text.append(chr(0x2800 + dots) if line >= 0 else " ", style=f"not dim {colours[line]}" if line >= 0 else "")
        rows.append(text)
    axis = Text(" " * (AXIS - 1) + "└" + "─" * body.canvas.columns, style="dim")
    numbers = " " * AXIS + body.x_numbers
    named = numbers.rstrip() + f"  {x_title}"
    return [*rows, axis, Text(named if len(named) <= len(numbers) else numbers, style="dim")]


def _gpus(rows: Sequence[GpuRow], width: int, height: int, top: int) -> list[Text]:
    """A line for each GPU; where they are more than fit, a part of them, slow ones marked."""
    if not rows:
        return []
    slow = [row.label for row in rows if row.marked]
    title = Text.assemble(("GPUs", "bold"), (f"  different: {', '.join(slow)}" if slow else "", f"bold {BAD}"))
    overview = list(_overview(rows, width)) if len(rows) > height - 1 else []
    fitting = max(0, height - 1 - len(overview))
    top = min(top, max(0, len(rows) - fitting))
    shown = rows[top : top + fitting]
    if overview:
        title.append(f"  below: {top + 1} to {top + len(shown)} of {len(rows)}", style="dim")
    longest = max((len(row.label) for row in shown), default=0)
    return [title, *overview, *(_gpu(row, width, longest) for row in shown)][:height]


def _overview(rows: Sequence[GpuRow], width: int) -> Iterator[Text]:
    """Every GPU as a block as high as its utilisation, by nodes."""
    line = Text()
    for node, group in groupby(rows, key=lambda row: row.node):
        part = Text(f"{node} ")
        for row in group:
            part.append("?" if row.util is None else spark(row.util), style=BAD if row.marked else "green")
        if line.cell_len and line.cell_len + 2 + part.cell_len > width:
            yield line
            line = Text()
        line += Text("  " if line.cell_len else "") + part
    yield line


def _gpu(row: GpuRow, width: int, longest: int) -> Text:
    values = (
        f" {_value(row.util):>4} %  {_memory(row):>14} GiB  {_value(row.power):>5} W  {_value(row.temperature):>3} °C"
    )
    label = row.label.ljust(longest)[: max(8, width // 4)]
    room = max(0, width - len(label) - len(values) - 2)
    size = min(20, room // 2) if row.course else room
    style = BAD if row.marked else "green"
    text = Text.assemble((label, f"bold {BAD}" if row.marked else ""), " ", (_bar(row.util, size), style), values)
    course = row.course[-max(0, room - size - 2) :] if room - size > 4 else ""
    text.append(f"  {course}" if course else "", style=ORANGE if row.marked else "cyan")
    text.truncate(width)
    return text


def _bar(percent: float | None, size: int) -> str:
    """A bar in eighths of a character."""
    eighths = round(8 * size * min(100.0, max(0.0, percent or 0.0)) / 100)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BAR[rest - 1] if rest else "")).ljust(size, "·")


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _memory(row: GpuRow) -> str:
    total = f" of {row.capacity:.0f}" if row.capacity else ""
    return "-" if row.memory is None else f"{row.memory:.1f}{total}"
