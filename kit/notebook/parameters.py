"""Parameters of a notebook: read from the cell tagged `parameters`, typed by its annotations, written as a cell."""

import ast
import io
import math
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml  # type: ignore[import-untyped]

from kit.config.schema import coerce, nearest, parse
from kit.errors import InputError
from kit.notebook.redact import is_secret

PARAMETERS, INJECTED = "parameters", "injected-parameters"  # tags of cells, as papermill names them
PLAIN_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, Path)}
NUMBERS = (bool, int, float, int | None, float | None)  # no secret has such a type; max_tokens is not one


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell. The default is its source text if that is not a literal."""

    name: str
    kind: Any
    default: Any
    help: str = ""


def read_notebook(path: Path) -> Any:
    """The notebook in nbformat 4. Raises InputError if it is missing, damaged or not in Python."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such notebook.")
    try:
        notebook = nbformat.v4.upgrade(nbformat.read(path, as_version=4))
        nbformat.validate(notebook)
    except Exception as error:  # on a file of another kind nbformat's converters raise anything
        raise InputError(f"{path} is not a notebook ({str(error).partition(chr(10))[0]}).") from None
    kernel_language = notebook.metadata.get("kernelspec", {}).get("language", "python")
    language = notebook.metadata.get("language_info", {}).get("name") or kernel_language
    if language != "python":
        raise InputError(f"{path} is written in {language}; only Python notebooks can be run here.")
    return notebook


def read_parameters(notebook: Any) -> dict[str, Parameter]:
    """The parameters of a notebook (a path or a loaded one), from the cell tagged `parameters`, without running it.

    Types: bool, int, float, str, Path, list[...], Literal[...], `X | None`, also quoted; without one, the default's.
    """
    notebook = read_notebook(Path(notebook)) if isinstance(notebook, str | Path) else notebook
    cells = [cell.source for cell in notebook.cells if _has_tag(cell, PARAMETERS)]
    if len(cells) > 1:
        raise InputError(f"{len(cells)} cells are tagged `parameters`; keep the tag on one of them.")
    return {parameter.name: parameter for parameter in _parse("".join(cells))}


def _has_tag(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def _parse(source: str) -> Iterator[Parameter]:
    """The parameters in the source of a cell; the comment behind a line is its help."""
    try:
        lines = ast.parse(source).body
    except SyntaxError as error:
        raise InputError(f"The parameters cell, line {error.lineno}, is not plain Python: {error.msg}.") from None
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    for line in lines:
        comment = comments.get(line.end_lineno or 0, "")
        match line:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
                yield Parameter(name, _type(annotation), _default(value), comment)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                default = _default(value)
                yield Parameter(name, Any if default is None else type(default), default, comment)


def _default(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _type(node: ast.expr) -> Any:
    """The type that an annotation names, without evaluating it."""
    match node:
        case ast.Name(id=name) if name in PLAIN_TYPES:
            return PLAIN_TYPES[name]
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str(quoted)):
            return _type(ast.parse(quoted, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return typing.Union[_type(left), _type(right)]  # noqa: UP007  (built at run time)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return types.GenericAlias(list, (_type(item),))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return typing.cast(Any, typing.Literal)[ast.literal_eval(choices)]
    raise InputError(
        f"The parameters cell: cannot read the type {ast.unparse(node)!r}; "
        f"use {', '.join(PLAIN_TYPES)}, list[...], Literal[...] or any of them with `| None`."
    )


def read_values(path: Path) -> dict[str, Any]:
    """Values from a YAML file, every scalar as text, because the annotation is its type.

    YAML itself reads 1e-5 as text and 1:30:00 as 5400.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must have `name: value` lines.")
    return values


def check(parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, text or typed, in the annotated types. Raises InputError for unknown names and bad values."""
    if given and not parameters:
        raise InputError("The notebook takes no parameters: tag the cell that holds their defaults `parameters`.")
    for name in given:
        if name not in parameters:
            raise InputError(f"Unknown parameter {name!r}; {nearest(name, parameters)}")
        if is_secret(name) and parameters[name].kind not in NUMBERS:
            raise InputError(f"Parameter {name!r} looks like a secret; pass it through the environment or a file.")
    return {name: _typed(value, parameters[name].kind, f"Parameter {name}") for name, value in given.items()}


def _typed(value: Any, kind: Any, where: str) -> Any:
    if isinstance(value, str | Path):
        return parse(str(value), kind, where)
    if isinstance(value, list):
        lists = [one for one in (kind, *typing.get_args(kind)) if typing.get_origin(one) is list]  # also list | None
        item_type = typing.get_args(lists[0])[0] if lists else Any
        value = [_typed(item, item_type, where) for item in value]
    return coerce(value, kind, where)


def _python(value: Any) -> str:
    """Source that evaluates to exactly the value."""
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, Path):
        return f"Path({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def inject(notebook: Any, values: Mapping[str, Any]) -> None:
    """Write the values into a new cell after the parameters cell, instead of an earlier such cell."""
    cells = [cell for cell in notebook.cells if not _has_tag(cell, INJECTED)]
    if values:
        source = [f"{name} = {_python(value)}" for name, value in values.items()]
        if any("Path(" in line for line in source):
            source.insert(0, "from pathlib import Path")
        place = next(number for number, cell in enumerate(cells, 1) if _has_tag(cell, PARAMETERS))
        cells.insert(place, nbformat.v4.new_code_cell("\n".join(source), metadata={"tags": [INJECTED]}))
    notebook.cells = cells
