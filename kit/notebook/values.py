"""Types of notebook parameters, and values in these types; the notebook's own code is read and never run."""

import ast
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config.schema import coerce, describe, parse
from kit.errors import InputError

PLAIN_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, Path)}
CONTAINERS: dict[Any, str] = {
    list: "a list", tuple: "a tuple", dict: "a dict", set: "a set", frozenset: "a set"
}  # fmt: skip
NAMED_TYPES: dict[str, Any] = {
    **PLAIN_TYPES,
    **{kind.__name__: kind for kind in CONTAINERS},
    **{name: getattr(typing, name) for name in ("Any", "Optional", "Union", "Literal", "Final")},
    "List": list, "Sequence": list, "Iterable": list, "Collection": list, "Tuple": tuple, "Set": set, "FrozenSet": set,
    "Dict": dict, "Mapping": dict, "MutableMapping": dict, "PurePath": Path, "PosixPath": Path, "object": Any,
}  # fmt: skip
MODULES = {"typing", "t", "typing_extensions", "pathlib", "builtins", "collections.abc"}  # of these types
BIGGEST = 10_000  # bits of a number and items of a sequence that a default may evaluate to


class Text(str):
    """Text from a command line or a file: what it means follows from the type of its parameter."""

    __slots__ = ()


@dataclass(frozen=True)
class Untyped:
    """The kind of a parameter whose type is not known, so that it keeps its default; `reason` is a sentence."""

    reason: str


# ------------------------------------------------------------------------------------------------------------- types


def type_of_annotation(node: ast.expr, aliases: Mapping[str, str]) -> Any:
    """The type that an annotation names, also a quoted one; Untyped where it is not made of NAMED_TYPES.

    `aliases` are other names of these and of their modules, as in `from typing import Optional as Maybe`.
    """
    try:
        plain = ast.fix_missing_locations(_PlainNames(aliases).visit(ast.Expression(node)))
        kind = eval(compile(plain, "annotation", "eval"), {"__builtins__": {}}, NAMED_TYPES)
    except (NameError, TypeError, ValueError, SyntaxError, RecursionError):
        kind = None
    if kind is not typing.Final and not _is_type(kind):
        return Untyped(f"its type {ast.unparse(node)!r} is not made of {', '.join(NAMED_TYPES)} or `| None`")
    return kind


def _is_type(kind: Any) -> bool:
    """Whether values can be converted to this type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal or kind in (Any, type(None), Ellipsis):
        return True
    if origin is typing.Final:
        return _is_type(arguments[0])
    if origin in (typing.Union, types.UnionType) or origin in CONTAINERS:
        return all(map(_is_type, arguments))
    return isinstance(kind, type) and (kind in PLAIN_TYPES.values() or kind in CONTAINERS)


class _PlainNames(ast.NodeTransformer):
    """Replaces typing.Optional by Optional and 'int' by int; refuses all that is not part of an annotation."""

    ALLOWED = (
        ast.Expression, ast.Name, ast.Load, ast.Subscript, ast.Tuple, ast.List, ast.BinOp, ast.BitOr, ast.UnaryOp,
        ast.USub, ast.Constant,
    )  # fmt: skip

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.aliases = aliases

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, self.ALLOWED):
            raise _NotConstantError
        return super().generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        module = ast.unparse(node.value)
        if self.aliases.get(module, module) not in MODULES:
            raise _NotConstantError
        return ast.Name(node.attr, ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.aliases.get(node.id, node.id), ast.Load())

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        inner: ast.AST = self.visit(ast.parse(node.value, mode="eval").body)
        return inner

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        name = self.visit(node.value)
        if isinstance(name, ast.Name) and name.id == "Literal":  # whose texts are values
            return ast.Subscript(name, node.slice, ast.Load())
        if isinstance(name, ast.Name) and name.id == "Annotated" and isinstance(node.slice, ast.Tuple):
            first: ast.AST = self.visit(node.slice.elts[0])  # the others are notes
            return first
        return ast.Subscript(name, self.visit(node.slice), ast.Load())


def type_of_value(value: Any) -> Any:
    """The type that a parameter without an annotation has from its default; Any for None."""
    if value is None:
        return Any
    if isinstance(value, Path):
        return Path
    if isinstance(value, list) and value:
        kinds = {type(item) for item in value}
        if kinds == {int, float}:
            return list[float]
        if len(kinds) == 1 and kinds <= {bool, int, float, str}:
            return list[kinds.pop()]  # type: ignore[misc]
    return (
        type(value)
        if type(value) in (*PLAIN_TYPES.values(), *CONTAINERS)
        else Untyped(
            f"its default is a {type(value).__name__}, whose type the kit does not know; give it an annotation"
        )
    )


# ---------------------------------------------------------------------------------------------------------- defaults


class _NotConstantError(ValueError):
    """An expression whose value only the notebook itself can tell."""


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitOr: operator.or_, ast.BitAnd: operator.and_, ast.BitXor: operator.xor,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Invert: operator.invert,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (bool, int, float, str, list, tuple, dict, set, Path, len, min, max, abs, round, sum)
}


def evaluate(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """The value of an expression of literals, operators, a few built-in functions and names of `known`.

    Raises ValueError for any other expression, and for one whose value would be large or that has none.
    """
    try:
        return _evaluate(node, known)
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{ast.unparse(node)} has no value that is known ({error})") from None


def _evaluate(node: ast.AST, known: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return known[name]
        case ast.List(elts=items):
            return [_evaluate(item, known) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_evaluate(item, known) for item in items)
        case ast.Set(elts=items):
            return {_evaluate(item, known) for item in items}
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_evaluate(key or node, known): _evaluate(value, known) for key, value in pairs}
        case ast.UnaryOp(op=sign, operand=operand):
            return _OPERATORS[type(sign)](_evaluate(operand, known))
        case ast.BinOp(left=left, op=sign, right=right):
            return _calculate(sign, _evaluate(left, known), _evaluate(right, known))
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            return _OPERATORS[type(sign)](_evaluate(left, known), _evaluate(right, known))
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_evaluate(value, known) for value in values)
        case ast.BoolOp(values=values):
            return any(_evaluate(value, known) for value in values)
        case ast.IfExp(test=test, body=body, orelse=other):
            return _evaluate(body if _evaluate(test, known) else other, known)
        case ast.JoinedStr():
            return ""  # whatever it is formatted from, it is text
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in _CALLS:
            named = {word.arg: _evaluate(word.value, known) for word in keywords if word.arg}
            return _CALLS[name](*(_evaluate(argument, known) for argument in arguments), **named)
    raise _NotConstantError(type(node).__name__)


def _calculate(sign: ast.operator, left: Any, right: Any) -> Any:
    """The result of an operator, unless it would take long."""
    sizes = [abs(side).bit_length() if isinstance(side, int) else 1 for side in (left, right)]
    if isinstance(sign, ast.Pow | ast.LShift) and isinstance(right, int) and sizes[0] * abs(right) > BIGGEST:
        raise _NotConstantError("a large number")
    if isinstance(sign, ast.Mult):
        counts = [len(side) if hasattr(side, "__len__") else abs(side) for side in (left, right)]
        is_sequence = any(hasattr(side, "__len__") for side in (left, right))
        if sum(sizes) > BIGGEST or (is_sequence and counts[0] * counts[1] > BIGGEST):
            raise _NotConstantError("a large value")
    if isinstance(sign, ast.Mod) and isinstance(left, str | bytes):
        return left  # text that is formatted stays text
    return _OPERATORS[type(sign)](left, right)


# ------------------------------------------------------------------------------------------------------------ values


def convert(value: Any, kind: Any, where: str) -> Any:
    """The value, text or typed, as `kind`. Raises InputError that starts with `where`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Final:
        return convert(value, arguments[0], where)
    if kind is Any:
        return _literal_or_text(value) if isinstance(value, Text) else value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, where)
    if (origin or kind) in CONTAINERS:
        return _convert_container(value, origin or kind, arguments, where)
    if isinstance(value, str | Path):
        return parse(str(value), kind, where)
    return coerce(value, kind, where)


