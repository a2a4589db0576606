"""Cell: what a notebook cell shows. A picture that is saved with the notebook, and controls above it in JupyterLab."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kit.watch.display import in_lab, publish


def explore(draw: Callable[..., Any], start: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]) -> None:
    """Show the HTML that `draw(**values)` gives, and in JupyterLab a control for each value that redraws it at once.

    Without JavaScript, and headless, the picture of the starting values stays.
    """
    from IPython import get_ipython

    display, values = uuid.uuid4().hex, dict(start)
    if in_lab(get_ipython()):
        from IPython.display import display as show

        show(_controls(values, choices, lambda: publish(display, _html(draw, values), update=True)))
    publish(display, _html(draw, values))


def _html(draw: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        picture = draw(**values)
    except Exception as error:  # a choice that is impossible: said in place of the picture
        from html import escape

        picture = f'<p style="color:#dc2626">{escape(str(error))}</p>'
    if hasattr(picture, "_repr_mimebundle_"):
        bundle: dict[str, Any] = picture._repr_mimebundle_()
        return bundle
    return {"text/html": picture, "text/plain": ", ".join(f"{k} = {v}" for k, v in values.items())}


def _controls(values: dict[str, Any], choices: Mapping[str, Sequence[Any]], redraw: Callable[[], None]) -> Any:
    import ipywidgets

    def control(name: str) -> Any:
        options = sorted({*choices[name], values[name]}, key=lambda v: (isinstance(v, str), v))
        made = ipywidgets.Dropdown(options=options, value=values[name], description=name.replace("_", " "))
        made.style.description_width = "initial"
        made.layout.width = "auto"

        def changed(event: Any) -> None:
            values[name] = event["new"]
            redraw()

        made.observe(changed, "value")
        return made

    return ipywidgets.HBox([control(n) for n in values], layout=ipywidgets.Layout(flex_flow="row wrap", grid_gap="6px"))
