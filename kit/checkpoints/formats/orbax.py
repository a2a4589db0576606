"""Checkpoints of Orbax (JAX): arrays of zarr, by default inside of one key-value store, OCDBT.

_METADATA, a JSON file, names the arrays (orbax/checkpoint/_src/metadata/tree.py). Shapes and types are in a description
of each array, which tensorstore reads from the store; JAX is not needed for that.
"""

import importlib
import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.checkpoints.formats.base import Piece, Problem, ProblemKind, TensorError, TensorInfo, Weights

FORMAT = "orbax"
METADATA = "_METADATA"
DESCRIPTIONS = (".zarray", "zarr.json")  # of an array, in zarr 2 and 3
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a folder until its save is complete


def read_headers(found: list[Path]) -> Weights:
    """The arrays of the folders that hold these files, _METADATA, by their names with dots.

    Each folder is an item of a step; where there are several, the names begin with those of their folders.
    """
    folders = [path.parent for path in found]
    files = tuple(sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()))
    if importlib.util.find_spec("tensorstore") is None:
        message = f"{folders[0]} is in Orbax's format. Reading it takes tensorstore: run `pip install tensorstore`."
        return Weights(FORMAT, files, {}, (Problem(ProblemKind.NOT_SUPPORTED, message),))
    tensors: dict[str, TensorInfo] = {}
    problems: list[Problem] = []
    for folder in folders:
        prefix = f"{folder.name}." if len(folders) > 1 else ""
        try:
            arrays, listed = dict(sorted(_arrays(folder))), _listed(folder)
        except Exception as error:  # tensorstore and JSON raise several types for a damaged store
            reason = str(error).partition("\n")[0]
            message = f"{folder} cannot be read as a checkpoint of Orbax: {reason}"
            problems.append(Problem(ProblemKind.DAMAGED_FILE, message))
            continue
        tensors |= {prefix + name: array for name, array in arrays.items()}
        problems += _problems(folder, listed - arrays.keys())
    return Weights(FORMAT, files, tensors, tuple(problems))


def _problems(folder: Path, missing: set[str]) -> Iterator[Problem]:
    for name in sorted(missing):
        message = f"The array {name}, which {folder / METADATA} lists, is missing."
        yield Problem(ProblemKind.MISSING_TENSOR, message)
    if UNFINISHED in str(folder.absolute()):
        yield Problem(ProblemKind.UNFINISHED_SAVE, f"Orbax has not completed the save {folder}: take an earlier step.")


def pieces(weights: Weights) -> dict[str, list[Piece]]:
    """Raises TensorError: the values are compressed, and only tensorstore or Orbax reads them."""
    message = f"{folders_of(weights)[0]}: the values are compressed, and kit does not read them. Load them with Orbax."
    raise TensorError(ProblemKind.NOT_SUPPORTED, message)


def folders_of(weights: Weights) -> list[Path]:
    """The folders with _METADATA, which may be inside of that of a step."""
    return [path.parent for path in weights.files if path.name == METADATA]


def _listed(folder: Path) -> set[str]:
    """The names of the arrays in _METADATA."""
    tree = json.loads((folder / METADATA).read_text())["tree_metadata"]
    return {".".join(str(step["key"]) for step in entry["key_metadata"]) for entry in tree.values()}


def _arrays(folder: Path) -> list[tuple[str, TensorInfo]]:
    tensorstore = importlib.import_module("tensorstore")
    place: Any = f"file://{folder.absolute()}/"
    if json.loads((folder / METADATA).read_text()).get("use_ocdbt", True):
        place = {"driver": "ocdbt", "base": place}
    store = tensorstore.KvStore.open(place).result()
    found = []
    for key in store.list().result():
        name, _, last = key.decode().rpartition("/")
        if last in DESCRIPTIONS:
            found.append((name, _describe(json.loads(store.read(key).result().value))))
    return found


def _describe(array: dict[str, Any]) -> TensorInfo:
    import numpy as np

    importlib.import_module("ml_dtypes")  # gives numpy the names of JAX's types, such as bfloat16
    kind = np.dtype(array.get("dtype") or array["data_type"])
    return TensorInfo(kind.name, tuple(array["shape"]), math.prod(array["shape"]) * kind.itemsize)
