"""Sizing: how many GPUs a model needs, what the ZeRO stages divide, and what tensor, pipeline and expert ranks hold."""

import math
from dataclasses import dataclass

from kit.config.cluster import Cluster, Nodes
from kit.config.recipe import Data, Model, Recipe, Tuning
from kit.errors import InputError
from kit.forecast.memory import GIB, memory
from kit.forecast.shape import Shape

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
STATE_BYTES = {"weights": 2, "gradients": 2, "optimizer": 12}  # a parameter, mixed precision (ZeRO paper, 3.1)


def sizing(
    model: str, method: str, gpu_memory_gib: float, seq_len: int = 2048, per_node: int = 8, most: int = 1024
) -> dict[str, int | None]:
    """The smallest number of GPUs, doubling from 1 to `most`, on which each strategy fits; None where none does.

    One row of seq_len tokens a GPU, activation checkpointing, the default optimizer. Raises InputError.
    """
    cluster = Cluster("any", Nodes(most, per_node, gpu_memory_gib=gpu_memory_gib, ram_gib=math.inf))
    tuning = Tuning(method, target_modules=("all-linear",))  # type: ignore[arg-type]
    base = Recipe("sizing", Model(model), Data("none", seq_len=seq_len), tuning)

    def fits(strategy: str, gpus: int) -> bool:
        local = min(gpus, per_node)
        spread = {"parallel.strategy": strategy, "parallel.nodes": gpus // local, "parallel.gpus_per_node": local}
        return memory(base.override(**spread), cluster).device_gib[1] <= gpu_memory_gib

    counts = [2**i for i in range(most.bit_length())]
    return {strategy: next((n for n in counts if fits(strategy, n)), None) for strategy in STRATEGIES}


def zero_table(s: Shape, gpus: int) -> list[dict[str, float | str]]:
    """GiB a GPU by kind of state at the ZeRO stages 0 to 3, and what each GPU holds whole (ZeRO paper, figure 1)."""
    rows: list[dict[str, float | str]] = []
    for stage, divided in enumerate(((), ("optimizer",), ("optimizer", "gradients"), tuple(STATE_BYTES))):
        row = {k: s.total * size / (gpus if k in divided else 1) / GIB for k, size in STATE_BYTES.items()}
        whole = [k for k in STATE_BYTES if k not in divided]
        rows.append({"stage": stage, **row, "total": sum(row.values()), "replicated": ", ".join(whole)})
    return rows


@dataclass(frozen=True)
class Split:
    """What the fullest rank of a model split three ways holds: parameters, and GiB of 16 bytes for each."""

    parameters: int
    state_gib: float


def parallel_split(s: Shape, tensor: int = 1, pipeline: int = 1, expert: int = 1) -> Split:
    """Tensor ranks divide projections and vocabulary, pipeline ranks layers, expert ranks experts; norms stay whole.

    The fullest is the first or last stage: its layers rounded up, and the embedding or the head (Megatron-LM, Table 2
    of arXiv 2205.05198, for the state of one stage). Raises InputError for a split that cannot be made.
    """
    if min(tensor, pipeline, expert) < 1:
        raise InputError(f"tensor, pipeline and expert count ranks, from 1; they are {tensor}, {pipeline}, {expert}.")
    experts = max(x.copies for x in s.linears)
    problems = {
        f"tensor = {tensor} does not divide the {s.heads} attention heads": s.heads % tensor,
        f"tensor = {tensor} does not divide the feed-forward width {s.ffn}": s.ffn % tensor,
        f"pipeline = {pipeline} is more than the {s.layers} layers": pipeline > s.layers,
        f"expert = {expert} needs experts, and the model has none": experts == 1 and expert > 1,
        f"expert = {expert} does not divide the {experts} experts": experts % expert,
    }
    for problem, found in problems.items():
        if found:
            raise InputError(f"{s.name}: {problem}.")
    layer = s.vectors + sum(x.parameters / tensor / (expert if x.copies > 1 else 1) for x in s.linears)
    ends = (s.embedding + s.head if pipeline == 1 else s.embedding) / tensor + s.outer.parameters
    parameters = math.ceil(math.ceil(s.layers / pipeline) * layer + ends)
    return Split(parameters, parameters * sum(STATE_BYTES.values()) / GIB)
