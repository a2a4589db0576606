"""Counting: a model's shape, from the model that transformers builds of its config on the meta device; no weights.

Torch and transformers are imported only as a model is built; `kit.forecast.shape` keeps what was counted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kit.config import schema
from kit.errors import InputError

ATTENTIONS = {  # a value of model.attention, and the flag of the classes of transformers that have it
    "sdpa": "_supports_sdpa",
    "eager": "",
    "flash_attention_2": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
# Projections that read the output of the attention, or of the activation of the feed-forward.
LAST = ("o_proj", "out_proj", "dense", "c_proj", "down_proj", "fc2", "dense_4h_to_h", "fc_out", "wo", "w2")
PEFT_NAMES = {  # what target_modules calls the parts of experts (PEFT 0.20, transformers_weight_conversion.py)
    "mixtral": {"gate_up_proj": ["w1", "w3"], "down_proj": ["w2"], "gate": ["gate"]},
    "qwen2_moe": {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"], "gate": ["gate"]},
}
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
NO_PART = ("_source", "quantization_config", "compression_config")  # keys of which no module is made


class UncountedError(Exception):
    """A layer has what no formula counts; the text says what."""


def count(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields of a `kit.forecast.shape.Shape`, as JSON; of the text part where the config has others.

    Raises InputError where transformers cannot build a causal model from the config, or no formula counts a layer.
    """
    built = _build(config, name)
    try:
        return _Count(built).fields()
    except UncountedError as problem:
        total = sum(parameter.numel() for parameter in built.model.parameters())
        raise InputError(
            f"{name}: the model has {total:,} parameters, but its layers have {problem}, which no formula of the "
            "forecast counts, so it cannot say whether the model fits."
        ) from None


@dataclass(frozen=True)
class _Built:
    """A model on the meta device; its config, and that of the complete model."""

    model: Any
    config: Any
    complete: Any


def _build(config: dict[str, Any], name: str) -> _Built:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(f"{name}: its parameters are counted with torch and transformers. {error}") from None
    kind = str(config.get("model_type", ""))
    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(
            f"{name}: transformers {transformers.__version__} does not know models of type {kind!r}, so the forecast "
            f"cannot say whether one fits; {schema.nearest(kind, transformers.CONFIG_MAPPING)}"
        )
    transformers.logging.set_verbosity_error()
    given = {key: value for key, value in config.items() if key not in NO_PART}
    try:
        complete = transformers.AutoConfig.for_model(**given)
        text = complete.get_text_config(decoder=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16)
        model.tie_weights()
    except Exception as error:  # whatever the values of a config make a constructor raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{name}: transformers {transformers.__version__} cannot build a causal language model from its config, "
            f"so its parameters cannot be counted: {reason}"
        ) from None
    return _Built(model, text, complete)


