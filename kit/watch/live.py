"""What a board shows in notebook cells: a picture, and in JupyterLab a live widget under it (board.js).

Measured in JupyterLab 4.6: display ids are gone after a reload of the page, widgets come back; a widget alone is blank
in the saved notebook, a picture alone has no zoom. So each cell gets both, and board.js hides the picture while it is
live.
"""

import itertools
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kit.watch.background import Background
from kit.watch.display import publish
from kit.watch.picture import delta
from kit.watch.view import View

PICTURE_INTERVAL = 10.0  # seconds between pictures, so that the notebook's file always holds a fresh one
FIRST_PICTURE = 1.5  # seconds until the first one that is not quick: drawing it takes a core, which the page needs
COMPLETE_EVERY = 4  # every fourth update sends a panel with all its points, for a page that has missed an update
WIDGET = "application/vnd.jupyter.widget-view+json"
NOTHING = {"text/plain": ""}
NO_MANAGER = "A live view needs a front end that shows Jupyter widgets. The picture above is renewed every 10 s."
MimeData = tuple[dict[str, Any], dict[str, Any]]


class CellOutputs:
    """The outputs of one board. `picture` makes MIME data with metadata; `on_view` gets the view that was chosen.

    `picture(True)` is one that is ready at once, for a cell that gets the widget a moment later.
    """

    def __init__(self, picture: Callable[[bool], MimeData], on_view: Callable[[View], None]) -> None:
        self._picture, self._on_view = picture, on_view
        self._drawing = threading.Lock()
        self._pictures = Background(self.redraw, PICTURE_INTERVAL)
        self._displays: list[str] = []  # ids of the pictures
        self._live: list[str] = []  # ids of the outputs for the widget
        self._without_widget: list[str] = []
        self._widget: Any = None
        self._sent: dict[str, Any] = {}  # what the widget knows
        self._count = itertools.count()

    @property
    def is_live(self) -> bool:
        """Whether some cell shows the widget, or waits for it."""
        return bool(self._live)

    def add(self, live: bool, quick: bool) -> None:
        """Show the board in the running cell; `live`: with the widget, which the next update brings."""
        display = uuid.uuid4().hex
        publish(display, *self._picture(quick))
        self._displays.append(display)
        self._pictures = Background(self.redraw, PICTURE_INTERVAL, FIRST_PICTURE)  # so far nothing may have been read
        if live:
            publish(f"{display}-live", NOTHING)
            self._live.append(f"{display}-live")
            self._without_widget.append(f"{display}-live")

    def show_once(self) -> None:
        """Show the picture in the running cell, where it stays as it is."""
        publish(uuid.uuid4().hex, *self._picture(False))

    def update(self, now: dict[str, Any], view: View) -> None:
        """Send the widget what is new. It is made here, in the board's thread, as its library takes time to load."""
        before, self._sent = self._sent, now
        turn, rest = divmod(next(self._count), COMPLETE_EVERY)
        if self._widget is None:
            self._widget = _make_widget(lambda: delta({}, self._sent), asdict(view))
            self._widget.observe(lambda change: self._on_view(View(**change["new"])), "view")
        else:
            panels = max(1, len(now["panels"]))
            self._widget.delta = delta(before, now, turn % panels if rest == 0 else -1)
        view_of_widget = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        while self._without_widget:
            publish(self._without_widget.pop(), {WIDGET: view_of_widget, "text/plain": NO_MANAGER}, update=True)

    def give_up_live(self) -> None:
        """Show only pictures from now on, and a new one at once."""
        self._live, self._without_widget = [], []
        self._pictures = Background(self.redraw, PICTURE_INTERVAL)

    def refresh_pictures(self) -> None:
        """Draw the pictures anew where they are due, in another thread; raises what it raised the last time."""
        self._pictures.refresh()
        if self._pictures.error:
            raise self._pictures.error

    def redraw(self) -> None:
        """Draw the pictures anew."""
        with self._drawing:  # so that the last one is never replaced by one that was begun before it
            picture = self._picture(False) if self._displays else ({}, {})
            for display in self._displays:
                publish(display, *picture, update=True)

    def close(self) -> None:
        """Draw the last pictures, and empty the widget's outputs, which cannot be shown without its model."""
        self.redraw()
        if self._widget is not None:
            for display in self._live:
                publish(display, NOTHING, update=True)
            self._widget.close()
            self._widget = None


def _make_widget(complete_state: Callable[[], dict[str, Any]], view: dict[str, Any]) -> Any:
    import anywidget
    import traitlets

    class LiveBoard(anywidget.AnyWidget):  # type: ignore[misc]  # anywidget ships no types
        """`complete` is sent to a page that asks for the state, and each `delta` after it. The page sets `view`."""

        _esm = Path(__file__).with_name("board.js").read_text()
        complete = traitlets.Dict().tag(sync=True, to_json=lambda _, __: complete_state())
        delta = traitlets.Dict().tag(sync=True)
        view = traitlets.Dict().tag(sync=True)

    return LiveBoard(view=view)
