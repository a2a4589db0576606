"""Work: what one rank computes, moves and launches in a step, from a model's shape and a recipe; no torch."""

from dataclasses import astuple, dataclass, replace

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast import paths
from kit.forecast.layout import FrozenWeights, Layout
from kit.forecast.paths import TrainingPath
from kit.forecast.shape import Linear, Shape

UNIT = 34  # kernels' worth of host work when FSDP gathers, drops or reduces a unit; fitted, see kit.forecast.steptime
PER_LAUNCH = 3.5  # compiled code launches a kernel without the rest of kit.forecast.steptime.KERNEL
CALL = 6  # kernels' worth of host work to call a compiled layer: its guards and its node in the autograd graph
IDLE = 300  # kernels' worth of time in which the GPU waits around the optimizer step: clipping, logs, lists of tensors
OUTSIDE = 150  # kernels of a micro-batch outside the layers: embedding, norm, loss, metrics


@dataclass(frozen=True)
class Traffic:
    """Bytes per element that a layer's kernels other than matmuls read and write, by what they work on.

    heads: queries and keys, rotated. adapter_inputs, adapter_outputs: of each adapted projection; dropped: added for
    its input, with dropout.
    """

    norms: float
    residuals: float
    heads: float
    feed_forward: float
    scores: float
    adapter_inputs: float
    dropped: float
    adapter_outputs: float


# transformers' Llama under bf16 autocast, as torch's dispatcher sees it: a norm in fp32 is eight kernels, 36 bytes.
PLAIN_FORWARD = Traffic(36, 12, 20, 10, 16, adapter_inputs=12, dropped=10, adapter_outputs=10)
PLAIN_BACKWARD = Traffic(99, 24, 32, 18, 20, adapter_inputs=16, dropped=9, adapter_outputs=4)
# The same without PEFT's casts to fp32.
UNCAST_FORWARD = replace(PLAIN_FORWARD, adapter_inputs=2, adapter_outputs=12)
UNCAST_BACKWARD = replace(PLAIN_BACKWARD, adapter_inputs=10, adapter_outputs=8)
# A compiled layer's elementwise kernels read and write each operand once; heads: with what attention reads.
COMPILED_FORWARD = Traffic(6, 0, 8, 6, 0, adapter_inputs=2, dropped=4, adapter_outputs=4)
COMPILED_BACKWARD = Traffic(9, 0, 16, 10, 0, adapter_inputs=6, dropped=4, adapter_outputs=6)


@dataclass(frozen=True)
class Work:
    """What a rank does: FLOPs of matmuls and of attention, bytes that its other kernels move, kernels it launches.

    fp8: FLOPs of matmuls of fp8 numbers; matmul has the others.
    """

    matmul: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    fp8: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * value for value in astuple(self)))

    @property
    def flops(self) -> float:
        """All FLOPs, recomputed ones included."""
        return self.matmul + self.attention + self.fp8


@dataclass(frozen=True)
class Batch:
    """Tokens of a micro-batch, of its rows, and of a document, weighted by tokens."""

    tokens: float
    row: float
    document: float


@dataclass(frozen=True)
class MicroBatch:
    """The work of a micro-batch: forward and backward in training, only the forward pass in evaluation."""

    training: Work
    evaluation: Work


