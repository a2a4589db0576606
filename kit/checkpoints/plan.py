"""Plan how often to save: the interval that loses least work, the storage it takes, and how long a restart reads."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.show import Gigabytes, Part, Result, Table, format_bytes, format_duration
from kit.slurm.run import Run
from kit.watch.metrics import Metrics
from kit.watch.series import Series

# Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions of 16,384 GPUs in 54 days.
MTBF_GPU_HOURS = 54 * 24 * 16_384 / 419
MARGIN_S = 300  # of a time limit, for starting and ending
RULE_LEAST_S = 1800
RESTORE_GB_S = {  # of published set-ups: Oracle's mount targets (80 Gb/s each, four for 8 nodes), 100 GbE
    "25 GbE": 3, "BeeGFS hot tier, one node (2 to 4 GB/s)": 3, "one 80 Gb/s mount target, or a RAID of NVMe": 10,
    "NFS over 100 GbE": 12, "four 80 Gb/s mount targets": 40, "eight NVMe drives": 50,
}  # fmt: skip
_SHARDED = "each of {ranks} ranks writes {rank}, then rank 0 writes .metadata; a restart reads all of it once"
_ZERO = "rank 0 writes the weights, each of {ranks} ranks its part of the optimizer; a restart reads the same"
IO_PATTERNS = {
    "ddp": "rank 0 writes {all} while the others wait; at a restart each of {ranks} ranks reads all of it",
    "fsdp1": _SHARDED,
    "fsdp2": _SHARDED,
    "hybrid": "{node_ranks} ranks, one replica, write {node_rank} each; at a restart all replicas read it",
    "zero1": _ZERO,
    "zero2": _ZERO,
    "zero3": "each of {ranks} ranks writes {rank}; a restart with another number of ranks gathers them first",
}


class Bound(StrEnum):
    """What decides how often to save."""

    FAILURES = "Young/Daly"
    TIME_LIMIT = "time limit"
    RUN_LENGTH = "length of the run"


@dataclass(frozen=True)
class SavePlan(Result):
    """How often to save, in seconds of work between saves, and what decided; storage of a run in GB.

    write_s: until a save is on disk. blocked_s: how long training waits. waste: the part of the time, 0 to 1, that ends
    up in no saved work. rule_s and rule_waste: those of the common rule max(30 min, 20 writes). steps: the interval in
    optimizer steps, 0 where a step's time is unknown. restore_s: how long a restart reads, by kind of storage.
    """

    interval_s: float
    steps: int
    bound: Bound
    bounds_s: dict[Bound, float]
    write_s: float
    mtbf_h: float
    waste: float
    rule_s: float
    rule_waste: float
    blocked_s: float
    storage_gb: dict[str, float]
    restore_s: dict[str, float]
    problems: tuple[str, ...]
    io: str = ""

    def parts(self) -> Iterable[Part]:
        """The interval and its reasons, then tables of bounds, storage and restarts."""
        if self.bound is Bound.RUN_LENGTH:
            others = min(seconds for bound, seconds in self.bounds_s.items() if bound is not Bound.RUN_LENGTH)
            yield (
                f"Saving at the end is enough (save_every = 0): the run takes {format_duration(self.interval_s)}, less "
                f"than the {format_duration(others)} between two saves that would lose least."
            )
        else:
            steps = f" (save_every = {self.steps})" if self.steps else ""
            yield f"Save every {format_duration(self.interval_s)} of work{steps}; the {self.bound} decides."
        yield from (f"Problem: {problem}" for problem in self.problems)
        blocked = format_duration(self.blocked_s)
        yield f"A save takes {format_duration(self.write_s)} and blocks training for {blocked}."
        lost = "" if self.bound is Bound.RUN_LENGTH else f"; {self.waste:.2%} of the time ends up in no saved work"
        yield f"One failure in {self.mtbf_h:,.0f} h{lost}."
        broken = "; it loses more than the 30 min that it promises" if self.rule_s > RULE_LEAST_S else ""
        rule = f"The rule max(30 min, 20 writes) saves every {format_duration(self.rule_s)}"
        yield f"{rule} and wastes {self.rule_waste:.2%}{broken}."
        if self.io:
            yield f"Reads and writes: {self.io}."
        bounds = [(bound.value, format_duration(seconds)) for bound, seconds in self.bounds_s.items()]
        yield Table(("bound", "save every"), bounds)
        yield Table(("storage of the run", "size"), [(name, Gigabytes(gb)) for name, gb in self.storage_gb.items()])
        restarts = [(name, format_duration(seconds)) for name, seconds in self.restore_s.items()]
        yield Table(("a restart reads from", "takes"), restarts)


def useful_part(interval: float, cost: float, mtbf: float, restart: float = 0, limit: float = math.inf) -> float:
    """The part of the time, 0 to 1, that ends up in saved work; all arguments in seconds.

    A renewal argument: each attempt reads for `restart`, then works `interval` and saves for `cost` in turn, until a
    failure (exponential, one in mtbf) or the time limit ends it; what was not saved is lost, and the next one begins.
    E[saved] = interval * sum over n of P(alive after the n-th save), E[time] = mtbf (1 - exp(-limit / mtbf)).
    """
    period = interval + cost
    saves = max(0.0, (limit - restart) / period)
    saves = math.floor(saves + 1e-9) if saves < math.inf else saves
    alive = math.exp(-period / mtbf)
    saved = interval * math.exp(-restart / mtbf) * alive * (1 - alive**saves) / -math.expm1(-period / mtbf)
    return saved / (mtbf * -math.expm1(-limit / mtbf))


def best_interval(cost: float, mtbf: float, restart: float = 0, limit: float = math.inf) -> float:
    """The interval in seconds with the largest `useful_part`.

    Without a limit the root of T = M (1 - exp(-(T + C) / M)), which sqrt(2 C M) approximates (Young 1974, CACM 17, 9;
    Daly 2006, FGCS 22, 3). A limit is filled with an integer number n of saves: where n (T + C) is the same for all n,
    the terms that the limit adds to `useful_part` are too, so the best n is one of the two next to the unlimited
    optimum.
    """
    interval = math.sqrt(2 * cost * mtbf)
    for _ in range(50):  # Newton
        decay = math.exp(-(interval + cost) / mtbf)
        interval -= (interval - mtbf * (1 - decay)) / (1 - decay)
    if limit == math.inf:
        return interval
    exact = (limit - restart) / (interval + cost)
    candidates = [_filling_interval(n, cost, restart, limit) for n in (math.floor(exact), math.ceil(exact))]
    return max(candidates, key=lambda t: useful_part(t, cost, mtbf, restart, limit) if t > 0 else t)


def _filling_interval(saves: int, cost: float, restart: float, limit: float) -> float:
    """The interval at which so many saves fill a time limit, less a millisecond so that the last one fits."""
    return (limit - restart) / max(1, saves) - cost - 1e-3


def plan_saves(
    *,
    checkpoint_gb: float,
    write_gb_s: float,
    gpus: int,
    nodes: int = 1,
    time_limit_s: float = math.inf,
    blocked_s: float = 0,
    restart_s: float = 0,
    step_s: float = 0,
    keep: int = 3,
    merged_gb: float = 0,
    base_gb: float = 0,
    io: str = "",
    run_s: float = math.inf,
    restore_gb_s: Mapping[str, float] = RESTORE_GB_S,
) -> SavePlan:
    """The interval that saves most work. Sizes are in GB (1e9 bytes), times in seconds of wall time.

    time_limit_s: of the job; infinite without a limit, or where the job ends earlier. blocked_s: how long a save
    stops training; 0 means for the complete write. restart_s: what a restart reads before its first step, without the
    checkpoint. step_s: one optimizer step; 0 means unknown. run_s: of the complete run; infinite where it is unknown.
    restore_gb_s: storage, from which restarts are compared.
    Rotation deletes after the new checkpoint is written, hence keep + 1 checkpoints; 20 % of the volume stays free.
    """
    write = max(checkpoint_gb / write_gb_s, blocked_s)
    cost = blocked_s or write
    mtbf = MTBF_GPU_HOURS * 3600 / gpus
    limit = max(1.0, time_limit_s - MARGIN_S)
    unlimited = best_interval(cost, mtbf)
    bound, interval, bounds = Bound.FAILURES, unlimited, {Bound.FAILURES: unlimited}
    if limit < math.inf:
        interval = bounds[Bound.TIME_LIMIT] = best_interval(cost, mtbf, restart_s, limit)
        if abs(interval / unlimited - 1) >= 0.05:
            bound = Bound.TIME_LIMIT
    problems = []
    if interval < write:
        problems.append(
            f"A write takes {write:.0f} s, but the {bound} asks for one every {bounds[bound]:.0f} s: not feasible. "
            f"Use faster storage, fewer bytes or a longer {bound}. The interval shown is one write long."
        )
        interval = write
    if run_s < interval:
        bound, interval = Bound.RUN_LENGTH, run_s
        bounds[bound] = run_s
    rule = max(RULE_LEAST_S, 20 * write)
    kept = {"checkpoints": (keep + 1) * checkpoint_gb, "merged": merged_gb, "base": base_gb}
    used, restore_gb = sum(kept.values()), checkpoint_gb + nodes * base_gb
    return SavePlan(
        interval_s=interval,
        steps=max(1, int(interval / step_s)) if step_s and bound is not Bound.RUN_LENGTH else 0,
        bound=bound,
        bounds_s=bounds,
        write_s=write,
        mtbf_h=mtbf / 3600,
        waste=1 - useful_part(interval, cost, mtbf, restart_s, limit),
        rule_s=rule,
        rule_waste=1 - useful_part(rule, cost, mtbf, restart_s, limit),
        blocked_s=cost,
        storage_gb=kept | {"free": used / 4, "total": used * 1.25},
        restore_s={name: restore_gb / rate for name, rate in restore_gb_s.items()},
        problems=tuple(problems),
        io=io,
    )


def plan_for_recipe(recipe: Recipe, cluster: Cluster, blocked_s: float = 0) -> SavePlan:
    """The plan for a recipe on a cluster, from the forecast's sizes and the profile's storage and time limit.

    blocked_s: how long saves of such a run were measured to block training, in seconds; 0 means unknown.
    """
    from kit.forecast.steptime import disk_rate
    from kit.forecast.timing import predict

    forecast, parallel = predict(recipe, cluster), recipe.parallel
    storage, run_s = forecast.storage, (forecast.time.wall_h or math.inf) * 3600
    ends_earlier = run_s <= cluster.slurm.limit_s
    own = {"the storage of this run": disk_rate(cluster, cluster.paths.runs) / 1e9}
    return plan_saves(
        checkpoint_gb=storage.checkpoint_gb,
        write_gb_s=disk_rate(cluster, cluster.paths.runs) / 1e9,
        gpus=recipe.world_size,
        nodes=parallel.nodes,
        time_limit_s=math.inf if ends_earlier else cluster.slurm.limit_s,
        blocked_s=blocked_s,
        restart_s=parallel.nodes * storage.merged_gb * 1e9 / disk_rate(cluster, cluster.paths.hf_home),
        step_s=forecast.time.step_s or 0,
        keep=recipe.schedule.keep,
        merged_gb=storage.merged_gb,
        base_gb=storage.merged_gb,
        io=_io_pattern(recipe, storage.checkpoint_gb),
        run_s=run_s,
        restore_gb_s=own | (RESTORE_GB_S if cluster.nodes.gpus else {}),
    )


def _io_pattern(recipe: Recipe, gb: float) -> str:
    """Which ranks write and read how much, in a sentence."""
    parallel = recipe.parallel
    pattern = IO_PATTERNS["hybrid" if parallel.sharding == "hybrid" else parallel.strategy]
    return pattern.format(
        all=format_bytes(1e9 * gb),
        ranks=recipe.world_size,
        rank=format_bytes(1e9 * gb / recipe.world_size),
        node_ranks=parallel.gpus_per_node,
        node_rank=format_bytes(1e9 * gb / parallel.gpus_per_node),
    )


def plan_for_run(run: Run) -> SavePlan:
    """The plan for a run's recipe and cluster, with the median of the seconds that its saves blocked training."""
    return plan_for_recipe(run.recipe, run.cluster, statistics.median(save_blocks(run).values() or [0]))


def save_blocks(run: Run) -> dict[int, float]:
    """Seconds for which each save blocked training, by step, from the run's W&B log."""
    metrics = Metrics(run.path)
    while metrics.poll():
        pass
    blocks = metrics.series.get("train/save_blocked_s", Series.empty())
    return dict(zip(map(int, blocks.steps), blocks.values, strict=True))
