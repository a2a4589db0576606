"""Checkpoints of Orbax (JAX): arrays of zarr, by default inside of one key-value store, OCDBT.

_METADATA, a JSON file, names the arrays (orbax/checkpoint/_src/metadata/tree.py). Shapes and types are in a description
of each array, which tensorstore reads from the store; JAX is not needed for that.
"""

import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from kit.checkpoints.formats.base import Piece, Problem, ProblemKind, TensorError, TensorInfo, Weights

FORMAT = "orbax"
METADATA = "_METADATA"
DESCRIPTIONS = (".zarray", "zarr.json")  # of an array, in zarr 2 and 3


def read_headers(found: list[Path]) -> Weights:
    """The arrays of the folder that holds the first of these files, _METADATA, by their names with dots."""
    folder = found[0].parent
    files = tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
    if importlib.util.find_spec("tensorstore") is None:
        message = f"{folder} is Orbax's, which the package tensorstore reads: run `pip install tensorstore`."
        return Weights(FORMAT, files, {}, (Problem(ProblemKind.NOT_SUPPORTED, message),))
    try:
        tensors = dict(sorted(_arrays(folder)))
    except Exception as error:  # tensorstore and JSON raise several types for a damaged store
        reason = str(error).partition("\n")[0]
        problem = Problem(ProblemKind.DAMAGED_FILE, f"{folder} cannot be read as a checkpoint of Orbax: {reason}")
        return Weights(FORMAT, files, {}, (problem,))
    missing = sorted(_listed(folder) - tensors.keys())
    messages = [f"{folder / METADATA} lists {name}, but there is no such array." for name in missing]
    return Weights(FORMAT, files, tensors, tuple(Problem(ProblemKind.MISSING_TENSOR, each) for each in messages))


def pieces(weights: Weights) -> dict[str, list[Piece]]:
    """Raises TensorError: the values are compressed, and only tensorstore or Orbax reads them."""
    message = f"{folder_of(weights)}: the values are compressed, and kit does not read them; Orbax itself has to."
    raise TensorError(ProblemKind.NOT_SUPPORTED, message)


def folder_of(weights: Weights) -> Path:
    """The folder with _METADATA, which may be inside of that of a step."""
    return next(path.parent for path in weights.files if path.name == METADATA)


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
