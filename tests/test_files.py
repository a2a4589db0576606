import os
import threading
from pathlib import Path

import pytest

from kit import files
from kit.config.recipe import Recipe
from kit.data.sources import open_source
from kit.errors import InputError
from kit.files import REPOSITORY, locate, umask_mode


@pytest.mark.parametrize("name", ["env/data/sample_trees.jsonl", "env/data"])
def test_shipped_data_are_found_from_any_folder(name):
    assert locate(name) == REPOSITORY / name


@pytest.mark.parametrize("name", ["tests", "kit", "env", "env/recipes/demo.toml", "env/data/../../tests", "models"])
def test_a_mistyped_path_does_not_lead_into_the_repository(name):
    assert (REPOSITORY / name).exists() or name == "models"
    assert locate(name) == Path(name)


def test_data_in_a_mistyped_folder_are_not_the_tests_of_the_kit():
    recipe = Recipe.load("demo", **{"data.source": "tests"})
    with pytest.raises(InputError):
        open_source(recipe.data.source)


def test_a_path_that_exists_goes_before_the_shipped_one(tmp_path):
    (tmp_path / "env" / "data").mkdir(parents=True)
    assert locate("env/data") == Path("env/data")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_mode_of_new_files_follows_the_umask(mask):
    before = os.umask(mask)
    try:
        assert umask_mode() == 0o666 & ~mask
        assert umask_mode(0o777) == 0o777 & ~mask
    finally:
        os.umask(before)


def test_the_umask_is_read_without_changing_it_for_other_threads(monkeypatch):
    def change(mask):
        raise AssertionError(f"os.umask({mask:o}) in thread {threading.current_thread().name}")

    monkeypatch.setattr(files.os, "umask", change)
    assert umask_mode() & 0o777
