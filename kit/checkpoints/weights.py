"""Find the weights of a checkpoint, describe its tensors from headers alone, and read tensors one at a time."""

import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.checkpoints.formats import dcp, orbax, safetensors_files, torch_files, zero
from kit.checkpoints.formats.base import Piece, Problem, ProblemKind, TensorError, TensorInfo, Weights
from kit.checkpoints.formats.torch_archives import ArchiveError, record_sizes
from kit.errors import InputError, KitError

# The first pattern that matches in a folder is read; an index comes before the shards that it names.
_LAYOUTS = (
    "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/*.distcp", ".metadata", "*.distcp",
    "adapter_model.safetensors", "*.safetensors.index.json", "model*.safetensors", "*.safetensors",
    "pytorch_model*.bin", "adapter_model.bin", zero.LATEST, orbax.METADATA, f"*/{orbax.METADATA}",
)  # fmt: skip
_READERS: dict[str, Callable[[list[Path]], Weights]] = {
    ".metadata": dcp.read_headers,
    ".distcp": dcp.read_headers,
    ".safetensors": safetensors_files.read_headers,
    ".json": safetensors_files.read_index,
    ".bin": torch_files.read_headers,
    ".pt": torch_files.read_headers,
    ".pth": torch_files.read_headers,
    zero.LATEST: zero.read_headers,
    orbax.METADATA: orbax.read_headers,
}
BLOCK = 1 << 20  # bytes of one read of a compressed stream
ARCHIVE_OVERHEAD = 1 << 20  # bytes of an archive with one tensor beyond its values; torch.save writes about 2,000
_PIECES = {
    "dcp": dcp.pieces,
    "safetensors": safetensors_files.pieces,
    "peft adapter": safetensors_files.pieces,
    "torch": torch_files.pieces,
    zero.FORMAT: zero.pieces,
    orbax.FORMAT: orbax.pieces,
}


def read_headers(path: Path) -> Weights:
    """The tensors of a Trainer's checkpoint, of a model, adapter or DCP folder, or of one file.

    Raises InputError where there are no weights, KitError where a file may not be read: the checkpoint itself may then
    be sound.
    """
    try:
        return _read_headers(path)
    except PermissionError as error:
        hidden = Path(error.filename)
        raise KitError(
            f"You may not read {hidden}: it has mode {hidden.stat().st_mode & 0o777:04o} and belongs to "
            f"{hidden.owner()}, who can change that (chmod -R g+rX), or copy it for you."
        ) from None


def _read_headers(path: Path) -> Weights:
    if not path.exists() and not path.is_symlink():
        raise InputError(f"{path} does not exist.")
    if not path.is_dir():
        if _suffix(path) not in _READERS:
            raise InputError(f"{path} is not a weight file; kit knows {', '.join(_READERS)}.")
        return _READERS[_suffix(path)]([path])
    any(path.iterdir())  # raises PermissionError, where glob would find nothing
    for pattern in _LAYOUTS:
        if found := sorted(path.glob(pattern)):
            weights = _READERS[_suffix(found[0])](found)
            return replace(weights, problems=(*weights.problems, *_shard_count_problems(path, found)))
    raise InputError(f"{path} holds no weights that kit knows; it looked for {', '.join(_LAYOUTS)}.")


def _suffix(path: Path) -> str:
    return path.suffix or path.name


def _shard_count_problems(folder: Path, found: list[Path]) -> list[Problem]:
    """A problem where the names, such as model-00001-of-00003, are not those of all shards of one save."""
    totals = {int(match[1]) for path in found if (match := re.search(r"-of-(\d+)\.", path.name))}
    if not totals or (len(totals) == 1 and len(found) >= max(totals)):
        return []
    names = ", ".join(path.name for path in found[:3])
    message = f"{folder} holds {len(found)} shards that are not all shards of one save: {names}."
    return [Problem(ProblemKind.MIXED_SAVES, message)]


