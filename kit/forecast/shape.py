"""Shape: what the formulas read of a model, as `kit.forecast.counting` counts it once for each config; no torch."""

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kit import files
from kit.config import models, schema
from kit.config.recipe import Recipe
from kit.errors import InputError

FORMAT = 1  # of what is kept of a count; raised when its fields change
PART, NO_PARTS = "_config", ("text_config", "quantization_config", "compression_config")
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "num_local_experts", "num_experts", "n_routed_experts"),
)
# Keys of a config that change no size.
UNREAD = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "quantization_config"),
    *("_source", "_name_or_path", "_model_name_or_path"),
)
# Families whose layers the formulas of kit.forecast.activations were written for.
CHECKED = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("smollm3", "olmo2", "phi", "phi3", "deepseek_v2", "deepseek_v3", "llama4_text", "gpt_oss", "starcoder2", "gpt2"),
    *("gpt_neox", "bloom", "falcon", "opt"),
)


@dataclass(frozen=True)
class Linear:
    """One projection of a layer. `names`: what LoRA's target modules call it.

    reads: hidden states, the output of the attention, or something inside of the attention or the feed-forward.
    Experts are one tensor, of whose `copies` a token uses `used`. One that fuses two projections has the names of both.
    """

    path: str
    reads: Literal["hidden", "attention", "inner"]
    inputs: int
    outputs: int
    parameters: int
    copies: int
    used: int
    names: tuple[str, ...]

    @property
    def in_attention(self) -> bool:
        """Whether it belongs to the attention."""
        return "att" in self.path

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads the hidden states of the layer, as queries, gates and routers do."""
        return self.reads == "hidden"

    @property
    def reads_attention(self) -> bool:
        """Whether it reads the output of the attention."""
        return self.reads == "attention"

    @property
    def source(self) -> tuple[str, str, int]:
        """The same for projections that read one tensor: the part of the layer, what it reads, and how wide that is."""
        return self.path.partition(".")[0], self.reads, self.inputs

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
    """What the formulas need to know of a model: `kinds` of layers, the largest first, and how many of each; `outer`,
    what is in none.

    query is the mean width of a token's queries and attention output, key that of keys and values, which differ in
    DeepSeek's MLA. `attentions` are the values that model.attention may have; of a single head of keys, `single_key`,
    that is not repeated for the queries, sdpa holds all scores; window is that of sliding attention, 0 without. `notes`
    says what is left out.
    """

    name: str
    family: str
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
    attentions: tuple[str, ...]
    single_key: bool
    window: int
    notes: tuple[str, ...]

    @property
    def largest(self) -> Layer:
        """The layer with most parameters."""
        return self.kinds[0][1]

    @property
    def layer(self) -> int:
        """Parameters of the largest layer."""
        return self.largest.parameters

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Projections of the largest layer."""
        return self.largest.linears

    @property
    def vectors(self) -> int:
        """Other parameters of the largest layer."""
        return self.largest.vectors

    @property
    def norms(self) -> int:
        """Norms of hidden states in the largest layer."""
        return self.largest.norms

    @property
    def ffn(self) -> int:
        """Width of a token's feed-forward in the largest layer, over all experts that it goes to."""
        return self.largest.ffn

    @property
    def checked(self) -> bool:
        """Whether the formulas of activations were compared with layers of this family."""
        return self.family in CHECKED

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

    @functools.cached_property
    def feed_forward(self) -> tuple[Linear, ...]:
        """The projections of the largest layer outside its attention."""
        return tuple(linear for linear in self.linears if not linear.in_attention)

    @functools.cached_property
    def gated(self) -> bool:
        """Whether the feed-forward multiplies two projections, as SwiGLU does."""
        up = sum(linear.outputs for linear in self.feed_forward if linear.reads_hidden)
        return up >= 2 * max(linear.inputs for linear in self.feed_forward if not linear.reads_hidden)

    @property
    def kept_wide_tensors(self) -> int:
        """Tensors as wide as the feed-forward that a layer keeps, which is not compiled.

        Three gated ones; those of GPT-OSS clamp both projections and add 1 to one: six, by its modelling code.
        """
        if self.family == "gpt_oss":
            return 6
        return 3 if self.gated else 1

    @property
    def wide_tensors(self) -> int:
        """Tensors as wide as the feed-forward that it makes: projections, activation, product."""
        return 3 if self.gated else 2

    @functools.cached_property
    def experts_used(self) -> int:
        """Experts that a token goes to; 0 without experts."""
        return max((linear.used for linear in self.feed_forward if linear.copies > 1), default=0)

    @functools.cached_property
    def fused_attention(self) -> bool:
        """Whether queries, keys and values are one projection."""
        return any(linear.outputs == self.query + 2 * self.key for linear in self.linears)

    @functools.cached_property
    def biased(self) -> bool:
        """Whether any projection has a bias."""
        return any(x.parameters > x.copies * x.inputs * x.outputs for x in self.linears)

    def masked(self, recipe: Recipe) -> bool:
        """Whether attention is handed a mask: for packed rows, and for those as long as a sliding window."""
        return recipe.data.packing or 0 < self.window <= recipe.data.seq_len

    def holds_scores(self, recipe: Recipe) -> bool:
        """Whether all attention scores of a layer lie in memory."""
        attention = recipe.model.attention_used
        return attention == "eager" or (attention == "sdpa" and self.single_key)

    def check(self, recipe: Recipe) -> None:
        """Raises InputError for what transformers or PEFT would refuse as the run starts."""
        attention = recipe.model.attention_used
        if attention not in (*self.attentions, "varlen"):
            raise InputError(
                f"model.attention: transformers has no {attention} for {self.name}, and the run would end "
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


def shape_of(config: dict[str, Any], name: str) -> Shape:
    """The shape behind the contents of a config.json, of its text part where it has others.

    What transformers makes of it is counted once, and kept for this user; of shipped configs it is shipped. Raises
    InputError for a model that cannot be built, or whose layers hold what no formula counts.
    """
    _check_values(config, name)
    return _shape(json.dumps(config, sort_keys=True), name)


@functools.lru_cache(maxsize=256)
def _shape(text: str, name: str) -> Shape:
    config = json.loads(text)
    fields = _shipped_counts().get(digest(config)) or _counted(config, name)
    kinds = tuple((count, _layer(layer)) for count, layer in fields["kinds"])
    found = fields | {"kinds": kinds, "outer": _layer(fields["outer"]), "attentions": tuple(fields["attentions"])}
    return Shape(name=name, notes=tuple(_notes(config, name, fields["family"])), **found)


def _layer(fields: dict[str, Any]) -> Layer:
    linears = tuple(Linear(**linear | {"names": tuple(linear["names"])}) for linear in fields["linears"])
    return Layer(**fields | {"linears": linears})


def _notes(config: dict[str, Any], name: str, family: str) -> Iterable[str]:
    if config.get("text_config"):
        parts = [key for key in config if key.endswith(PART) and key not in NO_PARTS and config[key]]
        left_out = f"its {' and '.join(parts)} is left out" if parts else "the rest is left out"
        yield f"Only the text part of {name} is counted; {left_out}."
    quantization = config.get("quantization_config")
    if method := quantization.get("quant_method") if isinstance(quantization, dict) else quantization:
        yield f"The published weights of {name} are quantised ({method}); they are counted as if they were not."
    if family not in CHECKED:
        yield (
            f"The parameters of {name} are counted, but what layers of type {family} keep was not compared with the "
            "forecast, which takes them for layers of a Llama with these projections: it is never sure that they fit."
        )


def digest(config: dict[str, Any]) -> str:
    """sha256 over what a config says of its model, in hexadecimal groups, which no scanner takes for a key."""
    read = {key: value for key, value in config.items() if key not in UNREAD}
    found = hashlib.sha256(json.dumps(read, sort_keys=True).encode())
    return found.digest().hex("-", 4)


@functools.cache
def _shipped_counts() -> dict[str, dict[str, Any]]:
    """Counts of the shipped configs, by digest; `python -m tests.forecast.shipped_counts` remakes them."""
    path = Path(__file__).with_name("counts.json")
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _counted(config: dict[str, Any], name: str) -> dict[str, Any]:
    """What was counted before with this release of transformers, else what is counted now."""
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("transformers")
        kept = files.state_home() / "counts" / f"{digest(config)}-{FORMAT}-{version}.json"
        if kept.is_file():
            with suppress(InputError):  # another file has been put there
                known: dict[str, Any] = files.read_json(kept)
                return known
        from kit.forecast.counting import count

        fields = count(config, name)
        with suppress(OSError):  # a home that cannot be written to: it is counted again next time
            kept.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(kept, fields)
        return fields
    raise InputError(f"{name}: its parameters are counted with transformers, which is not installed here.")


def _check_values(config: dict[str, Any], name: str) -> None:
    """Raises InputError for values that are not sizes: transformers builds a model from some of them."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise InputError(f"{name}: its config has text_config = {text!r}; it must be an object.")
    given = config | (text or {})
    for key in (key for key in SIZES if given.get(key) is not None):
        value = given[key]
        if isinstance(value, list) and all(isinstance(each, int) and each > 0 for each in value):
            continue  # one for each layer
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}: its config has {key} = {value!r}; it must be an integer of at least 1.")


@functools.cache
def shipped() -> dict[str, dict[str, Any]]:
    """What counts of published configs, by hub id, and where it was read; in the file, a text names an equal table."""
    table = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return {name: table[config] if isinstance(config, str) else config for name, config in table.items()}


def load_config(name: str, hf_home: str = "") -> dict[str, Any]:
    """The content of a config.json: of a file, a folder that has one, a shipped hub id, or a hub cache, in this order.

    `hf_home` is the profile's cache. Raises InputError where the model is not found.
    """
    if name in shipped() and not models.local_config(name):
        return shipped()[name]
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
    return config


def load_shape(name: str, hf_home: str = "") -> Shape:
    """The shape of a model, from the config that `load_config` finds. Raises InputError as it and `shape_of` do."""
    return shape_of(load_config(name, hf_home), name)
