"""Which attention a model can run: what PyTorch's variable-length attention cannot do, from a config.json; no torch."""

from collections.abc import Mapping
from typing import Any

from kit.forecast.gpus import capability

LARGEST_HEAD = 256  # elements of a head that FlashAttention-2's kernels take, in multiples of HEAD_STEP
HEAD_STEP = 8
VARLEN_CAPABILITY = (8, 0)  # Ampere, the first generation that FlashAttention-2 runs on
# Families whose code in transformers 5 does not call a registered attention function, or needs another mask than a
# causal one inside of each document.
WITHOUT_INTERFACE = ("bloom", "falcon", "mpt")
CHUNKED = ("llama4", "llama4_text")
SINKS = ("gpt_oss",)
BIDIRECTIONAL = ("gemma3",)  # with images; gemma3_text is the one without
DROPOUT_KEYS = ("attention_dropout", "attn_pdrop")
# What transformers takes where the config does not say: GPT2Config.attn_pdrop, Gemma2Config.attn_logit_softcapping.
DROPOUT_DEFAULTS = {"gpt2": 0.1}
SOFTCAP_DEFAULTS = {"gemma2": 50.0}


def varlen_gap(config: Mapping[str, Any], dtype: str, gpu: str = "", on_gpus: bool = True) -> str:
    """Why a model cannot use variable-length attention, as a clause; empty where it can.

    config: the content of config.json. dtype: that of the computation on GPUs. gpu: the name of the GPU, if known.
    Sliding windows are no obstacle: the kernel takes them. On CPUs each document is computed by itself.
    """
    if config.get("model_type") in BIDIRECTIONAL:
        return "the tokens of an image attend in both directions"
    text = {**config, **(config.get("text_config") or {})}
    return _model_gap(text) or (_gpu_gap(dtype, gpu) if on_gpus else "")


def _model_gap(config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type", ""))
    if kind in WITHOUT_INTERFACE:
        return f"transformers' code of {kind} does not call other attention functions"
    if kind in CHUNKED:
        return "the model attends in chunks"
    if kind in SINKS:
        return "the model has attention sinks"
    if cap := config.get("attn_logit_softcapping", SOFTCAP_DEFAULTS.get(kind)):
        return f"the model caps its attention scores (softcap {cap:g})"
    if dropout := _dropout(config, kind):
        return f"the model has attention dropout ({dropout:g})"
    return _head_gap(config)


def _dropout(config: Mapping[str, Any], kind: str) -> float:
    given = [config[key] for key in DROPOUT_KEYS if config.get(key) is not None]
    return float(given[0] if given else DROPOUT_DEFAULTS.get(kind, 0.0))


def _head_gap(config: Mapping[str, Any]) -> str:
    heads = config.get("num_attention_heads") or config.get("n_head")
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    latent = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)  # values are padded to it
    size = latent or config.get("head_dim") or (hidden // heads if heads else HEAD_STEP)  # a default of the family
    if size > LARGEST_HEAD or size % HEAD_STEP:
        return f"its heads have {size} elements, and the kernel takes multiples of {HEAD_STEP} up to {LARGEST_HEAD}"
    return ""


def _gpu_gap(dtype: str, gpu: str) -> str:
    if dtype == "float32":
        return "model.dtype is float32, and the kernel takes 16-bit numbers"
    known = capability(gpu)
    if known and known < VARLEN_CAPABILITY:
        return f"{gpu} is older than Ampere, where the kernel begins"
    return ""
