"""A notebook's parameters: read from the cell tagged `parameters`, typed by its annotations, put back as a cell."""

import ast
import contextlib
import io
import itertools
import math
import tokenize
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml  # type: ignore[import-untyped]

from kit.config.schema import coerce, nearest, parse, read_toml
from kit.errors import InputError
from kit.notebook.redact import is_secret

PLAIN: dict[str, Any] = {k.__name__: k for k in (bool, int, float, str, Path)}


MOST = 10_000  # settings of a sweep; Slurm's own limit, MaxArraySize, is 1001 unless the site has raised it


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell. The default is its source text where that is no literal."""

    name: str
    kind: Any
    default: Any
    help: str = ""


def read_notebook(path: Path) -> Any:
    """The notebook as nbformat 4. Raises InputError where it is missing, broken or not in Python."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such notebook.")
    try:
        notebook = nbformat.v4.upgrade(nbformat.read(path, as_version=4))
        nbformat.validate(notebook)
    except Exception as error:  # on a file of another kind nbformat raises whatever its converters stumble over
        raise InputError(f"{path} is not a notebook ({str(error).partition(chr(10))[0]}).") from None
    meta = notebook.metadata
    language = meta.get("language_info", {}).get("name") or meta.get("kernelspec", {}).get("language", "python")
    if language != "python":
        raise InputError(f"{path} is written in {language}; only Python notebooks can be run here.")
    return notebook


def read_parameters(notebook: Any) -> dict[str, Parameter]:
    """The parameters of a notebook (a path or a loaded one), from the cell tagged `parameters`, without running it.

    Types: bool, int, float, str, Path, list[...], Literal[...], `X | None`, also quoted; without one, the default's.
    """
    notebook = read_notebook(Path(notebook)) if isinstance(notebook, str | Path) else notebook
    cells = [c.source for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) > 1:
        raise InputError(f"{len(cells)} cells are tagged `parameters`; keep the tag on one of them.")
    return _parse("".join(cells))


def _parse(source: str) -> dict[str, Parameter]:
    try:
        lines = ast.parse(source).body
    except SyntaxError as error:
        raise InputError(f"The parameters cell, line {error.lineno}, is not plain Python: {error.msg}.") from None
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    found = [_parameter(line, comments.get(line.end_lineno or 0, "")) for line in lines]
    return {p.name: p for p in found if p}


def _parameter(line: ast.stmt, comment: str) -> Parameter | None:
    match line:
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
            return Parameter(name, _kind(annotation), _default(value), comment)
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            default = _default(value)
            return Parameter(name, Any if default is None else type(default), default, comment)
    return None


