"""Weights on disk: the tensors of a file, a folder or a sharded checkpoint, from headers alone, read one at a time."""

import io
import json
import math
import os
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError, KitError

_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}
_LETTERS = {"F": "float", "I": "int", "U": "uint"}
_DCP = "torch.distributed.checkpoint"
_SAFE = {
    f"{_DCP}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex "
    "TensorProperties StorageMeta _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo", "torch.serialization": "_get_layout", "pathlib": "PosixPath",
    "pathlib._local": "PosixPath", "collections": "OrderedDict", "torch": "Size float64 float32 float16 bfloat16 "
    "float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor, as a header or metadata describes it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint, the files that hold them and what is wrong with those; no tensor is read."""

    format: str
    files: tuple[Path, ...]
    tensors: dict[str, Entry]
    faults: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.bytes for entry in self.tensors.values())


@dataclass(frozen=True)
class Piece:
    """A stored part of a tensor: where it sits in the tensor, and its bytes in a file, raw or as a torch.save blob."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    length: int
    packed: bool = False


def weights(path: Path) -> Weights:
    """What a Trainer's checkpoint, a model, adapter or DCP folder, or one file holds.

    Raises InputError for none, KitError where one may not be read: that is no fault of the checkpoint.
    """
    try:
        return _weights(path)
    except PermissionError as error:
        where = Path(error.filename)
        raise KitError(
            f"{where} may not be read by you: it has mode {where.stat().st_mode & 0o777:04o} and belongs to "
            f"{where.owner()}, who can change that (chmod -R g+rX, or a copy)."
        ) from None


def _weights(path: Path) -> Weights:
    if not path.exists():
        raise InputError(f"{path} is not there.")
    if path.is_dir():
        any(path.iterdir())  # glob takes a folder that may not be read for an empty one
    found = [path] if path.is_file() else next((sorted(path.glob(p)) for p in _LAYOUTS if any(path.glob(p))), [])
    reader = _READERS.get(found[0].suffix or found[0].name) if found else None
    if not reader:
        raise InputError(f"{path} holds no weights that kit knows; it looked for {', '.join(_LAYOUTS)}.")
    held, totals = reader(found), {m[1] for p in found if path.is_dir() and (m := re.search(r"-of-(\d+)\.", p.name))}
    if totals and (len(totals) > 1 or len(found) < int(max(totals))):
        names = ", ".join(p.name for p in found[:3])
        return replace(
            held, faults=(*held.faults, f"{path} holds {len(found)} shards, not those of one save: {names}.")
        )
    return held


def sharded(found: list[Path]) -> Weights:
    """PyTorch's distributed checkpoint: __<rank>_<n>.distcp, then .metadata once every rank is done."""
    folder = found[0] if found[0].is_dir() else found[0].parent
    shards = tuple(sorted(folder.glob("*.distcp")))
    try:
        metadata = dcp_metadata(folder)
    except InputError as error:
        return Weights("dcp", shards, {}, (str(error),))
    need = defaultdict(lambda: 1, {p.name: 1 for p in shards})  # no shard may be empty
    blobs = {}  # of each file the last one, the likeliest to be out of place in another save's file
    for index, item in metadata.storage_data.items():
        need[item.relative_path] = max(need[item.relative_path], item.offset + item.length)
        if index.offset is not None and item.offset + item.length == need[item.relative_path]:
            blobs[item.relative_path] = item
    sizes = {p.name: p.stat().st_size for p in shards}
    faults = [_short(folder / name, sizes.get(name), n) for name, n in sorted(need.items()) if sizes.get(name, -1) < n]
    mixed = [name for name, size in sizes.items() if need[name] == 1 < size]  # .metadata does not name it
    mixed += [name for name, item in blobs.items() if sizes.get(name, -1) >= need[name] and not _is_zip(folder, item)]
    faults += [f"{folder / name} is of another save than .metadata: two lie in one folder." for name in sorted(mixed)]
    described = {n: t for n, t in metadata.state_dict_metadata.items() if hasattr(t, "properties")}
    tensors = {n: _entry(t.properties.dtype, t.size) for n, t in described.items()}
    return Weights("dcp", shards, tensors, tuple(faults))


