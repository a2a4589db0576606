"""Find the weights of a checkpoint, describe its tensors from headers alone, and read tensors one at a time."""

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit.checkpoints.formats import dcp, safetensors_files, torch_files
from kit.checkpoints.formats.base import Piece, Problem, ProblemKind, TensorInfo, Weights
from kit.errors import InputError, KitError


@dataclass(frozen=True)
class Format:
    """How to describe and how to locate the tensors of one kind of file."""

    read_headers: Callable[[list[Path]], Weights]
    pieces: Callable[[Weights], dict[str, list[Piece]]]


_DCP = Format(dcp.read_headers, dcp.pieces)
_SAFETENSORS = Format(safetensors_files.read_headers, safetensors_files.pieces)
_INDEX = Format(safetensors_files.read_index, safetensors_files.pieces)
_TORCH = Format(torch_files.read_headers, torch_files.pieces)

# The first pattern that matches in a folder is read; an index comes before the shards that it names.
_LAYOUTS = {
    "pytorch_model_fsdp_0/.metadata": _DCP,
    "pytorch_model_fsdp_0/*.distcp": _DCP,
    ".metadata": _DCP,
    "*.distcp": _DCP,
    "adapter_model.safetensors": _SAFETENSORS,
    "*.safetensors.index.json": _INDEX,
    "model*.safetensors": _SAFETENSORS,
    "*.safetensors": _SAFETENSORS,
    "pytorch_model*.bin": _TORCH,
    "adapter_model.bin": _TORCH,
}
_SUFFIXES = {
    ".metadata": _DCP, ".distcp": _DCP, ".safetensors": _SAFETENSORS, ".json": _INDEX, ".bin": _TORCH, ".pt": _TORCH,
    ".pth": _TORCH,
}  # fmt: skip
_FORMATS = {"dcp": _DCP, "safetensors": _SAFETENSORS, "peft adapter": _SAFETENSORS, "torch": _TORCH}


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
        form = _SUFFIXES.get(path.suffix or path.name)
        if form is None:
            raise InputError(f"{path} is not a weight file; kit knows {', '.join(_SUFFIXES)}.")
        return form.read_headers([path])
    any(path.iterdir())  # raises PermissionError, where glob would find nothing
    for pattern, form in _LAYOUTS.items():
        if found := sorted(path.glob(pattern)):
            weights = form.read_headers(found)
            return replace(weights, problems=(*weights.problems, *_shard_count_problems(path, found)))
    raise InputError(f"{path} holds no weights that kit knows; it looked for {', '.join(_LAYOUTS)}.")


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
    return _FORMATS[weights.format].pieces(weights)


def read_tensors(weights: Weights, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(name, CPU tensor) of the named tensors, one by one in the order of the files.

    No other bytes are read and no file is mapped. Raises KitError where a file ends early.
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
    """A stored part as a CPU tensor; an archive is unpickled as plain weights. Raises KitError for a short file."""
    import torch

    data = torch.empty(piece.length, dtype=torch.uint8)
    with piece.file.open("rb", buffering=512) as stream:  # unbuffered reads stop at 2 GiB
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into tensors that are not wanted
        stream.seek(piece.start)
        if stream.readinto(data.numpy()) < piece.length:  # type: ignore[attr-defined]
            need = piece.start + piece.length
            raise KitError(f"{piece.file} was truncated while it was read: {need} bytes are needed.")
    if piece.packed:
        return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)
    return data.view(getattr(torch, piece.dtype)).reshape(piece.shape)
