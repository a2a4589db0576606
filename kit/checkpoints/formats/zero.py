"""Checkpoints of DeepSpeed's ZeRO: the folder that the file `latest` names, such as global_step20.

Each rank writes its part of the optimizer and of the fp32 weights that are trained. In stage 1 and 2 rank 0 writes the
weights as well; in stage 3 they are only in the ranks' parts. There each weight is flattened and divided evenly among
the ranks, the last part being padded, and a rank's parts follow each other in the order of `param_shapes`
(deepspeed/utils/zero_to_fp32.py).
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.checkpoints.formats.base import Piece, Problem, ProblemKind, TensorInfo, Weights, complete_piece
from kit.checkpoints.formats.boxes import boxes_of_range
from kit.checkpoints.formats.dcp import tensor_info
from kit.checkpoints.formats.torch_archives import ArchiveError, record_sizes
from kit.errors import KitError

FORMAT = "deepspeed"
LATEST = "latest"  # the file with the name of the folder
PARTITIONED = "zero_pp_rank_*_mp_rank_00_model_states.pt"  # stage 3
COMPLETE = "mp_rank_00_model_states.pt"
OPTIMIZER = "*zero_pp_rank_{}_mp_rank_*_optim_states.pt"  # bf16_zero_pp_rank_... in some releases


class _Unknown:
    """Stands in for an object of a class of DeepSpeed, which is not imported: it holds values and runs nothing."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


@dataclass(frozen=True)
class _Part:
    """A rank's flat fp32 tensors: the file, and (begin in bytes, elements) of each."""

    file: Path
    begins: tuple[int, ...]
    lengths: tuple[int, ...]

    def find(self, offset: int, count: int) -> int:
        """The byte in the file where `count` elements begin, `offset` elements after the first.

        Raises ArchiveError where the tensors do not hold them in a row.
        """
        for begin, length in zip(self.begins, self.lengths, strict=True):
            if offset < length:
                if offset + count > length:
                    break
                return begin + 4 * offset
            offset -= length
        raise ArchiveError(f"{self.file} does not hold all values of its rank's part of a weight")


def problems(checkpoint: Path) -> Iterator[Problem]:
    """What of the folder that `latest` names is missing or damaged."""
    folder = _folder(checkpoint)
    if not folder.is_dir():
        message = (
            f"{checkpoint / LATEST} names {folder.name}, which does not exist; copy the complete checkpoint again."
        )
        yield Problem(ProblemKind.MISSING_FILE, message)
        return
    damaged = False
    for file in sorted(folder.glob("*.pt")):
        try:
            with file.open("rb") as stream:
                record_sizes(stream)
        except ArchiveError as error:
            damaged = True
            yield Problem(ProblemKind.DAMAGED_FILE, f"{file}: {error}.")
    if not damaged:
        try:
            yield from tuple(_missing_files(folder))
        except PermissionError:
            raise
        except Exception as error:  # a foreign file fails in many ways
            yield _foreign(folder, error)


def _foreign(folder: Path, error: Exception) -> Problem:
    reason = str(error).partition("\n")[0].rstrip(".")
    message = f"{folder} cannot be read as a checkpoint of DeepSpeed ({reason})."
    return Problem(ProblemKind.DAMAGED_FILE, message)


def _missing_files(folder: Path) -> Iterator[Problem]:
    """Files of ranks that are not there, by the number of ranks that rank 0's file has."""
    if not (first := sorted(folder.glob(OPTIMIZER.format(0)))):
        yield Problem(ProblemKind.MISSING_FILE, f"{folder} lacks the optimizer state of rank 0.")
        return
    ranks = _partitions(first[0])
    lacking = [rank for rank in range(ranks) if not any(folder.glob(OPTIMIZER.format(rank)))]
    if lacking:
        names = ", ".join(map(str, lacking[:8]))
        message = f"{folder} lacks the optimizer state of {len(lacking)} of {ranks} ranks: {names}."
        yield Problem(ProblemKind.MISSING_FILE, message)
    states = len(list(folder.glob(PARTITIONED)))
    if not (folder / COMPLETE).is_file() and states < ranks:
        yield Problem(ProblemKind.MISSING_FILE, f"{folder} has the model states of {states} of {ranks} ranks.")


def _partitions(file: Path) -> int:
    count = _load(file)["optimizer_state_dict"]["partition_count"]
    return int(count[0] if isinstance(count, list) else count)


def _folder(checkpoint: Path) -> Path:
    name = (checkpoint / LATEST).read_text(errors="replace").strip()
    return checkpoint / (Path(name).name or LATEST)


