"""The notebooks in git are short, explained, stripped of outputs and tied to no machine."""

import ast
import re
import statistics
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from kit.notebook.parameters import read_parameters

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def cells(path: Path, kind: str = "") -> list[Any]:
    return [c for c in nbformat.read(path, as_version=4).cells if not kind or c.cell_type == kind]


def test_notebook_numbers_are_unique() -> None:
    assert NOTEBOOKS
    assert len({p.name[:2] for p in NOTEBOOKS}) == len(NOTEBOOKS)


@every_notebook
def test_the_name_is_number_verb_object(path: Path) -> None:
    assert re.fullmatch(r"\d\d_[a-z]+(_[a-z]+)+", path.stem)


@every_notebook
def test_it_is_valid_and_in_python(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.kernelspec.language == "python"


@every_notebook
def test_each_notebook_begins_with_a_title(path: Path) -> None:
    first = cells(path)[0]
    assert first.cell_type == "markdown" and re.match(r"# \S", first.source)
    titles = [line for c in cells(path, "markdown") for line in c.source.splitlines() if line.startswith("# ")]
    assert len(titles) == 1


@every_notebook
def test_the_first_cell_lists_inputs_outputs_and_the_next_notebook(path: Path) -> None:
    words = cells(path)[0].source
    assert re.search(r"^Needs: \w", words, re.MULTILINE) and re.search(r"\b[Ll]eaves\b", words)
    if later := [p.name[:2] for p in NOTEBOOKS if p.name > path.name]:
        assert re.search(rf"\bNext: [^.]*\b{later[0]}\b", words)


@every_notebook
def test_the_first_code_cell_is_the_only_parameters_cell(path: Path) -> None:
    tagged = [i for i, c in enumerate(cells(path, "code")) if "parameters" in c.metadata.get("tags", [])]
    assert tagged == [0]


@every_notebook
def test_every_parameter_is_one_annotated_line_with_its_help(path: Path) -> None:
    lines = cells(path, "code")[0].source.splitlines()
    assert all(isinstance(ast.parse(line).body[0], ast.AnnAssign) for line in lines), lines
    parameters = read_parameters(path)
    assert len(parameters) == len(lines) > 0
    assert [name for name, p in parameters.items() if not p.help] == []


@every_notebook
def test_notebooks_in_git_have_no_outputs(path: Path) -> None:
    for cell in cells(path, "code"):
        assert cell.outputs == [] and cell.execution_count is None
        assert not {"papermill", "execution"} & set(cell.metadata)
    assert not {"papermill", "kit", "widgets"} & set(nbformat.read(path, as_version=4).metadata)


@every_notebook
def test_code_cells_are_short_and_define_nothing(path: Path) -> None:
    sources = [c.source for c in cells(path, "code")]
    lengths = [len(source.splitlines()) for source in sources]
    assert max(lengths) <= 15 and statistics.median(lengths) <= 6, lengths
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    plain = [TransformerManager().transform_cell(s) for s in sources]  # magics as calls
    assert [n.name for s in plain for n in ast.walk(ast.parse(s)) if isinstance(n, definitions)] == []


@every_notebook
def test_prose_precedes_code_and_is_every_second_cell(path: Path) -> None:
    kinds = "".join(c.cell_type[0] for c in cells(path))
    assert kinds.startswith("m") and "ccc" not in kinds, kinds


@every_notebook
def test_code_names_no_address_and_no_machine(path: Path) -> None:
    code = "\n".join(c.source for c in cells(path, "code"))
    assert re.findall(r"https?://\S+", code) == []
    assert re.findall(r"""["'](?:/|~/)\w[^"']*""", code) == [], "an absolute path"
    everything = path.read_text(encoding="utf-8")
    assert [place for place in (str(ROOT), str(Path.home()) + "/") if place in everything] == []
    assert re.findall(r"/(?:home|Users)/\w+", everything) == []
