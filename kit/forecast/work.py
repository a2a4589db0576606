"""Work: what one rank computes, moves and launches in a step, from a model's shape and a recipe; no torch."""

from dataclasses import dataclass

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.memory import Layout
from kit.forecast.shape import Shape

UNIT = 34  # kernels' worth of host work when FSDP gathers, drops or reduces a unit; fitted, see kit.forecast.timing
OUTSIDE = 150  # kernels of a micro-batch outside the layers: embedding, norm, loss, metrics


@dataclass(frozen=True)
class Work:
    """What a rank does: FLOPs of matmuls and of attention, bytes that its other kernels move, kernels it launches."""

    matmul: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        a, b = self, other
        return Work(a.matmul + b.matmul, a.attention + b.attention, a.moved + b.moved, a.kernels + b.kernels)

    def __mul__(self, times: float) -> "Work":
        return Work(times * self.matmul, times * self.attention, times * self.moved, times * self.kernels)


def _layers(s: Shape, recipe: Recipe, tokens: float, row: float) -> tuple[Work, Work]:
    """The layers' forward and backward on `tokens` in rows of `row` tokens.

    A forward costs 2 FLOPs per weight and token, and attention 4 x row x query width a layer and token, of which a
    causal kernel does half and one that is handed a mask all. Backward costs that once for the inputs and once for
    trained weights, attention 2.5 times (Kaplan et al. 2020; Dao 2023, 4.1). Kernels, and the bytes that they read and
    write per token besides matmuls, are those of transformers' Llama under bf16 autocast, as torch's dispatcher sees
    them: a norm in fp32 is eight kernels that move 36 bytes an element.
    """
    full, dropout = recipe.tuning.method == "full", recipe.tuning.dropout > 0
    adapted = [] if full else s.targeted(recipe.tuning.target_modules)
    low_rank = 0 if full else 2 * s.trainable(recipe) * tokens
    eager = s.heads * row * s.holds_scores(recipe)
    square = 4 * s.layers * row * s.query * tokens * (1.0 if s.masked(recipe) and _takes_mask(recipe) else 0.5)
    normed_heads = s.vectors % s.hidden > 0  # queries and keys have a norm of their own, of a head's width
    heads, linears = s.query + s.key, len(s.linears)
    norms, width = s.norms + 2 * normed_heads, s.norms * s.hidden + heads * normed_heads
    moved = 36 * width + 12 * s.hidden + 20 * heads + 10 * s.ffn + 16 * eager
    moved_back = 99 * width + 24 * s.hidden + 32 * heads + 18 * s.ffn + 20 * eager
    moved += sum((12 + 10 * dropout) * x.inputs + 10 * x.outputs for x in adapted)
    moved_back += sum((16 + 9 * dropout) * x.inputs + 4 * x.outputs for x in adapted)
    kernels = 8 * norms + linears + 15 + (8 + dropout) * len(adapted)
    kernels_back = (14 + 2 * full) * norms + (1 + full) * linears + 25 + (10 + dropout) * len(adapted)
    weights, many = 2 * s.active * tokens, s.layers * tokens
    # PEFT makes B @ A of all experts, scales it and adds the weights, 12 bytes of each; backward takes it apart again.
    made = 12 * s.layers * sum(x.parameters for x in adapted if x.copies > 1)
    trained = 2 * tokens * s.layers * sum(x.inputs * x.outputs * x.used for x in adapted if x.copies > 1)
    return (
        Work(weights + low_rank, square, many * moved + made, s.layers * kernels),
        Work(
            (1 + full) * weights + trained + 2 * low_rank,
            2.5 * square,
            many * moved_back + made,
            s.layers * kernels_back,
        ),
    )


def _takes_mask(recipe: Recipe) -> bool:
    return recipe.model.attention in ("sdpa", "eager")


def micro_batch(s: Shape, recipe: Recipe, tokens: float, row: float) -> tuple[Work, Work]:
    """Forward and backward of a micro-batch of `tokens`, in rows of `row`; and the forward alone, as evaluation has it.

    Checkpointing runs the layers again, and TRL's fused loss its head, whose logits are written and read in bf16.
    """
    forward, backward = _layers(s, recipe, tokens, row)
    head = 2 * s.embedding * tokens
    logits = Work(head, 0.0, tokens * (4 * s.vocab + 100 * s.hidden), OUTSIDE / 2)
    full = recipe.tuning.method == "full"
    back = Work(head * (2 + full), 0.0, tokens * (6 * s.vocab + 200 * s.hidden), OUTSIDE / 2)
    again = forward * recipe.parallel.activation_checkpointing
    return forward + logits + again + backward + back + Work(kernels=UNIT * _visits(s, recipe)), forward + logits


def _visits(s: Shape, recipe: Recipe) -> float:
    """How often a micro-batch has FSDP gather, drop or reduce a unit: forward, backward and gradients of each.

    FSDP1 makes every lora_A and lora_B a unit (PEFT's fsdp_auto_wrap_policy), which checkpointing gathers once more.
    """
    p = recipe.parallel
    if recipe.world_size == 1 or not p.strategy.startswith("fsdp"):
        return 0.0
    split = p.strategy == "fsdp1" and recipe.tuning.method != "full"
    adapters = 2 * s.layers * len(s.targeted(recipe.tuning.target_modules)) if split else 0
    return 3 * (s.layers + 1) + (3 + p.activation_checkpointing) * adapters


def optimizer_step(s: Shape, recipe: Recipe, cluster: Cluster) -> Work:
    """Adam reads parameter, gradient and two states and writes all but the gradient; foreach moves it in 21 passes."""
    y, n, foreach = Layout.of(recipe, cluster), s.trainable(recipe), recipe.schedule.optimizer == "adamw_torch"
    full = recipe.tuning.method == "full"
    tensors = len(s.linears) + s.norms if full else 2 * len(s.targeted(recipe.tuning.target_modules))
    return Work(moved=(21 if foreach else 7) * y.trained * n / y.shards[2], kernels=tensors * s.layers)


def useful_flops(s: Shape, recipe: Recipe, tokens: float, row: float) -> float:
    """FLOPs of forward and backward without recomputation, causal attention by half (PaLM, appendix B)."""
    passes, trained = (3, 0) if recipe.tuning.method == "full" else (2, s.trainable(recipe))
    weights = 2 * (s.active + s.embedding) + 2 * trained
    return tokens * (passes * weights + 6 * s.layers * row * s.query)
