"""Types that every format shares: a tensor's description, the weights of a checkpoint, and problems by kind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kit.errors import InputError, KitError


class ProblemKind(StrEnum):
    """What is wrong with a checkpoint. Decisions use these; messages are for people alone."""

    NO_TENSORS = "no tensors"
    NO_LORA = "no LoRA tensors"
    MISSING_FILE = "missing file"
    EMPTY_FILE = "empty file"
    TRUNCATED_FILE = "truncated file"
    DAMAGED_FILE = "damaged file"
    MISSING_TENSOR = "missing tensor"
    MIXED_SAVES = "files of different saves"
    UNFINISHED_SAVE = "unfinished save"
    NO_OPTIMIZER = "no optimizer state"
    MISSING_RANKS = "random state of some ranks missing"
    OTHER_RANKS = "saved by another number of ranks"
    UNREADABLE = "not readable"
    NOT_SUPPORTED = "not supported"
    HIDDEN_FROM_GROUP = "not readable by the group"
    COMPILED_NAMES = "names of compiled modules"
    NOT_FINITE = "values that are not finite"
    UNTRAINED = "untrained adapter"


# Training can resume, and an adapter can be exported, in spite of these.
HARMLESS = frozenset({ProblemKind.HIDDEN_FROM_GROUP, ProblemKind.UNTRAINED})


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint, with a complete sentence for people."""

    kind: ProblemKind
    message: str

    def __str__(self) -> str:
        return self.message


class DamageError(InputError):
    """A file that cannot be read, with its problem."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(kind, message)


class TensorError(KitError):
    """A tensor whose values cannot be read although its header is sound, with its problem."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(kind, message)


def join_messages(problems: Iterable[Problem]) -> str:
    """The messages of all problems in one line."""
    return " ".join(problem.message for problem in problems)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a header describes it; `dtype` is torch's name without "torch."."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint by name, the files that hold them, and the problems of these files."""

    format: str
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    problems: tuple[Problem, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Piece:
    """A stored part of a tensor: its offset and shape in the tensor, and its bytes in a file.

    The bytes are the raw values or, where `packed`, an archive written by torch.save, which DCP's `extensions` then
    transformed one after the other, as to compress it.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    length: int
    packed: bool = False
    extensions: tuple[Any, ...] = ()


def complete_piece(tensor: TensorInfo, file: Path, start: int) -> Piece:
    """The only piece of a tensor that is stored as one run of raw bytes."""
    return Piece((0,) * len(tensor.shape), tensor.shape, tensor.dtype, file, start, tensor.bytes)


def split_unreadable(paths: Sequence[Path]) -> tuple[list[Path], list[Problem]]:
    """The paths of regular files, and a problem for each other one, as opening a FIFO would wait for ever."""
    readable = [path for path in paths if path.is_file()]
    return readable, [_not_a_file(path) for path in paths if path not in readable]


def _not_a_file(path: Path) -> Problem:
    if not path.exists():
        return broken_link(path)
    return Problem(ProblemKind.UNREADABLE, f"{path} is not a regular file; a checkpoint consists of regular files.")


def broken_link(path: Path) -> Problem:
    """The problem of a symbolic link without a target, as in a hub cache that was moved."""
    return Problem(
        ProblemKind.MISSING_FILE,
        f"{path} is a symbolic link to {path.readlink()}, which does not exist; copy it again.",
    )
