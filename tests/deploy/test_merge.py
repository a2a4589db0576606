"""The merged model against the model that was trained, PEFT's own merge, and what cannot be merged."""

import json
import os
import shutil
import subprocess

import pytest

from kit.checkpoints import weights
from kit.deploy import adapter
from kit.deploy.merge import merge
from kit.errors import KitError
from tests.checkpoints.test_inspect import SHAPE, fsdp2_saves, make_base
from tests.deploy.test_adapter import base_model, logits, saved, trained_logits, without_base

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.20 itself

# Merging adds B A to W before the product instead of after it, which costs a few roundings of logits near 1.
MERGED = 1e-5


@pytest.mark.parametrize("variant", ["adapter", "uneven", "full-norm"])
def test_the_merged_model_gives_the_logits_of_the_trained_model(variant, tmp_path):
    exported = adapter.export(saved(variant), tmp_path / "adapter").path
    merged = merge(exported, fsdp2_saves() / "base", tmp_path / "merged", shard_gb=1e-4).path
    assert len(list(merged.glob("model-*.safetensors"))) > 2
    assert (logits(base_model(merged)) - trained_logits(variant)).abs().max() <= MERGED


def test_a_sharded_base_is_merged_like_a_single_file(tmp_path):
    import torch

    exported = adapter.export(saved("adapter"), tmp_path / "adapter").path
    base_model(fsdp2_saves() / "base").save_pretrained(tmp_path / "base", max_shard_size="100KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    one, two = (
        weights.read_headers(merge(exported, base, tmp_path / name).path)
        for base, name in ((fsdp2_saves() / "base", "one"), (tmp_path / "base", "two"))
    )
    first, second = dict(weights.read_tensors(one, one.tensors)), dict(weights.read_tensors(two, two.tensors))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_merged_bfloat16_base_stays_bfloat16_and_rounds_once(tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    base = make_base(tmp_path / "base")
    model = base_model(base).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    config = LoraConfig(target_modules=["q_proj"], r=4, lora_alpha=8, rank_pattern={"layers.1.self_attn.q_proj": 2},
                        alpha_pattern={"layers.1.self_attn.q_proj": 6}, init_lora_weights=False)  # fmt: skip
    peft = get_peft_model(model, config)
    peft.save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match="trained on .*/base, not on .*/bf16"):
        merged = merge(tmp_path / "adapter", tmp_path / "bf16", tmp_path / "merged").path
    assert sorted(p.name for p in merged.glob("*.safetensors")) == ["model.safetensors"]
    found = dict(weights.read_tensors(held := weights.read_headers(merged), held.tensors))
    for number, scaling in ((0, 8 / 4), (1, 6 / 2)):
        layer = peft.base_model.model.model.layers[number].self_attn.q_proj
        a, b = layer.lora_A.default.weight.float(), layer.lora_B.default.weight.float()
        expected = (layer.base_layer.weight.float() + scaling * (b @ a)).to(torch.bfloat16)
        assert torch.equal(found[f"model.layers.{number}.self_attn.q_proj.weight"], expected)


