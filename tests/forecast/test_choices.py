import dataclasses
import json

import pytest

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast import limits, split
from kit.forecast.choices import resolve
from kit.forecast.fit import memory
from kit.forecast.shape import load_shape
from kit.forecast.timing import predict
from kit.forecast.tune import tune
from tests.forecast.test_timing import H100, recipe

LONG = {"schedule__max_steps": 2000}
ONE = {"parallel__gpus_per_node": 1, "parallel__strategy": "ddp", "tuning__method": "lora"}


def on_gpu(name, **changes):
    return dataclasses.replace(H100, nodes=dataclasses.replace(H100.nodes, gpu=name, **changes))


def open_recipe(**changes):
    """A recipe that leaves every choice open."""
    return recipe(
        **{"parallel__activation_checkpointing": "auto", "model__attention": "auto", "parallel__compile": "auto"}
        | changes
    )


def choices(job, cluster=H100, **more):
    return {decision.key: decision for decision in resolve(job, cluster, **more).decisions}


def test_a_long_lora_run_on_one_gpu_takes_the_fast_path():
    found = resolve(open_recipe(**ONE, **LONG), H100)
    assert [str(decision).partition(", ")[0] for decision in found.decisions] == [
        "attention: varlen", "activation checkpointing: off", "compile: on",
    ]  # fmt: skip
    assert "fits without it: up to" in found.decisions[1].reason and "of 79.6 GiB" in found.decisions[1].reason
    assert "the first step takes 7 to 21 s longer" in found.decisions[2].reason
    assert found.recipe == open_recipe(
        **ONE, **LONG, model__attention="varlen", parallel__activation_checkpointing=False, parallel__compile="on"
    )


def test_values_that_a_person_wrote_stay():
    job = open_recipe(
        **ONE, **LONG, model__attention="eager", parallel__activation_checkpointing=True, parallel__compile="off"
    )
    assert resolve(job, H100).recipe == job and not resolve(job, H100).decisions


def test_a_resolved_recipe_resolves_to_itself():
    resolved = resolve(open_recipe(**ONE, **LONG), H100).recipe
    assert resolve(resolved, H100).recipe == resolved


@pytest.mark.parametrize(
    ("changes", "attention", "words"),
    [
        ({"model__name": "google/gemma-2-2b"}, "flex_attention", "softcap"),
        ({"model__name": "openai/gpt-oss-20b"}, "flex_attention", "sinks"),
        ({"model__dtype": "float32"}, "sdpa", "float32"),
        ({"data__packing": False}, "sdpa", "rows are not packed"),
    ],
)
def test_another_attention_is_chosen_with_its_reason(changes, attention, words):
    found = choices(open_recipe(**ONE, **LONG, tuning__target_modules=("all-linear",), **changes))["model.attention"]
    assert found.value == attention and words in found.reason


def test_an_old_gpu_keeps_sdpa():
    found = choices(open_recipe(**ONE), on_gpu("Tesla V100-SXM2-32GB"))["model.attention"]
    assert found.value == "sdpa" and "older than Ampere" in found.reason


def test_on_cpus_documents_are_computed_one_by_one_and_nothing_is_compiled(smollm2, local):
    found = choices(Recipe.load("demo", **{"model.name": str(smollm2)}), local)
    assert found["model.attention"].value == "varlen" and "by itself" in found["model.attention"].reason
    assert found["parallel.compile"].value == "off" and "CPUs" in found["parallel.compile"].reason
    assert found["parallel.activation_checkpointing"].value is False


def test_a_family_that_is_not_known_keeps_the_plain_path(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "new", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"intermediate_size": 128, "vocab_size": 256}'
    )
    found = choices(open_recipe(**ONE, **LONG, model__name=str(tmp_path)))
    assert found["model.attention"].value == "sdpa" and "type new" in found["model.attention"].reason
    assert found["parallel.compile"].value == "off"


def test_a_model_without_a_config_has_the_plain_path_and_no_error():
    found = choices(open_recipe(**ONE, **LONG, model__name="nobody/nothing"))
    assert found["model.attention"].value == "sdpa" and "not here" in found["model.attention"].reason
    assert found["parallel.activation_checkpointing"].value is True
    assert found["parallel.compile"].value == "off"


def test_activations_are_recomputed_where_the_job_does_not_fit_otherwise():
    job = open_recipe(**ONE, **LONG, schedule__micro_batch=16, data__seq_len=4096)
    found = choices(job)["parallel.activation_checkpointing"]
    assert found.value is True and "without it the job is not sure to fit" in found.reason
    without = resolve(job.override(**{"parallel.activation_checkpointing": False}), H100).recipe
    assert memory(without, H100).verdict != "fits"


def test_without_a_known_memory_activations_are_recomputed():
    found = choices(open_recipe(**ONE), on_gpu("H100", gpu_memory_gib=0.0))["parallel.activation_checkpointing"]
    assert found.value is True and "does not give the memory" in found.reason


