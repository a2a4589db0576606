"""Weights on disk: the tensors of a file, a folder or a sharded checkpoint, from headers alone, read one at a time."""

import io
import json
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError

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


def weights(path: Path) -> Weights:
    """What a Trainer's checkpoint, a model, adapter or DCP folder, or one file holds. Raises InputError for none."""
    found = [path] if path.is_file() else next((sorted(path.glob(p)) for p in _LAYOUTS if any(path.glob(p))), [])
    reader = _READERS.get(found[0].suffix or found[0].name) if found else None
    if not reader:
        raise InputError(f"{path} holds no weights that kit knows; it looked for {', '.join(_LAYOUTS)}.")
    return reader(found)


def sharded(found: list[Path]) -> Weights:
    """PyTorch's distributed checkpoint: __<rank>_<n>.distcp, then .metadata once every rank is done."""
    folder = found[0] if found[0].is_dir() else found[0].parent
    shards = tuple(sorted(folder.glob("*.distcp")))
    try:
        metadata = dcp_metadata(folder)
    except InputError as error:
        return Weights("dcp", shards, {}, (str(error),))
    need = defaultdict(lambda: 1, {p.name: 1 for p in shards})  # no shard may be empty
    for item in metadata.storage_data.values():
        need[item.relative_path] = max(need[item.relative_path], item.offset + item.length)
    sizes = {p.name: p.stat().st_size for p in shards}
    faults = [_short(folder / name, sizes.get(name), n) for name, n in sorted(need.items()) if sizes.get(name, -1) < n]
    described = {n: t for n, t in metadata.state_dict_metadata.items() if hasattr(t, "properties")}
    tensors = {n: _entry(t.properties.dtype, t.size) for n, t in described.items()}
    return Weights("dcp", shards, tensors, tuple(faults))


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
            return Unpickler(stream).load()
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
    """torch.save files, opened lazily and without running code that they may hold."""
    try:
        flat = {name: t for path in found for name, t in torch_file(path).items()}
    except Exception as error:  # a cut or foreign file fails in many ways
        return Weights("torch", tuple(found), {}, (f"{found[0].parent} cannot be read by torch.load ({error}).",))
    return Weights("torch", tuple(found), {n: _entry(t.dtype, t.shape) for n, t in flat.items()})


def torch_file(path: Path, mmap: bool = True) -> dict[str, Any]:
    """The tensors of a torch.save file by dotted name."""
    import torch

    def flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield prefix, value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from flat(item, f"{prefix}.{key}" if prefix else str(key))

    return dict(flat(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap), ""))


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


def read(held: Weights, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The named tensors one by one, on the CPU; from DCP shards only the bytes of their own items are read."""
    wanted = set(names)
    if held.format == "dcp":
        yield from _read_dcp(held, wanted)
    for path in held.files if held.format != "dcp" else ():
        if held.format == "torch":
            yield from ((n, t) for n, t in torch_file(path).items() if n in wanted)
            continue
        from safetensors import safe_open

        with safe_open(path, "pt") as stream:
            yield from ((n, stream.get_tensor(n)) for n in safetensors_header(path)[0] if n in wanted)


def _read_dcp(held: Weights, wanted: set[str]) -> Iterator[tuple[str, Any]]:
    """Each item is a torch.save blob of one rank's part. dcp.load would read some 30 kB around every one of them."""
    import torch

    folder = held.files[0].parent
    parts = defaultdict(list)
    for index, item in dcp_metadata(folder).storage_data.items():
        parts[index.fqn].append((index.offset, item))
    for name, entry in held.tensors.items():
        if name not in wanted:
            continue
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for offset, item in parts[name]:
            with (folder / item.relative_path).open("rb", buffering=512) as stream:  # unbuffered reads stop at 2 GiB
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead into the base
                stream.seek(item.offset)
                part = torch.load(io.BytesIO(stream.read(item.length)), map_location="cpu", weights_only=True)
            at = tuple(slice(o, o + n) for o, n in zip(offset or (0,) * part.ndim, part.shape, strict=True))
            whole[at].copy_(part)
        yield name, whole
