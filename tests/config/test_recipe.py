import dataclasses

import pytest

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from tests.conftest import REPOSITORY

MINIMAL = 'name = "x"\n[model]\nname = "m"\n[data]\nsource = "s"\n'


def load(tmp_path, text):
    path = tmp_path / "r.toml"
    path.write_text(text)
    return Recipe.load(path)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "env/recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_loads_and_survives_a_round_trip(path, tmp_path):
    recipe = Recipe.load(path)
    assert load(tmp_path, recipe.toml()) == recipe


@pytest.mark.parametrize("path", sorted((REPOSITORY / "env/clusters").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_cluster_loads_and_survives_a_round_trip(path, tmp_path):
    cluster = Cluster.load(path)
    (tmp_path / "c.toml").write_text(cluster.toml())
    assert Cluster.load(tmp_path / "c.toml") == cluster


def test_three_keys_are_enough(tmp_path):
    recipe = load(tmp_path, MINIMAL)
    assert recipe.schedule.optimizer == "adamw_torch_fused"
    assert recipe.parallel.strategy == "fsdp2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + '[tuning]\nmetod = "lora"\n', ["tuning", "'metod'", "did you mean 'method'"]),
        (MINIMAL + '[parallel]\nstrategy = "fsdp3"\n', ["strategy", "'fsdp3'", "did you mean 'fsdp2'", "zero3"]),
        (MINIMAL + "[schedule]\nmicro_batch = 0\n", ["micro_batch", "0", "at least 1"]),
        (MINIMAL + '[schedule]\nlr = "1e-4"\n', ["lr", "'1e-4'", "a number"]),
        (MINIMAL + "[schedule]\nmicro_batch = true\n", ["micro_batch", "True", "a whole number"]),
        (MINIMAL + "[schedule]\nwarmup_ratio = 1.5\n", ["warmup_ratio", "between 0 and 1"]),
        ('name = "x"\n[data]\nsource = "s"\n', ["model", "missing"]),
        (MINIMAL.replace('"x"', '"a b"'), ["name", "'a b'", "letters"]),
        ("name = ?\n", ["r.toml", "not valid TOML", "line 1"]),
    ],
)
def test_a_wrong_recipe_is_named_with_the_nearest_valid_word(tmp_path, text, words):
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_unknown_recipe_name_lists_the_shipped_ones():
    with pytest.raises(InputError, match="did you mean 'llama8b'"):
        Recipe.load("lama8b")


def test_overrides_read_text_by_the_type_of_the_field(tmp_path):
    recipe = load(tmp_path, MINIMAL).override(
        **{"schedule.lr": "1e-5", "data.packing": "false", "tuning.target_modules": "q_proj,v_proj", "name": "007"}
    )
    assert (recipe.schedule.lr, recipe.data.packing, recipe.name) == (1e-5, False, "007")
    assert recipe.tuning.target_modules == ("q_proj", "v_proj")


def test_an_unknown_override_offers_the_nearest_key(tmp_path):
    with pytest.raises(InputError, match=r"did you mean 'schedule.max_steps'"):
        load(tmp_path, MINIMAL).override(**{"schedule.max_step": 3})


def test_a_recipe_is_frozen_and_its_digest_follows_its_values(tmp_path):
    recipe = load(tmp_path, MINIMAL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "y"
    assert recipe.digest() == load(tmp_path, MINIMAL).digest() != recipe.override(name="y").digest()


def test_optimizer_steps_of_the_published_405b_run():
    # 2,298,000 tokens in rows of 2,048 are 1,123 rows; 16 ranks x 1 x 2 accumulated: 36 steps, as published.
    assert Recipe.load("llama405b-oasst2").optimizer_steps(1123) == 36
