"""What torch's CUDA caching allocator adds to a tensor: it counts blocks, which are rounded up; no torch.

c10/cuda/CUDACachingAllocator.cpp: a request of kMinLargeAlloc or more gets a segment that is a multiple of kRoundLarge,
and what is left of it becomes a block only if it is larger than kSmallSize.
"""

from collections.abc import Iterator

from kit.forecast.layout import Job

MIB = 2**20
MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_SIZE = 10 * MIB, 2 * MIB, MIB


def padding(size: float) -> float:
    """Bytes by which the block of a tensor of `size` bytes is larger."""
    rest = -size % ROUND_LARGE
    return rest if size >= MIN_LARGE_ALLOC and rest <= SMALL_SIZE else 0


def rounding(job: Job) -> float:
    """Bytes by which the blocks of the weights are larger than these.

    Only of tensors that are allocated one by one: FSDP1 and DeepSpeed have flat buffers, quantized weights other sizes.
    Optimizer state comes later and takes blocks that a forward and backward have freed, of any size.
    """
    layout = job.layout
    flat = job.zero or (job.sharded and job.fsdp1)
    if layout.on_cpu or flat or job.offloaded or job.recipe.model.base != "bf16":
        return 0
    stored = layout.trained_bytes if job.full else layout.frozen_bytes
    return sum(count * padding(size * stored / layout.weight_ranks) for count, size in _tensors(job))


def _tensors(job: Job) -> Iterator[tuple[int, int]]:
    """How many there are, and their elements: projections, embedding and head."""
    shape = job.shape
    for count, layer in shape.kinds:
        yield from ((count, linear.copies * linear.inputs * linear.outputs) for linear in layer.linears)
    yield 1, shape.embedding
    yield 1, shape.head
