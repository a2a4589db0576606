import tomllib

import jsonschema
import pytest

from kit.config.json_schema import FOLDER, README, TABLES, json_schema, key_table, render, write_readme
from kit.config.recipe import Recipe
from tests.conftest import REPOSITORY

KINDS = {"recipe": "recipes", "cluster": "clusters"}
SHIPPED = [(name, path) for name, kind in KINDS.items() for path in sorted((REPOSITORY / "env" / kind).glob("*.toml"))]
shipped = pytest.mark.parametrize(("name", "path"), SHIPPED, ids=[path.stem for _, path in SHIPPED])


@pytest.mark.parametrize("name", TABLES)
def test_the_schema_file_is_up_to_date(name):
    written = (FOLDER / f"{name}.schema.json").read_text()
    assert written == render(name), "run `python -m kit.config.json_schema`"


@shipped
def test_shipped_files_refer_to_their_schema_and_satisfy_it(name, path):
    text = path.read_text()
    first, _, _ = text.partition("\n")
    assert (path.parent / first.removeprefix("#:schema ")).resolve() == FOLDER / f"{name}.schema.json"
    jsonschema.validate(tomllib.loads(text), json_schema(name))


@pytest.mark.parametrize(
    ("name", "path", "key", "value"),
    [
        ("recipe", "recipes/demo.toml", "micro_batc", 1),
        ("recipe", "recipes/demo.toml", "micro_batch", 0),
        ("recipe", "recipes/demo.toml", "warmup_ratio", 2),
        ("cluster", "clusters/local.toml", "gpu_memory", 80),
        ("cluster", "clusters/local.toml", "gpus", "8"),
    ],
)
def test_an_editor_marks_what_the_kit_refuses(name, path, key, value):
    tables = tomllib.loads((REPOSITORY / "env" / path).read_text())
    tables["schedule" if name == "recipe" else "nodes"][key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tables, json_schema(name))


@pytest.mark.parametrize("name", TABLES)
def test_every_key_has_a_description_in_the_schema(name):
    tables = [json_schema(name), *json_schema(name)["$defs"].values()]
    keys = {key: field for table in tables for key, field in table["properties"].items()}
    assert [key for key, field in keys.items() if "description" not in field and "$ref" not in field] == []


def test_the_readme_has_every_key_with_its_default():
    written = README.read_text()
    assert written == write_readme(written), "run `python -m kit.config.json_schema`"
    assert key_table("recipe") in written and key_table("cluster") in written
    assert "| `schedule.lr` | `5e-05` | Peak learning rate. |" in written
    assert "| `model.name` | required | Hub id" in written and '| `slurm.container.kind` | `"none"` | ' in written
    assert set(Recipe.load("demo").keys()) == {row.split("`")[1] for row in key_table("recipe").splitlines()[2:]}
