"""Identity of a dataset: the digest of everything that decides its rows, and nothing else.

These are the format version, the recipe's data settings, the names, splits and bytes of the data files, and the bytes
of the tokenizer's files. Two recipes with the same digest share one prepared folder.
"""

import hashlib
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit import files
from kit.config import models
from kit.config.recipe import Recipe
from kit.data.sources import SourceFiles, check_place, find_files

# Raise this by one when a change of the code gives other rows for the same inputs. Every dataset is then prepared anew;
# folders of older versions still open. test_identity.py fails if rows change and this does not.
FORMAT_VERSION = 3

TOKENIZER_FILE = re.compile(r"token|vocab|merges|\.jinja$|\.model$")
STEADY_S = 2.0  # a file that changed less than this ago may change again within the resolution of its time stamp


def settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values that decide the rows."""
    data = {key: value for key, value in vars(recipe.data).items() if key not in ("tokens", "eval_tokens")}
    return {"model": recipe.model.name, "data": data, "seed": recipe.schedule.seed}


def same_settings(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two `settings` can have one digest: the model's name does not count, its tokenizer's files do."""
    return one | {"model": ""} == other | {"model": ""}


def find_inputs(recipe: Recipe) -> SourceFiles:
    """The files of the recipe's data. Raises InputError where the model or the data are not found.

    A missing file is noticed at once. Then the model is looked for: data of a hub id may have to be fetched.
    """
    check_place(recipe.data.source)
    models.source(recipe.model.name)
    return find_files(recipe.data.source)


def dataset_digest(recipe: Recipe, source: SourceFiles, out: Path) -> str:
    """sha256 over the contents of all inputs.

    The digests of single files are kept in OUT/.digests.json with their path, size and modification time, so that
    large inputs are read once only.
    """
    total = hashlib.sha256(_description(recipe, source))
    cache = out / ".digests.json"
    known: dict[str, str] = files.read_json(cache) if cache.is_file() else {}
    new = {}
    for path in _input_files(recipe, source):
        stat = path.stat()
        key = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}"
        content = known.get(key)
        if not content:
            with path.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            if time.time() - stat.st_mtime > STEADY_S:
                new[key] = content
        total.update(content.encode())
    if new:
        with suppress(OSError):  # a shared folder that this user may only read
            files.write_json(cache, known | new)
    return total.hexdigest()


def inputs_stamp(recipe: Recipe, source: SourceFiles) -> str:
    """sha256 over sizes and modification times instead of contents: cheap enough for every task of an array."""
    stats = [(str(path), path.stat()) for path in _input_files(recipe, source)]
    stamps = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(_description(recipe, source) + json.dumps(stamps).encode()).hexdigest()


def _description(recipe: Recipe, source: SourceFiles) -> bytes:
    made_from = [FORMAT_VERSION, settings(recipe) | {"model": ""}, source.names, source.splits]
    return json.dumps(made_from, sort_keys=True).encode()


def _input_files(recipe: Recipe, source: SourceFiles) -> list[Path]:
    tokenizer = Path(models.source(recipe.model.name))
    return [*source.files, *(path for path in sorted(tokenizer.iterdir()) if TOKENIZER_FILE.search(path.name))]
