"""The explorer: its choices, its marks and what it writes; in JupyterLab, what is shown follows them."""

import pytest

import kit
from kit.config.recipe import Recipe
from kit.data.dataset import prepare
from kit.errors import InputError
from kit.forecast.explore import Setting
from kit.notebook.explorer import Explorer, Verdict
from kit.notebook.explorer_controls import REFUSED, SPECS, Controls
from kit.slurm.plan import plan


@pytest.fixture
def llama():
    return Explorer(Setting(Recipe.load("llama8b"), kit.Cluster.load("h100-8x8")))


def verdict(explorer):
    return Verdict.of(explorer.setting.predict(), explorer.refusal()).html()


def labels(control):
    return {value: text for text, value in control.options}


def test_a_choice_changes_the_forecast_and_the_options_that_repeat_it(llama):
    llama.choose(**{"parallel.nodes": 2, "tuning.target_modules": ("q_proj", "v_proj")})
    assert llama.options() == "-s tuning.target_modules=q_proj,v_proj -s parallel.nodes=2"
    words = [word for word in llama.options().split() if word != "-s"]
    assert Recipe.load("llama8b", **dict(word.split("=") for word in words)) == llama.recipe
    llama.choose()
    assert llama.options() == "" and llama.recipe == Recipe.load("llama8b")


def test_the_saved_recipe_is_the_chosen_one_and_nothing_is_overwritten(llama, tmp_path):
    llama.choose(**{"data.seq_len": 4096})
    path = llama.save(tmp_path / "mine.toml")
    assert Recipe.load(path) == llama.recipe
    with pytest.raises(InputError, match="nothing is overwritten"):
        llama.save(path)


def test_settings_that_are_impossible_together_are_refused_and_the_last_ones_stay(llama):
    with pytest.raises(InputError, match="contradict each other"):
        llama.choose(**{"model.base": "nf4"})
    assert llama.recipe == Recipe.load("llama8b")


def test_the_explorer_the_plan_and_the_forecast_of_prepared_data_agree(recipe, local):
    recipe = recipe.override(**{"schedule.max_steps": 0, "schedule.epochs": 1.0})
    dataset = prepare(recipe)
    explorer = kit.explore(recipe, local)
    found = explorer.setting.predict()
    assert found.time.optimizer_steps == dataset.optimizer_steps
    assert found == kit.predict(recipe, local)
    assert f"{found.time.optimizer_steps} steps" in plan(recipe, local).facts["forecast"]


def test_the_verdict_has_its_colour_its_numbers_and_its_reason(llama):
    good = verdict(llama)
    assert 'data-mark="good"' in good and "s/step" in good and "Cannot be launched" not in good
    llama.choose(**{"tuning.method": "qlora", "parallel.strategy": "fsdp1"})
    assert 'data-mark="warning"' in (html := verdict(llama))
    assert "Cannot be launched here: " in html and "fsdp1" in html
    llama.choose("A100 40GB", **{"model.name": "meta-llama/Llama-3.1-70B", "parallel.strategy": "ddp"})
    bad = verdict(llama)
    assert 'data-mark="bad"' in bad and "h100-8x8 has no A100 40GB." in bad


def test_every_value_of_every_control_is_a_value_of_its_key(llama):
    for spec in SPECS:
        for value in spec.words:
            changes = {spec.key: value}
            if spec.key == "model.base" and value == "nf4":
                changes["tuning.method"] = "qlora"
            assert llama.start.changed(**changes).recipe


def test_controls_choose_and_mark_what_cannot_be_launched(llama):
    controls = Controls(llama)
    strategy, sharding = controls.controls["parallel.strategy"], controls.controls["parallel.sharding"]
    changed = {value: llama.recipe.override(**{"parallel.strategy": value}) for value in labels(strategy)}
    refused = [value for value, text in labels(strategy).items() if text.endswith(REFUSED)]
    assert refused == [value for value, recipe in changed.items() if llama.refusal_of(recipe)]  # zero without DeepSpeed
    assert "ddp" not in refused
    assert not labels(sharding)["hybrid"].endswith(REFUSED)  # under FSDP2
    strategy.value = "fsdp1"
    assert llama.recipe.parallel.strategy == "fsdp1" and not labels(sharding)["hybrid"].endswith(REFUSED)
    strategy.value = "zero3"
    assert sharding.disabled and strategy.value == "zero3"
    controls.controls["tuning.method"].value = "full"
    assert controls.controls["tuning.r"].disabled and controls.controls["model.base"].disabled
    assert "-s tuning.method=full -s parallel.strategy=zero3" in controls._options.value


def test_a_model_that_is_not_known_is_a_message_and_the_forecast_stays(llama):
    controls = Controls(llama)
    controls.controls["data.seq_len"].value = 4096
    controls.model.value = "meta-llama/Llama-3.1-70B-Instruct"
    assert llama.setting.predict().parameters > 70e9
    controls.controls["parallel.nodes"].value = 16
    assert llama.recipe.parallel.nodes == 16 and "has 8 x 8" in llama.refusal()


def test_what_is_shown_is_drawn_again_in_order_until_the_next_choice(llama):
    drawn = []
    llama._shown = [lambda: drawn.append(1), lambda: (llama._shown.clear(), llama.choose()), lambda: drawn.append(3)]
    llama.choose(**{"parallel.nodes": 2})
    assert drawn == [1]


def test_headless_the_parts_are_plain_figures_and_tables(llama):
    assert llama.memory_map.here == (2048, 4) and llama.fastest and llama.sizes.rows
