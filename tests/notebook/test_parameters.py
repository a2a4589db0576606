"""Types of parameters without annotations, of odd annotations and of odd values: typed, or refused one by one."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from kit.cli import main
from kit.errors import InputError
from kit.notebook.parameters import assignments, check, read_parameters, read_values
from kit.notebook.values import Text, Untyped, as_json


def notebook(cell: str) -> Any:
    return new_notebook(cells=[new_code_cell(cell, metadata={"tags": ["parameters"]})])


def given(cell: str, name: str, text: str) -> Any:
    """What a parameter is when the command line gives this text."""
    return check(read_parameters(notebook(cell)), {name: Text(text)})[name]


@pytest.mark.parametrize(
    ("default", "text", "value"),
    [
        ("2 * 1e-4", "3e-4", 0.0003),
        ("10 * 60", "5", 5),
        ("not True", "true", True),
        ("2**3", "9", 9),
        ("1 << 20", "7", 7),
        ("-1", "3", 3),
        ("1 / 3", "2", 2.0),
        ("int(1e6)", "12", 12),
        ("float('inf')", "1e3", 1000.0),
        ("round(0.5, 1)", "1", 1.0),
        ("3 > 2", "false", False),
        ("'a' + 'b'", "007", "007"),
        ("'a' if True else 'b'", "1e5", "1e5"),
        ("f'{1}'", "7", "7"),
        ("'%d' % 3", "7", "7"),
        ("'-' * 40", "5", "5"),
        ("str(5)", "6", "6"),
        ("Path('runs') / 'a'", "b", Path("b")),
        ("[1, 2]", "[3, 4]", [3, 4]),
        ("[1, 2]", "3,4", [3, 4]),
        ("['a']", "['b', 'c']", ["b", "c"]),
        ("['a']", '["b"]', ["b"]),
        ("['a']", "007", ["007"]),
        ("[0.1, 1]", "[2, 3]", [2.0, 3.0]),
        ("[]", "[1, 'a', None]", [1, "a", None]),
        ("[1] * 3", "[2]", [2]),
        ("(1, 2)", "(3, 4)", (3, 4)),
        ("(1, 2)", "[3, 4]", (3, 4)),
        ("{'a': 1}", "{'b': [2, True]}", {"b": [2, True]}),
        ("{'a': 1}", '{"b": true, "c": null}', {"b": True, "c": None}),
        ("{1, 2}", "{3}", {3}),
        ("dict(a=1)", "{}", {}),
        ("None", "5", 5),
        ("None", "3e-4", 0.0003),
        ("None", "false", False),
        ("None", "hello", "hello"),
        ("None", "007", "007"),
    ],
)
def test_a_default_gives_its_type(default, text, value):
    found = given(f"x = {default}", "x", text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        ("Optional[int]", "5", 5),
        ("Optional[int]", "none", None),
        ("typing.Optional[float]", "1e-3", 0.001),
        ("t.Optional[str]", "007", "007"),
        ("Maybe[int]", "5", 5),
        ("pathlib.Path", "a/b", Path("a/b")),
        ("'Optional[Path]'", "a", Path("a")),
        ("Optional['int']", "4", 4),
        ("Union[int, str]", "4", 4),
        ("Union[int, str]", "a", "a"),
        ("int | float", "0.5", 0.5),
        ("list[int]", "[1, 2]", [1, 2]),
        ("List[str]", "a, b", ["a", "b"]),
        ("typing.List[float]", "[1]", [1.0]),
        ("list", "[1, 'a']", [1, "a"]),
        ("Sequence[int]", "(1, 2)", [1, 2]),
        ("Optional[list[int]]", "1,2", [1, 2]),
        ("list[int] | None", "null", None),
        ("dict", "{'a': 1}", {"a": 1}),
        ("dict[str, float]", "{'a': 1}", {"a": 1.0}),
        ("Dict[str, list[int]]", '{"a": [1]}', {"a": [1]}),
        ("dict[int, str]", "{1: 'a'}", {1: "a"}),
        ("tuple[int, str]", "(1, 'a')", (1, "a")),
        ("tuple[int, ...]", "[1, 2, 3]", (1, 2, 3)),
        ("set[int]", "{1}", {1}),
        ("Any", "5", 5),
        ("typing.Any", "[1]", [1]),
        ("Any", "words", "words"),
        ("Literal['a', 'b']", "b", "b"),
        ("typing.Literal[1, 2]", "2", 2),
        ("Annotated[int, 'a note']", "2", 2),
        ("Final[int]", "2", 2),
        ("Final", "2", 2),
    ],
)
def test_an_annotation_gives_its_type(annotation, text, value):
    head = "import typing\nimport typing as t\nfrom typing import *\nfrom typing import Optional as Maybe\n"
    found = given(f"{head}x: {annotation} = 1", "x", text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("cell", "text", "words"),
    [
        ("x: list[int] = []", "[1, 'a']", "x\\[1\\] is 'a'; it must be a whole number"),
        ("x: tuple[int, str] = (1, '')", "(1, 'a', 2)", "a tuple of 2 values"),
        ("x: dict = {}", "a=1", "it must be a dict"),
        ("x: dict = {}", "[1]", "it must be a dict"),
        ("x: list = []", "[1", "neither a literal of Python nor JSON"),
        ("x: list = []", "[" * 10_000, "neither a literal of Python nor JSON"),
        ("x: dict[str, int] = {}", "{'a': 'b'}", "x\\['a'\\] is 'b'; it must be a whole number"),
        ("x: Union[int, float] = 1", "a", "a whole number or a number"),
        ("x = 10 * 60", "1.5", "whole number"),
        ("x = not True", "5", "true or false"),
        ("x = [1, 2]", "a", "whole number"),
    ],
)
def test_a_value_of_another_type_is_refused(cell, text, words):
    with pytest.raises(InputError, match=words):
        given(cell, "x", text)


@pytest.mark.parametrize(
    "line",
    [
        "x: date = date.today()",
        "x: np.float32 = 1",
        "x: torch.float = 1",
        "x: Callable[[int], int] = f",
        "x: 'not a type' = 1",
        "x: list[date] = []",
        "x: 5 = 5",
        "x: Optional = None",
        "x: f(int) = 1",
        "x = os.environ.get('A', 'b')",
        "x = datetime.now()",
        "x = y",
        "x = 9**9**9",
        "x = 'a' * 10**9",
        "x = [0] * 10**9",
        "x = 1 << 10**9",
        "x = '%1000000000d' * 10**9",
        "x = 1 / 0",
        "x = {**a}",
        "x = 2j",
        "x = b'a'",
        "x = lambda: 1",
    ],
)
def test_a_parameter_that_cannot_be_typed_refuses_only_itself(line):
    known = read_parameters(notebook(f"{line}\nlr: float = 1e-3"))
    assert isinstance(known["x"].kind, Untyped) or line.startswith("x = '%")
    assert check(known, {"lr": Text("1e-5")}) == {"lr": 1e-5}
    if isinstance(known["x"].kind, Untyped):
        with pytest.raises(InputError, match="Parameter 'x' cannot be given: "):
            check(known, {"x": Text("1")})


def test_a_default_made_of_earlier_parameters_has_a_type():
    known = read_parameters(notebook("batch = 8\naccum = 2\ntotal = batch * accum\nname = f'{total}'\nbatch = input()"))
    assert known["total"].kind is int and known["name"].kind is str
    assert isinstance(known["batch"].kind, Untyped)  # its last assignment counts


@pytest.mark.parametrize(
    "magic", ["%matplotlib inline", "!nvidia-smi", "%load_ext autoreload\n%autoreload 2", "?print"]
)
def test_a_magic_in_the_parameters_cell_is_allowed(magic):
    known = read_parameters(notebook(f"{magic}\nlr: float = 1e-3  # peak rate\nfiles = !ls"))
    assert known["lr"].kind is float and known["lr"].help == "peak rate"
    assert isinstance(known["files"].kind, Untyped)


def test_text_that_looks_like_a_magic_stays_text():
    assert read_parameters(notebook('x = """\n%matplotlib inline\n"""'))["x"].default == "\n%matplotlib inline\n"


def test_values_of_a_file_are_typed_at_every_depth(tmp_path):
    (tmp_path / "p.yaml").write_text("cfg: {a: 1, b: [x, 007]}\nrates: {low: 1e-5}\nany: true\nwords: 5\n")
    cell = "cfg: dict = {}\nrates: dict[str, float] = {}\nany = None\nwords: str = ''"
    found = check(read_parameters(notebook(cell)), read_values(tmp_path / "p.yaml"))
    assert found == {"cfg": {"a": 1, "b": ["x", "007"]}, "rates": {"low": 1e-5}, "any": True, "words": "5"}


def test_values_given_in_python_keep_their_types():
    known = read_parameters(notebook("x = None\nd: dict = {}\nt: tuple = ()"))
    assert check(known, {"x": "5", "d": {1: "2"}, "t": ("3",)}) == {"x": "5", "d": {1: "2"}, "t": ("3",)}


@pytest.mark.parametrize(
    "value",
    [
        (1,), (1, "a"), (), {1}, set(), frozenset({1}), {"a": (1, Path("b"))}, {1: None}, [float("-inf"), -0.0, 1e-5],
        {"it's": '"x"'}, [Path("a b")], [[], {}, [()]],
    ],
)  # fmt: skip
def test_values_are_written_exactly(value):
    names: dict[str, Any] = {}
    exec(assignments({"x": value}), names)
    assert names["x"] == value and type(names["x"]) is type(value)


def test_values_are_recorded_as_json():
    found = as_json({"path": Path("a"), "nan": float("nan"), "pair": (1, {2}), "keys": {1: None}})
    assert found == {"path": "a", "nan": "NaN", "pair": [1, [2]], "keys": {"1": None}}


def test_the_command_line_gives_each_value_its_type(tmp_path, capsys):
    cell = "cfg: dict = {'a': 1}\nlr = 2 * 1e-4\nlayers = [1]\npad_token: str = '<pad>'\nwhen: date = None"
    made = notebook(f"date = object\n{cell}")
    made.cells.append(new_code_cell("print(repr([cfg, lr, layers, pad_token, when]))"))
    nbformat.write(made, str(tmp_path / "in.ipynb"))
    words = ["-p", "cfg={'b': 2}", "-p", "lr=3e-4", "-p", "layers=[3, 4]", "-p", "pad_token=<p>"]
    assert main(["run", str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), *words]) == 0
    assert "[{'b': 2}, 0.0003, [3, 4], '<p>', None]" in capsys.readouterr().out
