"""Shape: a model's parameters, counted exactly from its config.json alone; no torch, no weights."""

import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files, schema
from kit.errors import InputError
from kit.recipe import Recipe

# Each family's layer as `path inputs outputs`, with h hidden, q queries, k keys, f feed-forward, as in transformers.
_ATTENTION = "self_attn.q_proj h q, self_attn.k_proj h k, self_attn.v_proj h k, self_attn.o_proj q h"
_LLAMA = f"{_ATTENTION}, mlp.gate_proj h f, mlp.up_proj h f, mlp.down_proj f h"
_LAYERS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), _LLAMA) | {
    "phi3": "self_attn.qkv_proj h q+2k, self_attn.o_proj q h, mlp.gate_up_proj h 2f, mlp.down_proj f h",
    "mixtral": f"{_ATTENTION}, mlp.experts.gate_up_proj h 2f, mlp.experts.down_proj f h",
    "gpt2": "attn.c_attn h q+2k, attn.c_proj q h, mlp.c_fc h f, mlp.c_proj f h",
}
_TIED_BY_DEFAULT = {"gemma", "gemma2", "gpt2"}
_GPT2_KEYS = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}


@dataclass(frozen=True)
class Linear:
    """One projection of a layer. `source` tells which tensor it reads; experts are one tensor, beyond LoRA's reach."""

    path: str
    source: str
    inputs: int
    outputs: int
    bias: bool
    experts: int

    @property
    def parameters(self) -> int:
        """Weights and bias."""
        return max(self.experts, 1) * self.inputs * self.outputs + self.bias * self.outputs


@dataclass(frozen=True)
class Shape:
    """What the formulas need to know of a model; `vectors` are a layer's other parameters, `outer` the final norm's."""

    name: str
    family: str
    hidden: int
    layers: int
    vocab: int
    heads: int
    query: int
    key: int
    ffn: int
    norms: int
    linears: tuple[Linear, ...]
    vectors: int
    outer: int
    tied: bool
    experts_used: int

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the LM head that are not the embedding's."""
        return 0 if self.tied else self.embedding

    @functools.cached_property
    def layer(self) -> int:
        """Parameters of one layer."""
        return sum(x.parameters for x in self.linears) + self.vectors

    @functools.cached_property
    def total(self) -> int:
        """All parameters, tied ones once."""
        return self.layers * self.layer + self.embedding + self.head + self.outer

    @functools.cached_property
    def active(self) -> int:
        """Weights that one token is multiplied with in the layers: experts as routed."""
        used = (x.inputs * x.outputs * (self.experts_used if x.experts else 1) for x in self.linears)
        return self.layers * sum(used)

    def targeted(self, modules: Iterable[str]) -> list[Linear]:
        """The projections of one layer that PEFT adapts. Raises InputError for a name that matches none."""
        reachable, found = [x for x in self.linears if not x.experts], []
        for module in modules:
            hits = [x for x in reachable if module == "all-linear" or f".{x.path}".endswith(f".{module}")]
            if not hits:
                names = {x.path.rpartition(".")[2] for x in reachable} | {"all-linear"}
                raise InputError(
                    f"tuning.target_modules: {module!r} matches no layer of {self.name} that LoRA can adapt; "
                    + schema.nearest(module, names)
                )
            found += [x for x in hits if x not in found]
        return found

    def trainable(self, recipe: Recipe) -> int:
        """Parameters that the recipe trains: all, or r x (inputs + outputs) of each projection (LoRA paper, 4.1)."""
        if recipe.tuning.method == "full":
            return self.total
        sides = sum(x.inputs + x.outputs for x in self.targeted(recipe.tuning.target_modules))
        return self.layers * recipe.tuning.r * sides


def shape_of(config: dict[str, Any], name: str) -> Shape:
    """The shape behind the contents of a config.json. Raises InputError for a family the formulas do not know."""
    family = config.get("model_type", "")
    if family not in _LAYERS:
        raise InputError(f"{name}: model_type {family!r} is unknown to the forecast; {schema.nearest(family, _LAYERS)}")
    c = {_GPT2_KEYS.get(key, key): value for key, value in config.items()}
    try:
        return _shape(c, name, family)
    except KeyError as error:
        raise InputError(f"{name}: its config of model_type {family!r} lacks the key {error}.") from None


def _shape(c: dict[str, Any], name: str, family: str) -> Shape:
    h, heads, gpt2 = c["hidden_size"], c["num_attention_heads"], family == "gpt2"
    experts, used = c.get("num_local_experts", 0), c.get("num_experts_per_tok", 1)
    width = c.get("head_dim") or h // heads
    q, k = heads * width, c.get("num_key_value_heads", heads) * width
    f = (c.get("n_inner") or 4 * h) if gpt2 else c["intermediate_size"]
    size = {"h": h, "q": q, "k": k, "f": f, "2f": 2 * f, "q+2k": q + 2 * k}
    norms = 4 if family == "gemma2" else 2
    biased = {"h": c.get("attention_bias", False) or family == "qwen2", "q": c.get("attention_bias", False)}

    def linear(path: str, i: str, o: str) -> Linear:
        bias = gpt2 or (c.get("mlp_bias", False) if path.startswith("mlp") else biased[i])
        return Linear(path, path.split(".")[0] + i, size[i], size[o], bias, experts if "experts" in path else 0)

    return Shape(
        name, family, h, c["num_hidden_layers"], c["vocab_size"], heads, q, k, f * used, norms,
        linears=tuple(linear(*row.split()) for row in _LAYERS[family].split(", ")),
        vectors=4 * h if gpt2 else (norms + experts) * h + 2 * width * (family == "qwen3"),  # gpt2's norms have biases
        outer=(c["n_positions"] + 2) * h if gpt2 else h,
        tied=c.get("tie_word_embeddings", family in _TIED_BY_DEFAULT),
        experts_used=used,
    )  # fmt: skip


@functools.cache
def shipped() -> dict[str, Shape]:
    """The published shapes that come with the kit, by hub id; in the file, text in place of a table names an equal."""
    table = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return {name: shape_of(table[c] if isinstance(c, str) else c, name) for name, c in table.items()}


def load_shape(name: str) -> Shape:
    """From a config.json, a folder that holds one, a shipped hub id, or the hub's local cache, in this order."""
    path = files.locate(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if name in shipped():
            return shipped()[name]
        path = _cached(name)
    try:
        return shape_of(json.loads(path.read_text(encoding="utf-8")), name)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}.") from None


def _cached(name: str) -> Path:
    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    found = list(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))
    if not found:
        raise InputError(
            f"No config of model {name!r}: looked for a file or folder of that name, among the shipped shapes and in "
            f"{hub}. Set model.name to a folder with a config.json, or HF_HOME to the cache that holds the model. "
            + schema.nearest(name, shipped())
        )
    return max(found, key=lambda p: p.stat().st_mtime)
