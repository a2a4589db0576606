"""Bytes per GPU (weights, activations, gradients, optimizer) in each phase of a step, without torch.

Only a model's config.json and a recipe are needed. The formulas are a closed form of what transformers 5, PEFT 0.20,
accelerate 1.15 and TRL 1.16 allocate on each rank, read off their source tensor by tensor. Measured, and not derived:
the intervals, `again` under DDP, an adapter's casts under FSDP1. Error on 85 peaks of tests/truth/h100.csv: rows of
Llama-1B, Llama-3B and TinyLlama median 0.07%, 90th percentile 0.4%; the 49 rows of other models, on which no number was
fitted, 0.05% and 0.4%, at worst 4.9% (gpt2's GELU in fp32). Further families, forecast blind: tests/truth/blind.md.
"""

import json
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.shape import Layer, Shape, load_shape

GIB = 2**30
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes: 4 bits, an 8-bit scale per 64, an fp32 scale per 256 scales (QLoRA paper)
TILE_TOKENS, TILE_VOCAB = 4096, 32768  # the logits tile of TRL's fused LM head (trl/kernels/chunked_logprob.py)
WORKSPACE = 64 * 2**20  # cuBLAS takes 32 MiB on Hopper for each of two threads, forward and autograd
STATE_COPIES = {"adamw": 2.0, "lion": 1.0, "sgd": 0.0, "adafactor": 0.0}  # optimizer state over parameters
Terms = dict[str, float]
Verdict = Literal["fits", "tight", "does not fit", "unknown"]


@dataclass(frozen=True)
class Layout:
    """Bytes per element, and over how many ranks weights, gradients and optimizer state are spread."""

    cpu: bool
    compute: int
    frozen: int
    trained: int
    shards: tuple[int, int, int]
    optimizer: float  # bytes per trained parameter

    @classmethod
    def of(cls, recipe: Recipe, cluster: Cluster, masters: bool = True) -> "Layout":
        """The layout of a recipe on a cluster; fp32 throughout where there are no GPUs."""
        p, method, cpu = recipe.parallel, recipe.tuning.method, cluster.nodes.gpus == 0
        group = p.gpus_per_node if p.sharding == "hybrid" else recipe.world_size
        strategy = "zero2" if p.strategy == "zero3" and p.sharding == "grad_op" else p.strategy
        spread = {"ddp": (1, 1, 1), "zero1": (1, 1, group), "zero2": (1, group, group)}
        stored = 4 if cpu or recipe.model.dtype == "float32" else 2
        masters &= method == "full" and strategy.startswith("fsdp")  # accelerate upcasts what FSDP trains
        # PEFT makes adapters fp32; TRL casts those of quantized models, DeepSpeed casts all, to bf16.
        adapters = method == "lora" and not strategy.startswith("zero")
        trained = 4 if cpu or masters or adapters else 2 if method == "qlora" else stored
        name = recipe.schedule.optimizer
        copies = next((n for key, n in STATE_COPIES.items() if name.startswith(key)), 2.0)
        state = 2.0 if "8bit" in name else copies * trained
        if strategy.startswith("zero"):
            state = 4 + 4 * copies  # DeepSpeed's fp32 master and fp32 state
        return cls(cpu, 4 if cpu else 2, stored, trained, spread.get(strategy, (group,) * 3), state)


def frozen_bytes(s: Shape, method: str, stored: int) -> tuple[float, float]:
    """Bytes of the frozen weights, of all and of the largest layer; nf4 covers the projections of the layers only."""
    if method == "full":
        return 0.0, 0.0

    def bytes_of(layer: Layer) -> float:
        linear = sum(x.parameters for x in layer.linears)
        return linear * (NF4 if method == "qlora" else stored) + (layer.parameters - linear) * stored

    outside = s.total - sum(n * layer.parameters for n, layer in s.kinds)
    layers = [bytes_of(layer) for _, layer in s.kinds]
    return sum(n * b for (n, _), b in zip(s.kinds, layers, strict=True)) + outside * stored, max(layers)


