"""Controls in JupyterLab above something that they redraw; elsewhere what the starting values give."""

import html
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kit.show import HTML_COLOURS, in_lab
from kit.watch.display import publish


def explore(draw: Callable[..., Any], start: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]) -> None:
    """Show what `draw(**values)` returns, and in JupyterLab a dropdown for each value that redraws it at once.

    `draw` returns a result or figure of the kit, or an HTML fragment. The output is saved with the notebook, so without
    JavaScript, and headless, that of the starting values stays.
    """
    from IPython.display import display

    display_id, values = uuid.uuid4().hex, dict(start)
    if in_lab():
        display(_dropdowns(values, choices, lambda: publish(display_id, _drawn(draw, values), update=True)))
    publish(display_id, _drawn(draw, values))


def _drawn(draw: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The output as MIME data; the error message for values that are not possible together."""
    try:
        drawn = draw(**values)
    except Exception as error:
        drawn = f'<p style="color:{HTML_COLOURS["bad"]}">{html.escape(str(error))}</p>'
    if not isinstance(drawn, str):
        return dict(drawn._repr_mimebundle_())
    return {"text/html": drawn, "text/plain": ", ".join(f"{name} = {value}" for name, value in values.items())}


def _dropdowns(values: dict[str, Any], choices: Mapping[str, Sequence[Any]], redraw: Callable[[], None]) -> Any:
    import ipywidgets

    def dropdown(name: str) -> Any:
        options = sorted({*choices[name], values[name]}, key=lambda option: (isinstance(option, str), option))
        control = ipywidgets.Dropdown(options=options, value=values[name], description=name.replace("_", " "))
        control.style.description_width = "initial"
        control.layout.width = "auto"

        def changed(event: Any) -> None:
            values[name] = event["new"]
            redraw()

        control.observe(changed, "value")
        return control

    layout = ipywidgets.Layout(flex_flow="row wrap", grid_gap="6px")
    return ipywidgets.HBox([dropdown(name) for name in values], layout=layout)