def pieces(weights: Weights) -> dict[str, list[Piece]]:
    """Where the bytes of every tensor are. Raises KitError for a torch.save file that only torch.load can read."""
    return _PIECES[weights.format](weights)


def read_tensors(weights: Weights, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(name, CPU tensor) of the named tensors, one by one in the order of the files.

    No other bytes are read and no file is mapped. Raises TensorError for values that cannot be read.
    """
    wanted = set(names)
    for name, parts in pieces(weights).items():
        if name in wanted:
            yield name, _assemble(weights.tensors[name], parts)


def _assemble(tensor: TensorInfo, parts: list[Piece]) -> Any:
    import torch

    first = load_piece(parts[0])
    if len(parts) == 1:
        return first
    complete = torch.empty(tensor.shape, dtype=first.dtype)
    for part in parts:
        place = tuple(slice(start, start + size) for start, size in zip(part.offset, part.shape, strict=True))
        complete[place].copy_(load_piece(part))
    return complete


def load_piece(piece: Piece) -> Any:
    """A stored part as a CPU tensor; an archive is unpickled as plain weights.

    Raises TensorError for a file that ends early, an archive that is damaged or of another tensor, and a dtype that
    torch does not have.
    """
    import torch

    dtype = torch_dtype(piece.dtype)
    data = torch.empty(piece.length, dtype=torch.uint8)
    with piece.file.open("rb", buffering=512) as stream:  # unbuffered reads stop at 2 GiB
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into tensors that are not wanted
        stream.seek(piece.start)
        if stream.readinto(data.numpy()) < piece.length:  # type: ignore[attr-defined]
            need = piece.start + piece.length
            message = f"{piece.file} was truncated while it was read: {need} bytes are needed."
            raise TensorError(ProblemKind.TRUNCATED_FILE, message)
    if piece.packed:
        return _unpack(piece, io.BytesIO(data.numpy().data))
    return data.view(dtype).reshape(piece.shape)


def _unpack(piece: Piece, stream: io.BytesIO) -> Any:
    """The tensor in an archive of torch.save. Raises TensorError where that is damaged or of another tensor."""
    import torch

    try:
        if piece.extensions:
            limit = math.prod(piece.shape) * torch_dtype(piece.dtype).itemsize + ARCHIVE_OVERHEAD
            stream = undo_extensions(piece.extensions, stream, limit)
        record_sizes(stream)
        stream.seek(0)
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load fails in many ways on a damaged archive
        reason = str(error).partition("\n")[0].rstrip(".")
        message = f"{piece.file}, byte {piece.start}: the stored tensor cannot be read ({reason})."
        raise TensorError(ProblemKind.DAMAGED_FILE, message) from None
    check_tensor(piece, tensor)
    return tensor.resolve_conj().resolve_neg()


def undo_extensions(extensions: Iterable[Any], stream: io.BytesIO, limit: int) -> io.BytesIO:
    """What DCP's extensions transformed, as to compress it. Raises ArchiveError beyond `limit` bytes."""
    transformed: Any = stream
    for extension in extensions:
        transformed = extension.transform_from(transformed)
    content = io.BytesIO()
    while block := transformed.read(BLOCK):
        if content.tell() + len(block) > limit:
            raise ArchiveError(f"without its extensions it would have more than {limit} bytes")
        content.write(block)
    content.seek(0)
    return content


def torch_dtype(name: str) -> Any:
    """torch's dtype of this name. Raises TensorError where torch has none, as for the 6 bits of safetensors."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TensorError(ProblemKind.NOT_SUPPORTED, f"Values of dtype {name} cannot be read: torch does not have it.")
    return dtype


def check_tensor(piece: Piece, tensor: Any) -> None:
    """Raises TensorError where a loaded tensor has another shape or dtype than the metadata says."""
    found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) if hasattr(tensor, "dtype") else "no tensor"
    if found != (piece.shape, piece.dtype):
        message = f"{piece.file}, byte {piece.start}: {found} is stored in place of {(piece.shape, piece.dtype)}."
        raise TensorError(ProblemKind.MIXED_SAVES, message)
