"""PyTorch's distributed checkpoints (DCP): shards __<rank>_<n>.distcp, then .metadata once every rank has written.

The format is read in torch/distributed/checkpoint/filesystem.py and metadata.py (torch 2.13).
"""

import io
import math
import pickle
import pickletools
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.checkpoints.formats.base import (
    DamageError,
    Piece,
    Problem,
    ProblemKind,
    TensorInfo,
    Weights,
    broken_link,
    split_unreadable,
)
from kit.checkpoints.formats.boxes import Box, covers

_DCP = "torch.distributed.checkpoint"
_ALLOWED_CLASSES = {
    f"{_DCP}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex "
    "TensorProperties StorageMeta _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo", "torch.serialization": "_get_layout", "pathlib": "PosixPath",
    "pathlib._local": "PosixPath", "collections": "OrderedDict", "torch": "Size float64 float32 float16 bfloat16 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu complex128 complex64 complex32 "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool",
}  # fmt: skip
METADATA_LIMIT = 1 << 29  # bytes; about 150 for each stored part of a tensor, so 3 million parts
_DTYPE = re.compile(r"(q?u?int|bits|float)\d+\w*")
_ZIP_END_RECORD = 22  # bytes of the end record of a zip archive without a comment


def read_headers(paths: list[Path]) -> Weights:
    """The tensors of the checkpoint folder that holds these files, or is the first of them."""
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    shards, problems = split_unreadable(sorted(folder.glob("*.distcp")))
    try:
        metadata = read_metadata(folder)
    except DamageError as error:
        return Weights("dcp", tuple(shards), {}, (*problems, error.problem))
    try:
        tensors = _tensors(metadata)
        _check_places(folder, metadata)
        problems += _shard_problems(folder, shards, metadata)
        problems += _uncovered_tensors(folder, metadata)
        problems += _extension_problems(folder, metadata)
    except DamageError as error:
        return Weights("dcp", tuple(shards), {}, (*problems, error.problem))
    except (AttributeError, TypeError):  # allowed classes in an order that DCP does not write
        message = f"{folder / '.metadata'} is damaged or not the metadata of a checkpoint."
        return Weights("dcp", tuple(shards), {}, (Problem(ProblemKind.DAMAGED_FILE, message),))
    return Weights("dcp", tuple(shards), tensors, tuple(problems))


def _tensors(metadata: Any) -> dict[str, TensorInfo]:
    return {
        name: tensor_info(stored.properties.dtype, stored.size)
        for name, stored in metadata.state_dict_metadata.items()
        if hasattr(stored, "properties")
    }


def tensor_info(dtype: Any, shape: Any) -> TensorInfo:
    """The description of a tensor with torch's dtype."""
    return TensorInfo(str(dtype).removeprefix("torch."), tuple(shape), math.prod(shape) * dtype.itemsize)


def _check_places(folder: Path, metadata: Any) -> None:
    """Raises DamageError where an item would be outside of the folder or before the begin of its file."""
    for index, item in metadata.storage_data.items():
        if not str(item.relative_path) or Path(item.relative_path).name != str(item.relative_path):
            wrong = f"in the file {str(item.relative_path)!r}, which is not in the folder"
        elif item.offset < 0 or item.length < 0:
            wrong = f"at the bytes {item.offset} to {item.offset + item.length}"
        else:
            continue
        message = f"{folder / '.metadata'} is damaged: it has {index.fqn} {wrong}."
        raise DamageError(ProblemKind.DAMAGED_FILE, message)


def _shard_problems(folder: Path, shards: list[Path], metadata: Any) -> list[Problem]:
    """What is wrong with the shards, measured by what the metadata says of each."""
    sizes = {path.name: path.stat().st_size for path in shards}
    needed: dict[str, int] = defaultdict(lambda: 1)  # no shard may be empty
    needed |= dict.fromkeys(sizes, 1)
    last_items = {}  # the last item of a file is the likeliest to be displaced in the file of another save
    for index, item in metadata.storage_data.items():
        end = item.offset + item.length
        needed[item.relative_path] = max(needed[item.relative_path], end)
        if index.offset is not None and end == needed[item.relative_path]:
            last_items[item.relative_path] = item

    short = [name for name in sorted(needed) if sizes.get(name, -1) < needed[name]]
    unnamed = {name for name, size in sizes.items() if needed[name] == 1 < size}
    displaced = {name for name, item in last_items.items() if name not in short and not _is_archive(folder, item)}
    problems = [_short_shard(folder / name, sizes.get(name), needed[name]) for name in short]
    for name in sorted(unnamed | displaced):
        message = f"{folder / name} is not of the same save as .metadata: the folder holds two saves."
        problems.append(Problem(ProblemKind.MIXED_SAVES, message))
    return problems


def _uncovered_tensors(folder: Path, metadata: Any) -> list[Problem]:
    """A problem where the stored parts of a tensor are not all of it, each once."""
    stored = {(index.fqn, tuple(index.offset or ())) for index in metadata.storage_data}
    uncovered = []
    for name, tensor in metadata.state_dict_metadata.items():
        if not hasattr(tensor, "properties") or not math.prod(tensor.size):
            continue
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
        boxes = [box for box in boxes if math.prod(box.sizes)]
        if not covers(boxes, tuple(tensor.size)) or any((name, box.offsets) not in stored for box in boxes):
            uncovered.append(name)
    if not uncovered:
        return []
    message = (
        f"{folder / '.metadata'} gives no place for all values of {len(uncovered)} tensors, such as {uncovered[0]}."
    )
    return [Problem(ProblemKind.MISSING_TENSOR, message)]


