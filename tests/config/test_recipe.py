import dataclasses

import pytest

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
        (MINIMAL + "[schedule]\nwarmup_ratio = 1.5\n", ["schedule.warmup_ratio", "between 0 and 1"]),
        (MINIMAL + "[schedule]\nlr = nan\n", ["schedule.lr", "nan", "a finite number"]),
        (MINIMAL + "[schedule]\nweight_decay = inf\n", ["schedule.weight_decay", "inf", "a finite number"]),
        (MINIMAL + "[parallel]\noffload = 1\n", ["parallel.offload", "is 1", "true or false"]),
        (MINIMAL + "[schedule]\nmax_steps = 2.0\n", ["schedule.max_steps", "2.0", "a whole number"]),
        (MINIMAL + '[tuning]\ntarget_modules = ["q_proj", 3]\n', ["tuning.target_modules[1]", "is 3", "text"]),
        (MINIMAL + '[tuning]\ntarget_modules = "q_proj"\n', ["tuning.target_modules", "'q_proj'", "a list"]),
        (MINIMAL.replace("[model]\nname", "model"), ["r.toml", "model", "'m'", "a table"]),
        (MINIMAL.replace('"m"', "2026-01-01"), ["r.toml", "2026-01-01", "date", "quotes"]),
        ('name = "x"\n[data]\nsource = "s"\n', ["model", "missing"]),
        (MINIMAL.replace('"x"', '"a b"'), ["name", "'a b'", "letters"]),
        ("name = ?\n", ["r.toml", "not valid TOML", "line 1"]),
    ],
)
def test_a_wrong_recipe_is_named_with_the_nearest_valid_word(tmp_path, text, words):
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    assert all(word in str(caught.value) for word in words), caught.value


def test_every_fault_of_a_recipe_is_named_at_once(tmp_path):
    with pytest.raises(InputError) as caught:
        load(tmp_path, MINIMAL + "[schedule]\nlr = nan\nmicro_batch = 0\n[tuning]\nranks = 1\n")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and all(line.startswith(f"{tmp_path / 'r.toml'}: ") for line in lines)


def test_an_int_is_a_float(tmp_path):
    recipe = load(tmp_path, MINIMAL + "[schedule]\nepochs = 2\n")
    assert recipe.schedule.epochs == 2.0 and type(recipe.schedule.epochs) is float