def _is_zip(folder: Path, item: Any) -> bool:
    """Whether a torch.save archive lies where .metadata says; True where an extension has transformed it."""
    with (folder / item.relative_path).open("rb") as stream:
        stream.seek(item.offset)
        head = stream.read(4)
        stream.seek(item.offset + item.length - 22)  # the end record of a zip without a comment
        return bool(getattr(item, "transform_descriptors", None)) or (head, stream.read(4)) == (b"PK\3\4", b"PK\5\6")


def _short(path: Path, size: int | None, need: int) -> str:
    if size is None:
        return f"{path} is not there, though .metadata names it."
    return f"{path} is empty." if size == 0 else f"{path} is cut off: {size} of at least {need} bytes."


def _entry(dtype: Any, shape: Any) -> Entry:
    return Entry(str(dtype).removeprefix("torch."), tuple(shape), math.prod(shape) * dtype.itemsize)


def dcp_metadata(folder: Path) -> Any:
    """torch's Metadata, unpickled with only the classes that belong there. Raises InputError if absent or damaged."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name in _SAFE.get(module, "").split():
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    path = folder / ".metadata"
    if not path.is_file():
        raise InputError(f"{folder} has no .metadata: the save did not finish.")
    try:
        with path.open("rb") as stream:
            found = Unpickler(stream).load()
            found.storage_data.items()
            return found
    except PermissionError:
        raise
    except Exception as error:  # a cut or foreign pickle fails in many ways
        raise InputError(f"{path} is damaged or no checkpoint's metadata ({error}).") from None


def _safetensors(found: list[Path]) -> Weights:
    """Files, read by their headers alone."""
    tensors: dict[str, Entry] = {}
    faults = []
    for path in found:
        try:
            header = safetensors_header(path)[0]
        except InputError as error:
            faults.append(str(error))
            continue
        if twice := header.keys() & tensors.keys():
            faults.append(f"{path} holds {min(twice)} a second time: two models lie in one folder.")
        for name, t in header.items():
            dtype = _DTYPES.get(t["dtype"]) or _LETTERS.get(t["dtype"][0], "") + t["dtype"][1:]
            tensors[name] = Entry(dtype, tuple(t["shape"]), t["data_offsets"][1] - t["data_offsets"][0])
    adapter = found[0].name == "adapter_model.safetensors"
    return Weights("peft adapter" if adapter else "safetensors", tuple(found), tensors, tuple(faults))


def _indexed(found: list[Path]) -> Weights:
    """The shards that a .safetensors.index.json names."""
    shards = [found[0].with_name(name) for name in sorted(set(files.read_json(found[0])["weight_map"].values()))]
    there = [p for p in shards if p.is_file()]
    absent = tuple(f"{p} is not there, though {found[0].name} names it." for p in shards if p not in there)
    read = _safetensors(there) if there else Weights("safetensors", (), {})
    return Weights(read.format, read.files, read.tensors, absent + read.faults)


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """({name: {dtype, shape, data_offsets}} in file order, where the data begin). Raises InputError for a cut file.

    Format (README of huggingface/safetensors): 8 bytes of length, JSON, data.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(length, size)))
        except ValueError:
            raise InputError(f"{path} is cut off or no safetensors file: {size} bytes without a header.") from None
    header.pop("__metadata__", None)
    header = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
    end = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
    if size < end:
        raise InputError(f"{path} is cut off: {size} of {end} bytes.")
    return header, 8 + length


def _torch(found: list[Path]) -> Weights:
    """torch.save files, of which only the pickle is read, without running code that it may hold."""
    try:
        for path in found:
            zipfile.ZipFile(path).close()  # fails for a cut file, and for the format before torch 1.6
        flat = {name: t for path in found for name, t in torch_file(path, device="meta").items()}
    except PermissionError:
        raise
    except Exception as error:  # a cut or foreign file fails in many ways
        return Weights("torch", tuple(found), {}, (f"{found[0].parent} cannot be read by torch.load ({error}).",))
    return Weights("torch", tuple(found), {n: _entry(t.dtype, t.shape) for n, t in flat.items()})