class _Count:
    """What the modules of a model hold."""

    def __init__(self, built: _Built) -> None:
        self.built, self.config, self.model = built, built.config, built.model
        self.hidden, self.heads = self._setting("hidden_size"), self._setting("num_attention_heads")
        self.fused: dict[str, list[str]] = _peft_names(str(self.config.model_type))

    def _setting(self, key: str) -> int:
        try:
            value = getattr(self.config, key)
        except Exception as error:  # it has none, or one for each layer
            raise UncountedError(f"another size in each layer ({str(error).partition('.')[0]})") from None
        if not isinstance(value, int):
            raise UncountedError(f"{key} = {value!r}")
        return value

    def fields(self) -> dict[str, Any]:
        """All fields of a shape but its name and notes."""
        layers = self._layers()
        described = [self._layer(layer) for layer in layers]
        kinds = Counter(map(repr, described))
        distinct = {repr(layer): layer for layer in described}
        ordered = sorted(kinds, key=lambda key: distinct[key]["parameters"], reverse=True)
        largest = distinct[ordered[0]]
        query, key = self._widths(largest["linears"])
        embedding, tied = self.model.get_input_embeddings().weight, self._is_tied()
        return {
            "family": str(self.config.model_type),
            "hidden": self.hidden,
            "layers": len(described),
            "vocab": embedding.shape[0],
            "heads": self.heads,
            "query": query,
            "key": key,
            "embedding": embedding.numel(),
            "tied": tied,
            "kinds": [[kinds[each], distinct[each]] for each in ordered],
            "outer": self._outer(layers, embedding, tied),
            "attentions": self._attentions(),
            "single_key": self.config.model_type == "falcon" and key * self.heads == query,
            "window": self._window(),
        }

    def _layers(self) -> list[Any]:
        """The modules of the decoder layers."""
        import torch

        lists = [module for module in self.model.modules() if isinstance(module, torch.nn.ModuleList)]
        found = [list(each) for each in lists if len(each) == self._setting("num_hidden_layers")]
        if not found:
            raise UncountedError("no list of num_hidden_layers modules")
        return max(found, key=lambda layers: sum(_size(layer) for layer in layers))

    def _layer(self, layer: Any) -> dict[str, Any]:
        linears: list[dict[str, Any]] = []
        vectors = 0
        for path, module in layer.named_modules():
            linears += self._linears_of(path, module)
            vectors += self._vectors(module)
        self._mark_readers(linears)
        counted = sum(linear["parameters"] for linear in linears) + vectors
        if counted != _size(layer):
            raise UncountedError(f"parameters in {_uncounted(layer)}")
        feed_forward = [linear for linear in linears if "att" not in linear["path"]]
        inner = [linear for linear in feed_forward if linear["reads"] != "hidden"]
        if not inner or len(feed_forward) == len(linears):
            raise UncountedError("no attention" if inner else "no feed-forward")
        return {
            "parameters": counted,
            "linears": linears,
            "vectors": vectors,
            "norms": self._norms(layer),
            "ffn": sum(linear["inputs"] * linear["used"] for linear in inner),
        }

    def _norms(self, layer: Any) -> int:
        """Norms of hidden states: those of queries and keys belong to the attention."""
        modules = [(path, module) for path, module in layer.named_modules() if "Norm" in type(module).__name__]
        return sum("att" not in path.rpartition(".")[0] and _size(module) > 0 for path, module in modules)

    def _linears_of(self, path: str, module: Any) -> Iterator[dict[str, Any]]:
        """The projections whose weights the module itself has."""
        own = dict(module.named_parameters(recurse=False))
        leaf = path.rpartition(".")[2]
        weight: Any = own.get("weight")
        if _is_linear(module):
            taken = {name for names in self.fused.values() for name in names}
            inputs, outputs = weight.shape if "Conv1D" in type(module).__name__ else reversed(weight.shape)
            size = sum(parameter.numel() for parameter in own.values())
            yield _linear(path, inputs, outputs, size, [] if leaf in taken else [leaf])
        elif weight is not None and weight.dim() == 2 and weight.shape[1] == self.hidden:  # a router
            bias = own["bias"].numel() if "bias" in own else 0
            yield _linear(f"!{path}", self.hidden, weight.shape[0], weight.numel() + bias, self.fused.get(leaf, []))
        else:
            for name, parameter in own.items():
                if parameter.dim() == 3:
                    if self.hidden not in parameter.shape[1:] or "Conv" in type(module).__name__:
                        raise UncountedError(f"a {type(module).__name__} ({name})")
                    yield self._experts(path, name, parameter, own.get(f"{name}_bias"))

    def _experts(self, path: str, name: str, parameter: Any, bias: Any) -> dict[str, Any]:
        """One tensor of all experts: stored as outputs x inputs, or the other way round."""
        experts, first, second = parameter.shape
        other = first if second == self.hidden else second
        inputs, outputs = (other, self.hidden) if "down" in name else (self.hidden, other)
        size = parameter.numel() + (0 if bias is None else bias.numel())
        return _linear(f"!{path}.{name}", inputs, outputs, size, self.fused.get(name, [])) | {
            "copies": experts,
            "used": self._experts_used(),
        }

    def _experts_used(self) -> int:
        used = next((value for key in EXPERTS_USED if (value := getattr(self.config, key, None))), None)
        if not isinstance(used, int):
            raise UncountedError("experts of which it is not known how many a token uses")
        return used

    def _mark_readers(self, linears: list[dict[str, Any]]) -> None:
        """Whether a projection reads hidden states, the output of the attention, or something between."""
        for linear in linears:
            leaf, attention = linear["path"].rpartition(".")[2], "att" in linear["path"]
            if linear["outputs"] == self.hidden and leaf in LAST:
                linear["reads"] = "attention" if attention else "inner"
            elif linear["inputs"] != self.hidden or leaf.endswith("_b_proj"):
                linear["reads"] = "inner"

    def _vectors(self, module: Any) -> int:
        """Parameters that are vectors, and no bias of a projection."""
        if _is_linear(module):
            return 0
        own = dict(module.named_parameters(recurse=False))
        weight = own.get("weight")
        if weight is not None and weight.dim() > 1:
            own.pop("bias", None)
        return sum(parameter.numel() for parameter in own.values() if _is_vector(parameter))

    def _widths(self, linears: list[dict[str, Any]]) -> tuple[int, int]:
        """Mean width of queries and the attention's output, and of keys and values."""
        attention = [linear for linear in linears if "att" in linear["path"]]
        put_out = next((linear["inputs"] for linear in attention if linear["reads"] == "attention"), 0)
        outputs = {linear["path"].rpartition(".")[2]: linear["outputs"] for linear in attention}
        if not put_out:
            raise UncountedError("an attention without an output projection")
        if "kv_b_proj" in outputs:  # latent attention: keys are as wide as queries, values as the output
            both = (outputs.get("q_b_proj", outputs.get("q_proj", put_out)) + put_out) // 2
            return both, both
        keys = next((size for name, size in outputs.items() if name in ("k_proj", "key", "k")), None)
        if keys is None:
            fused = max((linear["outputs"] for linear in attention if linear["reads"] == "hidden"), default=0)
            keys = (fused - put_out) // 2
        if keys <= 0:
            raise UncountedError("an attention without keys")
        return put_out, keys

    def _is_tied(self) -> bool:
        """Whether the head is the embedding; of a text part as its complete model has it."""
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if (
            self.built.complete is not self.config
            and self.built.complete.tie_word_embeddings != self.config.tie_word_embeddings
        ):
            return bool(self.built.complete.tie_word_embeddings)
        return head is None or head.weight is embedding.weight

    def _outer(self, layers: list[Any], embedding: Any, tied: bool) -> dict[str, Any]:
        """What is in no layer, and neither the embedding nor the head; what a head has more than the embedding."""
        head = self.model.get_output_embeddings()
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        inside |= {id(embedding)} | ({id(head.weight)} if head is not None else set())
        rest = sum(each.numel() for each in self.model.parameters() if id(each) not in inside)
        if not tied and head is not None:
            rest += head.weight.numel() - embedding.numel()
        within = {id(module) for layer in layers for module in layer.modules()} | {id(head)}
        linears = [
            linear
            for path, module in self.model.named_modules()
            if id(module) not in within and _is_linear(module)
            for linear in self._linears_of(path, module)
        ]
        return {"parameters": rest, "linears": linears, "vectors": 0, "norms": 0, "ffn": 0}

    def _attentions(self) -> list[str]:
        """The values of model.attention that the class of the complete model has."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        kind = type(self.built.complete)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[kind] if kind in MODEL_FOR_CAUSAL_LM_MAPPING else type(self.model)
        return [name for name, flag in ATTENTIONS.items() if not flag or getattr(model, flag, False)]

    def _window(self) -> int:
        """Tokens of a sliding window; 0 without."""
        used = getattr(self.config, "use_sliding_window", True)
        window = (used and getattr(self.config, "sliding_window", 0)) or 0
        if not isinstance(window, int):
            raise UncountedError(f"sliding_window = {window!r}")
        return window


def _linear(path: str, inputs: int, outputs: int, parameters: int, names: list[str]) -> dict[str, Any]:
    """The fields of a `kit.forecast.shape.Linear` that reads hidden states."""
    return {
        "path": path, "reads": "hidden", "inputs": inputs, "outputs": outputs, "parameters": parameters,
        "copies": 1, "used": 1, "names": names,
    }  # fmt: skip


def _size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_vector(parameter: Any) -> bool:
    return bool(parameter.dim() < 2 or parameter.numel() == parameter.shape[-1])


def _is_linear(module: Any) -> bool:
    """Whether PEFT adapts it as a linear layer."""
    import torch
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, torch.nn.Linear | Conv1D)


def _uncounted(layer: Any) -> str:
    """The first class in a layer with other parameters than matrices of projections, experts or routers."""
    for module in layer.modules():
        own = dict(module.named_parameters(recurse=False))
        if own and not _is_linear(module) and not all(map(_is_vector, own.values())):
            return f"{type(module).__name__} ({', '.join(own)})"
    return "modules that are shared"


def _peft_names(kind: str) -> dict[str, list[str]]:
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    return PEFT_NAMES.get("mixtral" if kind == "mixtral" else str(_MODEL_TO_CONVERSION_PATTERN.get(kind)), {})
