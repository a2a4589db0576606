import pytest

from kit.forecast.attention import varlen_gap
from kit.forecast.gpus import capability
from kit.forecast.shape import shipped

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("gpu", "version"),
    [
        ("H100 80GB HBM3", (9, 0)), ("NVIDIA H200", (9, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA L4", (8, 9)),
        ("NVIDIA L40S", (8, 9)), ("NVIDIA RTX 6000 Ada Generation", (8, 9)), ("RTX PRO 6000 Blackwell", (12, 0)),
        ("NVIDIA A10G", (8, 6)), ("NVIDIA RTX A6000", (8, 6)), ("Tesla V100-SXM2-32GB", (7, 0)), ("Tesla T4", (7, 5)),
        ("NVIDIA GB200", (10, 0)), ("NVIDIA A40", (8, 6)), ("rtx_4090", (8, 9)),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_its_name(gpu, version):
    assert capability(gpu) == version


def test_other_names_are_unknown():
    assert capability("") is None and capability("MI300X") is None and capability("GB10") is None


def test_a_plain_model_on_a_new_enough_gpu_has_no_gap():
    assert varlen_gap(LLAMA, "bfloat16", "NVIDIA A100") == ""
    assert varlen_gap(LLAMA, "bfloat16") == ""  # an unknown GPU
    assert varlen_gap(LLAMA | {"sliding_window": 128}, "bfloat16", "H100") == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 512}, "heads have 512 elements"),
        ({"head_dim": 100}, "multiples of 8"),
        ({"attn_logit_softcapping": 50.0}, "softcap 50"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
        ({"model_type": "gpt2"}, r"attention dropout \(0.1\)"),
        ({"attention_dropout": 0.2}, r"attention dropout \(0.2\)"),
        ({"qk_nope_head_dim": 256, "qk_rope_head_dim": 64}, "heads have 320 elements"),
        ({"model_type": "falcon"}, "does not call other attention functions"),
        ({"text_config": {"model_type": "llama4_text"}}, "in chunks"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(changes, words):
    with pytest.raises(AssertionError, match=words):
        assert not varlen_gap(LLAMA | changes, "bfloat16", "H100")


def test_the_type_and_the_gpu_count_on_gpus_only():
    assert "float32" in varlen_gap(LLAMA, "float32", "H100")
    assert "older than Ampere" in varlen_gap(LLAMA, "bfloat16", "Tesla V100")
    assert varlen_gap(LLAMA, "float32", on_gpus=False) == ""


def test_most_shipped_models_can_use_it():
    gaps = {name: varlen_gap(config, "bfloat16", "H100") for name, config in shipped().items()}
    assert "both directions" in gaps["google/gemma-3-4b-it"]
    assert not gaps["meta-llama/Llama-3.1-405B-Instruct"] and not gaps["Qwen/Qwen2.5-0.5B"]
    assert sum(not gap for gap in gaps.values()) > len(gaps) / 2
