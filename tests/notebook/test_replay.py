"""An executed notebook is made again: the same to the bit, or what differs and why it may."""

import io
import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from kit.cli import main
from kit.errors import InputError
from kit.notebook.execute import execute
from kit.notebook.replay import _result_differences, _results, replay
from kit.slurm.run import Run


@pytest.fixture
def made(tmp_path):
    """A notebook of these cells, executed."""

    def make(*cells, **values):
        parameters = new_code_cell("seed: int = 0", metadata={"tags": ["parameters"]})
        path = tmp_path / "in.ipynb"
        nbformat.write(new_notebook(cells=[parameters, *map(new_code_cell, cells)]), str(path))
        return execute(path, tmp_path / "out.ipynb", values, stream=io.StringIO())

    return make


NUMBERS = (
    "import random\nrandom.seed(seed)\nresult = {'loss': [random.random() for _ in range(3)], 'nan': float('nan')}"
)


def test_equal_parameters_give_equal_numbers(made, tmp_path):
    found = replay(made(NUMBERS, "import time\nprint(time.time())", seed=3), tmp_path / "again.ipynb")
    assert (found.same, found.differences, found.reasons) == (True, [], {})
    losses = [nbformat.read(tmp_path / f"{n}.ipynb", 4).metadata.kit.result["loss"] for n in ("out", "again")]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_different_numbers_are_listed_with_exit_code_1(made, tmp_path, capfd):
    made(NUMBERS.replace("random.seed(seed)", "import os\nrandom.seed(os.getpid())"))
    assert main(["replay", "out.ipynb", "again.ipynb", "--json"]) == 1
    (difference,) = json.loads(capfd.readouterr().out)["results"]
    was, now = (nbformat.read(tmp_path / f"{n}.ipynb", 4).metadata.kit.result["loss"][0] for n in ("out", "again"))
    assert difference == f"result['loss'] was {was}, is {now}"


def test_without_numbers_outputs_are_compared_except_tagged_cells(made, tmp_path):
    out = made("print(seed)", "import os\nprint(os.getpid())", "os.getpid()")
    found = replay(out, tmp_path / "1.ipynb")
    assert [text.split(" was ")[0] for text in found.differences] == ["cell 3", "cell 4"]
    source = nbformat.read(tmp_path / "in.ipynb", 4)
    for cell in source.cells[2:]:
        cell.metadata["tags"] = ["nbval-ignore-output"]
    nbformat.write(source, str(tmp_path / "in.ipynb"))
    out = execute(tmp_path / "in.ipynb", tmp_path / "2.ipynb", stream=io.StringIO())
    assert replay(out, tmp_path / "3.ipynb").same


def test_failed_notebooks_are_compared_by_their_failure(made, tmp_path):
    from kit.notebook.execute import NotebookFailed

    with pytest.raises(NotebookFailed):
        made("import pathlib\nassert pathlib.Path('fixed').exists(), 'no data'")
    assert replay(tmp_path / "out.ipynb", tmp_path / "1.ipynb").same
    (tmp_path / "fixed").touch()
    (difference,) = replay(tmp_path / "out.ipynb", tmp_path / "2.ipynb").differences
    assert difference == "end was The cell raised AssertionError(no data)., is completed"


def test_possible_reasons_of_a_difference_are_listed(made, tmp_path):
    out = made(NUMBERS)
    noted = nbformat.read(out, 4)
    noted.metadata.kit.update(python="3.9.1", host="elsewhere", data=["0" * 64])
    noted.metadata.kit.git = {"commit": "f" * 40, "dirty": False, "diff_sha256": "", "diff": ""}
    nbformat.write(noted, str(out))
    found = replay(out, tmp_path / "again.ipynb")
    assert found.same and set(found.reasons) == {"code", "environment", "data", "host"}
    assert found.reasons["environment"][0].startswith("python was 3.9.1, is 3.")
    assert found.reasons["code"][0].startswith(f"git was {'f' * 12}, is ")


def test_a_changed_notebook_is_replayed_only_with_anyway(made, tmp_path):
    out, source = made(NUMBERS), tmp_path / "in.ipynb"
    notebook = nbformat.read(source, 4)
    notebook.cells.append(new_code_cell("result['loss'][1] = 7.0"))
    nbformat.write(notebook, str(source))
    with pytest.raises(InputError, match=r"in.ipynb has changed since .*--anyway"):
        replay(out, tmp_path / "again.ipynb")
    assert not (tmp_path / "again.ipynb").exists()
    found = replay(out, tmp_path / "again.ipynb", anyway=True)
    assert found.differences[0].endswith("is 7.0") and "notebook_sha256 was" in found.reasons["code"][0]
    source.unlink()
    with pytest.raises(InputError, match=r"was made from .*in.ipynb, which no longer exists"):
        replay(out, tmp_path / "more.ipynb")


def test_notebooks_not_executed_by_kit_cannot_be_replayed(made, tmp_path):
    made(NUMBERS)
    with pytest.raises(InputError, match=r"in.ipynb does not name its source"):
        replay(tmp_path / "in.ipynb", tmp_path / "again.ipynb")


def test_paths_are_relative_to_the_notebooks_folder(made, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "data").write_text("7")
    out = made("result = {'n': int(open('data').read())}")
    assert str(tmp_path) not in json.dumps(nbformat.read(out, 4).metadata.kit)
    (moved := tmp_path / "here" / "moved").mkdir()
    for name in ("in.ipynb", "out.ipynb", "data"):
        (tmp_path / name).rename(moved / name)
    monkeypatch.chdir("/")
    assert replay(moved / "out.ipynb", moved / "again.ipynb").same


@pytest.mark.slow
def test_a_fine_tune_on_two_cpu_ranks_gives_the_same_losses_to_the_bit(finished_run, tmp_path):
    out = tmp_path / "03.ipynb"
    found = replay(out, tmp_path / "again.ipynb")
    assert found.same, found
    (old,), (new,) = (nbformat.read(path, 4).metadata.kit.runs for path in (out, tmp_path / "again.ipynb"))
    assert old != new and Run(tmp_path / new).state.state == "COMPLETED"
    assert (tmp_path / new / "state" / "result.json").exists()
    next((tmp_path / old / "wandb").rglob("*.wandb")).unlink()
    lost = _result_differences(_results(out), _results(tmp_path / "again.ipynb"))
    assert [text.split(" was ")[0] for text in lost] == ["run 0 train loss", "run 0 eval loss"]
