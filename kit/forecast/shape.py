"""Shape: a model's parameters, counted exactly from its config.json alone; no torch, no weights."""

import functools
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.config import models, schema
from kit.config.recipe import Recipe
from kit.errors import InputError

_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_ATTENTIONS = "sdpa eager flash_attention_2 flex_attention"
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Linear:
    """One projection of a layer; `source` tells which tensor it reads, `names` what LoRA's target modules call it.

    Experts are one tensor, of whose `copies` a token uses `used`. One that fuses two projections has the names of both.
    """

    path: str
    source: str
    inputs: int
    outputs: int
    parameters: int
    copies: int
    used: int
    names: tuple[str, ...]

    def answers(self, module: str) -> bool:
        """Whether an entry of target_modules means it: all-linear, its name, or that and more of its path."""
        whole = self.path.startswith("!") or f".{self.path}".endswith(f".{module}")
        return (bool(self.names) and module == "all-linear") or (whole and module.rpartition(".")[2] in self.names)


@dataclass(frozen=True)
class Layer:
    """One layer: all its parameters, its projections, its other parameters, its norms, and a token's feed-forward."""

    parameters: int
    linears: tuple[Linear, ...]
    vectors: int
    norms: int
    ffn: int

    def targeted(self, modules: Iterable[str]) -> list[Linear]:
        """The projections that PEFT adapts."""
        return [x for x in self.linears if any(map(x.answers, modules))]


@dataclass(frozen=True)
class Shape:
    """What the formulas need to know of a model: `kinds` of layers and how many of each; `outer`, what is in none.

    layer (its parameters), linears, vectors, norms and ffn are the largest kind's. query is the mean width of a token's
    queries and attention output, key that of keys and values, which differ in DeepSeek's MLA. `attentions` are
    the values that model.attention may have; of a single head of keys, `single_key`, that is not repeated for the
    queries, sdpa holds all scores; window is that of sliding attention, 0 without. `unknown` says what the formulas do
    not know, which makes every figure a bound; `notes`, what is left out.
    """

    name: str
    hidden: int
    layers: int
    vocab: int
    heads: int
    query: int
    key: int
    embedding: int
    tied: bool
    kinds: tuple[tuple[int, Layer], ...]
    outer: Layer
    layer: int
    linears: tuple[Linear, ...]
    vectors: int
    norms: int
    ffn: int
    attentions: tuple[str, ...]
    single_key: bool
    window: int
    unknown: str
    notes: tuple[str, ...]

    @property
    def head(self) -> int:
        """Parameters of the LM head that are not the embedding's."""
        return 0 if self.tied else self.embedding

    @functools.cached_property
    def total(self) -> int:
        """All parameters, tied ones once."""
        inner = sum(count * layer.parameters for count, layer in self.kinds)
        return inner + self.embedding + self.head + self.outer.parameters

    @functools.cached_property
    def active(self) -> int:
        """Weights that one token is multiplied with in the layers: experts as routed."""
        return sum(n * x.inputs * x.outputs * x.used for n, layer in self.kinds for x in layer.linears)

    def masked(self, recipe: Recipe) -> bool:
        """Whether attention is handed a mask: for packed rows, and for those as long as a sliding window."""
        return recipe.data.packing or 0 < self.window <= recipe.data.seq_len

    def holds_scores(self, recipe: Recipe) -> bool:
        """Whether all attention scores of a layer lie in memory."""
        return recipe.model.attention == "eager" or (recipe.model.attention == "sdpa" and self.single_key)

    def check(self, recipe: Recipe) -> None:
        """Raises InputError for what transformers or PEFT would refuse as the run starts, where the family is known."""
        if self.unknown:
            return
        if recipe.model.attention not in self.attentions:
            raise InputError(
                f"model.attention: transformers has no {recipe.model.attention} for {self.name}, and the run would end "
                f"as it loads the model; there is {' or '.join(self.attentions)}."
            )
        self.trainable(recipe)

    def targeted(self, modules: Iterable[str]) -> list[Linear]:
        """The projections of the largest layer that PEFT adapts. Raises InputError for a name that matches none."""
        modules = tuple(modules)
        every = [x for _, layer in (*self.kinds, (1, self.outer)) for x in layer.linears]
        for module in modules:
            names = {name for x in every if x.answers(module) for name in x.names}
            if not names:
                valid = {name for x in every for name in x.names} | {"all-linear"}
                problem = f"matches no layer of {self.name} that LoRA can adapt; {schema.nearest(module, valid)}"
            elif module != "all-linear" and (absent := names - {m.rpartition(".")[2] for m in modules}):
                problem = f"needs {absent.pop()!r} beside it: {self.name} holds the two of each expert in one tensor."
            else:
                continue
            raise InputError(f"tuning.target_modules: {module!r} {problem}")
        return [x for x in self.linears if any(map(x.answers, modules))]

    def trainable(self, recipe: Recipe) -> int:
        """Parameters that the recipe trains: all, or LoRA's r x (inputs + outputs) of each projection (its paper, 4.1).

        PEFT gives a fused tensor the ranks of all that it holds. Raises InputError as `targeted` does.
        """
        if recipe.tuning.method == "full":
            return self.total
        self.targeted(modules := recipe.tuning.target_modules)
        found = [(n, x) for n, layer in (*self.kinds, (1, self.outer)) for x in layer.targeted(modules)]
        if recipe.tuning.dropout and any(x.copies > 1 for _, x in found):
            raise InputError(f"tuning.dropout must be 0: PEFT adapts the experts of {self.name} without it only.")
        return recipe.tuning.r * sum(n * len(x.names) * x.copies * (x.inputs + x.outputs) for n, x in found)


