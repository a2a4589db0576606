"""Sharding: gathered weights and unsharded gradients of a rank, at each moment of a micro-batch; no torch."""

from dataclasses import dataclass

from kit.forecast.layout import Job

ZERO_BUCKET = 5e8  # elements of reduce_bucket_size and allgather_bucket_size (DeepSpeed's defaults)
ZERO3_LIVE = 1e9  # elements of stage3_max_live_parameters


@dataclass(frozen=True)
class Gathered:
    """Bytes of weights that are complete on this rank, at the moments of a micro-batch that may be fullest.

    first_layer: as the embedding has been computed. layers: in a layer's forward. next_layer: as the next one is copied
    out of its buffer. loss and loss_backward. last_layer and first_layer_backward: in the backward of that layer.
    """

    first_layer: float
    layers: float
    next_layer: float
    loss: float
    loss_backward: float
    last_layer: float
    first_layer_backward: float

    @classmethod
    def constant(cls, size: float) -> "Gathered":
        """The same at every moment."""
        return cls(size, size, size, size, size, size, size)

    @classmethod
    def of(cls, job: Job) -> "Gathered":
        """What the strategy gathers."""
        parallel = job.recipe.parallel
        if not job.sharded:
            return cls.constant(0.0)
        if job.zero:
            return cls.constant(min(ZERO3_LIVE, job.shape.total) * job.layout.compute_bytes + 2 * ZERO_BUCKET)
        if job.fsdp1:
            return cls._fsdp1(job)
        return cls._fsdp2_grad_op(job) if parallel.sharding == "grad_op" else cls._fsdp2(job)

    @classmethod
    def _fsdp1(cls, job: Job) -> "Gathered":
        """The root unit (embedding, final norm, head) stays gathered, and one layer, or all with SHARD_GRAD_OP."""
        every = job.recipe.parallel.sharding == "grad_op"
        return cls.constant(_embedding(job) + _head(job) + (layers_bytes(job) if every else layer_bytes(job)))

    @classmethod
    def _fsdp2(cls, job: Job) -> "Gathered":
        """fully_shard copies weights out of the all-gather's buffer.

        In forward that buffer lives until the next unit has been copied; in backward the next unit's is prefetched.
        accelerate makes [norm, head] a unit that stays gathered until its backward, with the embedding in it when tied;
        around PEFT, TRL's loss gathers the head by itself.
        """
        layer, embedding, head = layer_bytes(job), _embedding(job), _head(job)
        tied_root = embedding if job.shape.tied else 0
        copied_head = 2 * head if job.full else 0
        layer_behind_loss = 0 if job.full or job.shape.tied else layer
        return cls(
            first_layer=2 * (embedding + layer) if job.shape.tied else max(2 * embedding, embedding + 2 * layer),
            layers=tied_root + 2 * layer,
            next_layer=max(tied_root + 3 * layer, layer + copied_head),
            loss=tied_root + _gathered_for_the_loss(job),
            loss_backward=tied_root + head + layer_behind_loss,
            last_layer=tied_root + 2 * layer,
            first_layer_backward=embedding + layer,
        )

    @classmethod
    def _fsdp2_grad_op(cls, job: Job) -> "Gathered":
        """reshard_after_forward off: what is gathered in forward stays until its backward."""
        layer, head = layer_bytes(job), _head(job)
        whole = layers_bytes(job) + _embedding(job)
        return cls(
            first_layer=0.0,
            layers=whole + layer,
            next_layer=whole + layer,
            loss=whole + _gathered_for_the_loss(job),
            loss_backward=whole + head,
            last_layer=whole + (head if job.full else 0),
            first_layer_backward=whole,
        )


def _gathered_for_the_loss(job: Job) -> float:
    """The head's unit and its buffer; under PEFT only the head, and the layer before it."""
    if job.shape.tied:
        return layer_bytes(job)
    return 2 * _head(job) if job.full else _head(job) + layer_bytes(job)


def _embedding(job: Job) -> float:
    return job.shape.embedding * job.layout.compute_bytes


