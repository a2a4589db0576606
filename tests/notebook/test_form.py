"""Forms, the launch button and the buttons of a run: only in JupyterLab, and refused values set nothing."""

from typing import Literal

import pytest
from IPython.core.interactiveshell import InteractiveShell

import kit
from kit.errors import InputError
from kit.notebook.form import Form, newest_parameters
from kit.notebook.launcher import Launcher
from kit.notebook.parameters import Parameter
from kit.show import LabCell, callback_of, has_widgets, in_lab

CELL = 'recipe: str = "demo"  # a recipe\nsteps: int | None = None  # of the run\nfast: bool = True  # or not'


def test_the_parameters_are_those_of_the_newest_cell_that_only_assigns_them():
    cells = ["", 'old: str = "x"', CELL, "import kit\n\nkit.form()", "%%sbatch\n#!/bin/bash", "x = 1"]
    assert list(newest_parameters(cells)) == ["recipe", "steps", "fast"]
    assert newest_parameters(["import kit"]) == {}


def test_run_gives_the_names_typed_values():
    names = {"recipe": "llama8b"}  # a cell has changed it since
    form = Form(newest_parameters([CELL]), names)
    assert form.values() == {"recipe": "llama8b", "steps": None, "fast": True}
    form._controls["steps"].value, form._controls["fast"].value = "12", False
    form.run()
    assert names == {"recipe": "llama8b", "steps": 12, "fast": False}


def test_a_value_of_another_type_is_an_error_and_nothing_is_set():
    names = {"recipe": "demo", "steps": 5, "fast": True}
    form = Form(newest_parameters([CELL]), names)
    form._controls["recipe"].value, form._controls["steps"].value = "llama8b", "many"
    with pytest.raises(InputError, match="steps is 'many'; it must be a whole number"):
        form.run()
    assert names == {"recipe": "demo", "steps": 5, "fast": True}


def test_a_form_offers_the_shipped_recipes_and_the_words_of_a_literal():
    form = Form(newest_parameters([CELL]), {})
    assert "llama70b" in form._controls["recipe"].options
    chosen = Form({"mode": Parameter("mode", Literal["fast", "exact"], "exact")}, {})
    assert chosen._controls["mode"].options == ("fast", "exact") and chosen.values() == {"mode": "exact"}


def test_headless_there_is_no_form_and_no_button(recipe, local):
    assert not in_lab() and not has_widgets()
    assert kit.form() is None
    refused = kit.launcher(recipe, local, submit=False)
    assert refused.run is None and str(refused) == "launch is False: nothing was submitted"


def test_in_jupyterlab_nothing_is_submitted_before_a_click(recipe, local, tmp_path):
    with callback_of(LabCell("cell")):
        launcher = kit.launcher(recipe, local)
        assert launcher.run is None and "before a click" in str(launcher)
        assert launcher.controls() is not None
    assert not (tmp_path / "runs").exists()


def test_without_ipywidgets_a_sentence_says_how_to_submit(recipe, local, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with callback_of(LabCell("cell")):
        assert kit.form() is None
        launcher = kit.launcher(recipe, local)
        assert launcher.controls() is None and "kit.launch(job, machines)" in str(launcher)


@pytest.fixture(params=[True, False], ids=["kernel", "plain"])
def shell(request):
    """With a shell, as in a kernel, an ipywidgets.Output drops errors."""
    InteractiveShell.clear_instance()
    yield InteractiveShell.instance() if request.param else None
    InteractiveShell.clear_instance()


def test_a_refused_launch_is_shown_and_can_be_tried_again(recipe, local, shell):
    with callback_of(LabCell("cell")):
        launcher = Launcher(recipe.override(**{"parallel.nodes": 9}), local, None, "")
        widget = launcher._launch_button()
    start, text = widget.children[0].children
    start.click()
    assert launcher.run is None and "Lower parallel.nodes" in text.value
    assert not start.disabled and start.layout.display is None