def torch_file(path: Path, device: str = "cpu", mmap: bool = False) -> dict[str, Any]:
    """The tensors of a torch.save file by dotted name; on the device "meta" no data are read."""
    import torch

    def flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield prefix, value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from flat(item, f"{prefix}.{key}" if prefix else str(key))

    return dict(flat(torch.load(path, map_location=device, weights_only=True, mmap=mmap), ""))


# The first layout that is there is read; an index before the shards that it names.
_LAYOUTS = (
    "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/*.distcp", ".metadata", "*.distcp",
    "adapter_model.safetensors", "*.safetensors.index.json", "model*.safetensors", "*.safetensors",
    "pytorch_model*.bin", "adapter_model.bin",
)  # fmt: skip
_READERS: dict[str, Callable[[list[Path]], Weights]] = {
    ".metadata": sharded, ".distcp": sharded, ".safetensors": _safetensors, ".json": _indexed,
    ".bin": _torch, ".pt": _torch, ".pth": _torch,
}  # fmt: skip


def pieces(held: Weights) -> dict[str, list[Piece]]:
    """Where the bytes of every tensor lie. Raises KitError for a torch.save file whose tensors are no runs of bytes."""
    found: dict[str, list[Piece]] = defaultdict(list)
    if held.format == "dcp":
        for (name, _), piece in dcp_pieces(held.files[0].parent, dcp_metadata(held.files[0].parent)).items():
            found[name].append(piece)
        return {name: found[name] for name in held.tensors}
    for file in held.files:
        for name, start in (_torch_starts if held.format == "torch" else _safetensors_starts)(file):
            entry = held.tensors[name]
            piece = Piece((0,) * len(entry.shape), entry.shape, entry.dtype, file, start, entry.bytes)
            found[name].append(piece)
    return found


def dcp_pieces(folder: Path, metadata: Any) -> dict[tuple[str, tuple[int, ...]], Piece]:
    """The stored parts of a distributed checkpoint's tensors by (name, offset in the tensor)."""
    found = {}
    for index, item in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata.get(index.fqn)
        for chunk in getattr(tensor, "chunks", ()):
            if chunk.offsets == index.offset:
                at, dtype = tuple(chunk.offsets), str(tensor.properties.dtype).removeprefix("torch.")
                file = folder / item.relative_path
                found[index.fqn, at] = Piece(at, tuple(chunk.sizes), dtype, file, item.offset, item.length, True)
    return found


def _safetensors_starts(file: Path) -> Iterator[tuple[str, int]]:
    header, start = safetensors_header(file)
    return ((name, start + t["data_offsets"][0]) for name, t in header.items())


def _torch_starts(file: Path) -> Iterator[tuple[str, int]]:
    for name, t in torch_file(file, device="meta").items():  # torch.load notes where the data lie
        if not t.is_contiguous():
            raise KitError(f"{file} holds {name} with its dimensions exchanged; only torch.load can read that.")
        yield name, t.untyped_storage()._checkpoint_offset + t.storage_offset() * t.element_size()


def read(held: Weights, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The named tensors one by one, on the CPU, in the order of the files; no other bytes are read, none mapped."""
    import torch

    wanted = set(names)
    for name, parts in pieces(held).items():
        if name not in wanted:
            continue
        whole = load_piece(parts[0])
        if len(parts) > 1:
            whole = torch.empty(held.tensors[name].shape, dtype=whole.dtype)
            for part in parts:
                at = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
                whole[at].copy_(load_piece(part))
        yield name, whole


def load_piece(piece: Piece) -> Any:
    """A stored part as a tensor. Raises KitError where the file ends early; a blob is unpickled as plain weights."""
    import torch

    data = torch.empty(piece.length, dtype=torch.uint8)
    with piece.file.open("rb", buffering=512) as stream:  # unbuffered reads stop at 2 GiB
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead into the base
        stream.seek(piece.start)
        if stream.readinto(data.numpy()) < piece.length:  # type: ignore[attr-defined]
            raise KitError(
                f"{piece.file} was cut off while it was read: {piece.start + piece.length} bytes are needed."
            )
    if piece.packed:
        return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)
    return data.view(getattr(torch, piece.dtype)).reshape(piece.shape)
