import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kit.config.cluster import Cluster, Paths
from kit.config.recipe import Data, Model, Recipe, Tuning
from kit.errors import InputError
from kit.forecast.shape import load_shape, shape_of, shipped
from kit.forecast.timing import predict
from tests.forecast.test_memory import H100

LLAMA_405B, DEEPSEEK = "meta-llama/Llama-3.1-405B-Instruct", "deepseek-ai/DeepSeek-V3"
DISTINCT = list({id(config): name for name, config in reversed(shipped().items())}.values())[::-1]
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTENTION = {  # the same four projections under other families' own names
    "phi3": ("qkv_proj", "o_proj"),
    "gpt2": ("c_attn", "attn.c_proj"),
    "gpt_neox": ("query_key_value", "attention.dense"),
    "bloom": ("query_key_value", "self_attention.dense"),
    "falcon": ("query_key_value", "self_attention.dense"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense"),
    "deepseek_v2": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip


def lora(model: str, *modules: str, r: int = 8, dropout: float = 0.0) -> Recipe:
    return Recipe("test", Model(model), Data("none"), Tuning("lora", r, dropout=dropout, target_modules=modules))


def text_part(name: str) -> dict[str, Any]:
    """A shipped config, of its text part where it has others, without what no model is built from."""
    config = shipped()[name].get("text_config", shipped()[name])
    return {key: value for key, value in config.items() if key not in ("_source", "quantization_config")}


def built(config: dict[str, Any]) -> Any:
    """The model that transformers makes of the config, without its weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", DISTINCT)
def test_parameters_equal_those_of_the_model_built_by_transformers(name: str) -> None:
    """In all, and layer by layer."""
    layers: Counter[str] = Counter()
    shape, total = load_shape(name), 0
    for path, parameter in built(text_part(name)).named_parameters():
        total += parameter.numel()
        if layer := re.search(r"\.(layers|h)\.\d+\.", path):
            layers[layer[0]] += parameter.numel()
    assert shape.total == total
    assert Counter({layer.parameters: count for count, layer in shape.kinds}) == Counter(layers.values())
    assert shape.layer == max(layers.values())
    assert shape.unknown == ""


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT 0.20 asks transformers 5.24
@pytest.mark.parametrize("name", DISTINCT)
def test_trainable_parameters_equal_those_that_peft_makes(name: str) -> None:
    """At two layers, or four where that takes in every kind; the attention's projections, and all-linear."""
    peft = pytest.importorskip("peft")
    config = text_part(name)
    depth = 4 if "first_k_dense_replace" in config else 2
    config |= {"n_layer" if "n_layer" in config else "num_hidden_layers": depth}
    attention = ATTENTION.get(config["model_type"], QKVO)
    for modules in (attention, ("all-linear",)):
        model = built(config)
        settings = peft.LoraConfig(
            r=8,
            target_modules=list(modules) if modules == attention else "all-linear",
            task_type="CAUSAL_LM",
            fan_in_fan_out=config["model_type"] == "gpt2",
        )
        adapted = peft.get_peft_model(model, settings)
        truth = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert shape_of(config, name).trainable(lora(name, *modules)) == truth


def test_experts_are_adapted_without_dropout_only_as_peft_would_say_after_the_launch() -> None:
    config = text_part("mistralai/Mixtral-8x7B-v0.1")
    with pytest.raises(InputError, match="dropout must be 0"):
        shape_of(config, "mine").trainable(lora("mine", "all-linear", dropout=0.05))
    assert shape_of(config, "mine").trainable(lora("mine", "q_proj", dropout=0.05))
    model = built(config | {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        pytest.importorskip("peft").get_peft_model(
            model, pytest.importorskip("peft").LoraConfig(target_modules="all-linear", lora_dropout=0.05)
        )


def test_the_reference_model_has_its_published_size_and_adapter() -> None:
    shape = load_shape(LLAMA_405B)
    assert shape.total == 405_853_388_800  # counted on the model of the hub's config.json
    assert shape.trainable(lora(LLAMA_405B, *QKVO, r=32)) == 404_619_264


@pytest.mark.parametrize(
    ("name", "total", "active", "step"),
    [  # billions as on the model cards; gpt-oss from its model card's table 1 (arXiv 2508.10925)
        ("Qwen/Qwen3-30B-A3B", 30.5, 3.3, 0.1),
        ("Qwen/Qwen3-235B-A22B", 235, 22, 1),
        ("Qwen/Qwen1.5-MoE-A2.7B", 14.3, 2.7, 0.1),
        (DEEPSEEK, 671, 37, 1),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7, 12.9, 0.1),
        ("openai/gpt-oss-20b", 20.91, 3.61, 0.01),
        ("openai/gpt-oss-120b", 116.83, 5.13, 0.01),
    ],
)
def test_models_with_experts_have_their_published_sizes(name: str, total: float, active: float, step: float) -> None:
    """Cards count the embedding beside the head, or do not."""
    shape = load_shape(name)
    assert shape.total / 1e9 == pytest.approx(total, abs=step / 2)
    low, high = ((shape.active + shape.embedding * n) / 1e9 for n in (1, 2))
    assert low - step / 2 <= active <= high + step / 2


def test_layers_with_and_without_experts_are_told_apart() -> None:
    """DeepSeek-V3: the first three are dense (its report, 4.2); Llama 4 Maverick: every other one (its model card)."""
    assert [count for count, _ in load_shape(DEEPSEEK).kinds] == [58, 3]
    shape = load_shape("meta-llama/Llama-4-Maverick-17B-128E")
    assert [count for count, _ in shape.kinds] == [24, 24]
    assert shape.layers == 48
    assert shape.layer == shape.kinds[0][1].parameters > 10 * shape.kinds[1][1].parameters


def test_qwen_layers_named_dense_or_skipped_by_the_step_have_no_experts() -> None:
    config = text_part("Qwen/Qwen3-30B-A3B") | {
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    }
    shape = shape_of(config, "mine")
    assert [count for count, _ in shape.kinds] == [2, 4]
    assert shape.total == sum(p.numel() for p in built(config).parameters())


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ("tiiuae/falcon-7b", {"parallel_attn": False, "multi_query": False, "bias": True}),
        ("tiiuae/falcon-40b", {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 1024}),
        ("facebook/opt-125m", {"enable_bias": False, "tie_word_embeddings": False}),
        ("bigcode/starcoder2-3b", {"use_bias": False}),
        ("meta-llama/Llama-3.2-1B", {"attention_bias": True, "mlp_bias": True, "head_dim": None}),
        ("gpt2", {"n_inner": 512}),
        (DEEPSEEK, {"attention_bias": True, "first_k_dense_replace": 0, "num_hidden_layers": 2}),
        ("meta-llama/Llama-4-Scout-17B-16E", {"moe_layers": [3, 5], "num_hidden_layers": 8}),
    ],
)
def test_what_a_config_switches_is_followed(base: str, change: dict[str, Any]) -> None:
    config = text_part(base) | change
    assert shape_of(config, "mine").total == sum(p.numel() for p in built(config).parameters())


@pytest.mark.parametrize("name", DISTINCT)
def test_a_family_that_is_not_known_gets_an_upper_bound_labelled_so(name: str) -> None:
    """Every known model, under a name that is none: where its config has the usual keys, the bound holds."""
    config, exact = text_part(name) | {"model_type": "novel"}, load_shape(name)
    if {"intermediate_size", "ffn_dim"} & config.keys():
        bound = shape_of(config | {"vocab_size": exact.vocab, "num_attention_heads": exact.heads}, name)
        assert bound.unknown.startswith("model_type 'novel' is unknown: counted as ")
        assert exact.total <= bound.total < 2 * exact.total
    else:
        with pytest.raises(InputError, match="model_type 'novel' lacks the key"):
            shape_of(config, name)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, "lacks the key 'hidden_size'.* did you mean 'llama'"),
        ({"model_type": "llama", "hidden_size": 64}, "model_type 'llama' lacks the key 'num_hidden_layers'"),
        (LLAMA | {"num_attention_heads": 0}, "has num_attention_heads = 0"),
        (LLAMA | {"vocab_size": "100"}, "has vocab_size = '100'"),
        ({}, "model_type '' lacks the key 'hidden_size'"),
    ],
)
def test_a_config_that_cannot_be_counted_names_the_key(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        shape_of(config, "mine")


def test_parts_that_are_not_counted_and_weights_that_are_quantised_are_told() -> None:
    assert (
        "google/gemma-3-4b-it is counted; its vision_config is left out" in load_shape("google/gemma-3-4b-it").notes[0]
    )
    assert "quantised (fp8)" in load_shape(DEEPSEEK).notes[0]
    assert load_shape("meta-llama/Llama-3.1-8B").notes == ()


def test_a_text_part_is_read_with_what_only_the_whole_config_says() -> None:
    """Published Gemma 3 configs leave out the vocabulary and the heads, and others their type or the tie."""
    shape = load_shape("google/gemma-3-4b-it")
    assert (shape.vocab, shape.heads, shape.tied) == (262_208, 8, True)
    whole = {"model_type": "llava", "tie_word_embeddings": True, "text_config": LLAMA, "vision_config": {}}
    assert shape_of(whole, "mine").tied
    untyped = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert "'llava' is unknown" in shape_of(whole | {"text_config": untyped}, "mine").unknown


@pytest.mark.parametrize(
    ("name", "modules", "words"),
    [
        ("meta-llama/Llama-3.1-8B", ("v_proj", "q_porj"), r"'q_porj' matches no layer .* did you mean 'q_proj'"),
        ("meta-llama/Llama-3.1-8B", ("proj",), "'proj' matches no layer"),
        (DEEPSEEK, QKVO, "'q_proj' matches no layer"),
        ("openai/gpt-oss-20b", ("down_proj",), "'down_proj' matches no layer"),
        ("Qwen/Qwen3-30B-A3B", ("q_proj", "gate_proj"), "'gate_proj' needs 'up_proj' beside it"),
    ],
)
def test_target_modules_that_peft_would_not_find_are_named(name: str, modules: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_shape(name).trainable(lora(name, *modules))


def test_a_target_may_name_more_of_its_path() -> None:
    shape = load_shape("gpt2")
    assert [x.path for x in shape.targeted(["attn.c_proj"])] == ["attn.c_proj"]
    assert [x.path for x in shape.targeted(["c_proj"])] == ["attn.c_proj", "mlp.c_proj"]


def test_a_shape_is_read_from_a_file_a_folder_or_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(shipped()["gpt2"]))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in (str(snapshot), str(snapshot / "config.json"), "some/model"):
        assert load_shape(name).total == load_shape("gpt2").total


def test_a_forecast_reads_the_model_from_the_cache_of_the_profile(tmp_path: Path) -> None:
    snapshot = tmp_path / "pool" / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(shipped()["gpt2"]))
    recipe = Recipe("x", Model("some/model"), Data("s"), Tuning("full"))
    cluster = Cluster("x", paths=Paths(hf_home=str(tmp_path / "pool")))
    assert predict(recipe, cluster).parameters == load_shape("gpt2").total
    with pytest.raises(InputError, match="No config of model 'some/model'"):
        predict(recipe, Cluster("x"))


