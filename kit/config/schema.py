"""Validation of recipes, cluster profiles and notebook parameters, by pydantic, with errors that name the valid values.

Values are checked without guessing: an int is accepted as a float, but "1" is not an int and 1 is not a bool.
"""

import dataclasses
import difflib
import functools
import json
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic.dataclasses
from annotated_types import Ge, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from kit import files
from kit.errors import InputError

T = TypeVar("T")
Location = tuple[int | str, ...]  # of a value in tables and lists: ("schedule", "lr")
Label = Callable[[str], str]  # the beginning of a message, from a dotted key

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
NAMES = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path", type(None): "none",
    list: "a list", tuple: "a list", dict: "a table",
}  # fmt: skip
LISTED = 40  # a message lists at most so many valid names


@typing.dataclass_transform(frozen_default=True)
def table(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass for one table of a TOML file, validated by pydantic on construction.

    The docstring below each field is its description in the JSON schema.
    """
    return typing.cast(type[T], pydantic.dataclasses.dataclass(frozen=True, config=STRICT)(cls))


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Return `cls` made from TOML-like values; `where`, such as the file's name, starts every message.

    Raises InputError with one line for each unknown key, missing key or wrong value.
    """
    return typing.cast(T, _validate(cls, values, lambda key: f"{where}: {key}" if key else where))


def coerce(value: Any, kind: Any, where: str) -> Any:
    """Return the value as `kind`, any type that pydantic knows. Raises InputError that starts with `where`."""
    return value if kind is Any else _validate(kind, value, lambda key: _join(where, key))


def _validate(kind: Any, value: Any, label: Label) -> Any:
    """Validate as JSON: only then does pydantic's strict mode take a list as a tuple and text as a path."""
    plain = _plain(value, (), label)
    try:
        return _adapter(kind).validate_json(json.dumps(plain))
    except ValidationError as error:
        lines = [_message(one, kind, label) for one in error.errors(include_url=False)]
        raise InputError("\n".join(lines)) from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    is_table = dataclasses.is_dataclass(kind)  # it has its own configuration
    return TypeAdapter(kind, config=None if is_table else ConfigDict(strict=True))


def _plain(value: Any, location: Location, label: Label) -> Any:
    """The value with paths as text. Raises InputError for what JSON lacks, such as TOML's dates."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, (*location, str(key)), label) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*location, index), label) for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    key = label(_dotted(location))
    raise InputError(f"{key} is {value}, a {type(value).__name__}, which no key takes; write text in quotes.")


def _message(error: ErrorDetails, kind: Any, label: Label) -> str:
    location = error["loc"]
    if error["type"] == "unexpected_keyword_argument":
        parent, _ = _type_at(kind, location[:-1])
        known = nearest(str(location[-1]), types_of(parent))
        return f"{label(_dotted(location[:-1]))}: unknown key {location[-1]!r}; {known}"
    expected, depth = _type_at(kind, location)
    key = label(_dotted(location[:depth]))
    if error["type"] == "missing":
        return f"{key} is missing and has no default."
    if error["type"] == "value_error" and isinstance(error["input"], Mapping):  # raised by a validator of a table
        return f"{key}: {error['ctx']['error']}"
    if error["type"] == "value_error":  # raised by a validator of a field
        return f"{key} is {error['input']!r}; {error['ctx']['error']}"
    if error["type"] == "finite_number":
        return f"{key} is {error['input']!r}; it must be a finite number."
    choices = [str(choice) for choice in typing.get_args(expected)]
    if typing.get_origin(expected) is Literal:
        return f"{key} is {error['input']!r}; {nearest(str(error['input']), choices)}"
    return f"{key} is {error['input']!r}; it must be {describe(expected)}."


def _type_at(kind: Any, location: Location) -> tuple[Any, int]:
    """The annotation at a location in pydantic's errors, and how many of its parts lead there.

    Inside a union the location goes on with names of its members; the union itself is returned.
    """
    for depth, part in enumerate(location):
        plain, arguments = _without_annotation(kind), typing.get_args(_without_annotation(kind))
        if dataclasses.is_dataclass(plain):
            hints = typing.get_type_hints(plain, include_extras=True)
            kind = hints.get(str(part), Any)
        elif typing.get_origin(plain) is dict:
            kind = arguments[1]
        elif typing.get_origin(plain) in (list, tuple):
            kind = arguments[0]
        else:
            return plain, depth
    return kind, len(location)


def _without_annotation(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _dotted(location: Iterable[int | str]) -> str:
    """schedule.lr, target_modules[0]."""
    return functools.reduce(lambda key, part: _join(key, f"[{part}]" if isinstance(part, int) else part), location, "")


def _join(key: str, part: str) -> str:
    return f"{key}{'.' if key and part and not part.startswith('[') else ''}{part}"


def describe(kind: Any) -> str:
    """A type in words, such as "a whole number, at least 1"."""
    if typing.get_origin(kind) is Annotated:
        base, *limits = typing.get_args(kind)
        low = next((limit.ge for limit in limits if isinstance(limit, Ge)), None)
        high = next((limit.le for limit in limits if isinstance(limit, Le)), None)
        span = f", at least {low}" if high is None else f", between {low} and {high}"
        return describe(base) + (span if low is not None else "")
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(describe(member) for member in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    if dataclasses.is_dataclass(kind):
        return NAMES[dict]
    return NAMES.get(typing.get_origin(kind) or kind, str(kind))


def nearest(word: str, valid: Iterable[str]) -> str:
    """A sentence that offers the closest valid word and lists all, or the three closest of a long list."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if len(names) <= LISTED:
        return f"{hint}Valid: {', '.join(names)}."
    if not close:
        return f"none of the {len(names)} known names is close to it."
    return f"did you mean {' or '.join(repr(name) for name in close)}? {len(names)} names are known."


def types_of(cls: Any) -> dict[str, Any]:
    """The fields of a dataclass and their types, without ranges."""
    return typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}


