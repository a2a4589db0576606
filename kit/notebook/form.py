"""`kit.form`: the parameters of a notebook as controls with a Run button, in JupyterLab; nothing elsewhere."""

import ast
import html
import typing
from collections.abc import Callable, Mapping
from typing import Any

from kit.config import schema
from kit.notebook.lab import BY_HAND, CellsBelow, button, message
from kit.notebook.parameters import Parameter, assignments, read_source
from kit.notebook.values import Text, Untyped, convert, source_of
from kit.show import has_widgets

NEWEST_RUNS = 20  # names of runs that are offered


def form() -> None:
    """Show a control for each parameter of the notebook, from the newest parameters cell that this kernel has run.

    Run gives the notebook's names these values and runs the cells below. Headless nothing is shown.
    """
    if not has_widgets():
        return
    from IPython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    parameters = newest_parameters(shell.user_ns["In"])
    display(Form(parameters, shell.user_ns).widget if parameters else "No parameters cell has been run.")


def newest_parameters(cells: list[str]) -> dict[str, Parameter]:
    """The parameters of the newest of these cells that has nothing but annotated assignments."""
    for source in reversed(cells):
        try:
            lines = ast.parse(source).body
        except SyntaxError:  # magics
            continue
        if lines and all(isinstance(line, ast.AnnAssign) for line in lines):
            return read_source(source)
    return {}


class Form:
    """Controls for parameters; Run checks them all and gives `names` their values."""

    def __init__(self, parameters: Mapping[str, Parameter], names: dict[str, Any]) -> None:
        import ipywidgets

        self._parameters, self._names, self._below = parameters, names, CellsBelow()
        self._controls = {
            name: control_of(one, names.get(name, one.default))
            for name, one in parameters.items()
            if not isinstance(one.kind, Untyped)
        }
        self._message = ipywidgets.HTML()
        run = button("Run", self.run, self._report, "Use these values, and run the cells below", "primary")
        run.icon = "play"
        rows = [self._row(name, control) for name, control in self._controls.items()]
        self.widget = ipywidgets.VBox([*rows, ipywidgets.HBox([run, self._message])])
        self.widget.add_class("kit-form")

    def run(self) -> None:
        """Set the names and run the cells below. Raises InputError for a value of another type; nothing is set then."""
        values = self.values()
        self._names.update(values)
        done = "the cells below run with" if self._below.run() else f"now {BY_HAND}:"
        self._report(message(f"{done} {assignments(values).replace(chr(10), ', ')}"))

    def values(self) -> dict[str, Any]:
        """The values of the controls in the types of their parameters. Raises InputError."""
        found = {name: control.value for name, control in self._controls.items()}
        return {
            name: convert(Text(value) if isinstance(value, str) else value, self._parameters[name].kind, name)
            for name, value in found.items()
        }

    def _report(self, text: str) -> None:
        self._message.value = text

    def _row(self, name: str, control: Any) -> Any:
        import ipywidgets

        label = ipywidgets.HTML(f"<b>{html.escape(name.replace('_', ' '))}</b>")
        label.layout.width, control.layout.width = "8em", "22em"
        about = ipywidgets.HTML(html.escape(self._parameters[name].help))
        return ipywidgets.HBox([label, control, about], layout=ipywidgets.Layout(flex_flow="row wrap"))


def control_of(parameter: Parameter, value: Any) -> Any:
    """A checkbox, a dropdown or a text field; the field offers names where the kit knows which there are."""
    import ipywidgets

    if parameter.kind is bool:
        return ipywidgets.Checkbox(value=bool(value), indent=False)
    if typing.get_origin(parameter.kind) is typing.Literal:
        return ipywidgets.Dropdown(options=typing.get_args(parameter.kind), value=value)
    text = value if isinstance(value, str) else source_of(value)
    if offered := OFFERED.get(parameter.name):
        return ipywidgets.Combobox(value=text, options=offered(), continuous_update=False)
    return ipywidgets.Text(value=text, continuous_update=False)


def _run_names() -> list[str]:
    from kit.slurm.run import find_runs

    names = [run.name for run, _ in zip(find_runs(), range(NEWEST_RUNS), strict=False)]
    return ["latest", *names]


OFFERED: dict[str, Callable[[], list[str]]] = {
    "recipe": lambda: schema.names("recipes"),
    "cluster": lambda: schema.names("clusters"),
    "run": _run_names,
}
