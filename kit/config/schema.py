"""Plain values into typed, frozen dataclasses, with errors that name the field and the valid values.

Recipes and clusters come from TOML, notebook parameters from the command line; one set of rules serves both.
"""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kit import files
from kit.errors import InputError

T = TypeVar("T")


def nearest(word: str, valid: Iterable[str]) -> str:
    """A sentence that offers the closest valid word and lists them all."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(names)}."


def types_of(cls: type) -> dict[str, Any]:
    """A dataclass's annotations, resolved."""
    return typing.get_type_hints(cls)


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """A dataclass from a mapping; `where` starts every message. Raises InputError on an unknown key or bad value."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise InputError(f"{where}: unknown key {key!r}; {nearest(key, fields)}")
    out = {}
    for name, field in fields.items():
        here = f"{where}: {name}" if where.endswith("]") or ":" not in where else f"{where}.{name}"
        if name in values:
            out[name] = coerce(values[name], types_of(cls)[name], here)
            _check_range(out[name], field.metadata, here)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{here} is missing and has no default.")
    return cls(**out)


def _check_range(value: Any, limits: Mapping[str, Any], where: str) -> None:
    low, high = limits.get("least"), limits.get("most")
    if (low is not None and value < low) or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InputError(f"{where} is {value!r}; it must be {span}.")


def at_least(low: float, default: Any, most: float | None = None) -> Any:
    """A dataclass field with a range that `build` checks."""
    return dataclasses.field(default=default, metadata={"least": low, "most": most})


def coerce(value: Any, kind: Any, where: str) -> Any:
    """The value as `kind`, without guessing: an int is a float, but "1" is no int and 1 is no bool."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if value not in args:
            raise InputError(f"{where} is {value!r}; {nearest(str(value), map(str, args))}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _first_that_fits(value, args, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return build(typing.cast(type, kind), value, where)
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(coerce(v, args[0], f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {str(k): coerce(v, args[1], f"{where}.{k}") for k, v in value.items()}
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (kind in (str, int, float, bool, Path, type(None)) and type(value) is kind) or kind is Any:
        return value
    raise InputError(f"{where} is {value!r}; it must be {_name(kind)}.")


def _first_that_fits(value: Any, kinds: Iterable[Any], where: str) -> Any:
    for kind in kinds:
        try:
            return coerce(value, kind, where)
        except InputError:
            continue
    raise InputError(f"{where} is {value!r}; it must be {' or '.join(map(_name, kinds))}.")


def _name(kind: Any) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
    return words.get(kind) or str(getattr(kind, "__name__", kind))


def parse(text: str, kind: Any, where: str) -> Any:
    """Text from a command line as `kind`: `false` is a bool only where one is asked for, `007` stays text for str."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in args and text.lower() in ("none", "null"):
            return None
        return _first_parsed(text, [a for a in args if a is not type(None)], where)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise InputError(f"{where} is {text!r}; it must be {_name(kind)}.") from None
    if origin is typing.Literal:
        by_text = {str(a): a for a in args}
        return coerce(by_text.get(text, text), kind, where)
    if origin in (list, tuple, dict):
        if text[:1] in ("[", "{"):
            return coerce(_json(text, where), kind, where)
        return coerce([parse(item.strip(), args[0], where) for item in text.split(",")], kind, where)
    return coerce(text, kind, where)


def _first_parsed(text: str, kinds: list[Any], where: str) -> Any:
    for kind in kinds:
        try:
            return parse(text, kind, where)
        except InputError:
            continue
    raise InputError(f"{where} is {text!r}; it must be {' or '.join(map(_name, kinds))}.")


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: {text!r} is not valid JSON ({error}).") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. Raises InputError naming the file and the line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML: {error}.") from None


def find(name: str | Path, kind: str) -> Path:
    """A recipe or cluster file: the path as given, else `NAME.toml` in ./env/<kind>, else one shipped with the kit."""
    if Path(name).is_file():
        return Path(name)
    shipped = files.REPOSITORY / "env" / kind
    for folder in (Path("env") / kind, shipped):
        if (path := folder / f"{name}.toml").is_file():
            return path
    raise InputError(
        f"No {kind[:-1]} {str(name)!r}: there is no such file, and none of the shipped ones has that name; "
        + nearest(str(name), (p.stem for p in shipped.glob("*.toml")))
    )


def as_dict(value: Any) -> dict[str, Any]:
    """A dataclass as TOML-ready tables (tuples become lists)."""
    plain = dataclasses.asdict(value)
    return typing.cast(dict[str, Any], json.loads(json.dumps(plain, default=str)))
