"""JSON schemas of recipe and profile in env/schema, with which editors complete and check TOML files.

`python -m kit.config.json_schema` writes them; a TOML file refers to its schema by a first line `#:schema PATH`.
"""

import ast
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kit import files
from kit.config import cluster, recipe

FOLDER = files.REPOSITORY / "env" / "schema"
TABLES = {"recipe": recipe.Recipe, "cluster": cluster.Cluster}


def json_schema(name: str) -> dict[str, Any]:
    """The schema of "recipe" or "cluster", as JSON Schema 2020-12."""
    root = TABLES[name]
    schema = TypeAdapter(root).json_schema()
    module = inspect.getmodule(root)
    _describe(schema, root)
    for title, table in schema["$defs"].items():
        _describe(table, getattr(module, title))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _describe(schema: dict[str, Any], table: type) -> None:
    """Add the docstrings of the table's fields.

    pydantic's use_attribute_docstrings would read the source at every import, which takes 20 ms.
    """
    (definition,) = ast.parse(inspect.getsource(table)).body
    assert isinstance(definition, ast.ClassDef)
    for line, following in itertools.pairwise(definition.body):
        match line, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                schema["properties"][name]["description"] = inspect.cleandoc(text)


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
