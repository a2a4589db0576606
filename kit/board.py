"""The live view of a run: loss, pace and every GPU of every node, in a notebook, a terminal or a page."""

import math
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from kit import files
from kit.chart import COLOURS, GRID, INK, MUTED, POINTS, Chart, Line, fluid
from kit.errors import InputError, KitError
from kit.metrics import Metrics
from kit.run import Run
from kit.wandb_log import find_logs

POLL = 1.0  # seconds between looks at the files, and between updates of the live widget
REDRAW = 10.0  # seconds between pictures: the notebook's file always holds a fresh one
FIRST_LOOK = 0.3  # seconds of reading before the first picture of a long log
ASK = 10.0  # seconds between questions to Slurm
SILENT = 5.0  # seconds after which a node that samples once a second counts as silent
STALE = 600.0  # seconds without a byte after which wandb, too, takes a run without an exit record for dead
WIDTH, COLUMN, PANEL = 960, 490, 230  # pixels
LIVE = "-live"  # ends the display id of the widget's output
STEP, MINUTES = "optimizer step", "minutes since the first sample"


def watch(ref: "str | Path | Run") -> "Board":
    """A board for a run, its folder, its job id, or any folder that holds W&B logs. Returns at once.

    As the last value of a notebook cell it shows itself. Raises InputError where there is no such run.
    """
    return Board(ref)