def _default(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _kind(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in PLAIN:
            return PLAIN[name]
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str(quoted)):
            return _kind(ast.parse(quoted, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return typing.Union[_kind(left), _kind(right)]  # noqa: UP007  (built at run time)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return types.GenericAlias(list, (_kind(item),))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return typing.cast(Any, typing.Literal)[ast.literal_eval(choices)]
    raise InputError(
        f"The parameters cell: cannot read the type {ast.unparse(node)!r}; "
        f"use {', '.join(PLAIN)}, list[...], Literal[...] or any of them with `| None`."
    )


def read_values(path: Path) -> dict[str, Any]:
    """Values from a YAML file, every scalar as text: its type is the annotation's, so `1e-5` and `1:30:00` survive."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold `name: value` lines.")
    return values


def read_grid(path: Path) -> list[dict[str, Any]]:
    """The settings of a sweep, from TOML: lists span a product, other values hold for all, [[points]] come one by one.

    With both, every point is taken with the whole product. Tables become dotted keys. Raises InputError.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such grid.")
    tables = read_toml(path)
    points = tables.pop("points", [{}])
    if not (isinstance(points, list) and all(isinstance(point, dict) for point in points)):
        raise InputError(f"{path}: points must be tables, each under a line [[points]].")
    axes = {key: value if isinstance(value, list) else [value] for key, value in dotted(tables).items()}
    if not 0 < (count := len(points) * math.prod(map(len, axes.values()))) <= MOST:
        raise InputError(f"{path} has {count} settings; a sweep has 1 to {MOST}.")
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [one | dotted(point) for point in points for one in product]


def dotted(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of tables as one, with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in tables.items():
        out |= {f"{key}.{k}": v for k, v in dotted(value).items()} if isinstance(value, Mapping) else {key: value}
    return out


def label(values: Mapping[str, Any]) -> str:
    """Settings in a line, by the last part of their names."""
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in values.items()) or "as it is"


def check(parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, text or typed, as the annotations say. Raises InputError for unknown names and bad values."""
    if given and not parameters:
        raise InputError("The notebook takes no parameters: tag the cell that holds their defaults `parameters`.")
    for name in given:
        if name not in parameters:
            raise InputError(f"Unknown parameter {name!r}; {nearest(name, parameters)}")
        if is_secret(name) and parameters[name].kind not in (bool, int, float, int | None, float | None):
            raise InputError(f"Parameter {name!r} looks like a secret; pass it through the environment or a file.")
    return {name: _typed(value, parameters[name].kind, f"Parameter {name}") for name, value in given.items()}


def _typed(value: Any, kind: Any, where: str) -> Any:
    if isinstance(value, str | Path):
        return parse(str(value), kind, where)
    if isinstance(value, list):
        item = next(
            (typing.get_args(k)[0] for k in (kind, *typing.get_args(kind)) if typing.get_origin(k) is list), Any
        )
        value = [_typed(v, item, where) for v in value]
    return coerce(value, kind, where)


def _python(value: Any) -> str:
    """Source that evaluates to exactly the value."""
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, Path):
        return f"Path({str(value)!r})"
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def inject(notebook: Any, values: Mapping[str, Any]) -> None:
    """Puts the values into a cell of their own behind the parameters cell, in place of an earlier one."""
    cells = [c for c in notebook.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    if values:
        source = [f"{name} = {_python(value)}" for name, value in values.items()]
        if any("Path(" in line for line in source):
            source.insert(0, "from pathlib import Path")
        at = next(i for i, c in enumerate(cells) if "parameters" in c.metadata.get("tags", []))
        tags = {"tags": ["injected-parameters"]}
        cells.insert(at + 1, nbformat.v4.new_code_cell("\n".join(source), metadata=tags))
    notebook.cells = cells


def form(source: str | Path | dict[str, Any]) -> dict[str, Any] | None:
    """A control for each parameter, in JupyterLab; elsewhere it shows nothing and changes nothing.

    With a notebook's `globals()`, what is entered becomes the variable's value once it is valid. With the path of a
    notebook it gives the values that have been entered, for kit.notebook.execute or kit.notebook.sweep.
    """
    from IPython import get_ipython
    from IPython.display import display

    from kit.watch.display import in_lab

    own = isinstance(source, dict)
    known = _parse(_parameters_cell(source["In"])) if isinstance(source, dict) else read_parameters(source)
    entered = source if isinstance(source, dict) else {}
    if in_lab(get_ipython()):
        import ipywidgets

        display(ipywidgets.VBox([_control(p, entered) for p in known.values()]))
    return None if own else entered


def _parameters_cell(cells: list[str]) -> str:
    """The newest executed cell that holds annotated assignments and at most imports besides."""
    for cell in reversed(cells):
        with contextlib.suppress(SyntaxError):  # magics
            kinds = [type(line) for line in ast.parse(cell).body]
            if ast.AnnAssign in kinds and set(kinds) <= {ast.AnnAssign, ast.Import, ast.ImportFrom}:
                return cell
    raise InputError("No cell with `name: type = value` lines has run yet; run the parameters cell first.")


def _control(parameter: Parameter, entered: dict[str, Any]) -> Any:
    """A tick box, a list or a text field, with the parameter's help or what is wrong with the text beside it."""
    import ipywidgets

    name, kind = parameter.name, parameter.kind
    value, choices = entered.get(name, parameter.default), typing.get_args(kind)
    if kind is bool:
        control = ipywidgets.Checkbox(value=value, indent=False)
    elif typing.get_origin(kind) is typing.Literal:
        control = ipywidgets.Dropdown(options=choices, value=value)
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
        control = ipywidgets.Text(value=text, continuous_update=False)
    beside = ipywidgets.Label(parameter.help)

    def changed(event: Any) -> None:
        try:
            entered.update(check({name: parameter}, {name: event["new"]}))
            beside.value, beside.style.text_color = parameter.help, None
        except InputError as error:
            beside.value, beside.style.text_color = f"{error} It stays {value_of()!r}.", "#dc2626"

    def value_of() -> Any:
        return entered.get(name, parameter.default)

    control.observe(changed, "value")
    return ipywidgets.HBox([ipywidgets.Label(name, layout={"width": "10em"}), control, beside])
