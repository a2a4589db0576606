"""The counts that the kit ships: `python -m tests.forecast.shipped_counts` remakes kit/forecast/counts.json.

Counted from the models that transformers builds of the shipped configs and of the embedded model's.
"""

import json
from typing import Any

from kit import files
from kit.config import models
from kit.forecast import shape
from kit.forecast.counting import count

TARGET = files.REPOSITORY / "kit" / "forecast" / "counts.json"


def configs() -> dict[str, dict[str, Any]]:
    """Every config that has a shipped count, by name."""
    found = dict(shape.shipped())
    if path := models.find_config(files.EMBEDDED_MODEL):
        found[files.EMBEDDED_MODEL] = files.read_json(path)
    return found


def text() -> str:
    """The file: one line a config."""
    counts = {shape.digest(config): count(config, name) for name, config in configs().items()}
    lines = [f"{json.dumps(digest)}: {json.dumps(fields)}" for digest, fields in sorted(counts.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    files.write(TARGET, text())
