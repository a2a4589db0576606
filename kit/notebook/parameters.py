"""Parameters of a notebook: read from the cell tagged `parameters`, typed by its annotations, written as a cell."""

import ast
import io
import tokenize
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from IPython.core.inputtransformer2 import TransformerManager

from kit.config.schema import nearest
from kit.errors import InputError
from kit.notebook.redact import is_secret
from kit.notebook.values import Text, Untyped, convert, evaluate, source_of, type_of_annotation, type_of_value

PARAMETERS, INJECTED = "parameters", "injected-parameters"  # tags of cells, as papermill names them
NUMBERS = (bool, int, float, int | None, float | None)  # no secret has such a type; max_tokens is not one


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell. The default is its source text if that is not a literal.

    `kind` is its type, or Untyped for one that can only keep its default.
    """

    name: str
    kind: Any
    default: Any
    help: str = ""


def read_notebook(path: Path) -> Any:
    """The notebook in nbformat 4. Raises InputError if it is missing, damaged or not in Python."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such notebook.")
    import nbformat  # takes more than a second, which a form in a kernel does not wait for

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

    Types are those of kit.notebook.values; a parameter without an annotation has the type of its default.
    """
    notebook = read_notebook(Path(notebook)) if isinstance(notebook, str | Path) else notebook
    cells = [cell.source for cell in notebook.cells if has_tag(cell, PARAMETERS)]
    if len(cells) > 1:
        raise InputError(f"{len(cells)} cells are tagged `parameters`; keep the tag on one of them.")
    return read_source("".join(cells))


def read_source(source: str) -> dict[str, Parameter]:
    """The parameters that the source of a parameters cell assigns. Raises InputError for a syntax error."""
    return {parameter.name: parameter for parameter in _parse(source)}


def has_tag(cell: Any, tag: str) -> bool:
    """Whether the cell has this tag."""
    return tag in cell.metadata.get("tags", [])


def _parse(source: str) -> Iterator[Parameter]:
    """The parameters in the source of a cell; the comment behind a line is its help."""
    source, lines = _plain_python(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    aliases: dict[str, str] = {}  # names of types under which the cell imports them
    known: dict[str, Any] = {}  # values of the parameters so far
    for line in lines:
        if isinstance(line, ast.Import | ast.ImportFrom):
            aliases |= {name.asname: name.name for name in line.names if name.asname}
        for name, annotation, value in _assignments(line):
            kind, default = _type_and_default(name, annotation, value, aliases, known)
            yield Parameter(name, kind, default, comments.get(line.end_lineno or 0, ""))


def _plain_python(source: str) -> tuple[str, list[ast.stmt]]:
    """The cell, with calls in place of IPython's magics, and its statements. Raises InputError for a syntax error."""
    try:
        return source, ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        source = TransformerManager().transform_cell(source)
    try:
        return source, ast.parse(source).body
    except SyntaxError as error:
        raise InputError(f"The parameters cell, line {error.lineno}, is not Python: {error.msg}.") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"The parameters cell is not Python: {error}.") from None


def _assignments(line: ast.stmt) -> Iterator[tuple[str, ast.expr | None, ast.expr]]:
    """(name, annotation, value) of each name that a statement assigns a value to."""
    match line:
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
            yield name, annotation, value
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, None, value


def _type_and_default(
    name: str, annotation: ast.expr | None, value: ast.expr, aliases: Mapping[str, str], known: dict[str, Any]
) -> tuple[Any, Any]:
    """The type and the default of a parameter, whose value is added to the `known` ones if it is known."""
    source = ast.unparse(value)
    try:
        known[name] = evaluate(value, known)
    except ValueError:
        known.pop(name, None)
    try:
        default = ast.literal_eval(value)
    except ValueError:
        default = source
    kind = type_of_annotation(annotation, aliases) if annotation else typing.Final
    if kind is not typing.Final:  # which says nothing about the type
        return kind, default
    if name in known:
        return type_of_value(known[name]), default
    return Untyped(f"the type of its default {source!r} is not known before it runs; give it an annotation"), default


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
    return {str(name): _as_texts(value) for name, value in values.items()}


def _as_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {Text(key): _as_texts(item) for key, item in value.items()}
    return [_as_texts(item) for item in value] if isinstance(value, list) else Text(value)


def check(parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, text or typed, in the annotated types. Raises InputError for unknown names and bad values."""
    if given and not parameters:
        raise InputError("The notebook takes no parameters: tag the cell that holds their defaults `parameters`.")
    for name in given:
        if name not in parameters:
            raise InputError(f"Unknown parameter {name!r}; {nearest(name, parameters)}")
        kind = parameters[name].kind
        if isinstance(kind, Untyped):
            raise InputError(f"Parameter {name!r} cannot be given: {kind.reason}.")
        if is_secret(name) and kind not in NUMBERS:
            raise InputError(f"Parameter {name!r} looks like a secret; pass it through the environment or a file.")
    return {name: convert(value, parameters[name].kind, f"Parameter {name}") for name, value in given.items()}


def inject(notebook: Any, values: Mapping[str, Any]) -> None:
    """Write the values into a new cell after the parameters cell, instead of an earlier such cell."""
    cells = [cell for cell in notebook.cells if not has_tag(cell, INJECTED)]
    if values:
        import nbformat

        place = next(number for number, cell in enumerate(cells, 1) if has_tag(cell, PARAMETERS))
        cells.insert(place, nbformat.v4.new_code_cell(assignments(values), metadata={"tags": [INJECTED]}))
    notebook.cells = cells


def assignments(values: Mapping[str, Any]) -> str:
    """Source code that gives each name exactly its value."""
    lines = [f"{name} = {source_of(value)}" for name, value in values.items()]
    if any("Path(" in line for line in lines):
        lines.insert(0, "from pathlib import Path")
    return "\n".join(lines)
