"""Buttons of a run in JupyterLab: its state, its logs, the board, cancel and requeue."""

from collections.abc import Callable
from typing import Any

from kit.notebook.lab import button, display_in_cell, displayed_in, message
from kit.slurm.run import Run
from kit.watch.board import watch

LINES = 12  # of each log


def run_controls(run: Run) -> Any:
    """The buttons, as a widget. Cancel and Requeue act after a second click."""
    import ipywidgets
    from IPython.display import display

    text, output = ipywidgets.HTML(), ipywidgets.Output()

    def show(what: Callable[[], Any]) -> Callable[[], None]:
        def action() -> None:
            output.clear_output(wait=True)
            with displayed_in(output):
                display(what())

        return action

    def report(shown: str) -> None:
        text.value = shown

    def end() -> None:
        run.cancel()
        report(message(f"{run.name} is being cancelled"))

    def again() -> None:
        run.requeue()
        report(message(f"{run.name} starts again as job {run.job_id}"))

    buttons = [
        button("State", show(lambda: run.state), report, "The state now, and the evidence for it"),
        button("Tail", show(lambda: run.tail(lines=LINES)), report, "The last lines of every log"),
        button("Watch", lambda: display_in_cell(watch(run)), report, "The live board"),
        *confirmed("Cancel", end, report, "End the run"),
        *confirmed("Requeue", again, report, "Start again from the newest complete checkpoint"),
    ]
    return ipywidgets.VBox([ipywidgets.HBox(buttons, layout=ipywidgets.Layout(flex_flow="row wrap")), text, output])


def confirmed(label: str, action: Callable[[], None], report: Callable[[str], None], tooltip: str) -> list[Any]:
    """A button that asks: it shows two others, of which one acts."""

    def ask(asking: bool) -> None:
        first.layout.display = "none" if asking else ""
        for other in (yes, no):
            other.layout.display = "" if asking else "none"

    def act() -> None:
        ask(False)
        action()

    first = button(label, lambda: ask(True), report, tooltip)
    yes = button(f"{label}: yes", act, report, tooltip, "danger")
    no = button("No", lambda: ask(False), report)
    ask(False)
    return [first, yes, no]