def _extension_problems(folder: Path, metadata: Any) -> list[Problem]:
    """A problem for each extension that transformed items and that cannot be undone here."""
    used = {tuple(getattr(item, "transform_descriptors", None) or ()) for item in metadata.storage_data.values()}
    problems = []
    for descriptors in sorted(used):
        try:
            extensions(descriptors)
        except DamageError as error:
            problems.append(Problem(error.problem.kind, f"{folder}: {error}"))
    return problems


def extensions(descriptors: Sequence[str], registry: Any = None) -> tuple[Any, ...]:
    """DCP's extensions of these descriptors in the order in which reading applies them. Raises DamageError."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    try:
        return tuple((registry or ExtensionRegistry()).from_descriptor_list(descriptors))
    except ValueError as error:
        message = f"its values are stored with DCP's extension {', '.join(descriptors)}, which cannot be read: {error}."
        raise DamageError(ProblemKind.NOT_SUPPORTED, message) from None


def _is_archive(folder: Path, item: Any) -> bool:
    """True if a torch.save archive is where the metadata says, or if an extension has transformed the item."""
    if getattr(item, "transform_descriptors", None):
        return True
    with (folder / item.relative_path).open("rb") as stream:
        stream.seek(item.offset)
        head = stream.read(4)
        stream.seek(item.offset + item.length - _ZIP_END_RECORD)
        return (head, stream.read(4)) == (b"PK\3\4", b"PK\5\6")


def _short_shard(path: Path, size: int | None, need: int) -> Problem:
    if size is None and path.is_symlink():
        return broken_link(path)
    if size is None:
        return Problem(ProblemKind.MISSING_FILE, f"{path} does not exist, but .metadata names it.")
    if size == 0:
        return Problem(ProblemKind.EMPTY_FILE, f"{path} is empty.")
    return Problem(ProblemKind.TRUNCATED_FILE, f"{path} is truncated: {size} of at least {need} bytes.")


class _UnsupportedDtypeError(Exception):
    """A dtype of torch that kit does not read, such as one of quantised tensors."""


class _Unpickler(pickle.Unpickler):
    """Loads the classes of DCP's metadata alone, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED_CLASSES.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and _DTYPE.fullmatch(name):
            raise _UnsupportedDtypeError(f"torch.{name}")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_metadata(folder: Path) -> Any:
    """torch's Metadata object of a checkpoint. Raises DamageError, PermissionError."""
    path = folder / ".metadata"
    if not path.is_file():
        raise DamageError(ProblemKind.UNFINISHED_SAVE, f"{folder} has no .metadata: the save did not finish.")
    if path.stat().st_size > METADATA_LIMIT:
        message = f"{path} has {path.stat().st_size} bytes; metadata of a checkpoint has at most {METADATA_LIMIT}."
        raise DamageError(ProblemKind.DAMAGED_FILE, message)
    try:
        content = path.read_bytes()
        _check_memo(content)
        found = _Unpickler(io.BytesIO(content)).load()
        found.storage_data.items()
        return found
    except PermissionError:
        raise
    except _UnsupportedDtypeError as error:
        message = f"{path} names {error}; kit reads no checkpoints with tensors of this dtype."
        raise DamageError(ProblemKind.NOT_SUPPORTED, message) from None
    except Exception as error:  # a truncated or foreign pickle fails in many ways
        message = f"{path} is damaged or not the metadata of a checkpoint ({error})."
        raise DamageError(ProblemKind.DAMAGED_FILE, message) from None


def _check_memo(content: bytes) -> None:
    """Raises UnpicklingError where an index of the memo is larger than the pickle, which has less than that to store.

    The unpickler makes its memo as long as the largest index asks for: seven bytes would take 34 GB.
    """
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name.endswith("PUT") and (argument or 0) > len(content):
            raise pickle.UnpicklingError(f"its memo has no place {argument}")


def pieces(weights: Weights) -> dict[str, list[Piece]]:
    """Where the stored parts of every tensor are."""
    folder = weights.files[0].parent
    found: dict[str, list[Piece]] = {name: [] for name in weights.tensors}
    for (name, _), piece in stored_pieces(folder, read_metadata(folder)).items():
        found[name].append(piece)
    return found


def stored_pieces(folder: Path, metadata: Any, registry: Any = None) -> dict[tuple[str, tuple[int, ...]], Piece]:
    """The stored parts of all tensors by (name, offset in the tensor).

    `registry` is DCP's registry of the extensions that may have transformed them. Raises DamageError for others.
    """
    known: dict[tuple[str, ...], tuple[Any, ...]] = {}
    found = {}
    places = {(index.fqn, tuple(index.offset or ())): item for index, item in metadata.storage_data.items()}
    for name, tensor in metadata.state_dict_metadata.items():
        for chunk in getattr(tensor, "chunks", ()):
            offset = tuple(chunk.offsets)
            if (name, offset) not in places:
                continue  # a part without values
            item = places[name, offset]
            descriptors = tuple(getattr(item, "transform_descriptors", None) or ())
            if descriptors not in known:
                known[descriptors] = extensions(descriptors, registry)
            found[name, offset] = Piece(
                offset,
                tuple(chunk.sizes),
                str(tensor.properties.dtype).removeprefix("torch."),
                folder / item.relative_path,
                item.offset,
                item.length,
                packed=True,
                extensions=known[descriptors],
            )
    return found
