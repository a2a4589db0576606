"""Safetensors files: a model, its shards with an index, or a PEFT adapter, described by their headers alone.

Format (README of huggingface/safetensors): 8 bytes of header length (little endian), a JSON object {name: {dtype,
shape, data_offsets}}, then the values. The values of all tensors follow each other without gaps.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kit import files
from kit.checkpoints.formats.base import (
    Piece,
    Problem,
    ProblemKind,
    TensorInfo,
    Weights,
    complete_piece,
    split_broken_links,
)
from kit.errors import InputError

ADAPTER_FILE = "adapter_model.safetensors"
_TORCH_NAMES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}
_TORCH_PREFIXES = {"F": "float", "I": "int", "U": "uint", "C": "complex"}


class Header(NamedTuple):
    """The tensors of one file in the order of their bytes, and where in the file the bytes of each begin."""

    tensors: dict[str, TensorInfo]
    starts: dict[str, int]


class HeaderError(Exception):
    """A file that safetensors would refuse."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(kind, message)


def read_headers(paths: list[Path]) -> Weights:
    """The tensors of some files. A file that cannot be read is a problem, not an exception."""
    existing, problems = split_broken_links(paths)
    tensors: dict[str, TensorInfo] = {}
    for path in existing:
        try:
            found = read_header(path).tensors
        except HeaderError as error:
            problems.append(error.problem)
            continue
        if repeated := found.keys() & tensors.keys():
            problems.append(
                Problem(ProblemKind.MIXED_SAVES, f"{path} holds {min(repeated)} again: the folder holds two models.")
            )
        tensors |= found
    name = "peft adapter" if paths and paths[0].name == ADAPTER_FILE else "safetensors"
    return Weights(name, tuple(existing), tensors, tuple(problems))


def read_index(paths: list[Path]) -> Weights:
    """The shards that a .safetensors.index.json names."""
    index = paths[0]
    try:
        shard_of = _weight_map(index)
    except HeaderError as error:
        return Weights("safetensors", (), {}, (error.problem,))
    shards = [index.parent / name for name in sorted(set(shard_of.values()))]
    missing = [path for path in shards if not path.exists() and not path.is_symlink()]
    weights = read_headers([path for path in shards if path not in missing])
    problems = [
        Problem(ProblemKind.MISSING_FILE, f"{path} does not exist, but {index.name} names it.") for path in missing
    ]
    problems += weights.problems
    absent = [name for name in shard_of if name not in weights.tensors]
    if absent and not problems:
        message = f"{index} names {len(absent)} tensors that no shard holds, such as {absent[0]}."
        problems.append(Problem(ProblemKind.MISSING_TENSOR, message))
    return replace(weights, problems=tuple(problems))


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor: file name} of an index. Raises HeaderError."""
    try:
        content = files.read_json(index)
    except InputError as error:
        raise HeaderError(ProblemKind.DAMAGED_FILE, str(error)) from None
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise HeaderError(ProblemKind.DAMAGED_FILE, f"{index} has no weight_map that names a file for each tensor.")
    return found


def read_header(path: Path) -> Header:
    """The header of one file, checked as safetensors checks it. Raises HeaderError for a file that it would refuse."""
    size = path.stat().st_size
    if not size:
        raise HeaderError(ProblemKind.EMPTY_FILE, f"{path} is empty.")
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(length, size))
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        message = f"{path} is truncated or not a safetensors file: {size} bytes without a header."
        raise HeaderError(ProblemKind.TRUNCATED_FILE, message) from None
    if not isinstance(table, dict):
        raise HeaderError(ProblemKind.DAMAGED_FILE, f"{path} has a header that is not a JSON object.")
    table.pop("__metadata__", None)
    tensors, starts, end = _layout(path, table)
    need = 8 + length + end
    if size < need:
        raise HeaderError(ProblemKind.TRUNCATED_FILE, f"{path} is truncated: {size} of {need} bytes.")
    if size > need:
        raise HeaderError(ProblemKind.DAMAGED_FILE, f"{path} has {size - need} bytes after its last tensor.")
    return Header(tensors, {name: 8 + length + start for name, start in starts.items()})


class _Layout(NamedTuple):
    tensors: dict[str, TensorInfo]
    starts: dict[str, int]
    end: int


def _layout(path: Path, table: dict[str, Any]) -> _Layout:
    """Tensors and their first bytes, counted from the end of the header. Raises HeaderError."""
    offsets = {name: _offsets(path, name, fields) for name, fields in table.items()}
    tensors, starts, end = {}, {}, 0
    for name in sorted(offsets, key=lambda name: offsets[name]):
        first, last = offsets[name]
        if first != end:
            message = f"{path}: the bytes of {name} do not begin where those of the tensor before end."
            raise HeaderError(ProblemKind.DAMAGED_FILE, message)
        shape, bits = tuple(table[name]["shape"]), _bits(table[name]["dtype"])
        if math.prod(shape) * bits != (last - first) * 8:
            message = f"{path}: {name} has {last - first} bytes, which do not fit its shape {list(shape)}."
            raise HeaderError(ProblemKind.DAMAGED_FILE, message)
        tensors[name] = TensorInfo(_torch_dtype(table[name]["dtype"]), shape, last - first)
        starts[name] = first
        end = last
    return _Layout(tensors, starts, end)


def _offsets(path: Path, name: str, fields: Any) -> tuple[int, int]:
    """(first, last + 1) byte of a tensor. Raises HeaderError where the header's fields are missing or malformed."""
    try:
        first, last = fields["data_offsets"]
        numbers = [first, last, *fields["shape"]]
        sound = all(type(number) is int and number >= 0 for number in numbers) and _bits(fields["dtype"]) > 0
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        message = f"{path}: the header does not give dtype, shape and data_offsets of {name}."
        raise HeaderError(ProblemKind.DAMAGED_FILE, message)
    return first, last


def _bits(dtype: str) -> int:
    """Bits of one value; 0 for a name without a number."""
    if dtype == "BOOL":
        return 8
    number = re.match(r"[A-Z]+(\d+)", dtype)
    return int(number[1]) if number else 0


def _torch_dtype(dtype: str) -> str:
    return _TORCH_NAMES.get(dtype) or _TORCH_PREFIXES.get(dtype[0], dtype[0]) + dtype[1:]


def pieces(weights: Weights) -> dict[str, list[Piece]]:
    """Where the bytes of every tensor are."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for file in weights.files:
        for name, start in read_header(file).starts.items():
            found[name].append(complete_piece(weights.tensors[name], file, start))
    return found