class Board:
    """What a run logged and how it is doing, read from its folder; nothing of it lives in this kernel alone."""

    def __init__(self, ref: "str | Path | Run") -> None:
        self.run, self.folder = _find(ref)
        self.metrics = Metrics(self.folder)
        self._lock = threading.RLock()
        self._state, self._cause, self._over = "UNKNOWN", "", False
        self._asked = self._redrawn = -math.inf
        self._trouble = ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._displays: list[str] = []
        self._widget: Any = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: the run has ended and all of it is read, or the board was finished."""
        return self._closed.is_set()

    def status(self) -> str:
        """How the run is, now: state, step, age of the newest row, time left, nodes, damage, source."""
        with self._lock:
            self._read()
            return self._status()

    def svg(self) -> str:
        """The picture as it is now, with the time it was drawn: it holds without JavaScript."""
        with self._lock:
            self._read()
            return self._draw()

    def html(self) -> str:
        """A page that needs nothing else."""
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.folder.name)}</title>'
            f'</head><body style="margin:24px;background:#fff">\n{self.svg()}\n</body></html>\n'
        )

    def _status(self) -> str:
        metrics, (step, steps, left) = self.metrics, self._progress()
        facts = [self._state.lower() + (f" ({self._cause})" if self._cause else "")]
        if step or steps:
            facts.append(f"step {step:,}" + (f" of {steps:,}" if steps else ""))
        facts.append(f"newest row {_duration(time.time() - metrics.newest)} ago" if metrics.newest else "no row yet")
        if left > 0 and not self._over:
            facts.append(f"about {_duration(left)} left")
        facts += self._nodes()
        facts.append(f"{metrics.damaged} damaged records")
        facts.append(f"from {metrics.source}" if metrics.source else "no W&B log yet")
        return " · ".join(facts + [text for text in (metrics.problem, self._trouble) if text])

    def _progress(self) -> tuple[int, int, float]:
        """(optimizer steps done, steps in all, seconds left), 0 where nobody said; kit.train tells the last two."""
        done = int(self.metrics.last("train/global_step") or 0)
        path = self.folder / "state" / "progress.json"
        if not path.is_file():
            return done, 0, 0.0
        told = files.read_json(path)
        return max(done, told["step"]), told["max_steps"], told["eta_s"] - (time.time() - path.stat().st_mtime)

    def _nodes(self) -> list[str]:
        nodes, expected = self.metrics.nodes, self.metrics.expected
        if not nodes:
            return [f"0 of {expected} nodes reporting"] if expected else []
        newest = max(nodes.values()) if self._over else time.time()
        silent = {node: newest - seen for node, seen in nodes.items() if newest - seen > SILENT}
        of = max(expected, len(nodes))
        verb = "reported" if self._over else "reporting"
        names = ", ".join(f"{node} silent for {_duration(age)}" for node, age in sorted(silent.items()))
        return [f"{len(nodes) - len(silent)} of {of} nodes {verb}" + (f" ({names})" if names else "")]

    def _read(self, seconds: float = math.inf) -> bool:
        """Ask for the state, then read what is there, for so many seconds at most. True if there was anything new."""
        with self._lock:
            if self.run is not None and time.monotonic() - self._asked > ASK:
                self._ask(self.run)
            until, new = time.monotonic() + seconds, False
            while time.monotonic() < until and self.metrics.poll():
                new = True
            if self.run is None:
                self._judge()
            return new

    def _ask(self, run: Run) -> None:
        from kit.slurm import state

        self._asked = time.monotonic()
        try:
            found = state(run)
            self._state, self._over, self._cause = found.state, found.ended, found.cause
        except KitError as error:
            self._state, self._cause = "UNKNOWN", str(error)

    def _judge(self) -> None:
        """The state of a run that is known by its W&B log alone."""
        code, logs = self.metrics.exit_code, find_logs(self.folder)
        if code is not None:
            self._state, self._cause = ("FAILED", f"exit code {code}") if code else ("FINISHED", "")
        elif logs and (age := time.time() - max(log.stat().st_mtime for log in logs)) > STALE:
            self._state, self._cause = "STALE", f"nothing was written for {_duration(age)}"
        else:
            self._state, self._cause = ("RUNNING", "") if logs else ("WAITING", "")
        self._over = self._state in ("FINISHED", "FAILED", "STALE")

    def charts(self) -> list[Chart]:
        """The panels, in reading order."""
        load = "CPU" if all(index == "cpu" for _, index in self._places()) else "GPU"
        return [
            Chart("Loss", STEP, "cross-entropy (nats)", self._logged(train="train/loss", eval="eval/loss")),
            Chart("Throughput", STEP, "tokens/s", self._logged(all_ranks="train/tokens_per_s"), low=0),
            Chart("Learning rate", STEP, "learning rate", self._logged(learning_rate="train/learning_rate"), low=0),
            Chart("Gradient norm", STEP, "norm", self._logged(gradient_norm="train/grad_norm"), low=0),
            Chart(f"{load} utilisation", MINUTES, "%", self._sampled("util"), low=0, high=100),
            Chart(f"{load} memory", MINUTES, "GiB", self._sampled("mem_gib") + self._capacity(), low=0),
        ]

    def _logged(self, **keys: str) -> list[Line]:
        found = {name.replace("_", " "): key for name, key in keys.items() if key in self.metrics.series}
        return [Line(name, *self.metrics.line(key, POINTS)) for name, key in found.items()]

    def _places(self) -> list[tuple[str, int | str]]:
        """(host, GPU index) of every GPU, or (host, "cpu") of every node where no GPU is seen."""
        places = {key[:2] for key in self.metrics.series if isinstance(key, tuple)}
        return sorted((p for p in places if p[1] != "cpu"), key=str) or sorted(places, key=str)

    def _sampled(self, reading: str) -> list[Line]:
        """A line for each place; when they are more than there are colours, all of a node share its name."""
        places, lines = self._places(), []
        for host, index in places:
            if (host, index, reading) in self.metrics.series:
                own_name = index != "cpu" and len(places) <= len(COLOURS)
                x, y = self.metrics.line((host, index, reading), POINTS)
                lines.append(Line(f"{host} GPU {index}" if own_name else host, self._minutes(x), y))
        return lines

    def _capacity(self) -> list[Line]:
        """The memory of the smallest GPU."""
        sizes = [series for key, series in self.metrics.series.items() if key[2:] == ("mem_total_gib",)]
        smallest = sorted(sizes, key=lambda size: size.values[-1])[:1]
        ends = [(self._minutes(np.array([s.steps[0], s.steps[-1]])), [s.values[-1]] * 2) for s in smallest]
        return [Line("capacity", x, y, limit=True) for x, y in ends]

    def _minutes(self, times: Any) -> Any:
        return (times - self.metrics.first_sample) / 60

    def _header(self) -> dict[str, Any]:
        good = {"RUNNING": COLOURS[0], "COMPLETED": COLOURS[2], "FINISHED": COLOURS[2]}
        colour = good.get(self._state, COLOURS[1] if self._over else COLOURS[3])
        step, steps, _ = self._progress()
        done = min(1.0, step / steps) if steps else 0.0
        return {"title": self.folder.name, "status": self._status(), "colour": colour, "done": done}

    def _draw(self) -> str:
        head, charts = self._header(), self.charts()
        lines = textwrap.wrap(head["status"], 150)
        top = 46 + 16 * len(lines)
        height = top + PANEL * math.ceil(len(charts) / 2)
        body = f'<circle cx="6" cy="13" r="5" fill="{head["colour"]}"/>'
        body += f'<text x="18" y="18" font-size="15" font-weight="600" fill="{INK}">{escape(head["title"])}</text>'
        body += f'<text x="{WIDTH}" y="18" text-anchor="end">as of {time.strftime("%Y-%m-%d %H:%M:%S")}</text>'
        body += "".join(f'<text y="{38 + 16 * i}" fill="{INK}">{escape(line)}</text>' for i, line in enumerate(lines))
        for width, fill in ((WIDTH, GRID), (WIDTH * head["done"], head["colour"])):
            body += f'<rect y="{top - 18}" width="{width:.0f}" height="4" rx="2" fill="{fill}"/>'
        for i, chart in enumerate(charts):
            place = f"translate({i % 2 * COLUMN} {top + i // 2 * PANEL})"
            body += f'<g transform="{place}">{chart.svg(height=PANEL - 10)}</g>'
        return fluid(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'font-family="sans-serif" font-size="12" fill="{MUTED}"><rect width="100%" height="100%" fill="#fff"/>'
            f"{body}</svg>"
        )

    def _live(self) -> dict[str, Any]:
        """What the widget draws."""
        return self._header() | {"panels": [_panel(chart) for chart in self.charts()]}

    def _picture(self) -> dict[str, Any]:
        with self._lock:
            return {"image/svg+xml": self._draw(), "text/plain": self._status()}

    def show(self) -> None:
        """Show it in this notebook cell and keep it up to date; outside a notebook, print the status."""
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None:
            print(self.status())
            return
        self._read(FIRST_LOOK if _in_lab(shell) else math.inf)
        self._displays.append(uuid.uuid4().hex)
        _publish(self._displays[-1], self._picture())
        if _in_lab(shell):
            self._widget = self._widget or _widget(self._live())
            view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
            _publish(self._displays[-1] + LIVE, {"application/vnd.jupyter.widget-view+json": view, "text/plain": ""})
        self._start()

    _ipython_display_ = show

    def wait(self, timeout: float | None = None) -> str:
        """Block until the run has ended, for `timeout` seconds at most; the run's state."""
        self._start()
        if self._closed.wait(timeout):
            self._close()  # once more from here: papermill keeps only what comes while a cell runs
        return self._state

    def finish(self) -> None:
        """Stop watching: draw the last picture where the board was shown, and in JupyterLab in this cell, too."""
        from IPython import get_ipython

        self._close()
        if _in_lab(get_ipython()):  # after a reload of the page no earlier output can be reached
            _publish(uuid.uuid4().hex, self._picture())

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, daemon=True, name=f"board {self.folder.name}")
            self._thread.start()

    def _follow(self) -> None:
        """The thread. It prints nothing, since that would land in whatever cell runs; trouble goes into the status."""
        while not self._closed.wait(POLL):
            with self._lock:
                self._trouble = ""
                new = self._try(self._read)
                if self._over and not new:
                    self._closed.set()
                    self._redrawn = -math.inf  # the last picture
                self._try(self._refresh)

    def _try(self, action: Callable[[], bool | None]) -> bool:
        try:
            return bool(action())
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
            return False

    def _refresh(self) -> None:
        if self._widget is not None:
            self._widget.data = self._live()
        if time.monotonic() - self._redrawn > REDRAW:
            self._redrawn = time.monotonic()
            for display in self._displays:
                _publish(display, self._picture(), update=True)

    def _close(self) -> None:
        """The last picture; the widget's output becomes empty, so that none is left whose model is gone."""
        with self._lock:
            self._closed.set()
            self._redrawn = -math.inf
            self._refresh()
            if self._widget is not None:
                for display in self._displays:
                    _publish(display + LIVE, {"text/plain": ""}, update=True)
                self._widget.close()
                self._widget = None