def test_layers_are_compiled_where_that_alone_makes_the_activations_fit():
    """Some micro-batch fits without recomputation if the layers are compiled and not otherwise; the run is short."""
    found = []
    for micro_batch in range(1, 12):
        job = open_recipe(**ONE, schedule__max_steps=5, schedule__micro_batch=micro_batch, data__seq_len=4096)
        found.append(choices(job)["parallel.compile"])
    reasons = {decision.reason for decision in found if decision.value == "on"}
    assert reasons == {"compiled layers keep fewer activations, so that none are recomputed"}


def test_a_short_run_is_not_compiled_and_says_what_it_would_gain():
    found = choices(open_recipe(**ONE, schedule__max_steps=20))["parallel.compile"]
    assert found.value == "off" and found.reason.startswith("the run has only 20 steps: ")


def test_without_a_compiler_nothing_is_compiled():
    job = open_recipe(**ONE, **LONG)
    assert "this machine has no C compiler" in choices(job, compiler=False)["parallel.compile"].reason
    bare = on_gpu("H100", compiler="none")
    assert "profile h100 says" in choices(job, bare)["parallel.compile"].reason
    assert choices(job, on_gpu("H100", compiler="gcc"))["parallel.compile"].value == "on"


def test_compiled_layers_are_not_recomputed_where_that_gains_little():
    changes = {"parallel__activation_checkpointing": True, "schedule__micro_batch": 4}
    fast_host = dataclasses.replace(H100, nodes=dataclasses.replace(H100.nodes, launch_us=1.0))
    found = choices(open_recipe(**LONG, **changes, tuning__method="lora", parallel__strategy="fsdp2"), fast_host)[
        "parallel.compile"
    ]
    assert found.value == "off" and "a compiled layer that is recomputed gains too little" in found.reason
    assert choices(open_recipe(**ONE, **LONG, **changes), fast_host)["parallel.compile"].value == "on"
    full = open_recipe(**LONG, parallel__activation_checkpointing=True)
    assert choices(full)["parallel.compile"].value == "on"


def test_experts_are_not_compiled():
    job = open_recipe(**ONE, **LONG, model__name="Qwen/Qwen3-30B-A3B", parallel__activation_checkpointing=True)
    assert "experts" in choices(job)["parallel.compile"].reason


def test_layers_under_deepspeed_are_not_compiled():
    found = choices(open_recipe(**LONG, tuning__method="lora", parallel__strategy="zero3"))["parallel.compile"]
    assert (found.value, found.reason) == ("off", "DeepSpeed's hooks run between the operations of a layer")


def test_predict_and_tune_say_how_much_faster_ddp_is():
    job = open_recipe(tuning__method="lora", **LONG)
    note = predict(job, H100).notes[0]
    assert "DDP is" in note and "% faster by the forecast" in note and 'set parallel.strategy = "ddp"' in note
    assert tune(job, H100).notes == (note,)
    assert not predict(job.override(**{"parallel.strategy": "ddp"}), H100).notes
    assert not predict(open_recipe(**LONG), H100).notes  # a full fine-tune


def test_predict_shows_the_choices_and_the_path_of_its_numbers():
    found = predict(open_recipe(**ONE, **LONG), H100)
    text = str(found)
    assert "Numbers hold for: variable-length attention, compiled layers" in text
    assert "Chosen: attention: varlen, " in text and "of the measured matmul rate" not in text
    assert found.as_dict()["choices"][0]["key"] == "model.attention"


def test_the_path_says_whether_lengths_and_cpus_were_measured(smollm2, local):
    manifest = {"splits": {"train": {"rows": 10, "tokens": 20000}}, "lengths": {"upto": [400], "documents": [50]}}
    job = open_recipe(**ONE, **LONG)
    assert "rows of one document, since no dataset is prepared; measured on H200" in predict(job, H100).path
    assert "rows of one document" not in predict(job, H100, manifest).path
    demo = Recipe.load("demo", **{"model.name": str(smollm2)})
    assert predict(demo, local).path.endswith("not measured on CPUs")
    assert "h100.csv" in predict(job.override(**{"model.attention": "sdpa", "parallel.compile": "off"}), H100).path


# What a person wrote and cannot be


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "Tesla V100"])
def test_fp8_is_refused_before_ada(gpu):
    with pytest.raises(InputError, match="fp8 needs GPUs of the Ada or Hopper generation"):
        limits.check(open_recipe(**ONE, model__base="fp8"), on_gpu(gpu))
    assert any(
        "fp8 needs GPUs" in warning for warning in predict(open_recipe(**ONE, model__base="fp8"), on_gpu(gpu)).warnings
    )


@pytest.mark.parametrize("gpu", ["NVIDIA L40S", "H200", "RTX PRO 6000 Blackwell", "a new one"])
def test_fp8_is_taken_on_newer_and_on_unknown_gpus_and_its_cost_is_told(gpu):
    job = open_recipe(**ONE, model__base="fp8")
    limits.check(job, on_gpu(gpu))
    assert any("21 to 27%" in note and "an eighth" in note for note in resolve(job, on_gpu(gpu)).notes)