@dataclass(frozen=True)
class _Layers:
    """All layers of a model on a batch."""

    shape: Shape
    recipe: Recipe
    batch: Batch

    @property
    def full(self) -> bool:
        return self.recipe.tuning.method == "full"

    @property
    def path(self) -> TrainingPath:
        return TrainingPath.of(self.recipe)

    @property
    def adapted(self) -> list[Linear]:
        return [] if self.full else self.shape.targeted(self.recipe.tuning.target_modules)

    @property
    def drops(self) -> bool:
        return self.recipe.tuning.dropout > 0

    @property
    def layer_tokens(self) -> float:
        return self.shape.layers * self.batch.tokens

    @property
    def weights(self) -> float:
        """FLOPs of a forward through the weights: 2 per weight and token (Kaplan et al. 2020)."""
        return 2 * self.shape.active * self.batch.tokens

    @property
    def low_rank(self) -> float:
        """FLOPs of a forward through the adapters."""
        return 0 if self.full else 2 * self.shape.trainable(self.recipe) * self.batch.tokens

    @property
    def expert_products(self) -> float:
        """Bytes of B @ A of all experts: PEFT makes it, scales it and adds the weights, 12 bytes of each."""
        return 12 * self.shape.layers * sum(linear.parameters for linear in self.adapted if linear.copies > 1)

    def attention(self) -> float:
        """FLOPs of a forward pass of attention: of all pairs where there is a mask, else of the causal half.

        Variable-length attention computes the pairs inside of documents only, in blocks.
        """
        shape, batch = self.shape, self.batch
        if self.path.varlen:
            return 2 * shape.layers * (batch.document + paths.ATTENTION_BLOCK) * shape.query * batch.tokens
        takes_mask = self.recipe.model.attention_used in ("sdpa", "eager")
        pairs = 1.0 if takes_mask and shape.masked(self.recipe) else 0.5
        return 4 * shape.layers * batch.row * shape.query * batch.tokens * pairs

    def moved(self, traffic: Traffic) -> float:
        """Bytes a token of one layer."""
        shape, inputs = self.shape, sum(linear.inputs for linear in self.adapted)
        scores = shape.heads * self.batch.row if shape.holds_scores(self.recipe) else 0
        return (
            traffic.norms * self._norm_width()
            + traffic.residuals * shape.hidden
            + traffic.heads * (shape.query + shape.key)
            + traffic.feed_forward * shape.ffn
            + traffic.scores * scores
            + (traffic.adapter_inputs + (traffic.dropped if self.drops else 0)) * inputs
            + traffic.adapter_outputs * sum(linear.outputs for linear in self.adapted)
        )

    def _norm_width(self) -> int:
        width = self.shape.norms * self.shape.hidden
        heads = 0 if self.path.compiled or not self._normed_heads else self.shape.query + self.shape.key
        return width + heads

    @property
    def _normed_heads(self) -> bool:
        """Whether queries and keys have norms, of a head's width."""
        return self.shape.vectors % self.shape.hidden > 0

    def kernels(self) -> tuple[float, float]:
        """Kernels of one layer, forward and backward."""
        linears, adapters, passes = len(self.shape.linears), len(self.adapted), 2 if self.full else 1
        if self.path.compiled:
            forward, backward = linears + 3 * adapters + 8, passes * linears + 4 * adapters + 12
            return forward / PER_LAUNCH + CALL, backward / PER_LAUNCH + CALL
        norms = self.shape.norms + (2 if self._normed_heads else 0)
        dropout = 1 if self.drops else 0
        casts = (3, 2) if self.path.plain else (0, 0)
        forward = 8 * norms + linears + 15 + (5 + casts[0] + dropout) * adapters
        of_norms = 14 + (2 if self.full else 0)
        return forward, of_norms * norms + passes * linears + 25 + (8 + casts[1] + dropout) * adapters

    def passes(self) -> tuple[Work, Work]:
        """Forward and backward. Backward costs the weights' FLOPs once for the inputs and once for trained weights,
        attention 2.5 times the forward (Dao 2023, 4.1).
        """
        traffic = (PLAIN_FORWARD, PLAIN_BACKWARD) if self.path.plain else (UNCAST_FORWARD, UNCAST_BACKWARD)
        if self.path.compiled:
            traffic = (COMPILED_FORWARD, COMPILED_BACKWARD)
        kernels = [self.shape.layers * count for count in self.kernels()]
        moved = [self.layer_tokens * self.moved(each) + self.expert_products for each in traffic]
        attention = self.attention()
        forward = Work(self.weights + self.low_rank, attention, moved[0], kernels[0])
        backward = Work(self._backward_matmul(), 2.5 * attention, moved[1], kernels[1])
        if self.full and self.path.compiled:
            read = sum((linear.inputs + linear.outputs) * linear.used for linear in self.shape.linears)
            backward += Work(moved=paths.WEIGHT_GRADIENT_MOVED * self.layer_tokens * read)
        if self.path.fp8:
            forward, backward = self._in_fp8(forward, backward)
        if self.path.nf4:
            unpacked = Work(moved=paths.NF4_MOVED * self.shape.layers * self._layer_weights)
            forward, backward = forward + unpacked, backward + unpacked
        return forward, backward

    def _backward_matmul(self) -> float:
        experts = [linear for linear in self.adapted if linear.copies > 1]
        trained = 2 * self.layer_tokens * sum(linear.inputs * linear.outputs * linear.used for linear in experts)
        return (2 if self.full else 1) * self.weights + trained + 2 * self.low_rank

    @property
    def _layer_weights(self) -> int:
        return sum(linear.parameters for linear in self.shape.linears)

    def _in_fp8(self, forward: Work, backward: Work) -> tuple[Work, Work]:
        """With the frozen weights' matmuls in fp8: operands are rounded, weights transposed in each backward."""
        linears = self.shape.linears
        rounded = 3 * self.layer_tokens * sum(linear.inputs * linear.used for linear in linears)
        rounded_back = 3 * self.layer_tokens * sum(linear.outputs * linear.used for linear in linears)
        transposed = 2 * self.shape.layers * self._layer_weights
        return self._rounded(forward, rounded), self._rounded(backward, rounded_back + transposed)

    def _rounded(self, work: Work, moved: float) -> Work:
        return replace(work, matmul=work.matmul - self.weights, fp8=self.weights, moved=work.moved + moved)