@functools.cache
def _families() -> dict[str, dict[str, Any]]:
    table = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
    for family in table.values():
        family |= {k: v.format_map(table["parts"]) for k, v in family.items() if k in ("layer", "dense")}
    return table | {"known": {name: family for name, family in table.items() if "layer" in family}}


def shape_of(config: dict[str, Any], name: str) -> Shape:
    """The shape behind the contents of a config.json, of its text part where it has others.

    A bound, labelled so, where families.toml does not know the model_type. Raises InputError for a missing or bad key.
    """
    families, notes, unknown = _families(), [], ""
    if parts := [key for key in ("vision_config", "audio_config") if key in config]:
        notes.append(f"Only the text part of {name} is counted; its {' and '.join(parts)} is left out.")
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        notes.append(f"The published weights of {name} are quantised ({method}); they are counted as if they were not.")
    given = config | (config.get("text_config") or {})
    c = {families["same"].get(key, key): value for key, value in given.items() if value is not None}
    table = families["known"].get(kind := str(c.get("model_type", "")))
    if not table:
        kin = "deepseek_v3" if "kv_lora_rank" in c else "qwen2_moe" if "num_local_experts" in c else "llama"
        table = families[kin] | families["bound"]
        unknown = (
            f"model_type {kind!r} is unknown: counted as {kin} with every bias and more norms, an upper bound unless "
            "it holds other tensors."
        )
    default = table.get("default", {})
    slides = default | given  # null in the config means no window
    window = (slides.get("use_sliding_window", True) and slides.get("sliding_window")) or 0
    whole = families.get(str(config.get("model_type")), {})
    attentions = str(whole.get("attentions") or table.get("attentions") or _ATTENTIONS).split()
    c = default | c | {"window": window, "attentions": tuple(attentions)}
    c = {"qkv_bias": c.get("attention_bias", c.get("bias", False))} | c
    if table.get("fourfold"):
        c.setdefault("intermediate_size", 4 * c.get("hidden_size", 0))
    for key in _KEYS:
        if not isinstance(c.get(key), int) or c[key] < 1:
            said = f"has {key} = {c[key]!r}" if key in c else f"lacks the key {key!r}"
            hint = f" The model_type is unknown: {schema.nearest(kind, families['known'])}" if unknown else ""
            raise InputError(f"{name}: its config of model_type {kind!r} {said}.{hint}")
    return _shape(c, name, table, unknown, tuple(notes))