Activations = namedtuple("Activations", "inputs kept passing forward backward mask")
Gathered = namedtuple("Gathered", "start layers turn loss loss_backward last first")
Gradients = namedtuple("Gradients", "waiting second two late whole again unit down behind embed head end")


def _activations(s: Shape, recipe: Recipe, y: Layout) -> Activations:
    """Bytes of one micro-batch in one layer: its input, what it keeps for backward, and what passes through besides.

    passing: in a forward that keeps nothing; forward: in one that keeps; backward: while gradients flow; mask: of all.
    Counted off the modelling code of transformers 5, tensor by tensor, under autocast to bf16.
    """
    c, h, f, length, t = y.compute, s.hidden, s.ffn, recipe.data.seq_len, recipe.tuning
    tokens, full, dropped = recipe.schedule.micro_batch * length, t.method == "full", t.dropout > 0
    # with a mask for sdpa, transformers repeats the keys, and sdpa makes the mask a bf16 one
    masked = s.masked(recipe) and recipe.model.attention == "sdpa"
    scores = s.heads * length * s.holds_scores(recipe)
    mlp = [x for x in s.linears if "att" not in x.path]
    down = [x for x in mlp if not x.source.endswith("h")]
    gated = sum(x.outputs for x in mlp if x.source.endswith("h")) >= 2 * max(x.inputs for x in down)
    wide, used = 2 + gated, max((x.used for x in mlp if x.copies > 1), default=0)
    normed, rms = _normed(s)
    kept = 4 * normed + 2 * c * (s.query + (s.query if masked else s.key)) + 4 * s.heads  # norms keep fp32
    kept += c * f * (3 if gated else 1) + 2 * c * used * h + (4 + c) * scores + c * length * masked
    if any(x.outputs == s.query + 2 * s.key for x in s.linears):
        kept += c * (2 * s.query + s.key)  # queries and keys are copied out of the fused projection to be rotated
    casts = False
    experts = 0
    if full:  # a LayerNorm is fp32 under autocast, so that each projection casts what it reads for itself
        kept += c * (f + h * (2 if rms else sum(x.source.endswith("h") for x in s.linears)) + normed * rms)
    else:
        # An fp32 adapter under autocast casts its input, one with dropout drops from it, each for itself; others
        # share what they read, and what the attention puts out is there already. Under FSDP1 that is a bound: the
        # measured rows are of before kit.train.trainer.leave_casts_to_fsdp.
        targets = s.targeted(t.target_modules)
        casts = t.method == "lora" and recipe.parallel.strategy in ("ddp", "fsdp1") and not y.cpu
        alone = [x.inputs * (c + dropped) for x in targets]
        shared = {x.source: x.inputs * c for x in targets if not x.source.endswith(("q", "V"))}.values()
        kept += sum(alone if casts or dropped else shared) + c * t.r * len(targets)
        casts = casts and any(x in down for x in targets)
        experts = c * sum(x.parameters for x in targets if x.copies > 1)  # PEFT adds B @ A of them all to the weights
    cast = casts * 4 * (1 + dropped) * f  # in fp32, and that without what was dropped
    forward = 5 * c * h + cast + (0 if full else c * f)
    passing = max(c * wide * f + 2 * c * h, casts * 2 * c * f + cast + 3 * c * h)
    backward = max(c * ((wide - full) * f + h), forward * recipe.parallel.activation_checkpointing)
    backward += 8 * h * (recipe.parallel.strategy == "fsdp1" and not full)  # an adapter's fp32 input, its gradient
    eager = (8 + c) * scores
    return Activations(
        tokens * c * h, tokens * kept + experts, tokens * (passing + eager) + 2 * experts,
        tokens * (forward + eager) + experts, tokens * max(backward, eager - 3 * c * f) + experts,
        tokens * length * masked,
    )  # fmt: skip


