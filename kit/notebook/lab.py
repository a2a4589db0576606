"""What widgets of several notebooks share: buttons, messages, and JupyterLab's own commands."""

import html
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kit.errors import KitError
from kit.show import HTML_COLOURS, Mark, callback_of, lab_cell

BELOW = ("notebook:move-cursor-down", "notebook:run-all-below")  # JupyterLab's ids; the second begins at the cursor
BY_HAND = "run the cells below (Run, Run Selected Cell and All Below)"


class CellsBelow:
    """Runs the cells below the one whose widget was clicked, by JupyterLab's own commands."""

    def __init__(self) -> None:
        self._front_end: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # ipylab 1.1 gives traitlets a type, not an instance
            try:
                from ipylab import JupyterFrontEnd
            except ImportError:
                return
        self._front_end = JupyterFrontEnd()

    def run(self) -> bool:
        """Queue them; False where ipylab, which sends commands to JupyterLab, is not installed."""
        if self._front_end is None:
            return False
        for command in BELOW:
            self._front_end.commands.execute(command)
        return True


def message(text: str, mark: Mark | None = None) -> str:
    """A message as HTML, in the colour of its mark."""
    colour = f"color:{HTML_COLOURS[mark]};" if mark else ""
    return f'<div style="{colour}white-space:pre-wrap;line-height:1.4">{html.escape(text)}</div>'


def button(
    label: str, action: Callable[[], None], report: Callable[[str], None], tooltip: str = "", style: str = ""
) -> Any:
    """A button that runs an action of this cell; a KitError or OSError of it is reported as HTML."""
    import ipywidgets

    made = ipywidgets.Button(description=label, tooltip=tooltip, button_style=style)
    made.layout.width = "auto"
    cell = lab_cell()

    def clicked(_: Any) -> None:
        made.disabled = True
        try:
            with callback_of(cell):
                action()
        except (KitError, OSError) as error:
            report(message(str(error), "bad"))
        finally:
            made.disabled = False

    made.on_click(clicked)
    return made


@contextmanager
def displayed_in(output: Any) -> Iterator[None]:
    """Within it, what is displayed goes to this ipywidgets.Output, which in a kernel drops errors; here they pass."""
    failure = None
    with output:
        try:
            yield
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def display_in_cell(shown: Any) -> None:
    """Show something below the widgets of the callback's cell.

    An ipywidgets.Output does not get the later updates of what it shows; the outputs of a cell do.
    """
    from IPython import get_ipython
    from IPython.display import display

    publisher, cell = get_ipython().display_pub, lab_cell()
    before = publisher.parent_header
    publisher.parent_header = dict(cell.header) if cell else before
    try:
        display(shown)
    finally:
        publisher.parent_header = before
