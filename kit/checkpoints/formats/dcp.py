"""PyTorch's distributed checkpoints (DCP): shards __<rank>_<n>.distcp, then .metadata once every rank has written.

The format is read in torch/distributed/checkpoint/filesystem.py and metadata.py (torch 2.13).
"""

import math
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

from kit.checkpoints.formats.base import (
    Piece,
    Problem,
    ProblemKind,
    TensorInfo,
    Weights,
    broken_link,
    split_broken_links,
)
from kit.errors import InputError

_DCP = "torch.distributed.checkpoint"
_ALLOWED_CLASSES = {
    f"{_DCP}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex "
    "TensorProperties StorageMeta _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo", "torch.serialization": "_get_layout", "pathlib": "PosixPath",
    "pathlib._local": "PosixPath", "collections": "OrderedDict", "torch": "Size float64 float32 float16 bfloat16 "
    "float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool",
}  # fmt: skip
_ZIP_END_RECORD = 22  # bytes of the end record of a zip archive without a comment


def read_headers(paths: list[Path]) -> Weights:
    """The tensors of the checkpoint folder that holds these files, or is the first of them."""
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    shards, problems = split_broken_links(sorted(folder.glob("*.distcp")))
    try:
        metadata = read_metadata(folder)
    except MetadataError as error:
        return Weights("dcp", tuple(shards), {}, (*problems, error.problem))
    try:
        tensors = _tensors(metadata)
        problems += _shard_problems(folder, shards, metadata)
        problems += _missing_tensors(folder, tensors, metadata)
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


def _missing_tensors(folder: Path, tensors: dict[str, TensorInfo], metadata: Any) -> list[Problem]:
    stored = {index.fqn for index in metadata.storage_data}
    missing = [name for name, tensor in tensors.items() if tensor.bytes and name not in stored]
    if not missing:
        return []
    message = f"{folder / '.metadata'} gives no place for {len(missing)} tensors, such as {missing[0]}."
    return [Problem(ProblemKind.MISSING_TENSOR, message)]


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


class MetadataError(InputError):
    """A .metadata file that is absent, damaged, or asks for classes that do not belong there."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(kind, message)


class _Unpickler(pickle.Unpickler):
    """Loads the classes of DCP's metadata alone, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED_CLASSES.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_metadata(folder: Path) -> Any:
    """torch's Metadata object of a checkpoint. Raises MetadataError, PermissionError."""
    path = folder / ".metadata"
    if not path.is_file():
        raise MetadataError(ProblemKind.UNFINISHED_SAVE, f"{folder} has no .metadata: the save did not finish.")
    try:
        with path.open("rb") as stream:
            found = _Unpickler(stream).load()
            found.storage_data.items()
            return found
    except PermissionError:
        raise
    except Exception as error:  # a truncated or foreign pickle fails in many ways
        message = f"{path} is damaged or not the metadata of a checkpoint ({error})."
        raise MetadataError(ProblemKind.DAMAGED_FILE, message) from None


def pieces(weights: Weights) -> dict[str, list[Piece]]:
    """Where the stored parts of every tensor are."""
    folder = weights.files[0].parent
    found: dict[str, list[Piece]] = {name: [] for name in weights.tensors}
    for (name, _), piece in stored_pieces(folder, read_metadata(folder)).items():
        found[name].append(piece)
    return found


def stored_pieces(folder: Path, metadata: Any) -> dict[tuple[str, tuple[int, ...]], Piece]:
    """The stored parts of all tensors by (name, offset in the tensor)."""
    found = {}
    for index, item in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata.get(index.fqn)
        for chunk in getattr(tensor, "chunks", ()):
            if chunk.offsets != index.offset:
                continue
            offset, dtype = tuple(chunk.offsets), str(tensor.properties.dtype).removeprefix("torch.")
            file = folder / item.relative_path
            found[index.fqn, offset] = Piece(
                offset, tuple(chunk.sizes), dtype, file, item.offset, item.length, packed=True
            )
    return found
