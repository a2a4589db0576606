"""Layout: in which types, and over how many ranks, a job holds weights, gradients and optimizer state; no torch."""

from dataclasses import dataclass
from functools import cached_property

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.paths import TrainingPath, frozen_linear_bytes
from kit.forecast.shape import Layer, Linear, Shape

GIB = 2**30
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, an 8-bit scale per 64, an fp32 scale per 256 scales (QLoRA paper)
# Tensors of optimizer state, as large as the parameter: AdamW's two moments, Lion's one; Adafactor's rows and columns.
STATE_TENSORS = {"adamw": 2.0, "lion": 1.0, "sgd": 0.0, "adafactor": 0.0}


@dataclass(frozen=True)
class Layout:
    """Bytes of an element, bytes of optimizer state a trained parameter, and the ranks that share each."""

    on_cpu: bool
    compute_bytes: int
    frozen_bytes: int
    trained_bytes: int
    optimizer_bytes: float
    weight_ranks: int
    gradient_ranks: int
    optimizer_ranks: int

    @classmethod
    def of(cls, recipe: Recipe, cluster: Cluster, fp32_masters: bool = True) -> "Layout":
        """The layout of a recipe on a cluster; fp32 throughout where there are no GPUs."""
        on_cpu = cluster.nodes.gpus == 0
        stored = 4 if on_cpu or recipe.model.dtype == "float32" else 2
        trained = _trained_bytes(recipe, on_cpu, stored, fp32_masters)
        weights, gradients, optimizer = _ranks(recipe)
        return cls(
            on_cpu,
            4 if on_cpu else 2,
            stored,
            trained,
            _optimizer_bytes(recipe, trained),
            weights,
            gradients,
            optimizer,
        )


def _trained_bytes(recipe: Recipe, on_cpu: bool, stored: int, fp32_masters: bool) -> int:
    """accelerate upcasts what FSDP trains, PEFT makes adapters fp32; TRL (quantized) and DeepSpeed make them bf16."""
    method, strategy = recipe.tuning.method, recipe.parallel.strategy
    masters = fp32_masters and method == "full" and strategy.startswith("fsdp")
    adapters = method == "lora" and not strategy.startswith("zero")
    if on_cpu or masters or adapters:
        return 4
    return 2 if method == "qlora" else stored


def _optimizer_bytes(recipe: Recipe, trained: int) -> float:
    """State in the type of the parameter; DeepSpeed has fp32 state and an fp32 copy of the parameters (ZeRO paper)."""
    name = recipe.schedule.optimizer
    tensors = next((count for prefix, count in STATE_TENSORS.items() if name.startswith(prefix)), 2.0)
    if recipe.parallel.strategy.startswith("zero"):
        return 4 + 4 * tensors
    return 2.0 if "8bit" in name else tensors * trained


def _ranks(recipe: Recipe) -> tuple[int, int, int]:
    """The ranks that share weights, gradients and optimizer state (ZeRO paper, figure 1); hybrid: those of a node."""
    parallel = recipe.parallel
    group = parallel.gpus_per_node if parallel.sharding == "hybrid" else recipe.world_size
    strategy = parallel.strategy
    if strategy == "ddp":
        return 1, 1, 1
    if strategy == "zero1":
        return 1, 1, group
    if strategy == "zero2" or (strategy == "zero3" and parallel.sharding == "grad_op"):
        return 1, group, group
    return group, group, group


@dataclass(frozen=True)
class FrozenWeights:
    """Bytes of the weights that are not trained: of the whole model, and of its largest layer."""

    model: float
    largest_layer: float

    @classmethod
    def of(cls, shape: Shape, recipe: Recipe, stored: int) -> "FrozenWeights":
        """`stored`: bytes of an element; nf4 and fp8 cover the projections of the layers only."""
        if recipe.tuning.method == "full":
            return cls(0.0, 0.0)

        def bytes_of(layer: Layer) -> float:
            rest = layer.parameters - sum(linear.parameters for linear in layer.linears)
            base = recipe.model.base
            return sum(frozen_linear_bytes(linear, base, stored, NF4_BYTES) for linear in layer.linears) + rest * stored

        outside = shape.total - sum(count * layer.parameters for count, layer in shape.kinds)
        layers = [bytes_of(layer) for _, layer in shape.kinds]
        counts = [count for count, _ in shape.kinds]
        model = sum(count * size for count, size in zip(counts, layers, strict=True)) + outside * stored
        return cls(model, max(layers))


@dataclass(frozen=True)
class Job:
    """What the formulas of memory read: a model, a recipe, and how one rank holds it.

    fused_loss: TRL's loss, which holds a tile of logits; without, transformers 4.48's, which holds them all.
    """

    shape: Shape
    recipe: Recipe
    layout: Layout
    fused_loss: bool = True

    @cached_property
    def path(self) -> TrainingPath:
        """Which code the layers run."""
        return TrainingPath.of(self.recipe)

    @property
    def full(self) -> bool:
        """Whether all weights are trained."""
        return self.recipe.tuning.method == "full"

    @property
    def recomputes(self) -> bool:
        """Whether layers are checkpointed."""
        return self.recipe.parallel.recomputes

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.recipe.schedule.micro_batch * self.recipe.data.seq_len

    @cached_property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.shape.trainable(self.recipe)

    @cached_property
    def targets(self) -> list[Linear]:
        """The projections of the largest layer that have adapters."""
        return [] if self.full else self.shape.targeted(self.recipe.tuning.target_modules)

    @cached_property
    def frozen(self) -> FrozenWeights:
        """Bytes of what is not trained."""
        return FrozenWeights.of(self.shape, self.recipe, self.layout.frozen_bytes)

    @property
    def sharded(self) -> bool:
        """Whether weights are spread over ranks, so that layers are gathered."""
        return self.layout.weight_ranks > 1

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed holds the state."""
        return self.recipe.parallel.strategy.startswith("zero")

    @property
    def fsdp1(self) -> bool:
        """Whether FSDP1 is named, on one rank or several."""
        return self.recipe.parallel.strategy == "fsdp1"

    @property
    def ddp_buckets(self) -> bool:
        """Whether DDP holds buckets: a copy of all gradients (torch's Reducer, gradient_as_bucket_view off)."""
        return self.recipe.parallel.strategy == "ddp" and self.recipe.world_size > 1

    @property
    def offloaded(self) -> bool:
        """Whether weights, gradients and optimizer state are in the memory of the host."""
        return self.recipe.parallel.offloads and not self.layout.on_cpu and (self.sharded or self.zero)

    @property
    def masked_sdpa(self) -> bool:
        """Whether sdpa is handed a mask; transformers then repeats the keys for each head of queries."""
        return self.shape.masked(self.recipe) and self.recipe.model.attention_used == "sdpa"

    @property
    def scores(self) -> int:
        """Attention scores a token that are in memory: none with kernels that compute them in blocks."""
        if not self.shape.holds_scores(self.recipe):
            return 0
        return self.shape.heads * self.recipe.data.seq_len
