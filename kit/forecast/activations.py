"""Activations: what one layer keeps for its backward pass, what passes through it, and what the loss takes; no torch.

Counted off the modelling code of transformers 5 and PEFT 0.20, tensor by tensor, under autocast to bf16. A layer that
torch.compile has fused keeps other tensors: `kit.forecast.paths.compiled_layer_bytes`.
"""

from dataclasses import dataclass

from kit.forecast.layout import Job
from kit.forecast.paths import compiled_layer_bytes, frozen_head_loss_bytes
from kit.forecast.shape import Shape

TILE_TOKENS, TILE_WORDS = 4096, 32768  # the logits tile of TRL's fused LM head (trl/kernels/chunked_logprob.py)
Terms = dict[str, float]


@dataclass(frozen=True)
class Norms:
    """The norms of a layer: how wide a token is in all of them together, and whether they are RMS norms."""

    width: int
    rms: bool

    @classmethod
    def of(cls, shape: Shape) -> "Norms":
        """Read off the parameters: an RMS norm has a weight an element, a LayerNorm also a bias."""
        block, rest = shape.norms * shape.hidden, shape.vectors - shape.norms * shape.hidden
        if rest == block and (shape.biased or rest != shape.query + shape.key):
            return cls(block, rms=False)
        if rest == 2 * (
            shape.query // shape.heads
        ):  # one weight of a head's width for all heads of queries, one of keys
            return cls(block + shape.query + shape.key, rms=True)
        return cls(block + rest, rms=True)


@dataclass(frozen=True)
class Adapters:
    """How PEFT runs the adapters of one layer."""

    casts_inputs: bool
    drops_inputs: bool
    casts_product: bool
    expert_weights: float

    @classmethod
    def of(cls, job: Job) -> "Adapters":
        """casts_inputs: to the adapter's fp32, by PEFT's own code; casts_product: so of what the down projection reads.

        expert_weights: bytes of B @ A of all experts, which PEFT adds to their weights in each pass.
        """
        tuning, strategy = job.recipe.tuning, job.recipe.parallel.strategy
        casts = tuning.method == "lora" and strategy in ("ddp", "fsdp1") and not job.layout.on_cpu and job.path.plain
        down = [linear for linear in job.shape.feed_forward if not linear.reads_hidden]
        experts = sum(linear.parameters for linear in job.targets if linear.copies > 1)
        return cls(
            casts_inputs=casts,
            drops_inputs=tuning.dropout > 0 and not job.full,
            casts_product=casts and any(linear in down for linear in job.targets),
            expert_weights=job.layout.compute_bytes * experts,
        )


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one micro-batch in one layer.

    inputs: what goes in. kept: what it keeps for backward. passing: the largest of the temporaries in a forward pass
    that keeps nothing; forward: in one that keeps; backward: while gradients flow. mask: of all layers.
    """

    inputs: float
    kept: float
    passing: float
    forward: float
    backward: float
    mask: float

    @classmethod
    def of(cls, job: Job) -> "LayerActivations":
        """The activations of the largest layer."""
        shape, compute, tokens = job.shape, job.layout.compute_bytes, job.tokens
        adapters, scores = Adapters.of(job), (8 + compute) * job.scores  # in fp32 twice, and in the compute type
        experts, forward = adapters.expert_weights, _forward_bytes(job, adapters)
        backward = max(_backward_bytes(job, forward), scores - 3 * compute * shape.ffn)
        return cls(
            inputs=tokens * compute * shape.hidden,
            kept=tokens * sum(kept_terms(job).values()) + experts,
            passing=tokens * (_passing_bytes(job, adapters) + scores) + 2 * experts,
            forward=tokens * (forward + scores) + experts,
            backward=tokens * backward + experts,
            mask=tokens * job.recipe.data.seq_len if job.masked_sdpa else 0,
        )


def kept_terms(job: Job) -> Terms:
    """Bytes a token that a layer keeps for its backward, by tensor."""
    shape, compute = job.shape, job.layout.compute_bytes
    scores = (4 + compute) * job.scores  # the softmax in fp32, and in the compute type
    mask = compute * job.recipe.data.seq_len if job.masked_sdpa else 0  # sdpa makes a bf16 one of the boolean mask
    if job.path.compiled:
        repeated = 2 * compute * (shape.query - shape.key) if job.masked_sdpa else 0
        kept = compiled_layer_bytes(shape, job.recipe, compute, Norms.of(shape).width)
        return {"compiled layer": kept, "attention scores": scores, "repeated keys and values": repeated, "mask": mask}
    terms: Terms = {
        "norm inputs, fp32": 4 * Norms.of(shape).width,
        "queries and attention output": 2 * compute * shape.query,
        "keys and values": 2 * compute * (shape.query if job.masked_sdpa else shape.key),
        "softmax statistics, fp32": 4 * shape.heads,
        "feed-forward": compute * shape.ffn * shape.kept_wide_tensors,
        "routed states": compute * shape.experts_used * shape.hidden * (2 if _experts_are_trained(job) else 1),
        "attention scores": scores,
        "mask": mask,
        # queries, keys and their copies after rotation
        "fused projection": compute * (2 * shape.query + shape.key) if shape.fused_attention else 0,
    }
    return terms | (_trained_weight_terms(job) if job.full else _adapter_terms(job))


def _experts_are_trained(job: Job) -> bool:
    """Whether the gradients of experts, or of their adapters, read what is routed to them; their outputs are kept."""
    return job.full or job.shape.family == "gpt_oss" or any(linear.copies > 1 for linear in job.targets)


def _trained_weight_terms(job: Job) -> Terms:
    """What the gradients of weights read. A LayerNorm is fp32 under autocast: each projection casts it for itself."""
    shape, compute, norms = job.shape, job.layout.compute_bytes, Norms.of(job.shape)
    readers = 2 if norms.rms else sum(linear.reads_hidden for linear in shape.linears)
    return {
        "product of the feed-forward": compute * shape.ffn,
        "inputs of projections": compute * shape.hidden * readers,
        "normalised values": compute * norms.width if norms.rms else 0,
    }


def _adapter_terms(job: Job) -> Terms:
    """What the gradients of adapters read.

    An fp32 adapter under autocast casts its input, one with dropout drops from it, each for itself; others share what
    they read, and the output of the attention is there already. Under FSDP1 that is a bound: the measured rows are of
    before kit.train.patches.leave_casts_to_autocast.
    """
    compute, adapters = job.layout.compute_bytes, Adapters.of(job)
    if adapters.casts_inputs or adapters.drops_inputs:
        mask = 1 if adapters.drops_inputs else 0  # a byte an element
        inputs = sum(linear.inputs * (compute + mask) for linear in job.targets)
    else:
        shared = {linear.source: linear.inputs for linear in job.targets if not linear.reads_attention}
        inputs = compute * sum(shared.values())
    return {"inputs of adapters": inputs, "between A and B": compute * job.recipe.tuning.r * len(job.targets)}


def _fp32_product_bytes(job: Job, adapters: Adapters) -> float:
    """Bytes a token of what the down projection reads, in fp32, and that again without what was dropped."""
    if not adapters.casts_product:
        return 0
    return 4 * job.shape.ffn * (2 if adapters.drops_inputs else 1)


def _forward_bytes(job: Job, adapters: Adapters) -> float:
    """Bytes a token beyond what is kept, at the end of a layer's forward: hidden states, and the product's casts."""
    compute, shape = job.layout.compute_bytes, job.shape
    product = 0 if job.full else compute * shape.ffn
    return 5 * compute * shape.hidden + _fp32_product_bytes(job, adapters) + product


def _passing_bytes(job: Job, adapters: Adapters) -> float:
    """Bytes a token in a forward that keeps nothing: in the feed-forward, or as the product is cast."""
    compute, shape, cast = job.layout.compute_bytes, job.shape, _fp32_product_bytes(job, adapters)
    product = 2 * compute * shape.ffn if adapters.casts_product else 0
    return max(
        compute * shape.wide_tensors * shape.ffn + 2 * compute * shape.hidden,
        product + cast + 3 * compute * shape.hidden,
    )


def _backward_bytes(job: Job, forward: float) -> float:
    """Bytes a token of gradients in a layer's backward, or of the forward that is run again before it."""
    compute, shape = job.layout.compute_bytes, job.shape
    wide = shape.wide_tensors - (1 if job.full else 0)
    gradients = max(compute * (wide * shape.ffn + shape.hidden), forward if job.recomputes else 0)
    adapter_input = 8 * shape.hidden if job.fsdp1 and not job.full else 0  # an adapter's fp32 input, and its gradient
    return gradients + adapter_input


