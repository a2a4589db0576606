"""The live view of runs: loss, pace and every GPU of every node, in a notebook, a terminal or a page."""

import itertools
import math
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from kit.errors import InputError
from kit.slurm.run import Run
from kit.watch import panels
from kit.watch.alerts import Alert, alerts, tell
from kit.watch.charts import Chart
from kit.watch.display import in_lab, publish
from kit.watch.online import sync
from kit.watch.status import Standing

POLL = 0.5  # seconds between looks at the files, and updates of the live widget: what is logged is seen in two
REDRAW = 10.0  # seconds between pictures, so that the notebook's file always holds a fresh one
FIRST = 0.5  # seconds that a person in JupyterLab is let wait for the first look
START = 0.05  # seconds until the first look, unless somebody waits for it: the cell that asks for a board ends sooner
SWITCH = 0.0005  # seconds for which a thread may keep the interpreter while another one waits; Python's own are 0.005
GAP = 0.002  # seconds of rest after each part of a long log, so that whoever uses the kernel is not in its way
LIVE = "-live"  # ends the display id of the widget's output
_shown: dict[str, "Board"] = {}  # by notebook cell: a board that takes another one's place ends it


def watch(
    *refs: str | Path | Run,
    smooth: float = 0.0,
    log: Sequence[str] = (),
    also: Sequence[str] = (),
    on_alert: Sequence[str] = (),
) -> "Board":
    """A board for a run, or for several in the same panels. Returns at once; as a cell's last value it shows itself.

    A run is a Run, its folder, name or job id, "entity/project/run" on a W&B server, a .wandb file, or a folder that
    holds W&B logs. What cannot be watched is told on the board. `smooth` is the weight of the past, 0 to 0.99; `log`
    are titles of panels with a logarithmic axis; `also` other logged names to draw; `on_alert` a command that is run
    without a shell for each alert, which it gets as its last argument.
    """
    return Board(refs, panels.View(smooth, list(log)), also, on_alert)


