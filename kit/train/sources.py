"""Which stored tensors each parameter of a model comes from, by transformers' table of names and conversions."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from re import search
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from kit.checkpoints.formats.base import TensorInfo
from kit.errors import InputError


@dataclass(frozen=True)
class Source:
    """A stored tensor that is a parameter, or a part of one: of index `row` on dim 0, from `start` on on dim 1.

    Files hold the experts of a layer one by one, and transformers joins them: parameter[row, start : start + length].
    """

    name: str
    row: int | None = None
    start: int = 0


@dataclass
class Sources:
    """The sources of each parameter by its name; stored tensors that the model does not use.

    unknown: a conversion that the kit cannot do; empty where it can do all.
    """

    of: dict[str, list[Source]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    unknown: str = ""


def find_sources(model: Any, stored: Mapping[str, TensorInfo]) -> Sources:
    """The sources of a model's parameters in these files. Nothing is checked against the shapes of the model."""
    table, state, found = get_model_conversion_mapping(model), model.state_dict(), Sources()
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            found.unused += [] if _is_ignored(model, name) else [name]
        elif pattern is None:
            found.of[target] = [Source(name)]
        else:
            parts[target][pattern].append(name)
    for target, of_patterns in parts.items():
        converter = of_pattern[next(iter(of_patterns))]
        if not _joins_experts(converter):
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            found.unknown = f"transformers makes {target} from the stored tensors by {operations}"
            break
        found.of[target] = list(_experts(converter.source_patterns, of_patterns, stored))
    return found


def _is_ignored(model: Any, name: str) -> bool:
    """Whether transformers, too, says nothing of a stored tensor that the model does not have."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(search(pattern, name) for pattern in patterns) or name in dict(model.named_buffers())


def _joins_experts(converter: Any) -> bool:
    """Whether the conversion stacks experts on dim 0, and then joins several matrices of each on dim 1."""
    kinds = [(type(operation), operation.dim) for operation in converter.operations if hasattr(operation, "dim")]
    several = len(converter.source_patterns) > 1
    joined = [(MergeModulelist, 0), (Concatenate, 1)] if several else [(MergeModulelist, 0)]
    return len(kinds) == len(converter.operations) and kinds == joined


def _experts(
    patterns: Sequence[str], of_patterns: Mapping[str, list[str]], stored: Mapping[str, TensorInfo]
) -> Iterator[Source]:
    start = 0
    for pattern in patterns:
        names = of_patterns.get(pattern, [])
        yield from (Source(name, row, start) for row, name in enumerate(names))
        start += stored[names[0]].shape[0] if names else 0


def check_sources(
    of: Mapping[str, list[Source]], stored: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raises InputError where the stored tensors are not exactly the parameters of these shapes."""
    if missing := [name for name in shapes if not of.get(name)]:
        raise InputError(
            f"{where} lacks {len(missing)} of the {len(shapes)} tensors of the model that its config.json describes, "
            f"such as {missing[0]}. Copy the base again, or correct config.json."
        )
    for name, shape in shapes.items():
        for source in of[name]:
            found, wanted = stored[source.name].shape, shape if source.row is None else shape[1:]
            sides = (found, wanted) if source.row is None else (found[1:], wanted[1:])
            if sides[0] != sides[1]:
                _refuse(where, source.name, found, f"{name} of {list(shape)}")
        held = sum(prod(stored[source.name].shape) for source in of[name])
        if held != prod(shape):
            _refuse(where, of[name][0].name, stored[of[name][0].name].shape, f"{name} of {list(shape)}")


def _refuse(where: str, name: str, shape: tuple[int, ...], wanted: str) -> None:
    raise InputError(
        f"{where} does not match its config.json: {name} has the shape {list(shape)}, and the model wants {wanted}."
    )