def _normed(s: Shape) -> tuple[int, bool]:
    """How wide a token is in all norms of a layer together, and whether they are RMS norms; from the parameters."""
    block, biased = s.norms * s.hidden, any(x.parameters > x.copies * x.inputs * x.outputs for x in s.linears)
    rest = s.vectors - block
    if rest == block and (biased or rest != s.query + s.key):
        return block, False
    return block + (s.query + s.key if rest == 2 * (s.query // s.heads) else rest), True


def _loss(s: Shape, recipe: Recipe, y: Layout, fused: bool) -> tuple[float, float]:
    """Bytes of the loss, forward and backward: hidden states, a tile of logits, and the head's gradient."""
    tokens, c, h = recipe.schedule.micro_batch * recipe.data.seq_len, y.compute, s.hidden
    if not fused:
        logits = float(tokens * (s.vocab * (c + 3 * 4) + 3 * c * h))  # transformers 4.48: three fp32 copies
        return logits, logits
    full = recipe.tuning.method == "full"
    tile = min(tokens, TILE_TOKENS) * TILE_VOCAB * (c + 29 * y.cpu)  # without Triton, seven fp32 tiles and one of bool
    states = tokens * h * (4 + c + c * full)  # what goes into the final norm in fp32, what comes out, what has a label
    head = s.embedding * full  # its gradient is summed up in fp32
    backward = max(states + tokens * h * (4 + c) + tile + 4 * head, tokens * h * 24)  # or six fp32 copies in the norm
    return states + tokens * h * c + tile, backward + c * head


def _gathered(s: Shape, recipe: Recipe, y: Layout, unit: float, inner: float) -> Gathered:
    """Bytes of weights gathered from other ranks, at the moments that may be fullest; unit: one layer's, inner: all.

    FSDP2 copies weights out of the all-gather's buffer. In forward that buffer lives until the next unit has been
    copied (turn); in backward the next unit's is prefetched. accelerate makes [norm, head] a unit that stays gathered
    until its backward, with the embedding in it when tied; around PEFT, TRL's loss gathers the head by itself.
    """
    p, full, tied = recipe.parallel, recipe.tuning.method == "full", s.tied
    embed, head, root = s.embedding * y.compute, s.head * y.compute, s.embedding * y.compute * tied
    if y.shards[0] == 1:
        return Gathered(*[0.0] * 7)
    if p.strategy == "zero3":  # stage3_max_live_parameters and two prefetch buckets of 5e8 elements
        return Gathered(*[min(1e9, s.total) * y.compute + 1e9] * 7)
    if p.strategy == "fsdp1":  # the root unit (embedding, norm, head) stays
        return Gathered(*[embed + head + (inner if p.sharding == "grad_op" else unit)] * 7)
    tail = unit if tied else 2 * head if full else head + unit
    if p.sharding == "grad_op":
        whole = inner + embed
        return Gathered(0.0, whole + unit, whole + unit, whole + tail, whole + head, whole + head * full, whole)
    start = 2 * (embed + unit) if tied else max(2 * embed, embed + 2 * unit)
    turn, back = max(root + 3 * unit, unit + 2 * head * full), root + head + unit * (not full and not tied)
    return Gathered(start, root + 2 * unit, turn, root + tail, back, root + 2 * unit, embed + unit)


def _gradients(s: Shape, recipe: Recipe, y: Layout) -> Gradients:
    """Bytes of gradients.

    waiting: of earlier micro-batches, whole under no_sync; second, two, late: once the last layer's are reduced, before
    the second's, before the first's; whole: all; again: as much once more, seen under DDP in forward and at the end of
    a backward that accumulates (one full fine-tune, six adapters; cause not traced). Not yet reduced: unit (a layer's),
    down (its largest projection's, while its backward is fullest), behind (the layer's behind), embed, head (waits for
    the embedding's), end (what reducing the embedding's takes).
    """
    p, full, n, c = recipe.parallel, recipe.tuning.method == "full", s.trainable(recipe), y.compute
    sharded, zero = y.shards[0] > 1, p.strategy.startswith("zero")
    fsdp1, waits = sharded and p.strategy == "fsdp1", recipe.schedule.grad_accum > 1 and not zero
    embed, root = s.embedding * c * full, (s.embedding + s.head) * c * full
    unit, down = (s.layer if full else n / s.layers) * c, max(x.parameters for x in s.linears) * c * full
    state = y.trained / c / y.shards[1]  # what is left of a gradient's bytes once it is reduced
    whole = n * c * state * (not (p.offload and not y.cpu and (sharded or zero)))
    late = whole if waits and not sharded else max(whole - ((root if fsdp1 else embed) + unit) * state, 0)
    again = n * y.trained * (p.strategy == "ddp" and recipe.world_size > 1)
    # FSDP1: weights, gradients, and the flat gradient; else the gradient, the copy that is reduced, the outcome
    end = root * (3 - state) if fsdp1 else embed * (2 + 1 / y.shards[1] if sharded else s.tied)
    waiting = waits * n * (c if sharded else y.trained)
    behind = unit * (p.strategy == "fsdp2" and sharded and full)
    return Gradients(
        waiting, waiting + behind * (state - waits), max(late - unit * state, 0) + again * waits,
        late + again * waits, whole, again, unit * (sharded or not waits), down, behind, embed,
        0 if sharded and not fsdp1 and not s.tied else embed, end + again * waits,
    )  # fmt: skip


def phases(s: Shape, recipe: Recipe, cluster: Cluster, fused: bool = True, masters: bool = True) -> dict[str, Terms]:
    """Bytes per GPU by phase and term, once the optimizer has its state; each phase at its peak.

    fused and masters off describe older stacks: full logits in the loss, and FSDP training in pure bf16.
    """
    y, p, n = Layout.of(recipe, cluster, masters), recipe.parallel, s.trainable(recipe)
    full, zero, several = recipe.tuning.method == "full", p.strategy.startswith("zero"), recipe.world_size > 1
    c, (sp, _, so), ac = y.compute, y.shards, p.activation_checkpointing
    moved = p.offload and not y.cpu and (sp > 1 or zero)
    frozen, layer = frozen_bytes(s, recipe.tuning.method, y.frozen)
    inner = frozen + n * c - (s.embedding + s.head) * (c if full else y.frozen)
    a, d = _activations(s, recipe, y), _gradients(s, recipe, y)
    g = _gathered(s, recipe, y, layer + (s.layer if full else n / s.layers) * c, inner)
    loss, loss_backward = _loss(s, recipe, y, fused)
    one = a.inputs if ac else a.kept
    # nothing is trained before an adapter's first norm, so that keeps no fp32 input
    saved = s.layers * one + a.mask - 4 * a.inputs / c * (not full and not ac)
    kept, last = a.kept + a.backward, a.kept * ac + a.backward
    static = {
        "weights": (frozen + n * y.trained) / sp * (not moved or sp == 1),
        "optimizer": n * y.optimizer / so * (not moved),
        "dequantized weight": max(x.inputs * x.outputs for x in s.linears) * c * (recipe.tuning.method == "qlora"),
        "buckets": d.again + 2 * 2 * min(5e8, n) * (zero and several),
        "workspace": WORKSPACE * (not y.cpu),
    }

    def fullest(*moments: tuple[float, float, float, float, float]) -> Terms:
        names = ("gradients", "gathered weights", "saved activations", "temporaries", "unsharded gradients")
        return static | dict(zip(names, max(moments, key=sum), strict=True))

    foreach = y.trained * n / so * (recipe.schedule.optimizer == "adamw_torch" and not y.cpu and not zero)
    early, first = d.waiting + d.again, a.inputs + a.mask
    return {
        "load": {"weights": static["weights"], "largest tensor": s.embedding * y.frozen * (sp > 1)},
        "forward": fullest(
            (early, g.start, first, 0, 0), (early, g.layers, saved, a.passing if ac else a.forward, 0),
            (early, g.turn, saved, 0, 0), (early, g.loss, saved, loss, 0),
        ),
        "loss backward": fullest((d.waiting, g.loss_backward, saved, loss_backward, 0)),
        "last-layer backward": fullest(
            (d.waiting, g.last, saved, last, d.embed + d.down),
            (d.second, g.last, saved - one, last, d.embed + d.down + d.behind),
        ),
        "first-layer backward": fullest(
            (d.late, g.first, first, kept, d.head + d.behind + d.down),
            (d.late, g.first, first, a.inputs, d.head + d.behind + d.unit),
            (d.two, g.last, first + a.inputs, kept, d.head + d.behind + d.down),
        ),
        "embedding backward": fullest((d.whole, 0, a.inputs, 0, d.end)),
        "optimizer step": fullest((d.whole + 4 * n / so * zero, 0, 0, 0, 0)) | {"foreach temporaries": foreach},
    }  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """The forecast for one rank in GiB; `reserved` is the allocator's, `device` what nvidia-smi or a process shows."""

    allocated_gib: float
    reserved_gib: tuple[float, float]
    device_gib: tuple[float, float]
    peak_phase: str
    terms_gib: Terms
    capacity_gib: float
    verdict: Verdict
    cheapest_fix: str
    phases_gib: dict[str, Terms]
    warnings: tuple[str, ...]


def _forecast(s: Shape, recipe: Recipe, cluster: Cluster) -> Memory:
    cpu, several = cluster.nodes.gpus == 0, recipe.world_size > 1
    found = {k: {t: b / GIB for t, b in terms.items() if b} for k, terms in phases(s, recipe, cluster).items()}
    peak = max(found, key=lambda k: sum(found[k].values()))
    allocated, warnings = sum(found[peak].values()), tuple(_warnings(s, recipe, cluster))
    # Cached and fragmented blocks, more where collectives have pools of their own: bounds of the rows of every second
    # model of tests/truth/h100.csv, which hold 33 of the 40 others (device: 35). Then the CUDA context, and NCCL.
    sharded = several and recipe.parallel.strategy not in ("ddp", "zero1", "zero2")
    reserved = (1.03 * allocated, 1.3 * allocated) if sharded else (1.01 * allocated, 1.12 * allocated)
    device = (reserved[0] + (1.8 if several else 1.3), reserved[1] + (2.0 if several else 1.35))
    # A CPU process holds 0.4 to 1.2 GiB of libraries.
    if cpu:
        reserved, device = (allocated, 1.3 * allocated), (allocated + 0.4, 1.3 * allocated + 1.2)
    capacity = cluster.nodes.ram_gib / recipe.parallel.gpus_per_node if cpu else cluster.nodes.gpu_memory_gib
    guess = sharded and recipe.tuning.method == "qlora"  # one published run took 10 GiB more than the arithmetic
    sure = device[1] <= capacity and not guess and not _foreach_hazard(s, recipe, cpu)
    verdict: Verdict = "fits" if sure else "tight"
    if device[0] > capacity:
        verdict = "does not fit"
    if not capacity:  # a profile that does not give the memory of its GPUs
        verdict = "unknown"
    return Memory(allocated, reserved, device, peak, found[peak], capacity, verdict, "", found, warnings)


def _foreach_hazard(s: Shape, recipe: Recipe, cpu: bool) -> bool:
    """Seen on 4 H100s, cause unknown: some 40 GiB beyond the arithmetic in the first step of Llama-8B and Qwen2-7B.

    Not seen on Mistral-7B and TinyLlama (untied, 32k words) and Llama-3B (tied): so of an untied head of 128k words.
    """
    foreach = recipe.schedule.optimizer == "adamw_torch" and recipe.parallel.strategy == "fsdp2" and not cpu
    return foreach and recipe.tuning.method == "full" and not s.tied and s.vocab >= 128_000 and s.total >= 7e9


def _warnings(s: Shape, recipe: Recipe, cluster: Cluster) -> Iterator[str]:
    p, nodes = recipe.parallel, cluster.nodes
    if nodes.gpus and not nodes.gpu_memory_gib:
        yield f"Cluster {cluster.name} gives no nodes.gpu_memory_gib, so there is no verdict."
    if s.unknown:
        yield f"This forecast is a bound: {s.unknown}"
    yield from s.notes
    rows = min([s.hidden, *(x.outputs for x in s.linears)] + [recipe.tuning.r] * (recipe.tuning.method != "full"))
    shards = Layout.of(recipe, cluster).shards[0]
    if p.strategy == "fsdp2" and shards > rows:
        yield f"FSDP2 spreads rows over {shards} ranks, and the smallest tensor has {rows}: some ranks hold none of it."
    if _foreach_hazard(s, recipe, nodes.gpus == 0):
        yield (
            "adamw_torch (foreach) under FSDP2 ran out of 80 GB in the first optimizer step of full fine-tunes like "
            "this one, 40 GiB above the forecast; set schedule.optimizer = adamw_torch_fused."
        )
    if p.nodes > nodes.count or 0 < nodes.gpus < p.gpus_per_node:
        yield (
            f"The recipe asks for {p.nodes} x {p.gpus_per_node} processes; cluster {cluster.name} has {nodes.count} "
            f"nodes of {nodes.gpus or nodes.cpus}."
        )
    if recipe.tuning.method == "qlora" and p.strategy.startswith("fsdp"):
        yield "The forecast takes bnb_4bit_quant_storage = bfloat16; FSDP does not shard 4-bit weights stored as uint8."
    load = s.total * Layout.of(recipe, cluster).frozen / GIB
    if load > nodes.ram_gib:
        yield f"One process of each node reads all weights into its memory: {load:.0f} GiB of {nodes.ram_gib:.0f}."


def _changes(recipe: Recipe, cpu: bool) -> dict[str, Recipe]:
    """Single changes that may save memory, those that cost least first."""
    p, b, method = recipe.parallel, recipe.schedule.micro_batch, recipe.tuning.method
    lora: dict[str, Any] = {"target_modules": ("all-linear",)} if method == "full" else {}
    table: list[tuple[bool, str, dict[str, Any]]] = [
        (recipe.schedule.optimizer == "adamw_torch" and not cpu, "schedule", {"optimizer": "adamw_torch_fused"}),
        (not p.activation_checkpointing, "parallel", {"activation_checkpointing": True}),
        (b > 1, "schedule", {"micro_batch": 1, "grad_accum": recipe.schedule.grad_accum * b}),
        (p.sharding != "full", "parallel", {"sharding": "full"}),
        (p.strategy != "fsdp2" and recipe.world_size > 1, "parallel", {"strategy": "fsdp2"}),
        (method == "full", "tuning", {"method": "lora"} | lora),
        (method != "qlora" and not cpu, "tuning", {"method": "qlora"} | lora),
        (not p.offload and not cpu, "parallel", {"offload": True}),
        *((True, "parallel", {"nodes": p.nodes * times}) for times in (2, 4, 8)),
    ]
    return {
        ", ".join(f"{section}.{key} = {json.dumps(value)}" for key, value in change.items()): replace(
            recipe, **{section: replace(getattr(recipe, section), **change)}
        )
        for useful, section, change in table
        if useful
    }


def _fix(s: Shape, recipe: Recipe, cluster: Cluster) -> str:
    """The first single change that fits, else that is tight, else the one that saves most, with its new GiB."""
    tried = {k: _forecast(s, r, cluster) for k, r in _changes(recipe, cluster.nodes.gpus == 0).items()}
    for verdict, words in (("fits", "it fits"), ("tight", "it is tight")):
        for change, m in tried.items():
            if m.verdict == verdict:
                return f"With {change} {words}: {m.allocated_gib:.1f} GiB allocated."
    change, m = min(tried.items(), key=lambda item: item[1].allocated_gib)
    return f"No single change is enough; {change} comes closest with {m.allocated_gib:.1f} GiB."


def memory(recipe: Recipe, cluster: Cluster, shape: Shape | None = None) -> Memory:
    """Does it fit, what is its peak made of, and which single change helps most cheaply. Raises InputError.

    `shape`: the recipe's model, where it is already loaded.
    """
    s = shape or load_shape(recipe.model.name, cluster.paths.hf_home)
    s.check(recipe)
    found = _forecast(s, recipe, cluster)
    if found.verdict in ("fits", "unknown"):
        return found
    return replace(found, cheapest_fix=_fix(s, recipe, cluster))
