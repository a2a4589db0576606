"""Output of notebook cells: MIME data under a display id, and whether JupyterLab shows the cell that runs."""

from typing import Any


def in_lab(shell: Any) -> str:
    """The id of the running cell in JupyterLab, or an empty string in any other front end and without a kernel.

    JupyterLab sends the id with each request. papermill and nbclient do not, and must not get a widget: nbconvert
    prefers the widget, of which it can draw nothing.
    """
    kernel = getattr(shell, "kernel", None)
    return kernel.get_parent().get("metadata", {}).get("cellId", "") if kernel else ""


def publish(display_id: str, data: dict[str, Any], update: bool = False) -> None:
    """Show MIME data under a display id, or with `update` replace what that display shows."""
    from IPython.display import publish_display_data

    publish_display_data(data, transient={"display_id": display_id}, update=update)