@pytest.mark.parametrize(("setting", "words"), [
    ({"init_lora_weights": "pissa_niter_4"}, "pissa"), ({"peft_type": "IA3"}, "IA3"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "sets layer_replication"), ({"use_dora": True}, "8 missing, such as"),
    ({"target_parameters": ["experts.down_proj"]}, "sets target_parameters"), ({"a_new_variant": 1}, "a_new_variant"),
])  # fmt: skip
def test_settings_that_are_not_a_plain_sum_are_refused(tmp_path, setting, words):
    exported = adapter.export(saved("adapter"), tmp_path / "adapter").path
    path = exported / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    with pytest.raises(KitError, match=words):
        merge(exported, fsdp2_saves() / "base", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(("shape", "words"), [
    ({"hidden_size": 32}, "hidden_size: 32"), ({"num_hidden_layers": 1}, "no tensor"),
    ({"num_key_value_heads": 4}, "needs an unquantised tensor of shape"), ({"model_type": "mistral"}, "model_type"),
])  # fmt: skip
def test_another_base_is_refused(tmp_path, shape, words):
    exported = adapter.export(saved("adapter"), tmp_path / "adapter").path
    kind = shape.pop("model_type", None)
    base = make_base(tmp_path / "base", **shape)
    if kind:
        path = base / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": kind}))
    with pytest.raises(KitError, match=words):
        merge(exported, base, tmp_path / "merged")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_another_hub_id_than_the_adapters_is_refused(tmp_path, monkeypatch):
    exported = adapter.export(saved("adapter"), tmp_path / "adapter").path
    without_base(exported)  # which names nobody/nothing
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    shutil.copytree(fsdp2_saves() / "base", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(KitError, match="trained on nobody/nothing, not on some/model"):
        merge(exported, "some/model", tmp_path / "merged")


def test_a_full_disk_is_found_before_the_merge(tmp_path):
    exported = adapter.export(saved("adapter"), tmp_path / "adapter").path
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a small file system can only be mounted by root")
    try:
        with pytest.raises(KitError, match=r"The merged model takes .* GB; .*disk has 0.0 GB free"):
            merge(exported, fsdp2_saves() / "base", disk / "merged")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


# Merging by PEFT's own settings: the adapted model's logits are the reference.


def llama(**shape: object):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(SHAPE | shape)))


def qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SHAPE))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64))


ALL = {"target_modules": "all-linear"}
EMBEDDING = {"target_modules": ["q_proj", "embed_tokens"]}
WHOLE = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "norm"]}
UNTIED = {"tie_word_embeddings": False}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to", "ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("make", "lora"), [
    (llama, ALL), (llama, ALL | {"use_rslora": True}), (llama, ALL | {"use_dora": True}),
    (llama, EMBEDDING), (llama, WHOLE), (llama, {"target_modules": ["v_proj", "lm_head"]}),
    (lambda: llama(**UNTIED), EMBEDDING), (lambda: llama(**UNTIED), {"target_modules": ["v_proj", "lm_head"]}),
    (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"]}), (gpt2, {"target_modules": ["c_proj"], "use_dora": True}),
    (gpt2, {"target_modules": ["attn.c_proj", "lm_head"]}), (qwen2, {"target_modules": ["q_proj"], "bias": "all"}),
])  # fmt: skip
def test_the_merged_model_equals_pefts_merge(tmp_path, make, lora):
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file, save_file

    torch.manual_seed(4)
    make().save_pretrained(tmp_path / "base")
    model = get_peft_model(base_model(tmp_path / "base"), LoraConfig(r=4, init_lora_weights=False, **lora))
    for name, weight in model.named_parameters():
        if weight.requires_grad:  # magnitudes and whole modules too, and far enough for every part to count
            weight.data += 0.1 * torch.randn_like(weight) * ("lora_" not in name or "magnitude" in name)
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(PeftModel.from_pretrained(base_model(tmp_path / "base"), tmp_path / "adapter"))
    if make is gpt2:  # as the hub's file of gpt2 itself: a bare model's names
        path = tmp_path / "base" / "model.safetensors"
        save_file({n.removeprefix("transformer."): t for n, t in load_file(path).items()}, path, {"format": "pt"})
    merged = merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged").path
    difference = (logits(base_model(merged)) - expected).abs().max()
    assert difference <= MERGED * expected.abs().max()
    assert (logits(base_model(tmp_path / "base")) - expected).abs().max() > 0.01


