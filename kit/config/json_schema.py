"""JSON schemas of recipe and profile in env/schema, with which editors complete and check TOML files.

`python -m kit.config.json_schema` writes them; a TOML file refers to its schema by a first line `#:schema PATH`.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe

FOLDER = files.REPOSITORY / "env" / "schema"
TABLES = {"recipe": Recipe, "cluster": Cluster}


def json_schema(name: str) -> dict[str, Any]:
    """The schema of "recipe" or "cluster", as JSON Schema 2020-12."""
    schema = TypeAdapter(TABLES[name]).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def render(name: str) -> str:
    """The text of env/schema/NAME.schema.json."""
    return json.dumps(json_schema(name), indent=1) + "\n"


def main(folder: Path = FOLDER) -> None:
    """Write all schemas."""
    folder.mkdir(exist_ok=True)
    for name in TABLES:
        files.write(folder / f"{name}.schema.json", render(name))


if __name__ == "__main__":
    main()