def test_a_copy_with_a_bad_value_is_refused_as_well(tmp_path):
    recipe = load(tmp_path, MINIMAL)
    with pytest.raises(ValueError, match="micro_batch"):
        dataclasses.replace(recipe.schedule, micro_batch=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule.lr": "nan"}, ["schedule.lr", "a finite number"]),
        ({"schedule.max_steps": "many"}, ["override: schedule.max_steps", "'many'", "a whole number"]),
        ({"schedule.max_steps": -1}, ["override: schedule.max_steps", "-1", "at least 0"]),
        ({"schedule.max_steps": "2.0"}, ["override: schedule.max_steps", "'2.0'", "a whole number"]),
        ({"data.packing": "yes"}, ["override: data.packing", "'yes'", "true or false"]),
        ({"model.dtype": "bf16"}, ["override: model.dtype", "'bf16'", "did you mean 'bfloat16'"]),
        ({"parallel.tensor": 2}, ["override: parallel", "tensor is 2", "has to divide gpus_per_node, which is 1"]),
        ({"parallel.expert": 3, "parallel.gpus_per_node": 8}, ["expert is 3", "divide gpus_per_node, which is 8"]),
        (
            {"parallel.gpus_per_node": 8, "parallel.tensor": 4, "parallel.expert": 2},
            ["expert is 2, which is not a multiple of tensor 4"],
        ),
    ],
)
def test_a_bad_override_names_the_key_and_what_is_valid(tmp_path, changes, words):
    with pytest.raises(InputError) as caught:
        load(tmp_path, MINIMAL).override(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_ranks_that_split_a_layer_count_once_in_the_batch_and_in_the_steps(tmp_path):
    spread = {"parallel.nodes": 2, "parallel.gpus_per_node": 8, "schedule.micro_batch": 3}
    recipe = load(tmp_path, MINIMAL).override(**spread | {"parallel.tensor": 4, "parallel.expert": 8})
    assert (recipe.world_size, recipe.data_ranks, recipe.batch, recipe.optimizer_steps(120)) == (16, 4, 12, 10)
    assert recipe.override(**{"parallel.tensor": 1}).batch == 48


DIGESTS = {
    "demo": "15f45543bf8c68394bee6be9d9a670d13d578ee27e66c81cd0422071e6a42134",  # pragma: allowlist secret
    "llama405b-oasst2": "ad9835a35af416b35930c7a18938fc281857330aaa30db87ba5113a97471ce1a",  # pragma: allowlist secret
    "llama70b": "91d8e7fad0b1ab4ca5be5cc5dbb309cb831f18779757495c240a671781923d7e",  # pragma: allowlist secret
    "llama8b": "9d3298abdba2aeb8d9017065c72ec2ca309d0475ec9a761019ccb821edae1a39",  # pragma: allowlist secret
}


DEFAULTS_THEN = {"model.attention": "sdpa", "parallel.activation_checkpointing": True}


@pytest.mark.parametrize(("name", "digest"), DIGESTS.items())
def test_a_recipe_keeps_the_digest_that_run_folders_have_recorded(name, digest):
    dropout = 0.0 if name == "demo" else 0.05
    assert Recipe.load(name, **DEFAULTS_THEN, **{"tuning.dropout": dropout}).digest() == digest


@pytest.mark.parametrize(("written", "place"), [("false", "none"), ("true", "cpu"), ("nvme", "nvme")])
def test_offload_names_a_place_and_recorded_booleans_still_mean_one(tmp_path, written, place):
    as_text = written if written in ("true", "false") else f'"{written}"'
    recipe = load(tmp_path, MINIMAL + f"[parallel]\noffload = {as_text}\n")
    assert recipe.parallel.offload == place
    assert recipe.parallel.offloads == (place != "none")
    assert recipe == load(tmp_path, MINIMAL).override(**{"parallel.offload": written})
    assert load(tmp_path, recipe.toml()) == recipe


def test_offload_counts_in_the_digest_as_the_boolean_that_run_folders_have_recorded():
    recorded = "e440305bfe01f4f6091475613c027c1289cb15a1c6988c42437d4d50f8a99738"  # pragma: allowlist secret
    job = Recipe.load("llama8b", **DEFAULTS_THEN, **{"tuning.dropout": 0.05, "parallel.offload": True})
    assert job.digest() == recorded != job.override(**{"parallel.offload": "nvme"}).digest()


@pytest.mark.parametrize("changes", [{"model.base": "fp8"}, {"parallel.compile": "off"}])
def test_a_key_that_was_added_later_counts_in_the_digest_where_it_is_set(changes):
    assert Recipe.load("llama8b", **changes).digest() != Recipe.load("llama8b").digest()


def test_choices_are_open_until_the_job_is_planned_and_a_job_without_a_plan_takes_the_plain_path(tmp_path):
    recipe = load(tmp_path, MINIMAL)
    assert (recipe.model.attention, recipe.parallel.compile) == ("auto", "auto")
    assert recipe.parallel.activation_checkpointing == "auto"
    assert recipe.model.attention_used == "sdpa"
    assert recipe.parallel.recomputes and not recipe.parallel.compiles
    chosen = recipe.override(
        **{"model.attention": "varlen", "parallel.compile": "on", "parallel.activation_checkpointing": "false"}
    )
    assert chosen.model.attention_used == "varlen"
    assert not chosen.parallel.recomputes and chosen.parallel.compiles


def test_qlora_has_nf4_weights_until_the_method_changes(tmp_path):
    recipe = load(tmp_path, MINIMAL + '[tuning]\nmethod = "qlora"\n')
    assert recipe.model.base == "nf4"
    assert load(tmp_path, recipe.toml()) == recipe
    assert recipe.override(**{"tuning.method": "lora"}).model.base == "bf16"
    assert recipe.override(**{"tuning.method": "full"}).override(**{"tuning.method": "qlora"}) == recipe


@pytest.mark.parametrize(
    ("method", "base", "words"),
    [
        ("qlora", "bf16", ["qlora", "bf16", 'write method = "lora"']),
        ("qlora", "fp8", ["qlora", "fp8", 'write method = "lora"']),
        ("lora", "nf4", ["lora", "nf4", 'write method = "qlora"']),
        ("full", "fp8", ["model.base fp8 is for frozen weights", 'base = "bf16"']),
    ],
)
def test_a_type_of_frozen_weights_that_contradicts_the_method_is_refused(tmp_path, method, base, words):
    text = MINIMAL.replace('"m"', f'"m"\nbase = "{base}"') + f'[tuning]\nmethod = "{method}"\n'
    both = {"tuning.method": method, "model.base": base}
    for refused in (lambda: load(tmp_path, text), lambda: load(tmp_path, MINIMAL).override(**both)):
        with pytest.raises(InputError) as caught:
            refused()
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


def test_a_schedule_of_no_steps_is_an_error_that_names_both_keys(tmp_path):
    """transformers' Trainer takes max_steps = 0 for a run of one step."""
    message = r"schedule: epochs and max_steps are both 0, so no step is trained: set one of them\."
    with pytest.raises(InputError, match=message):
        load(tmp_path, MINIMAL + "[schedule]\nepochs = 0\n")
    with pytest.raises(InputError, match=message):
        load(tmp_path, MINIMAL).override(**{"schedule.epochs": 0})
    assert load(tmp_path, MINIMAL + "[schedule]\nepochs = 0\nmax_steps = 3\n").optimizer_steps(1000) == 3


def test_a_name_that_is_too_long_for_a_folder_is_refused():
    assert Recipe.load("demo", name="a" * 128).name == "a" * 128
    with pytest.raises(InputError, match=r"name is .* 128 at most"):
        Recipe.load("demo", name="a" * 129)
