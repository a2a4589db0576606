"""Output of notebook cells: MIME data under a display id."""

from typing import Any


def publish(
    display_id: str, data: dict[str, Any], metadata: dict[str, Any] | None = None, update: bool = False
) -> None:
    """Show MIME data under a display id, or with `update` replace what that display shows."""
    from IPython.display import publish_display_data

    publish_display_data(data, metadata or {}, transient={"display_id": display_id}, update=update)
