"""The live board of runs: loss, throughput and every GPU of every node, in a notebook, on a terminal or as a page."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError
from kit.figures.base import PLOTLY
from kit.figures.charts import Chart
from kit.figures.png import SVG, static_picture
from kit.show import Part, Result, in_lab
from kit.slurm.run import Run
from kit.watch import panels, picture
from kit.watch.alerts import Alert, find_alerts, run_command
from kit.watch.background import short_switch_interval
from kit.watch.figure import plotly_dict
from kit.watch.gpu_table import gpu_table
from kit.watch.hardware import heat_maps
from kit.watch.live import PICTURE_INTERVAL, CellOutputs, MimeData
from kit.watch.status import NO_ANSWER, RunStatus, coarse_duration
from kit.watch.sync import sync
from kit.watch.view import View

INTERVAL = 0.5  # seconds between looks at the files, and updates of the widget
START = 0.05  # seconds until the first look, so that the cell that makes a board ends sooner
FIRST = 0.5  # seconds that JupyterLab waits for the first look
REST = 0.002  # seconds after each part of a long log, in which cells can run
STATIC = "static picture, renewed every 10 s: {}"
NO_CELL = STATIC.format("this front end sends no cell id; JupyterLab shows a live view")
_in_cell: dict[str, "Board"] = {}  # by id of the notebook cell; a new board there ends the old one


def watch(
    *refs: str | Path | Run,
    smooth: float = 0.0,
    log: Sequence[str] = (),
    also: Sequence[str] = (),
    on_alert: Sequence[str] = (),
    page: str | Path = "",
) -> "Board":
    """A board of a run, or of several runs in the same panels. Returns at once; the last value of a cell shows itself.

    A run is a Run, its folder, name or job id, "entity/project/run" on a W&B server, a .wandb file, or a folder with
    W&B logs. What cannot be watched is a sentence on the board. `smooth` is the weight of the past in the moving
    average, 0 to 0.99; `log` are titles of panels with a logarithmic axis; `also` are other logged names to draw;
    `on_alert` is a command that is run without a shell for each alert, with the alert as its last argument; `page` is
    a file that is written anew as an HTML page every ten seconds until the runs have ended.
    """
    if not refs:
        raise InputError("watch() needs a run: its folder, name or job id.")
    return Board([RunStatus(ref) for ref in refs], View(smooth, list(log)), also, on_alert, page)


class Board(Result):
    """What runs have logged and how they are doing. A daemon thread reads the files; nothing else holds any state."""

    def __init__(
        self,
        runs: Sequence[RunStatus],
        view: View,
        also: Sequence[str],
        on_alert: Sequence[str],
        page: str | Path = "",
    ) -> None:
        self.runs, self.view = runs, view
        self._page, self._page_written = Path(page) if page else None, -math.inf
        self._also, self._on_alert = also, on_alert
        self._alerts: list[tuple[RunStatus, Alert]] = []
        self._missing = ""  # the package without which there is no live view
        self._failure = self._command_failure = ""  # of the last refresh, and of the user's command
        self._syncing: threading.Thread | None = None
        self._lab = bool(in_lab())
        self._outputs = CellOutputs(self._mime_data, self._change_view)
        self._last_look = time.monotonic()
        self._wake = threading.Event()  # look now
        self._looked = threading.Event()  # the first look is done
        self._settled = threading.Event()  # all that is there has been read
        self._stop = threading.Event()
        self._closed = threading.Event()  # the thread has ended
        threading.Thread(target=self._follow, daemon=True, name="board").start()

    @property
    def launched(self) -> list[Run]:
        """The runs of the board that have a run folder; W&B logs and runs of a server have none."""
        return [status.run for status in self.runs if status.run]

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: all runs have ended and are read, or the board was finished."""
        return self._closed.is_set()

    @property
    def refused(self) -> str:
        """Why there is nothing to watch, or an empty string."""
        self._settle()
        return " ".join(run.refused for run in self.runs if run.refused)

    def status(self) -> str:
        """A line for each run: state, step, age of the newest row, time left, nodes, damage, source."""
        self._settle()
        return "\n".join(run.line() for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        """Status, alerts and the newest value of each logged metric; null where it is not finite."""
        self._settle()
        return {
            "runs": [run.as_dict() | {"metrics": _newest_values(run)} for run in self.runs],
            "alerts": [{"run": run.title, "text": alert.text} for run, alert in self._alerts],
            "warnings": self._warnings(),
        }

    def parts(self) -> Iterator[Part]:
        """Status lines, warnings, and a table of the newest values."""
        self._settle()
        yield from self._parts()

    def _parts(self) -> Iterator[Part]:
        several = len(self.runs) > 1
        yield from (f"{run.title}: {run.line()}" if several else run.line() for run in self.runs)
        yield from (head.verdict for head in self._headers() if head.verdict)
        yield from (f"! {warning}" for warning in self._warnings())
        tables = (picture.table(self._charts()), gpu_table(self.runs))
        yield from (table for table in tables if table.rows)

    def svg(self) -> str:
        """The picture of the board now."""
        self._settle()
        return self._svg()

    def html(self) -> str:
        """The picture as a page that needs nothing else."""
        self._settle()
        return self._html()

    def _html(self) -> str:
        """The page; while a run goes on, a browser loads it again every ten seconds."""
        title = escape(", ".join(run.title for run in self.runs))
        over = all(run.over for run in self.runs)
        again = "" if over else f'<meta http-equiv="refresh" content="{PICTURE_INTERVAL:.0f}">'
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{again}<title>{title}</title>'
            f'</head><body style="margin:24px;background:#fff">\n{self._svg()}\n</body></html>\n'
        )

    def _write_page(self, only_if_due: bool = False) -> None:
        due = time.monotonic() - self._page_written > PICTURE_INTERVAL
        if self._page is not None and (due or not only_if_due):
            self._page_written = time.monotonic()
            files.write(self._page, self._html())

    def header_of(self, place: int) -> panels.Header:
        """The header of one run, by its place among the runs."""
        return panels.header(self.runs[place])

    def charts_of(self, place: int) -> list[Chart]:
        """The panels of one run, by its place among the runs."""
        return panels.charts([self.runs[place]], self.view, self._also)

    def warnings(self) -> list[str]:
        """What is wrong now, as sentences."""
        return self._warnings()

    def charts(self) -> list[Chart]:
        """The panels, in reading order."""
        self._settle()
        return self._charts()

    def _ipython_display_(self) -> None:
        """Show the board in this notebook cell and keep it up to date; in a terminal print it."""
        shell = _shell()
        if getattr(shell, "kernel", None) is None:
            print(self)
            return
        cell = in_lab()
        if cell:
            self._lab = True
            previous = _in_cell.get(cell, self)
            if previous is not self:
                previous.stop()
            _in_cell[cell] = self
        else:
            self._settle()
        self._outputs.add(live=bool(cell), quick=bool(cell) and not self.ended)
        self._wake.set()

    def wait(self, timeout: float | None = None) -> str:
        """Block until the runs have ended and a sync is done, at most `timeout` seconds; returns the state(s).

        Raises InputError where there is no run, as a job that waits for it must not go on.
        """
        if self._closed.wait(timeout):
            if self._syncing:
                self._syncing.join()
            self._outputs.redraw()  # here, as papermill keeps only what is sent while a cell runs
            if self.refused:
                raise InputError(self.refused)
        return ", ".join(run.state for run in self.runs)

    def stop(self) -> None:
        """Stop watching; the last pictures are drawn in the background."""
        self._stop.set()
        self._wake.set()

    def finish(self) -> None:
        """Stop watching, and show the last picture in this cell, too: earlier outputs are lost after a page reload."""
        self.stop()
        self._closed.wait(10)
        if self._lab:
            self._outputs.show_once()

    def sync(self, timeout: float = 600.0) -> None:
        """Upload what was logged offline to the W&B server, in the background; the status line shows its progress."""
        self._syncing = threading.Thread(target=self._sync, args=(timeout,), daemon=True)
        self._syncing.start()

    def _sync(self, timeout: float) -> None:
        self._looked.wait()  # the folders are known from then on
        for run in self.runs:

            def echo(line: str, run: RunStatus = run) -> None:
                run.note = f"sync: {line.removeprefix('wandb: ')}"
                if self.ended:
                    self._outputs.redraw()

            try:
                if run.folder is None:
                    raise InputError(f"{run.title} is on the server already.")
                sync(run.folder, echo, timeout)
                echo("done")
            except Exception as error:  # whatever it is, the board shows it
                echo(str(error))

    def _settle(self) -> None:
        """Wait until everything is read; in JupyterLab, where a person waits, only for the first look."""
        if self._lab:
            self._looked.wait(FIRST)
            return
        self._settled.clear()
        self._wake.set()
        while not self._closed.is_set() and not self._settled.wait(0.05) and not self._stalled():
            pass

    def _stalled(self) -> float:
        """Seconds since the thread last finished a look, where that is too long: the file system does not answer."""
        silence = time.monotonic() - self._last_look
        return silence if silence > NO_ANSWER and not self.ended else 0.0

    def _warnings(self) -> list[str]:
        several = len(self.runs) > 1
        sentences = [f"{run.title}: {alert.text}" if several else alert.text for run, alert in self._alerts]
        sentences += panels.unknown(self.runs, self._also)
        if stalled := self._stalled():
            sentences.append(f"the files of the run could not be read for {coarse_duration(stalled)}")
        return sentences + [text for text in (self._command_failure, self._failure) if text]

    def _charts(self) -> list[Chart]:
        return panels.charts(self.runs, self.view, self._also)

    def _headers(self) -> list[panels.Header]:
        return [panels.header(run) for run in self.runs]

    def _svg(self, note: str = "") -> str:
        return picture.svg(self._headers(), self._warnings(), self._charts(), heat_maps(self.runs, self.view), note)

    def _mime_data(self, quick: bool = False) -> MimeData:
        """What a cell shows, from what is known now; `quick`: without a PNG, which takes half a second."""
        static = not self._lab and not all(run.over for run in self.runs)
        missing = (
            STATIC.format(f"{self._missing}; pip install anywidget, and restart the kernel") if self._missing else ""
        )
        note = missing or (NO_CELL if static else "")
        text = "\n".join([*map(str, self._parts()), *([note] if note else [])])
        svg = self._svg(note)
        drawn, metadata = ({SVG: svg}, {}) if quick else static_picture(svg, picture.WIDTH, in_child=self._lab)
        figure = self._figure() if all(run.over for run in self.runs) else {}
        return {**figure, **drawn, "text/plain": text}, metadata

    def _figure(self) -> dict[str, Any]:
        """MIME data of the figure of runs that have ended; nothing where they have logged nothing."""
        charts = [chart for chart in self._charts() if chart.lines]
        title = ", ".join(run.title for run in self.runs)
        return {PLOTLY: plotly_dict(title, charts, heat_maps(self.runs, self.view))} if charts else {}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        self._settle()
        return self._mime_data()

    def _follow(self) -> None:
        """The thread. It prints nothing, as that would land in whatever cell runs; errors are shown on the board."""
        try:
            self._wake.wait(START)
            self._look_until_the_end()
        except Exception as error:
            self._failure = f"the board has stopped: {type(error).__name__}: {error}"
        self._try(self._write_page)
        self._try(self._outputs.close)
        for run in self.runs:
            self._try(run.close)
        self._looked.set()
        self._closed.set()

    def _look_until_the_end(self) -> None:
        refreshed = -math.inf
        if self._outputs.is_live:  # the page makes the panels while the files are opened
            self._try(self._refresh)
        while not self._stop.is_set():
            with short_switch_interval():
                updated = [run for run in self.runs if run.update()]
                self._last_look = time.monotonic()
                if not updated or self._last_look - refreshed > INTERVAL:
                    refreshed = self._last_look
                    self._try(self._refresh)
            self._looked.set()
            if updated:
                time.sleep(REST)
                continue
            if all(run.settled for run in self.runs):
                self._settled.set()
            if all(run.over for run in self.runs):
                return
            self._wake.wait(INTERVAL)
            self._wake.clear()

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"

    def _refresh(self) -> None:
        self._judge()
        if self._outputs.is_live:
            maps = heat_maps(self.runs, self.view)
            now = picture.as_json(self._headers(), self._warnings(), self._charts(), maps)
            now["axes"] = panels.axes(self.runs)
            now["alerts"] = {alert.key: f"{run.title}: {alert.text}" for run, alert in self._alerts}
            try:
                self._outputs.update(now, self.view)
            except ImportError as error:
                self._missing = f"the kernel has no package {error.name}"
                self._outputs.give_up_live()
        self._outputs.refresh_pictures()
        if not any(run.catching_up for run in self.runs):
            self._write_page(only_if_due=True)
        self._failure = ""

    def _judge(self) -> None:
        """Find the alerts, and run the user's command for each one that is new."""
        before = {alert.key for _, alert in self._alerts}
        self._alerts = [(run, alert) for run in self.runs for alert in find_alerts(run)]
        for run, alert in self._alerts:
            if self._on_alert and alert.key not in before:
                text = f"{run.title}: {alert.text}"
                threading.Thread(target=self._run_command, args=(text,), daemon=True).start()

    def _run_command(self, text: str) -> None:
        self._command_failure = run_command(self._on_alert, text)

    def _change_view(self, view: View) -> None:
        self.view = view
        self._wake.set()


def _shell() -> Any:
    """The shell of the notebook or of IPython, or None; IPython is not imported for it."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def _newest_values(run: RunStatus) -> Mapping[str, float | None]:
    names = [key for key in list(run.metrics.series) if isinstance(key, str)]
    values = {name: run.metrics.last(name) for name in sorted(names)}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