@dataclass(frozen=True)
class LossBytes:
    """Bytes that the LM head and the loss take: in the forward pass, and in the backward pass."""

    forward: float
    backward: float

    @classmethod
    def of(cls, job: Job) -> "LossBytes":
        """The loss of the job's stack and path."""
        if not job.fused_loss:
            return cls._of_full_logits(job)
        if not (job.full or job.layout.on_cpu or job.path.plain):
            held = frozen_head_loss_bytes(job.shape, job.tokens, job.layout.compute_bytes)
            return cls(held, held)
        return cls._fused(job)

    @classmethod
    def _of_full_logits(cls, job: Job) -> "LossBytes":
        """transformers 4.48: logits in the compute type and three times in fp32; three hidden states."""
        compute = job.layout.compute_bytes
        logits = float(job.tokens * (job.shape.vocab * (compute + 3 * 4) + 3 * compute * job.shape.hidden))
        return cls(logits, logits)

    @classmethod
    def _fused(cls, job: Job) -> "LossBytes":
        """TRL's: hidden states, a tile of logits, and the gradient of a trained head, summed up in fp32."""
        shape, tokens, compute = job.shape, job.tokens, job.layout.compute_bytes
        without_triton = 29 if job.layout.on_cpu else 0  # seven fp32 tiles and one of booleans
        tile = min(tokens, TILE_TOKENS) * TILE_WORDS * (compute + without_triton)
        labelled = compute if job.full else 0
        # what goes into the final norm in fp32, what comes out, what of it has a label
        states = tokens * shape.hidden * (4 + compute + labelled)
        head = shape.embedding if job.full else 0
        gradients = states + tokens * shape.hidden * (4 + compute) + tile + 4 * head
        norm = tokens * shape.hidden * 24  # six fp32 copies in the backward of the final norm
        return cls(states + tokens * shape.hidden * compute + tile, max(gradients, norm) + compute * head)
