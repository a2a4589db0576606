"""`kit.launcher`: submits a run headless at once, in JupyterLab after a click on Launch."""

from collections.abc import Iterator
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.notebook.lab import BY_HAND, CellsBelow, button, displayed_in, message
from kit.show import Part, Result, has_widgets, in_lab
from kit.slurm.launch import launch
from kit.slurm.run import Run

NOT_ASKED = "launch is False: nothing was submitted"
NOT_YET = "Nothing is submitted before a click on Launch."
NO_WIDGETS = "Nothing was submitted: the Launch button needs ipywidgets. Without it, kit.launch(job, machines) submits."


class Launcher(Result):
    """A run that is submitted, or will be after a click; `run` is None until then."""

    def __init__(self, recipe: Recipe, cluster: Cluster, run: Run | None, reason: str) -> None:
        self.run, self._reason = run, reason
        self._recipe, self._cluster = recipe, cluster

    def as_dict(self) -> dict[str, Any]:
        """The run; null where nothing is submitted."""
        return {"run": self.run.as_dict() if self.run else None}

    def parts(self) -> Iterator[Part]:
        """The run, or why nothing is submitted."""
        yield from self.run.parts() if self.run else [self._reason]

    def controls(self) -> Any:
        """The Launch button, or the buttons of the run."""
        if self.run is not None:
            return self.run.controls()
        return self._launch_button() if self._reason == NOT_YET else None

    def _launch_button(self) -> Any:
        import ipywidgets
        from IPython.display import display

        below, output, text = CellsBelow(), ipywidgets.Output(), ipywidgets.HTML()

        def submit() -> None:
            text.value = message("submitting; the data are prepared first where they are not yet")
            with displayed_in(output):
                self.run = launch(self._recipe, self._cluster)
                display(self.run)
            start.layout.display = "none"  # a second click would submit a second run
            text.value = message("submitted" if below.run() else f"submitted; now {BY_HAND}", "good")

        def report(error: str) -> None:
            text.value = error

        start = button("Launch", submit, report, f"Submit {self._recipe.name} to {self._cluster.name}", "primary")
        start.icon = "rocket"
        return ipywidgets.VBox([ipywidgets.HBox([start, text]), output])


def launcher(recipe: Recipe, cluster: Cluster, submit: bool = True) -> Launcher:
    """Submit a run as `kit.launch` does; in JupyterLab only after a click on the button that the result shows.

    Nothing is submitted unless `submit`. Raises as `kit.launch` does; after a click the message is shown.
    """
    if not submit:
        return Launcher(recipe, cluster, None, NOT_ASKED)
    if in_lab():
        return Launcher(recipe, cluster, None, NOT_YET if has_widgets() else NO_WIDGETS)
    return Launcher(recipe, cluster, launch(recipe, cluster), "")