class Board:
    """What runs logged and how they are doing, read by a thread; nothing of it lives in this kernel alone."""

    def __init__(
        self, refs: Sequence[str | Path | Run], view: panels.View, also: Sequence[str], on_alert: Sequence[str]
    ) -> None:
        if not refs:
            raise InputError("watch() needs a run: its folder, name or job id.")
        self.runs = [Standing(ref) for ref in refs]
        self.view, self.also, self.on_alert = view, also, on_alert
        self._trouble = self._failed = ""  # of the user's command, and of the last look
        self._syncing: threading.Thread | None = None
        self._alerts: list[tuple[Standing, Alert]] = []
        self._displays: list[str] = []
        self._empty: list[str] = []  # those that have no widget yet
        self._lab = bool(in_lab(_shell()))
        self._widget: Any = None
        self._sent: dict[str, Any] = {}
        self._count = itertools.count()
        self._redrawn = -math.inf
        self._wake, self._looked, self._settled = threading.Event(), threading.Event(), threading.Event()
        self._stop, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._follow, daemon=True, name="board").start()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: the runs have ended and all of them is read, or the board was finished."""
        return self._closed.is_set()

    @property
    def refused(self) -> str:
        """Why there is nothing to watch, if so."""
        self._settle()
        return " ".join(run.refused for run in self.runs if run.refused)

    def status(self) -> str:
        """How the runs are, now, a line each: state, step, age of the newest row, time left, nodes, damage, source."""
        self._settle()
        return "\n".join(run.status() for run in self.runs)

    def text(self) -> str:
        """The board for a terminal."""
        self._settle()
        return panels.text(*self._parts())

    def svg(self) -> str:
        """The picture as it is now, with the time it was drawn: it holds without JavaScript."""
        self._settle()
        return panels.svg(*self._parts())

    def html(self) -> str:
        """A page that needs nothing else."""
        title = escape(", ".join(run.title for run in self.runs))
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'</head><body style="margin:24px;background:#fff">\n{self.svg()}\n</body></html>\n'
        )

    def charts(self) -> list[Chart]:
        """The panels, in reading order."""
        self._settle()
        return panels.charts(self.runs, self.view, self.also)

    def show(self) -> None:
        """Show it in this notebook cell and keep it up to date; outside a notebook, print it."""
        if _shell() is None:
            print(self.text())
            return
        if cell := in_lab(_shell()):
            self._lab = True
            if _shown.get(cell, self) is not self:
                _shown[cell].finish(quietly=True)
            _shown[cell] = self
        else:
            self._settle()
        display = uuid.uuid4().hex
        publish(display, self._picture())
        if cell:
            publish(display + LIVE, {"text/plain": ""})
            self._empty.append(display)
        self._redrawn = -math.inf if cell else time.monotonic()  # in JupyterLab at once: this one may lack all
        self._displays.append(display)
        self._wake.set()

    _ipython_display_ = show

    def wait(self, timeout: float | None = None) -> str:
        """Block until the runs have ended, for `timeout` seconds at most, and a sync has; the state, or several.

        Raises InputError where there is no run: a job that waits for it must not go on.
        """
        if self._closed.wait(timeout):
            if self._syncing:
                self._syncing.join()
            self._redraw()  # once more from here: papermill keeps only what comes while a cell runs
            if self.refused:
                raise InputError(self.refused)
        return ", ".join(run.state for run in self.runs)

    def finish(self, quietly: bool = False) -> None:
        """Stop watching: draw the last picture where the board was shown and, unless `quietly`, in this cell, too."""
        self._stop.set()
        self._wake.set()
        if quietly:
            return
        self._closed.wait(10)
        if self._lab:  # after a reload of the page no earlier output can be reached
            publish(uuid.uuid4().hex, self._picture())

    def sync(self, timeout: float = 600.0) -> None:
        """Bring what was logged offline to the W&B server, in processes of their own; the board tells how it goes."""
        self._syncing = threading.Thread(target=self._sync, args=(timeout,), daemon=True)
        self._syncing.start()

    def _sync(self, timeout: float) -> None:
        self._looked.wait()  # until then nobody knows where the runs are
        for run in self.runs:

            def say(line: str, run: Standing = run) -> None:
                run.note = f"sync: {line.removeprefix('wandb: ')}"
                if self.ended:
                    self._redraw()

            try:
                if run.folder is None:
                    raise InputError(f"{run.title} is on the server already.")
                sync(run.folder, say, timeout)
                say("done")
            except Exception as error:
                say(str(error))

    def _settle(self) -> None:
        """Wait until all that is there is read; in JupyterLab, where a person waits, only for the first look."""
        if self._lab:
            self._looked.wait(FIRST)
            return
        self._settled.clear()
        self._wake.set()
        while not (self._closed.is_set() or self._settled.wait(0.05)):
            pass

    def _notify(self) -> None:
        """Run the user's command for each alert that was not there before."""
        before = {alert.key for _, alert in self._alerts}
        self._alerts = [(run, alert) for run in self.runs for alert in alerts(run)]
        for run, alert in self._alerts:
            if self.on_alert and alert.key not in before:
                words = (self.on_alert, f"{run.title}: {alert.text}", self._tell_trouble)
                threading.Thread(target=tell, args=words, daemon=True).start()

    def _warnings(self) -> list[str]:
        several = len(self.runs) > 1
        texts = [f"{run.title}: {alert.text}" if several else alert.text for run, alert in self._alerts]
        more = [*panels.unknown(self.runs, self.also), self._trouble, self._failed]
        return texts + [sentence for sentence in more if sentence]

    def _tell_trouble(self, text: str) -> None:
        self._trouble = text

    def _parts(self) -> tuple[list[dict[str, Any]], list[str], list[Chart]]:
        heads = [panels.header(run) for run in self.runs]
        return heads, self._warnings(), panels.charts(self.runs, self.view, self.also)

    def _picture(self) -> dict[str, Any]:
        parts = self._parts()
        return {"image/svg+xml": panels.svg(*parts), "text/plain": panels.text(*parts)}

    def _follow(self) -> None:
        """The thread. It prints nothing, since that would land in whatever cell runs; trouble goes on the board."""
        sys.setswitchinterval(SWITCH)  # so that whoever uses the kernel does not feel this thread
        self._wake.wait(START)
        drawn = -math.inf
        while not self._stop.is_set():
            news = [run.look() for run in self.runs]
            if not any(news) or time.monotonic() - drawn > POLL:
                drawn = time.monotonic()
                self._try(self._refresh)
            self._looked.set()
            if any(news):
                time.sleep(GAP)
                continue
            if all(run.settled for run in self.runs):
                self._settled.set()
            if all(run.over for run in self.runs):
                break
            self._wake.wait(POLL)
            self._wake.clear()
        self._try(self._end)
        self._closed.set()

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._failed = ""
        except Exception as error:
            self._failed = f"{type(error).__name__}: {error}"

    def _refresh(self) -> None:
        self._notify()
        if self._lab and self._displays:
            self._update()
        if time.monotonic() - self._redrawn > REDRAW:
            self._redraw()

    def _update(self) -> None:
        """Send the widget what is new; it is made here, since loading its library takes a while.

        Every fourth time a panel is sent whole, in turn, for a page that was reloaded and may have missed an update.
        """
        heads, warnings, charts = self._parts()
        told = {alert.key: f"{run.title}: {alert.text}" for run, alert in self._alerts}
        plain = [panels.plain(chart) for chart in charts]
        now = {"runs": heads, "warnings": warnings, "alerts": told, "panels": plain}
        before, self._sent = self._sent, now
        turn, rest = divmod(next(self._count), 4)
        if self._widget is None:
            self._widget = _widget(lambda: self._sent, asdict(self.view))
            self._widget.observe(self._seen, "view")
        else:
            self._widget.delta = panels.delta(before, now, turn % len(plain) if rest == 0 else -1)
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        while self._empty:
            live = {"application/vnd.jupyter.widget-view+json": view, "text/plain": ""}
            publish(self._empty.pop() + LIVE, live, update=True)

    def _seen(self, change: Any) -> None:
        """A person has zoomed, say: what they look at is drawn finer."""
        self.view = panels.View(**change["new"])
        self._wake.set()

    def _redraw(self) -> None:
        self._redrawn = time.monotonic()
        for display in self._displays:
            publish(display, self._picture(), update=True)

    def _end(self) -> None:
        """The last picture; the widget's output becomes empty, so that none is left whose model is gone."""
        self._redraw()
        if self._widget is not None:
            for display in self._displays:
                publish(display + LIVE, {"text/plain": ""}, update=True)
            self._widget.close()
            self._widget = None
        for run in self.runs:
            run.close()


def _shell() -> Any:
    """The shell of the notebook or of IPython, if this is one; it is not worth loading."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def _widget(whole: Callable[[], dict[str, Any]], view: dict[str, Any]) -> Any:
    import anywidget
    import traitlets

    class Live(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget ships no types
        """`whole` is what a page gets that asks anew; from then on it gets each `delta`. `view` comes from the page."""

        _esm = Path(__file__).with_name("board.js").read_text()
        whole = traitlets.Dict().tag(sync=True, to_json=lambda _, __: whole())
        delta = traitlets.Dict().tag(sync=True)
        view = traitlets.Dict().tag(sync=True)

    return Live(view=view)
