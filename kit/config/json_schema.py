"""JSON schemas of recipe and profile in env/schema, with which editors complete and check TOML files.

`python -m kit.config.json_schema` writes them; a TOML file refers to its schema by a first line `#:schema PATH`.
"""

import ast
import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kit import files
from kit.config import cluster, recipe

README = files.REPOSITORY / "README.md"
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


def key_table(name: str) -> str:
    """Every key with its default and meaning, as a table in Markdown."""
    schema = json_schema(name)
    rows = [
        f"| `{key}` | {default} | {text.replace('|', chr(92) + '|')} |" for key, default, text in _keys(schema, schema)
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _keys(schema: dict[str, Any], table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, meaning) of a table's keys and of the tables in it; NAME is any name."""
    for name, field in table["properties"].items():
        inner = field if "$ref" in field else field.get("additionalProperties") or {}
        key = f"{prefix}{name}" + (".NAME" if "additionalProperties" in field else "")
        if "$ref" in inner:
            yield from _keys(schema, schema["$defs"][inner["$ref"].rpartition("/")[2]], f"{key}.")
            continue
        required = "required" if name in table.get("required", ()) else ""
        default = f"`{json.dumps(field['default'])}`" if "default" in field else required
        choices = f" One of: {', '.join(map(str, field['enum']))}." if "enum" in field else ""
        yield key, default, " ".join(field.get("description", "").split()) + choices


def write_readme(text: str) -> str:
    """The README with the tables of keys as they are now, each between its two comments."""
    for name in TABLES:
        begin, end = f"<!-- keys of {name}.toml: python -m kit.config.json_schema -->\n", f"<!-- end of {name}.toml -->"
        before, found, rest = text.partition(begin)
        text = f"{before}{found}\n{key_table(name)}\n\n{end}{rest.partition(end)[2]}" if found else text
    return text


def main(folder: Path = FOLDER) -> None:
    """Write all schemas, and the tables in the README."""
    folder.mkdir(exist_ok=True)
    for name in TABLES:
        files.write(folder / f"{name}.schema.json", render(name))
    files.write(README, write_readme(README.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