def _convert_union(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    is_none = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if is_none and type(None) in kinds:
        return None
    for kind in sorted(kinds, key=lambda kind: type(value) is not kind):  # its own type first, else in their order
        if kind is not type(None):
            try:
                return convert(value, kind, where)
            except InputError:
                continue
    raise InputError(f"{where} is {_shown(value)}; it must be {' or '.join(map(_describe, kinds))}.")


def _convert_container(value: Any, base: Any, arguments: tuple[Any, ...], where: str) -> Any:
    items = _read_container(value, base, where) if isinstance(value, str) else value
    if base is dict and isinstance(items, Mapping):
        key_kind, item_kind = arguments or (Any, Any)
        return {
            convert(key, key_kind, where): convert(item, item_kind, f"{where}[{str(key)!r}]")
            for key, item in items.items()
        }
    if base is dict or not isinstance(items, list | tuple | set | frozenset):
        raise InputError(f"{where} is {_shown(value)}; it must be {CONTAINERS[base]}.")
    kinds = _item_kinds(base, arguments, len(items))
    if len(kinds) != len(items):
        raise InputError(f"{where} is {_shown(value)}; it must be {CONTAINERS[base]} of {len(kinds)} values.")
    pairs = enumerate(zip(items, kinds, strict=True))
    return base([convert(item, kind, f"{where}[{index}]") for index, (item, kind) in pairs])


def _item_kinds(base: Any, arguments: tuple[Any, ...], count: int) -> list[Any]:
    """The type of each item; of tuple[int, str] as many as it has."""
    if base is tuple and arguments and arguments[-1] is not Ellipsis:
        return list(arguments)
    return [arguments[0] if arguments else Any] * count


def _read_container(text: str, base: Any, where: str) -> Any:
    """What a literal of Python or JSON says, or texts that are separated by commas."""
    if text.strip()[:1] in tuple("[({"):
        try:
            return read_literal(text)
        except ValueError:
            raise InputError(f"{where} is {text!r}, which is neither a literal of Python nor JSON.") from None
    if base is dict:
        return text
    return [Text(item.strip()) for item in text.split(",")]


def read_literal(text: str) -> Any:
    """The value of a literal of Python or of JSON. Raises ValueError."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        words: dict[str, Any] = {"true": True, "false": False, "none": None}
        if text.strip().lower() in words:
            return words[text.strip().lower()]
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _literal_or_text(text: str) -> Any:
    try:
        return read_literal(text)
    except ValueError:
        return str(text)


def _describe(kind: Any) -> str:
    return CONTAINERS.get(typing.get_origin(kind) or kind) or describe(kind)


def _shown(value: Any) -> str:
    return repr(str(value) if isinstance(value, Text) else value)


def source_of(value: Any) -> str:
    """Source code that evaluates to exactly the value."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{source_of(key)}: {source_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple | set | frozenset) and value:
        items = ", ".join(map(source_of, value))
        opening, closing = {list: "[]", tuple: "()", set: "{}", frozenset: ("frozenset([", "])")}[type(value)]
        return f"{opening}{items}{',' if isinstance(value, tuple) else ''}{closing}"
    if isinstance(value, Path):
        return f"Path({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def as_json(value: Any) -> Any:
    """The value as JSON has it: a path and NaN as text, a tuple and a set as a list, keys as text."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