def _load(file: Path) -> dict[str, Any]:
    """The content of a file, with its tensors on the device meta. Raises an error for classes of other packages."""
    import torch

    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    stand_ins: Any = [(_Unknown, name) for name in unknown if name.startswith("deepspeed.")]
    with torch.serialization.safe_globals(stand_ins):
        content: dict[str, Any] = torch.load(file, map_location="meta", weights_only=True)
    return content


def read_headers(paths: list[Path]) -> Weights:
    """The weights of the checkpoint whose file `latest` is given: of stage 3 in fp32, as they are trained."""
    checkpoint = paths[0].parent
    found = tuple(problems(checkpoint))
    files = tuple(sorted(_folder(checkpoint).glob("*.pt")))
    if found:
        return Weights(FORMAT, files, {}, found)
    try:
        return Weights(FORMAT, files, _tensors(_folder(checkpoint)))
    except PermissionError:
        raise
    except Exception as error:  # a foreign file fails in many ways
        return Weights(FORMAT, files, {}, (_foreign(_folder(checkpoint), error),))


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    states = _load(_model_states(folder)[0])
    if (folder / COMPLETE).is_file():
        return {name: tensor_info(tensor.dtype, tensor.shape) for name, tensor in states["module"].items()}
    trained = {name: _fp32(shape) for group in states["param_shapes"] for name, shape in group.items()}
    kept = {name: states["module"][name] for name in states["buffer_names"] if name in states["module"]}
    return trained | {name: tensor_info(tensor.dtype, tensor.shape) for name, tensor in kept.items()}


def _fp32(shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo("float32", tuple(shape), 4 * math.prod(shape))


def _model_states(folder: Path) -> list[Path]:
    """The files of the ranks in stage 3, by rank; else that of rank 0."""
    if (folder / COMPLETE).is_file():
        return [folder / COMPLETE]
    ranks = range(len(list(folder.glob(PARTITIONED))))
    return [folder / PARTITIONED.replace("*", str(rank), 1) for rank in ranks]


def pieces(weights: Weights) -> dict[str, list[Piece]]:
    """Where the bytes of every tensor are. Raises KitError for parts that are not those of these weights."""
    folder = weights.files[0].parent
    first = _model_states(folder)[0]
    states = _load(first)
    stored = {name: [_stored(weights.tensors[name], first, states["module"][name])] for name in weights.tensors
              if name in states["module"] and states["module"][name].numel()}  # fmt: skip
    if (folder / COMPLETE).is_file():
        return stored
    try:
        return _partitioned(states["param_shapes"], _parts(folder)) | stored
    except ArchiveError as error:
        raise KitError(f"{error}: the checkpoint is damaged, or not of DeepSpeed's ZeRO stage 3.") from None


def _stored(info: TensorInfo, file: Path, tensor: Any) -> Piece:
    if not tensor.is_contiguous():
        raise KitError(f"{file} holds a weight with its dimensions exchanged; only torch.load can read that.")
    return complete_piece(info, file, _begin(tensor))


def _begin(tensor: Any) -> int:
    """The byte of its file where a tensor begins, which torch.load notes on the storage."""
    return int(tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.element_size())


def _parts(folder: Path) -> list[_Part]:
    """The parts of the ranks, by rank."""
    found = []
    for rank in range(len(_model_states(folder))):
        (file,) = folder.glob(OPTIMIZER.format(rank))
        flat = _load(file)["optimizer_state_dict"].get("fp32_flat_groups", [])
        found.append(_Part(file, tuple(map(_begin, flat)), tuple(tensor.numel() for tensor in flat)))
    return found


def _partitioned(groups: list[dict[str, tuple[int, ...]]], parts: list[_Part]) -> dict[str, list[Piece]]:
    """The pieces of all weights of stage 3, from the parts of the ranks."""
    found: dict[str, list[Piece]] = defaultdict(list)
    offset = 0  # of the weight in each rank's part
    for name, shape in ((name, tuple(shape)) for group in groups for name, shape in group.items()):
        values = math.prod(shape)
        share = -(-values // len(parts))
        for rank, part in enumerate(parts):
            start, end = min(rank * share, values), min((rank + 1) * share, values)
            if start == end:  # only padding
                continue
            begin = part.find(offset, end - start)
            for box in boxes_of_range(start, end, shape):
                length = 4 * math.prod(box.sizes)
                found[name].append(Piece(box.offsets, box.sizes, "float32", part.file, begin, length))
                begin += length
        offset += share
    return found