def _head(job: Job) -> float:
    return job.shape.head * job.layout.compute_bytes


def layer_bytes(job: Job) -> float:
    """Bytes of the largest layer once gathered: frozen weights as stored, trained ones in the compute type."""
    trained = job.shape.layer if job.full else job.trained / job.shape.layers
    return job.frozen.largest_layer + trained * job.layout.compute_bytes


def layers_bytes(job: Job) -> float:
    """Bytes of all layers once gathered."""
    outside = (job.shape.embedding + job.shape.head) * (
        job.layout.compute_bytes if job.full else job.layout.frozen_bytes
    )
    return job.frozen.model + job.trained * job.layout.compute_bytes - outside


@dataclass(frozen=True)
class Gradients:
    """Bytes of gradients, at the moments of a micro-batch.

    Reduced or waiting to be:
    waiting: of earlier micro-batches. after_last_layer: once the last layer's have been reduced. before_second_layer,
    before_first_layer: before that layer's are. all_reduced: of all parameters, as the optimizer sees them.
    ddp_copy: DDP's buckets.

    Complete on this rank, not yet reduced:
    layer; largest_projection: of it, while the layer's backward is fullest; layer_behind: of the layer that FSDP2
    reduces meanwhile; embedding; head: waits for the embedding's; embedding_reduction: what reducing that takes.
    """

    waiting: float
    after_last_layer: float
    before_second_layer: float
    before_first_layer: float
    all_reduced: float
    ddp_copy: float
    layer: float
    largest_projection: float
    layer_behind: float
    embedding: float
    head: float
    embedding_reduction: float

    @classmethod
    def of(cls, job: Job) -> "Gradients":
        """Gradients of the largest layer, of the root and of all, by strategy."""
        shape, compute, layout = job.shape, job.layout.compute_bytes, job.layout
        accumulates = job.recipe.schedule.grad_accum > 1 and not job.zero
        layer = (shape.layer if job.full else job.trained / shape.layers) * compute
        root = (shape.embedding + shape.head) * compute if job.full else 0
        embedding = shape.embedding * compute if job.full else 0
        kept_part = layout.trained_bytes / compute / layout.gradient_ranks  # of a gradient, once it is reduced
        all_reduced = 0.0 if job.offloaded else job.trained * compute * kept_part
        copy = job.trained * layout.trained_bytes if job.ddp_buckets else 0
        waiting = job.trained * (compute if job.sharded else layout.trained_bytes) if accumulates else 0
        behind = layer if job.recipe.parallel.strategy == "fsdp2" and job.sharded and job.full else 0
        last = (root if job.sharded and job.fsdp1 else embedding) + layer  # of what is reduced after the second layer
        before_first = all_reduced if accumulates and not job.sharded else max(all_reduced - last * kept_part, 0)
        return cls(
            waiting=waiting,
            after_last_layer=waiting + behind * (kept_part - (1 if accumulates else 0)),
            before_second_layer=max(before_first - layer * kept_part, 0),
            before_first_layer=before_first,
            all_reduced=all_reduced,
            ddp_copy=copy,
            layer=layer if job.sharded or not accumulates else 0,
            largest_projection=max(linear.parameters for linear in shape.linears) * compute if job.full else 0,
            layer_behind=behind,
            embedding=embedding,
            head=0 if job.sharded and not job.fsdp1 and not shape.tied else embedding,
            embedding_reduction=_embedding_reduction(job, root, embedding, kept_part),
        )


def _embedding_reduction(job: Job, root: float, embedding: float, kept_part: float) -> float:
    """FSDP1 has weights, gradients and the flat gradient of the root; FSDP2 the gradient, the copy that is reduced, and
    the outcome; without shards a tied embedding has the gradient of the head and that of its rows.
    """
    if job.sharded and job.fsdp1:
        return root * (3 - kept_part)
    if job.sharded:
        return embedding * (2 + 1 / job.layout.gradient_ranks)
    return embedding if job.shape.tied else 0