def test_a_model_that_is_nowhere_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(InputError, match="HF_HOME") as error:
        load_shape("meta-llama/Llama-3.1-8b")
    assert str(tmp_path / "hub") in str(error.value)
    assert "did you mean 'meta-llama/Llama-3.1-8B'" in str(error.value)


@pytest.mark.parametrize(("text", "words"), [("{", "not valid JSON"), ("[1]", "not a model's config, but a list")])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=words):
        load_shape(str(tmp_path))


def test_every_shipped_config_says_where_it_was_read() -> None:
    assert len(DISTINCT) >= 30
    assert all(config["_source"] for config in shipped().values())


def test_the_attentions_of_a_model_are_those_that_transformers_has_for_it() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODELS

    def there(name: str) -> set[str]:
        config = {key: value for key, value in shipped()[name].items() if not key.startswith("_")}
        found = MODELS[type(transformers.AutoConfig.for_model(**config))]
        has = {
            "sdpa": "_supports_sdpa",
            "flash_attention_2": "_supports_flash_attn",
            "flex_attention": "_supports_flex_attn",
        }
        return {"eager"} | {attention for attention, flag in has.items() if getattr(found, flag)}

    assert {name: set(load_shape(name).attentions) for name in shipped()} == {name: there(name) for name in shipped()}


def test_an_attention_that_the_model_does_not_have_is_refused_with_those_that_it_has() -> None:
    recipe = Recipe("test", Model("google/gemma-2-2b"), Data("none"))
    with pytest.raises(
        InputError, match=r"no sdpa for google/gemma-2-2b.* there is eager or flash_attention_2 or flex"
    ):
        predict(recipe, H100)
    assert predict(recipe.override(**{"model.attention": "flash_attention_2"}), H100).memory.allocated_gib > 0


@pytest.mark.parametrize(
    ("name", "change", "window"),
    [
        ("mistralai/Mistral-7B-v0.1", {}, 4096),
        ("mistralai/Mistral-7B-v0.3", {}, 0),
        ("mistralai/Mistral-7B-v0.1", {"sliding_window": None}, 0),
        ("google/gemma-3-4b-it", {}, 1024),
        ("Qwen/Qwen2.5-7B", {"sliding_window": 4096}, 0),
        ("Qwen/Qwen2.5-7B", {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        ("meta-llama/Llama-3.1-8B", {}, 0),
    ],
)
def test_a_sliding_window_counts_where_the_config_uses_it(name: str, change: dict[str, Any], window: int) -> None:
    assert shape_of(shipped()[name] | change, name).window == window
