"""Safetensors files: a model, its shards with an index, or a PEFT adapter, described by their headers alone.

Format (README of huggingface/safetensors): 8 bytes of header length (little endian), a JSON object {name: {dtype,
shape, data_offsets}}, then the values. The values of all tensors follow each other without gaps. Names are unique.
"""

import json
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from kit import files
from kit.checkpoints.formats.base import (
    DamageError,
    Piece,
    Problem,
    ProblemKind,
    TensorInfo,
    Weights,
    complete_piece,
    split_unreadable,
)
from kit.errors import InputError

ADAPTER_FILE = "adapter_model.safetensors"
HEADER_LIMIT = 100_000_000  # bytes; safetensors refuses longer headers (MAX_HEADER_SIZE in its tensor.rs)
_TORCH_NAMES = {
    "BF16": "bfloat16", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_NOT_IN_TORCH = {"F4", "F6_E2M3", "F6_E3M2"}  # or not as one value an element
_TORCH_PREFIXES = {"F": "float", "I": "int", "U": "uint", "C": "complex"}


class Header(NamedTuple):
    """The tensors of one file in the order of their bytes, and where in the file the bytes of each begin."""

    tensors: dict[str, TensorInfo]
    starts: dict[str, int]


def read_headers(paths: list[Path]) -> Weights:
    """The tensors of some files. A file that cannot be read is a problem, not an exception."""
    existing, problems = split_unreadable(paths)
    tensors: dict[str, TensorInfo] = {}
    for path in existing:
        try:
            found = read_header(path).tensors
        except DamageError as error:
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
    except DamageError as error:
        return Weights("safetensors", (), {}, (error.problem,))
    shards = [index.parent / name for name in sorted(set(shard_of.values()))]
    missing = [path for path in shards if not path.exists() and not path.is_symlink()]
    weights = read_headers([path for path in shards if path not in missing])
    problems = [
        Problem(ProblemKind.MISSING_FILE, f"{path} does not exist, but {index.name} names it.") for path in missing
    ]
    problems += [*weights.problems, *_index_problems(index, shard_of, weights)]
    return replace(weights, problems=tuple(problems))


def _some(names: list[str]) -> str:
    """The first of these names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")


def _index_problems(index: Path, shard_of: dict[str, str], weights: Weights) -> list[Problem]:
    """Problems where index and shards disagree: readers that go by the index miss tensors that it does not name.

    Of a damaged shard nothing is known.
    """
    held: dict[str, set[str]] = {}
    for path in weights.files:
        with suppress(DamageError):
            held[path.name] = set(read_header(path).tensors)
    problems = []
    if absent := [name for name, shard in shard_of.items() if name not in held.get(shard, {name})]:
        message = f"{index} names tensors that their shards do not hold: {_some(absent)}."
        problems.append(Problem(ProblemKind.MISSING_TENSOR, message))
    if unnamed := sorted(name for names in held.values() for name in names - shard_of.keys()):
        message = f"{index} does not name all tensors that its shards hold: {_some(unnamed)}."
        problems.append(Problem(ProblemKind.MISSING_TENSOR, message))
    return problems


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor: file name} of an index. Raises DamageError."""
    try:
        content = files.read_json(index)
    except InputError as error:
        raise DamageError(ProblemKind.DAMAGED_FILE, str(error)) from None
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise DamageError(ProblemKind.DAMAGED_FILE, f"{index} has no weight_map that names a file for each tensor.")
    if outside := [name for name in found.values() if Path(name).name != name]:
        message = f"{index} names {outside[0]!r}, which is not the name of a file in the folder of the index."
        raise DamageError(ProblemKind.DAMAGED_FILE, message)
    return found


def read_header(path: Path) -> Header:
    """The header of one file. Raises DamageError for a file that safetensors refuses."""
    size = path.stat().st_size
    if not size:
        raise DamageError(ProblemKind.EMPTY_FILE, f"{path} is empty.")
    with path.open("rb") as stream:
        data = 8 + int.from_bytes(stream.read(8), "little")  # where the values begin
        if data - 8 > HEADER_LIMIT:
            message = f"{path} is not a safetensors file: its header would have {data - 8} bytes."
            raise DamageError(ProblemKind.DAMAGED_FILE, message)
        if size < data:
            message = f"{path} is truncated or not a safetensors file: {size} bytes without a header."
            raise DamageError(ProblemKind.TRUNCATED_FILE, message)
        text = stream.read(data - 8)
    try:
        with safe_open(path, framework="np"):
            table = json.loads(text, object_pairs_hook=_unique)
    except _RepeatedNameError as error:
        message = f"{path} is damaged: its header holds {error} twice."
        raise DamageError(ProblemKind.DAMAGED_FILE, message) from None
    except SafetensorError as error:
        need = data + _end(text)
        if size < need:
            raise DamageError(ProblemKind.TRUNCATED_FILE, f"{path} is truncated: {size} of {need} bytes.") from None
        raise DamageError(ProblemKind.DAMAGED_FILE, f"{path} is damaged: {error}.") from None
    table.pop("__metadata__", None)
    tensors, starts = {}, {}
    for name, fields in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = fields["data_offsets"]
        tensors[name] = TensorInfo(_torch_dtype(fields["dtype"]), tuple(fields["shape"]), last - first)
        starts[name] = data + first
    return Header(tensors, starts)


class _RepeatedNameError(ValueError):
    """A name that a header holds twice, of which safetensors takes the last without a word."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON text. Raises _RepeatedNameError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)
        raise _RepeatedNameError(repeated[0][0])
    return found


def _end(text: bytes) -> int:
    """Where the values end by a header that safetensors refuses; 0 where it does not tell."""
    try:
        tensors = {name: fields for name, fields in json.loads(text).items() if name != "__metadata__"}
        return max(int(fields["data_offsets"][1]) for fields in tensors.values())
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return 0


def _torch_dtype(dtype: str) -> str:
    if dtype in _NOT_IN_TORCH:
        return dtype
    return _TORCH_NAMES.get(dtype) or _TORCH_PREFIXES.get(dtype[0], dtype[0]) + dtype[1:]


def pieces(weights: Weights) -> dict[str, list[Piece]]:
    """Where the bytes of every tensor are."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for file in weights.files:
        for name, start in read_header(file).starts.items():
            found[name].append(complete_piece(weights.tensors[name], file, start))
    return found