def _publish(display: str, data: dict[str, Any], update: bool = False) -> None:
    from IPython.display import publish_display_data

    publish_display_data(data, transient={"display_id": display}, update=update)


def _find(ref: "str | Path | Run") -> tuple[Run | None, Path]:
    if isinstance(ref, Run):
        return ref, ref.path
    folder = Path(ref)
    if (folder / "run.json").is_file() or not folder.is_dir():
        run = Run.attach(ref)
        return run, run.path
    if not find_logs(folder) and not (folder / "wandb").is_dir():
        raise InputError(f"{folder} is neither a run (it has no run.json) nor does it hold a wandb folder.")
    return None, folder.absolute()


def _duration(seconds: float) -> str:
    """In the unit that a person would take: 42 s, 12 min, 3.5 h, 2 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds:.0f} s"


def _panel(chart: Chart) -> dict[str, Any]:
    """A chart as JSON: None where a value is not finite."""

    def plain(values: Any) -> list[float | None]:
        return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]

    lines = [
        {"name": d.line.name, "limit": d.line.limit, "colour": d.colour, "x": plain(d.x), "y": plain(d.y)}
        for d in chart.drawn()
    ]
    ends = {"low": plain([chart.low])[0], "high": plain([chart.high])[0]}
    return {"title": chart.title, "x_title": chart.x_title, "y_title": chart.y_title, "lines": lines} | ends


def _in_lab(shell: Any) -> bool:
    """JupyterLab names the cell in each request; papermill and nbclient do not, and must not meet a widget."""
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and "cellId" in kernel.get_parent().get("metadata", {})


def _widget(data: dict[str, Any]) -> Any:
    import anywidget
    import traitlets

    class Live(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget ships no types
        _esm = Path(__file__).with_name("board.js").read_text()
        data = traitlets.Dict().tag(sync=True)

    return Live(data=data)