def _sizes(c: dict[str, Any]) -> dict[str, int]:
    """The sizes that families.toml speaks of."""
    h, heads, f, get = c["hidden_size"], c["num_attention_heads"], c["intermediate_size"], c.get
    d, kv, new = get("head_dim", h // heads), get("num_key_value_heads", heads), get("new_decoder_architecture", False)
    if c["model_type"] == "falcon" and not new:
        kv = 1 if get("multi_query", True) else heads
    m, e = get("moe_intermediate_size", f), get("word_embed_proj_dim", h)
    a, latent, nope, rope, v = (get(key, 0) for key in _LATENT)
    two = not get("parallel_attn", True) or get("num_ln_in_parallel_attn", 1 + new) == 2
    last = get("do_layer_norm_before", True) and not get("_remove_final_layer_norm")
    both = heads * (nope + rope)
    return {
        "h": h, "n": 2 * h, "n2": 2 * h * two, "nl": 2 * h * last, "heads": heads, "d": d, "q": heads * d, "k": kv * d,
        "qkv": (heads + 2 * kv) * d, "f": get("intermediate_size_mlp", f), "2f": 2 * f, "m": m, "2m": 2 * m, "1": 1,
        "E": get("num_local_experts", 0), "s": get("shared_expert_intermediate_size", get("n_shared_experts", 1) * m),
        "a": a, "c": latent, "c+r": latent + rope, "Q": both, "Q1": 0 if a else both, "KV": heads * (nope + v),
        "V": heads * v, "e": e * (e != h), "vocab": c["vocab_size"], "embedding": c["vocab_size"] * e,
        "positions": (get("max_position_embeddings", 0) + 2 * (c["model_type"] == "opt")) * h,
    }  # fmt: skip


def _sparse(c: dict[str, Any]) -> int:
    """How many layers have experts, where some have none."""
    step, first = c.get("interleave_moe_layer_step", c.get("decoder_sparse_step", 1)), c.get("first_k_dense_replace", 0)
    plain = c.get("mlp_only_layers", ())
    routed = (i for i in range(c["num_hidden_layers"]) if (i + 1) % step == 0 and i >= first and i not in plain)
    return len(list(c.get("moe_layers", routed)))


def _shape(c: dict[str, Any], name: str, table: dict[str, Any], unknown: str, notes: tuple[str, ...]) -> Shape:
    size, fused, used = _sizes(c), table.get("fused", {}), c.get("num_experts_per_tok", 1)
    taken = {part for parts in fused.values() for part in parts}

    def linear(path: str, i: str, o: str, bias: str = "") -> Linear:
        leaf, (copies, active) = path.rpartition(".")[2], (size["E"], used) if ".experts." in path else (1, 1)
        names = tuple(fused.get(leaf, ())) if path.startswith("!") else (leaf,) * (leaf not in taken)
        parameters = copies * (size[i] + c.get(bias, False)) * size[o]
        return Linear(path, path.split(".")[0] + i, size[i], size[o], parameters, copies, active, names)

    def layer(tensors: str, vectors: str) -> Layer:
        rows = [linear(*row.split()) for row in tensors.split(",") if row]
        linears = tuple(x for x in rows if x.inputs and x.outputs)
        norms = sum(size[word] > 0 for word in vectors.split() if word in ("h", "n", "n2"))
        other = sum(size[word] for word in vectors.split())
        ffn = size["m"] * used + size["s"] * ("shared" in tensors) if ".experts." in tensors else size["f"]
        return Layer(sum(x.parameters for x in linears) + other, linears, other, norms, ffn)

    depth, vectors, mla = c["num_hidden_layers"], table.get("vectors", "h h"), (size["Q"] + size["V"]) // 2
    sparse = _sparse(c) if "dense" in table and not unknown else depth
    kinds = tuple((n, layer(table[key], vectors)) for n, key in ((sparse, "layer"), (depth - sparse, "dense")) if n)
    largest = max((kind for _, kind in kinds), key=lambda kind: kind.parameters)
    return Shape(
        name, c["hidden_size"], depth, c["vocab_size"], c["num_attention_heads"], mla or size["q"], mla or size["k"],
        size["embedding"], c.get("tie_word_embeddings", table.get("tied", False)), kinds,
        outer=layer(table.get("outside", ""), table.get("outer", "h")), layer=largest.parameters,
        linears=largest.linears, vectors=largest.vectors, norms=largest.norms, ffn=largest.ffn,
        attentions=c["attentions"], single_key=table.get("single_key", False) and size["k"] == size["d"],
        window=c["window"], unknown=unknown, notes=notes,
    )  # fmt: skip


@functools.cache
def shipped() -> dict[str, dict[str, Any]]:
    """What counts of published configs, by hub id, and where it was read; in the file, a text names an equal table."""
    table = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return {name: table[config] if isinstance(config, str) else config for name, config in table.items()}


def load_shape(name: str, hf_home: str = "") -> Shape:
    """From a config.json, a folder that has one, a shipped hub id, or a hub cache, in this order.

    `hf_home` is the profile's cache. Raises InputError where the model is not found.
    """
    if name in shipped() and not models.local_config(name):
        return shape_of(shipped()[name], name)
    path = models.find_config(name, hf_home)
    if path is None:
        raise InputError(
            f"No config of model {name!r}: it is not a file, not a folder with a config.json, not among the shipped "
            f"shapes and not in the hub's cache {' or '.join(map(str, models.hub_caches(hf_home)))}. Set model.name to "
            "a folder with a config.json, or HF_HOME to the cache that contains the model; "
            f"{schema.nearest(name, shipped())}"
        )
    config = files.read_json(path)
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a model's config, but a {type(config).__name__}.")
    return shape_of(config, name)