@pytest.mark.parametrize(("harm", "words"), [
    (lambda tensors: tensors.pop(next(n for n in tensors if "lora_B" in n)), "1 missing, such as .*lora_B"),
    (lambda tensors: tensors.update({"lm_head.lora_C.weight": tensors[min(tensors)].clone()}), "not know tensors like"),
])  # fmt: skip
def test_a_damaged_adapter_is_not_merged(tmp_path, harm, words):
    from safetensors.torch import load_file, save_file

    exported = adapter.export(saved("adapter"), tmp_path / "adapter").path
    path = exported / "adapter_model.safetensors"
    tensors = load_file(path)
    harm(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(KitError, match=words):
        merge(exported, fsdp2_saves() / "base", tmp_path / "merged")
    os.truncate(path, 1000)
    with pytest.raises(KitError, match=r"cannot be merged: .* is truncated"):
        merge(exported, fsdp2_saves() / "base", tmp_path / "merged")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]


def test_lora_on_fused_experts_is_refused_with_the_setting_named(tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(5)
    base = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2))
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    get_peft_model(base_model(tmp_path / "base"), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(KitError, match=r"it sets target_parameters\. Use PEFT's merge"):
        merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")


# Resized vocabularies, and multimodal models, whose names on disk are not those in memory.


def train_resized(folder, rows, tied, target_modules=("q_proj",), **lora):
    """A base, the same with another number of tokens, and an adapter that was trained on that."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(6)
    llama(tie_word_embeddings=tied).save_pretrained(folder / "base")
    resized = base_model(folder / "base")
    resized.resize_token_embeddings(rows)
    resized.save_pretrained(folder / "resized")
    resized.name_or_path = str(folder / "base")  # as when the resized model was never saved
    model = get_peft_model(
        resized, LoraConfig(r=4, init_lora_weights=False, target_modules=list(target_modules), **lora)
    )
    for name, weight in model.named_parameters():
        if weight.requires_grad and "lora_" not in name:
            weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model (with|has) `tie_word_embeddings")
@pytest.mark.filterwarnings("ignore:.*their shapes agree:UserWarning")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [136, 120])
@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], ["lm_head"], None])
def test_an_adapter_of_a_resized_vocabulary_merges_into_the_base_that_has_its_rows(tmp_path, rows, tied, saved):
    expected = logits(train_resized(tmp_path, rows, tied, modules_to_save=saved))
    merged = merge(tmp_path / "adapter", tmp_path / "resized", tmp_path / "merged").path
    assert (logits(base_model(merged)) - expected).abs().max() <= MERGED * expected.abs().max()
    with pytest.raises(KitError, match=f"has 128 rows, the adapter's has {rows}"):
        merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model (with|has) `tie_word_embeddings")
@pytest.mark.filterwarnings("ignore:.*their shapes agree:UserWarning", "ignore:.*does not hold:UserWarning")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("modules", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"]])
def test_embeddings_that_are_saved_below_lora_replace_those_of_the_base(tmp_path, tied, modules):
    import torch

    expected = logits(train_resized(tmp_path, 136, tied, target_modules=["q_proj", *modules]))
    other = base_model(tmp_path / "resized")
    for name in modules if not tied else ["embed_tokens"]:  # as after another resize: the new rows are random
        rows = other.get_input_embeddings() if name == "embed_tokens" else other.get_output_embeddings()
        rows.weight.data[128:] = torch.randn_like(rows.weight[128:])
    other.save_pretrained(tmp_path / "other")
    merged = merge(tmp_path / "adapter", tmp_path / "other", tmp_path / "merged").path
    assert (logits(base_model(merged)) - expected).abs().max() <= MERGED * expected.abs().max()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*their shapes agree:UserWarning")
@pytest.mark.parametrize(("kept", "lost"), [("embed_tokens", "lm_head"), ("lm_head", "model.embed_tokens")])
def test_one_of_two_resized_tensors_is_merged_with_a_warning_that_names_the_other(tmp_path, kept, lost):
    model = train_resized(tmp_path, 136, tied=False, modules_to_save=[kept])
    shutil.rmtree(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    words = rf"resized from 128 to 136 rows, and it does not hold {lost}\.weight\. The rows from 128 on are those of"
    with pytest.warns(UserWarning, match=words):
        merged = merge(tmp_path / "adapter", tmp_path / "resized", tmp_path / "merged").path
    assert (logits(base_model(merged)) - logits(model)).abs().max() <= MERGED
    with pytest.raises(KitError, match="has 128 rows, the adapter's has 136"):
        merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "other")


def test_another_vocabulary_than_the_adapters_is_refused_with_both_sizes(tmp_path):
    exported = adapter.export(saved("adapter"), tmp_path / "adapter").path
    with pytest.raises(KitError, match="another vocab_size: 136, not 128"):
        merge(exported, make_base(tmp_path / "base", vocab_size=136), tmp_path / "merged")


TEXT = SHAPE | {"vocab_size": 300}
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {"image_size": 28, "patch_size": 14}
TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2}
MROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
# A class, its text part and its images, and what else the config needs.
MULTIMODAL = {
    "Gemma3": (TEXT | {"head_dim": 16, "sliding_window": 16}, IMAGE | PATCHES,
               {"mm_tokens_per_image": 4, "image_token_index": 299, "boi_token_index": 297, "eoi_token_index": 298}),
    "Llava": (TEXT | {"model_type": "llama"}, IMAGE | PATCHES | {"model_type": "clip_vision_model"},
              {"image_token_index": 299}),
    "Mistral3": (TEXT | {"model_type": "mistral"}, IMAGE | PATCHES | {"model_type": "pixtral"},
                 {"image_token_index": 299}),
    "Qwen2VL": (TEXT | MROPE, TOWER | {"embed_dim": 32, "hidden_size": 64}, {}),
    "Qwen2_5_VL": (TEXT | MROPE, TOWER | {"out_hidden_size": 64, "intermediate_size": 48}, {}),
}  # fmt: skip


def multimodal(name, tied=True):
    import transformers

    text, images, more = MULTIMODAL[name]
    settings = getattr(transformers, f"{name}Config")
    config = settings(text_config=text, vision_config=images, **more, tie_word_embeddings=tied)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model (with|has) `tie_word_embeddings")
@pytest.mark.parametrize(("name", "tied", "lora"), [
    *[(name, True, {"target_modules": r".*language_model.*\.(q|v)_proj"}) for name in MULTIMODAL],
    ("Gemma3", True, ALL | {"use_rslora": True}), ("Llava", False, ALL),
    *[(name, name == "Gemma3", {"target_modules": ["v_proj", "lm_head"]}) for name in ("Llava", "Gemma3")],
    ("Qwen2VL", True, {"target_modules": ["q_proj"], "use_dora": True}),
    ("Qwen2_5_VL", False, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
])  # fmt: skip
def test_an_adapter_of_a_multimodal_model_merges_by_the_names_of_its_files(tmp_path, name, tied, lora):
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(7)
    made = multimodal(name, tied)
    made.save_pretrained(tmp_path / "base")
    load = type(made).from_pretrained
    get_peft_model(load(tmp_path / "base"), LoraConfig(r=4, init_lora_weights=False, **lora)).save_pretrained(
        tmp_path / "adapter"
    )
    expected = logits(PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter"))
    merged, found = load(
        merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged").path, output_loading_info=True
    )
    assert not any(found.values())
    assert (logits(merged) - expected).abs().max() <= MERGED * max(1, expected.abs().max())
    assert (logits(load(tmp_path / "base")) - expected).abs().max() > 0.001


def test_a_multimodal_adapter_with_the_names_of_older_files_merges(tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    torch.manual_seed(8)
    made = multimodal("Llava", tied=False)
    made.save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=r".*language_model.*\.q_proj")
    get_peft_model(type(made).from_pretrained(tmp_path / "base"), config).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    one = merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "one").path / "model.safetensors"
    older = {
        n.replace("model.model.language_model.", "model.language_model.model."): t for n, t in load_file(path).items()
    }
    assert older.keys() != load_file(path).keys()
    save_file(older, path, {"format": "pt"})
    two = merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "two").path / "model.safetensors"
    assert one.read_bytes() == two.read_bytes()