def test_a_recipe_with_fp8_weights_that_does_not_fit_gets_a_change_that_is_valid():
    job = open_recipe(**ONE, model__base="fp8", schedule__micro_batch=64, data__seq_len=32768)
    found = predict(job, on_gpu("h100-80gb")).memory
    assert found.verdict == "does not fit" and found.cheapest_fix


def test_fp8_is_not_sharded():
    with pytest.raises(InputError, match=r"is not sharded by fsdp2.*strategy to ddp"):
        limits.check(open_recipe(tuning__method="lora", model__base="fp8"), H100)
    limits.check(open_recipe(**ONE, model__base="fp8"), H100)


def test_fp8_needs_gpus(local):
    with pytest.raises(InputError, match="fp8 needs GPUs"):
        limits.check(open_recipe(**ONE, model__base="fp8"), local)


def test_varlen_by_hand_is_refused_where_the_model_cannot():
    job = open_recipe(**ONE, model__name="google/gemma-2-2b", model__attention="varlen")
    for refused in (limits.check, predict):
        with pytest.raises(InputError, match=r"varlen is not possible for google/gemma-2-2b: .*softcap"):
            refused(job, H100)


def test_compile_by_hand_is_refused_without_a_compiler():
    job = open_recipe(**ONE, parallel__compile="on")
    with pytest.raises(InputError, match="this machine has no C compiler"):
        limits.check(job, H100, compiler=False)
    limits.check(job, H100)  # unknown


def test_a_compiler_is_found_by_name_and_by_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert limits.find_compiler() == ""
    mine = tmp_path / "mycc"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CC", str(mine))
    assert limits.find_compiler() == str(mine)


def test_shipped_recipes_resolve_on_shipped_clusters():
    for name in ("llama8b", "llama70b"):
        found = resolve(Recipe.load(name), Cluster.load("h100-8x8")).recipe
        assert "auto" not in (found.model.attention, found.parallel.compile, found.parallel.activation_checkpointing)


SPLIT = {"tuning__method": "full", "parallel__tensor": 2, "parallel__strategy": "fsdp2"}


def split_on(folder, kind, **changes):
    """A recipe that splits the layers of a model of this type, of which only the config is there."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 6, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": kind} | sizes))
    return recipe(**SPLIT | {"model__name": str(folder), "parallel__gpus_per_node": 4} | changes)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llama", {"tuning__method": "lora"}, "averages them. Set tuning.method to full, or both to 1"),
        ("llama", {"parallel__strategy": "ddp"}, "set parallel.strategy to fsdp2"),
        ("llama", {"parallel__sharding": "hybrid"}, "parallel.sharding to full"),
        ("llama", {"parallel__offload": "cpu"}, "set parallel.offload to none"),
        ("llama", {"parallel__compile": "on"}, "set parallel.compile to off"),
        ("llama", {"schedule__save": "async"}, "go with schedule.save sync"),
        ("llama", {"parallel__tensor": 4}, "parallel.tensor is 4, which does not divide num_key_value_heads 2"),
        ("llama", {"parallel__tensor": 1, "parallel__expert": 2}, "parallel.expert was not checked"),
        ("gpt_oss", {}, "parallel.tensor was not checked against one rank for models of type gpt_oss"),
        ("mixtral", {"parallel__expert": 4}, "parallel.expert is 4, which does not divide the 6 experts"),
    ],
)
def test_layers_are_not_split_where_that_is_not_exact(tmp_path, kind, changes, words):
    with pytest.raises(InputError, match=words):
        limits.check(split_on(tmp_path, kind, **changes), H100)


def test_layers_are_split_for_full_fine_tunes_without_a_forecast(tmp_path):
    limits.check(split_on(tmp_path, "mixtral", parallel__expert=2), H100)
    job = open_recipe(**SPLIT, model__name="meta-llama/Llama-3.1-8B", parallel__gpus_per_node=4)
    with pytest.raises(InputError, match=r"no formulas yet for parallel\.tensor .* at least 29\.9 GiB a rank"):
        predict(job, H100)  # 8.03e9 parameters x 16 bytes / 4 ranks
    shape = load_shape(job.model.name)
    split.check_room(job, H100, shape)
    with pytest.raises(InputError, match=r"at least 29\.9 GiB a rank, of 24\.0"):
        split.check_room(job, on_gpu("H100", gpu_memory_gib=24.0), shape)
    assert choices(job)["parallel.compile"].value == "off"
    assert choices(job)["parallel.activation_checkpointing"].value is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel__strategy": "ddp", "tuning__method": "full"}, True),
        ({"parallel__strategy": "ddp", "tuning__method": "full", "model__dtype": "float32"}, False),
        ({"parallel__strategy": "fsdp2", "tuning__method": "full"}, False),
        ({"parallel__strategy": "ddp", "tuning__method": "lora"}, False),
    ],
)
def test_a_full_fine_tune_whose_weights_are_in_bf16_says_so(changes, said):
    notes = resolve(recipe(**changes), H100).notes
    assert any("keeps its weights in bf16" in note for note in notes) is said