def micro_batch(shape: Shape, recipe: Recipe, tokens: float, row: float, document: float | None = None) -> MicroBatch:
    """The work of a micro-batch of `tokens`, in rows of `row` tokens.

    document: tokens of a document, weighted by tokens; None takes the row. Checkpointing runs the layers again, and
    TRL's fused loss its head, whose logits are written and read in bf16; kit.train's loss of a frozen head does not.
    """
    layers = _Layers(shape, recipe, Batch(tokens, row, document or row))
    forward, backward = layers.passes()
    head = 2 * shape.embedding * tokens
    # trained heads are projected for their gradient, too; kit.train's frozen head needs no logits in its backward
    projections = 3 if layers.full else 2 if layers.path.plain else 1
    loss = Work(head, 0.0, tokens * (4 * shape.vocab + 100 * shape.hidden), OUTSIDE / 2)
    loss_backward = Work(head * projections, 0.0, tokens * (6 * shape.vocab + 200 * shape.hidden), OUTSIDE / 2)
    units = Work(kernels=UNIT * _visits(shape, recipe), moved=_copied(shape, recipe))
    training = forward + loss + _recomputed(forward, layers) + backward + loss_backward + units
    return MicroBatch(training, forward + loss)


def _recomputed(forward: Work, layers: _Layers) -> Work:
    if not layers.recipe.parallel.recomputes:
        return Work()
    if not layers.path.compiled or not _is_sharded(layers.recipe):
        return forward
    return forward * (paths.COMPILED_AGAIN_FULL if layers.full else paths.COMPILED_AGAIN)


def _is_sharded(recipe: Recipe) -> bool:
    """Whether FSDP gathers weights."""
    return recipe.world_size > 1 and recipe.parallel.strategy.startswith("fsdp")


def _copied(shape: Shape, recipe: Recipe) -> float:
    """Bytes that a micro-batch moves to gather weights, on the fast path; the plain path's constants contain them."""
    parallel = recipe.parallel
    if TrainingPath.of(recipe).plain or not _is_sharded(recipe):
        return 0.0
    weights = FrozenWeights.of(shape, recipe, 2).model + 2 * shape.trainable(recipe)
    return paths.GATHER_COPIES * weights * (1 if parallel.sharding == "grad_op" else 2)


def _visits(shape: Shape, recipe: Recipe) -> float:
    """How often a micro-batch has FSDP gather, drop or reduce a unit: forward, backward and gradients of each.

    FSDP1 makes every lora_A and lora_B a unit (PEFT's fsdp_auto_wrap_policy), which checkpointing gathers once more.
    """
    parallel = recipe.parallel
    if not _is_sharded(recipe):
        return 0.0
    layers = 3 * (shape.layers + 1)
    if parallel.strategy == "fsdp2" or recipe.tuning.method == "full":
        return layers
    adapters = 2 * shape.layers * len(shape.targeted(recipe.tuning.target_modules))
    return layers + (4 if parallel.recomputes else 3) * adapters


def optimizer_step(shape: Shape, recipe: Recipe, cluster: Cluster) -> Work:
    """Adam reads parameter, gradient and two states and writes all but the gradient; foreach moves it in 21 passes.

    Clipping takes three: it reads the gradients for their norm, then reads and writes them.
    """
    layout, full = Layout.of(recipe, cluster), recipe.tuning.method == "full"
    passes = 24 if recipe.schedule.optimizer == "adamw_torch" else 10
    tensors = len(shape.linears) + shape.norms if full else 2 * len(shape.targeted(recipe.tuning.target_modules))
    idle = 0 if TrainingPath.of(recipe).plain else IDLE
    moved = passes * layout.trained_bytes * shape.trainable(recipe) / layout.optimizer_ranks
    return Work(moved=moved, kernels=tensors * shape.layers + idle)


def useful_flops(shape: Shape, recipe: Recipe, tokens: float, document: float) -> float:
    """FLOPs of forward and backward without recomputation, causal attention by half (PaLM, appendix B).

    document: tokens of a document, weighted by tokens: pairs of different documents are of no use.
    """
    full = recipe.tuning.method == "full"
    trained = 0 if full else shape.trainable(recipe)
    weights = 2 * (shape.active + shape.embedding) + 2 * trained
    return tokens * ((3 if full else 2) * weights + 6 * shape.layers * document * shape.query)
