"""Which path through the libraries a recipe takes, and what the faster one keeps in memory and moves.

The plain path is transformers, PEFT and TRL as they are: tests/truth/h100.csv measured it. The fast path has torch's
variable-length attention, adapters in the type of their layer and, where compiled, fused elementwise kernels:
tests/truth/fast.csv. Formulas of the fast path count the tensors that a compiled Llama layer keeps and moves; their
constants are set so that no measured peak of that file is above its forecast. Peaks in h200_second.csv are above theirs
by up to 1.6%, one under DDP by 19%: tests/truth/blind_second.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kit.config.recipe import Recipe
from kit.forecast.shape import Linear, Shape

CHUNK_TOKENS = 4096  # tokens whose logits the loss of a frozen head computes at a time
RELU = frozenset({"opt"})  # families whose feed-forward keeps only what its activation returns
DROPOUT = frozenset({"gpt2", "opt"})  # families whose published configs drop 10% after attention and feed-forward
PARALLEL_NORMS = frozenset({"gpt_neox"})  # families whose two norms read the same hidden states
# The constants below are fitted to the rows of Llama-8B in tests/truth/fast.csv.
VARLEN_ATTENTION = 0.42  # of a matmul's rate: FlashAttention-2 on an H100
ATTENTION_BLOCK = 256  # tokens by which blocks make a document longer, forward and backward
FP8_SPEED = 2.0  # of an fp8 matmul over a bf16 one
NF4_MOVED = 12.0  # bytes a weight that unpacking it costs in each pass
# Bytes an element of what the matmul of a weight's gradient reads; fitted to full fine-tunes in h200_second.csv.
WEIGHT_GRADIENT_MOVED = 3.0
GATHER_COPIES = 4.0  # times that a gathered byte is read or written: by the collective, and by FSDP2's copy out of it
# Recomputing a compiled layer under FSDP2 over its forward, with adapters and in full fine-tunes, of a prototype.
# Without FSDP it takes one forward (h200_third.csv).
COMPILED_AGAIN, COMPILED_AGAIN_FULL = 2.0, 1.5


@dataclass(frozen=True)
class TrainingPath:
    """varlen: variable-length attention. compiled: each decoder layer is compiled. fp8, nf4: type of frozen weights."""

    varlen: bool
    compiled: bool
    fp8: bool
    nf4: bool

    @classmethod
    def of(cls, recipe: Recipe) -> "TrainingPath":
        """The path of a recipe; a choice that is still open counts as the plain path."""
        model = recipe.model
        return cls(model.attention == "varlen", recipe.parallel.compiles, model.base == "fp8", model.base == "nf4")

    @property
    def plain(self) -> bool:
        """Whether every layer is as transformers and PEFT have it, with PEFT's casts to fp32."""
        return not (self.varlen or self.compiled)


def describe(recipe: Recipe, on_gpus: bool, lengths_known: bool) -> str:
    """The path that a forecast is for, in words, and how well it is known.

    lengths_known: whether the lengths of the documents are those of a prepared dataset.
    """
    path = TrainingPath.of(recipe)
    attention = "variable-length attention" if path.varlen else f"{recipe.model.attention_used} attention"
    layers = "compiled layers" if path.compiled else "layers not compiled"
    words = [attention, layers]
    if path.fp8 or path.nf4:
        words.append(f"{recipe.model.base} frozen weights")
    if path.varlen and recipe.data.packing and not lengths_known:
        words.append("rows of one document, since no dataset is prepared")
    known = "not measured on CPUs"
    if on_gpus:
        known = "measured on H100 (tests/truth/h100.csv)" if path.plain else "measured on H200 (tests/truth/fast.csv)"
    return f"{', '.join(words)}; {known}"


def compiled_layer_bytes(shape: Shape, recipe: Recipe, compute: int, norm_width: int) -> float:
    """Bytes a token that a compiled layer keeps for its backward; `norm_width`: the width of its norms' inputs.

    Inductor keeps what matmuls and attention need and computes elementwise results again: the inputs of the norms in
    the compute type, queries, keys, values, the attention's output, and of a gated feed-forward both projections.
    Values that are a view of a fused projection keep all of it, in addition to the rotated queries and keys.
    """
    full = recipe.tuning.method == "full"
    adapted = list(shape.linears) if full else shape.targeted(recipe.tuning.target_modules)
    attention = compute * 2 * (shape.query + shape.key) + 4 * shape.heads  # with fp32 statistics of the softmax
    if shape.fused_attention and recipe.model.attention == "varlen":
        attention += compute * (shape.query + shape.key)
    if shape.family in PARALLEL_NORMS:
        norm_width -= shape.hidden
    kept = attention + compute * (norm_width + _projected_width(shape, adapted) + _read_width(shape, adapted))
    if shape.family in DROPOUT:
        kept += 2 * shape.hidden  # two masks of a byte an element
    if full:
        return kept
    kept += compute * recipe.tuning.r * len(adapted)
    if recipe.tuning.dropout > 0:  # what was dropped from is kept by each for itself; its mask is drawn again
        kept += compute * sum(linear.inputs * linear.used for linear in adapted)
    return kept


def _projected_width(shape: Shape, adapted: Sequence[Linear]) -> int:
    """What the activation function reads of a token. ReLU's result is enough, which an adapted projection reads."""
    if shape.family in RELU and any(not linear.in_attention and not linear.reads_hidden for linear in adapted):
        return 0
    return sum(linear.outputs * linear.used for linear in shape.feed_forward if linear.reads_hidden)


def _read_width(shape: Shape, adapted: Sequence[Linear]) -> int:
    """What the projections read of a token, each tensor once; the attention's output is counted with the attention."""
    read: dict[tuple[str, str, int], int] = {}
    for linear in adapted:
        if linear.reads_attention:
            continue
        part, kind, inputs = linear.source
        one_norm = shape.norms == 1 and linear.reads_hidden  # attention and feed-forward read the same
        place = ("layer" if one_norm else part, kind, inputs)
        # experts read copies of what their router does
        read[place] = max(read.get(place, 0), linear.inputs * linear.used)
    return sum(read.values())


def frozen_head_loss_bytes(shape: Shape, tokens: int, compute: int) -> float:
    """Bytes of kit.train's loss over an LM head that is not trained: chunks of logits, and four hidden states.

    The forward pass also computes the derivative of the hidden states, so that the backward pass has no logits. A chunk
    has its logits and their derivative at a time; from the second on also the derivative of the chunk before.
    """
    tensors = 2 if tokens <= CHUNK_TOKENS else 3
    return min(tokens, CHUNK_TOKENS) * shape.vocab * compute * tensors + tokens * shape.hidden * (4 + 3 * compute)


def frozen_linear_bytes(linear: Linear, base: str, stored: int, nf4: float) -> float:
    """Bytes of a frozen projection: fp8 has a byte a weight and an fp32 scale a row."""
    if base == "nf4":
        return linear.parameters * nf4
    if base == "fp8":
        return linear.parameters + 4 * linear.outputs * linear.copies
    return linear.parameters * stored
