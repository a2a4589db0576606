import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kit.config.cluster import Cluster, Paths
from kit.config.recipe import Data, Model, Recipe, Tuning
from kit.errors import InputError
from kit.forecast.fit import memory
from kit.forecast.shape import CHECKED, digest, load_shape, shape_of, shipped
from kit.forecast.timing import predict
from tests.forecast import shipped_counts
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


def causal_types() -> list[str]:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    return sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_config(kind: str) -> dict[str, Any]:
    """transformers' default config of a type as a file has it."""
    config = pytest.importorskip("transformers").AutoConfig.for_model(kind)
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


# Of types whose default config builds no model, or whose layers have what no formula counts: recurrences, convolutions.
REFUSED = {
    "bailing_hybrid", "bamba", "blt", "cohere_compass_text", "cpmant", "ctrl", "dbrx", "deepseek_v2", "deepseek_v4",
    "dots1", "dots3_note", "dots3_note_text", "emu3", "falcon_h1", "falcon_mamba", "gemma4_unified_assistant",
    "granitemoehybrid", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v4", "inkling2_loop_text",
    "inkling2_text", "inkling_text", "jamba", "jetmoe", "kimi_linear", "lara_mini", "lfm2_moe", "lfm3",
    "longcat_flash", "mamba", "mamba2", "marian", "ministral", "mllama", "modernbert-decoder", "moshi", "musicgen",
    "musicgen_melody", "nemotron", "nemotron_h", "olmo_hybrid", "prophetnet", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer",
    "rwkv", "xlm", "xlnet", "xlstm", "zamba", "zamba2", "zaya",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", causal_types())
def test_parameters_of_every_type_with_a_causal_model_are_exact_or_refused(kind: str) -> None:
    try:
        config = default_config(kind)
    except Exception as error:  # it needs another package, or has values without a default
        pytest.skip(f"{kind} has no default config: {str(error).splitlines()[0]}")
    if kind in REFUSED:
        with pytest.raises(InputError, match=r"no formula of the forecast counts|cannot build a causal language model"):
            shape_of(config, kind)
        return
    shape = shape_of(config, kind)
    if "text_config" in config:
        assert "Only the text part" in shape.notes[0]
        config = pytest.importorskip("transformers").AutoConfig.for_model(**config).get_text_config().to_dict()
        config |= {"tie_word_embeddings": shape.tied}
    assert shape.total == sum(p.numel() for p in built(config).parameters())


def test_layers_of_a_family_that_was_not_compared_are_never_sure_to_fit() -> None:
    """ernie4_5_moe was once counted as 3.3 billion parameters, and fitted."""
    config = default_config("ernie4_5_moe")
    shape = shape_of(config, "mine")
    assert shape.total == 21_825_437_888
    assert any("what layers of type ernie4_5_moe keep was not compared" in note for note in shape.notes)
    assert memory(lora("mine", "q_proj"), H100, shape).verdict == "tight"
    known = load_shape("Qwen/Qwen3-30B-A3B")
    assert memory(lora("mine", "q_proj"), H100, known).verdict == "fits"


def test_a_config_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = LLAMA | {"vocab_size": 12345}
    first = shape_of(config, "one")
    (kept,) = (tmp_path / "kit" / "counts").iterdir()
    assert kept.name.startswith(digest(config))
    monkeypatch.setattr("kit.forecast.counting.count", lambda *_: pytest.fail("it was counted again"))
    again = shape_of(config | {"use_cache": False, "_source": "elsewhere"}, "two")
    assert (again.kinds, again.total, again.name) == (first.kinds, first.total, "two")


@pytest.mark.slow
def test_the_shipped_counts_are_those_of_the_models_that_transformers_builds() -> None:
    assert shipped_counts.TARGET.read_text() == shipped_counts.text()


SMALL = {
    "hidden_size": 64, "n_embd": 64, "intermediate_size": 96, "ffn_dim": 96, "num_attention_heads": 4, "n_head": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "head_dim": 16, "moe_intermediate_size": 32, "num_local_experts": 4,
    "num_experts": 4, "n_routed_experts": 4, "word_embed_proj_dim": 64, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKED)
def test_parameters_stay_exact_or_are_refused_with_each_switch_of_a_config(kind: str) -> None:
    config = {key: value and SMALL.get(key, value) for key, value in default_config(kind).items()}
    config |= {"pad_token_id": None}  # some defaults are beyond a small vocabulary
    config |= {key: 2 for key in ("num_experts_per_tok",) if key in config}
    compared = 0
    for key, value in config.items():
        if not isinstance(value, bool):
            continue
        changed = config | {key: not value}
        try:
            truth = sum(p.numel() for p in built(changed).parameters())
        except (ValueError, TypeError, NotImplementedError):  # transformers itself refuses the combination
            continue
        try:
            assert shape_of(changed, kind).total == truth, key
            compared += 1
        except InputError:
            pass
    assert compared


@pytest.mark.parametrize("own", [True, False, None])
@pytest.mark.parametrize("kind", ["mistral3", "gemma3", "llava", "llava_next", "internvl", "idefics3"])
def test_the_tie_of_a_multimodal_model_is_that_of_its_complete_config(kind: str, own: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    for of_text in (True, False):
        text = LLAMA | {"tie_word_embeddings": of_text}
        flag = {} if own is None else {"tie_word_embeddings": own}
        truth = transformers.AutoConfig.for_model(kind, text_config=text, **flag).tie_word_embeddings
        shape = shape_of({"model_type": kind, "text_config": text, "vision_config": {}, **flag}, kind)
        assert shape.tied is truth
        inner = sum(count * layer.parameters for count, layer in shape.kinds) + shape.outer.parameters
        assert shape.total == inner + (1 if truth else 2) * shape.embedding


def test_a_family_that_is_not_known_gives_no_figure_and_no_verdict(tmp_path: Path) -> None:
    config = text_part("meta-llama/Llama-3.1-8B") | {"model_type": "novel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="does not know models of type 'novel', so the forecast cannot say whether"):
        predict(lora(str(tmp_path), "q_proj"), H100)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, "does not know models of type 'lama'.* did you mean 'llama'"),
        (LLAMA | {"num_attention_heads": 0}, "has num_attention_heads = 0"),
        (LLAMA | {"vocab_size": "100"}, "has vocab_size = '100'"),
        (LLAMA | {"hidden_size": True}, "has hidden_size = True"),
        (LLAMA | {"num_hidden_layers": 2.0}, "has num_hidden_layers = 2.0"),
        (LLAMA | {"num_key_value_heads": [4, 2]}, "cannot build a causal language model .* 'num_key_value_heads'"),
        (LLAMA | {"head_dim": -16}, "has head_dim = -16"),
        (LLAMA | {"attention_bias": "none"}, "cannot build a causal language model .* 'attention_bias'"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "cannot build a causal language model .* 'tie_word_embeddings'"),
        (
            LLAMA | {"model_type": "mistral", "sliding_window": "auto"},
            "cannot build a causal language model .* 'sliding_window'",
        ),
        (
            LLAMA | {"model_type": "qwen3_moe", "decoder_sparse_step": 0},
            "cannot build a causal language model .* by zero",
        ),
        (
            LLAMA | {"model_type": "qwen3_moe", "mlp_only_layers": 3},
            "cannot build a causal language model .* 'mlp_only_layers'",
        ),
        ({"model_type": "llava", "text_config": "llama"}, "has text_config = 'llama'; it must be an object"),
        ({}, "models of type ''"),
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
    assert shape_of(whole | {"text_config": untyped}, "mine").family == "llama"  # the default of LLaVA's text part


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
    recipe = Recipe("test", Model("google/gemma-2-2b", attention="sdpa"), Data("none"))
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
