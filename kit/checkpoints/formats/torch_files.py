"""Files of torch.save: only their pickle is read, and no code that it may hold is run."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.checkpoints.formats.base import (
    Piece,
    Problem,
    ProblemKind,
    TensorInfo,
    Weights,
    complete_piece,
    split_unreadable,
)
from kit.checkpoints.formats.dcp import tensor_info
from kit.checkpoints.formats.torch_archives import ArchiveError, needed_bytes, record_sizes
from kit.errors import KitError


def read_headers(paths: list[Path]) -> Weights:
    """The tensors of some files by dotted name, without reading their values."""
    existing, problems = split_unreadable(paths)
    tensors: dict[str, TensorInfo] = {}
    for path in existing:
        try:
            tensors |= {name: tensor_info(t.dtype, t.shape) for name, t in _read_header(path).items()}
        except PermissionError:
            raise
        except Exception as error:  # a truncated or foreign file fails in many ways
            message = f"{path} cannot be read by torch.load ({error})."
            problems.append(Problem(ProblemKind.DAMAGED_FILE, message))
    return Weights("torch", tuple(existing), tensors, tuple(problems))


def _read_header(path: Path) -> dict[str, Any]:
    """The tensors of a file on the device meta. Raises ArchiveError where a record is shorter than its tensor."""
    import torch

    with path.open("rb") as stream:
        sizes = record_sizes(stream)  # fails for a truncated file, and for the format before torch 1.6
    tensors = load(path, device="meta")
    reader: Any = torch._C.PyTorchFileReader(str(path))
    stored = {reader.get_record_offset(name): size for name, size in sizes.items() if name.startswith("data/")}
    for name, tensor in tensors.items():
        found = stored.get(tensor.untyped_storage()._checkpoint_offset, 0)
        if found < needed_bytes(tensor):
            raise ArchiveError(f"the record of {name} has {found} of {needed_bytes(tensor)} bytes")
    return tensors


def load(path: Path, device: str = "cpu", mmap: bool = False) -> dict[str, Any]:
    """The tensors of a file by dotted name; on the device "meta" no values are read."""
    import torch

    return dict(_flatten(torch.load(path, map_location=device, weights_only=True, mmap=mmap), ""))


def _flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))


def pieces(weights: Weights) -> dict[str, list[Piece]]:
    """Where the bytes of every tensor are. Raises KitError for a tensor that is not one run of bytes."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for file in weights.files:
        for name, tensor in load(file, device="meta").items():
            if not tensor.is_contiguous():
                raise KitError(f"{file} holds {name} with its dimensions exchanged; only torch.load can read that.")
            # torch.load notes on each storage where in the file its bytes begin
            start = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.element_size()
            found[name].append(complete_piece(weights.tensors[name], file, start))
    return found
