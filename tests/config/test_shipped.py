"""Recipes and profiles that can be given by name are listed with what their files say."""

import json
from pathlib import Path

from kit.cli import main
from kit.config.recipe import Recipe


def test_recipes_are_those_of_the_kit_and_of_the_folder_env(capsys):
    Path("env/recipes").mkdir(parents=True)
    Path("env/recipes/mine.toml").write_text("# My own. It is short.\n" + Recipe.load("demo").toml())
    assert main(["recipes", "--json"]) == 0
    found = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)["recipes"]}
    assert set(found) == {"demo", "llama405b-oasst2", "llama70b", "llama8b", "mine"}
    assert found["llama70b"]["nodes x GPUs"] == "2 x 8" and found["mine"]["about"] == "My own"
    assert main(["predict", "nine"]) == 2 and "did you mean 'mine'" in capsys.readouterr().err


def test_clusters_are_listed_with_their_gpus(capsys):
    assert main(["clusters"]) == 0
    shown = capsys.readouterr().out
    assert "8 x H100 80GB HBM3" in shown and "This machine: CPU processes, no Slurm needed" in shown