def parse(text: str, kind: Any, where: str) -> Any:
    """Return text from a command line as `kind`: `false` is a bool only for bool, and `007` stays text for str.

    Lists are JSON or separated by commas. Raises InputError that starts with `where`.
    """
    kind = _without_annotation(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _parse_union(text, arguments, where)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind in (int, float):
        return _parse_number(text, kind, where)
    if kind in (str, Path):
        return kind(text)
    if origin is Literal:
        by_text = {str(choice): choice for choice in arguments}
        return coerce(by_text.get(text, text), kind, where)
    if origin in (list, tuple, dict):
        if text[:1] in ("[", "{"):
            return coerce(_parse_json(text, where), kind, where)
        return coerce([parse(item.strip(), arguments[0], where) for item in text.split(",")], kind, where)
    return coerce(text, kind, where)


def _parse_union(text: str, kinds: tuple[Any, ...], where: str) -> Any:
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    for kind in kinds:
        if kind is not type(None):
            try:
                return parse(text, kind, where)
            except InputError:
                continue
    raise InputError(f"{where} is {text!r}; it must be {' or '.join(map(describe, kinds))}.")


def _parse_number(text: str, kind: Any, where: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{where} is {text!r}; it must be {describe(kind)}.") from None


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: {text!r} is not valid JSON ({error}).") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. Raises InputError that names the file and the line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML: {error}.") from None


def names(kind: Literal["recipes", "clusters"]) -> list[str]:
    """The names under which `find` has recipes or profiles: of ./env and of those that come with the kit."""
    folders = (Path("env") / kind, files.REPOSITORY / "env" / kind)
    return sorted({path.stem for folder in folders for path in folder.glob("*.toml")})


def find(name: str | Path, kind: Literal["recipes", "clusters"]) -> Path:
    """The path of a recipe or profile: `name` itself, else ./env/<kind>/<name>.toml, else one shipped with the kit.

    Raises InputError that names the nearest shipped one.
    """
    if Path(name).is_file():
        return Path(name)
    for folder in (Path("env") / kind, files.REPOSITORY / "env" / kind):
        if (path := folder / f"{name}.toml").is_file():
            return path
    raise InputError(
        f"No {kind[:-1]} {str(name)!r}: it is neither a file nor the name of a shipped {kind[:-1]}; "
        + nearest(str(name), names(kind))
    )


def as_dict(value: Any) -> dict[str, Any]:
    """A dataclass as TOML-ready tables: tuples become lists."""
    plain = dataclasses.asdict(value)
    return typing.cast(dict[str, Any], json.loads(json.dumps(plain, default=str)))


def differences(tables: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of each table whose values differ from the defaults; a table within a table is kept complete."""
    changed: dict[str, Any] = {}
    for name, table in tables.items():
        default = defaults.get(name)
        if isinstance(table, Mapping) and isinstance(default, Mapping):
            keys = {key: value for key, value in table.items() if value != default.get(key)}
            if keys:
                changed[name] = keys
        elif table != default:
            changed[name] = table
    return changed
