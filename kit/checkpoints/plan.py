"""Interval: how often to save, the bound that decides, what it costs, and what a restart has to read."""

import math
import statistics
from dataclasses import dataclass

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.slurm.run import Run
from kit.watch.metrics import Metrics
from kit.watch.series import Series

MTBF_GPU_HOURS = 54 * 24 * 16_384 / 419  # Llama 3 (arXiv 2407.21783, 3.3.4): 419 unexpected interruptions in 54 days
RESTORE_GB_S = {  # as published set-ups give them: Oracle's mount targets (80 Gb/s each, four for 8 nodes), 100 GbE
    "25 GbE": 3, "BeeGFS hot tier, one node (2 to 4 GB/s)": 3, "one 80 Gb/s mount target, or a RAID of NVMe": 10,
    "NFS over 100 GbE": 12, "four 80 Gb/s mount targets": 40, "eight NVMe drives": 50,
}  # fmt: skip
_SHARDED = "each of {ranks} ranks writes {each:.3g} GB of its own, rank 0 then .metadata; a restart reads it back once"
IO_PATTERNS = {
    "ddp": "rank 0 writes {gb:.3g} GB while the others wait; at a restart each of {ranks} ranks reads all of it",
    "fsdp1": _SHARDED,
    "fsdp2": _SHARDED,
    "hybrid": "the {shard} ranks of one replica write {part:.3g} GB each; at a restart every replica reads them",
    "zero1": "rank 0 writes the weights, each of {ranks} ranks its part of the optimizer; a restart reads likewise",
    "zero2": "rank 0 writes the weights, each of {ranks} ranks its part of the optimizer; a restart reads likewise",
    "zero3": "each of {ranks} ranks writes {each:.3g} GB of its own; a restart with other ranks must gather them first",
    "tensor": "each rank writes columns or rows of every matrix; other ranks at a restart read parts of all files",
    "pipeline": "each stage writes its layers; the stages' sizes differ, and the largest decides how long a save takes",
}


@dataclass(frozen=True)
class Plan:
    """How often to save (seconds of work between saves), the bound that decided, and the storage a run takes (GB).

    write_s is until a save is on disk, blocked_s for how long training waits. waste is the part of the time that ends
    up in no saved work; rule_s and rule_waste are those of the common rule max(30 min, 20 writes); steps is the
    interval in optimizer steps, 0 where a step's time is not known.
    """

    interval_s: float
    steps: int
    bound: str
    bounds_s: dict[str, float]
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

    def lines(self) -> list[str]:
        """The plan for a person."""
        bounds = ", ".join(f"{name} {seconds / 60:,.0f} min" for name, seconds in self.bounds_s.items())
        sizes = ", ".join(f"{name} {gb:,.1f}" for name, gb in self.storage_gb.items())
        times = ", ".join(f"{name} {seconds:,.3g}" for name, seconds in self.restore_s.items())
        steps = f" (save_every = {self.steps})" if self.steps else ""
        return [
            f"save every {self.interval_s / 60:,.0f} min of work{steps}: the {self.bound} bound won ({bounds})",
            f"a save takes {self.write_s:.2g} s and blocks training for {self.blocked_s:.2g} s",
            f"one failure in {self.mtbf_h:,.0f} h; waste {self.waste:.2%}",
            f"the rule max(30 min, 20 writes) would save every {self.rule_s / 60:,.0f} min: waste {self.rule_waste:.2%}"
            + ("; it loses more than the 30 min it promises" if self.rule_s > 1800 else ""),
            f"storage over the run's life, GB: {sizes}",
            f"a restart reads for, in s: {times}",
            *([f"reads and writes: {self.io}"] if self.io else []),
            *self.problems,
        ]


def useful(interval: float, cost: float, mtbf: float, restart: float = 0, limit: float = math.inf) -> float:
    """The part of the time, 0 to 1, that ends up in saved work; all in seconds.

    A renewal argument: each attempt reads for `restart`, then works `interval` and saves for `cost` in turn, until a
    failure (exponential, one in mtbf) or the time limit ends it; what was not saved is lost, and the next one begins.
    E[saved] = interval * sum over n of P(alive after the n-th save), E[time] = mtbf (1 - exp(-limit / mtbf)).
    """
    period = interval + cost
    saves = (limit - restart) / period
    saves = math.floor(saves + 1e-9) if saves < math.inf else saves
    alive = math.exp(-period / mtbf)
    saved = interval * math.exp(-restart / mtbf) * alive * (1 - alive**saves) / -math.expm1(-period / mtbf)
    return saved / (mtbf * -math.expm1(-limit / mtbf))


def best(cost: float, mtbf: float, restart: float = 0, limit: float = math.inf) -> float:
    """The interval of most useful work.

    Without a limit the root of T = M (1 - exp(-(T + C) / M)), which sqrt(2 C M) approximates (Young 1974, CACM 17, 9;
    Daly 2006, FGCS 22, 3). A limit is filled with a whole number of saves: where n (T + C) is the same for all n, the
    terms that the limit adds to `useful` are too, so the best n is one of the two beside the unlimited optimum.
    """
    interval = math.sqrt(2 * cost * mtbf)
    for _ in range(50):  # Newton
        decay = math.exp(-(interval + cost) / mtbf)
        interval -= (interval - mtbf * (1 - decay)) / (1 - decay)
    if limit == math.inf:
        return interval
    exact = (limit - restart) / (interval + cost)
    fitting = [(limit - restart) / max(1, n) - cost - 1e-3 for n in (math.floor(exact), math.ceil(exact))]
    return max(fitting, key=lambda t: useful(t, cost, mtbf, restart, limit) if t > 0 else t)


def plan(
    checkpoint_gb: float, write_gb_s: float, gpus: int, time_limit_h: float = 0, max_loss_min: float = 0,
    keep: int = 3, merged_gb: float = 0, base_gb: float = 0, mtbf_gpu_h: float = MTBF_GPU_HOURS, margin_s: float = 300,
    blocked_s: float = 0, restart_s: float = 0, preempted_h: float = 0, notice_s: float = 0, step_s: float = 0,
    nodes: int = 1, io: str = "",
) -> Plan:  # fmt: skip
    """The interval that saves most work within what one may lose; 0 is no limit, no preemption, or not known.

    blocked_s: what a save costs training, the whole write where 0. preempted_h: one preemption in so many hours.
    notice_s: from a signal that the job saves on to its end; where a write fits, neither the limit nor a preemption
    loses work. Rotation deletes after the new checkpoint is written, hence keep + 1; 20% of the volume stays free.
    """
    write = max(checkpoint_gb / write_gb_s, blocked_s)
    noticed, cost, failures = notice_s >= write, blocked_s or write, gpus / (mtbf_gpu_h * 3600)
    preemptions = 1 / (preempted_h * 3600) if preempted_h and not noticed else 0
    mtbf, limit = 1 / (failures + preemptions), math.inf
    bound = "preemption" if preemptions > failures else "Young/Daly"
    bounds = {bound: best(cost, mtbf)}
    interval = bounds[bound]
    if time_limit_h and not noticed:
        limit = time_limit_h * 3600 - margin_s
        bounds["time limit"] = best(cost, mtbf, restart_s, limit)
        bound = bound if abs(bounds["time limit"] / interval - 1) < 0.05 else "time limit"
        interval = bounds["time limit"]
    if max_loss_min:
        bounds["largest loss"] = loss = max_loss_min * 60 - (write - cost)  # work since a save began is not durable
        if loss < interval:
            bound, interval = "largest loss", loss
            if limit < math.inf and loss > 0:
                interval = (limit - restart_s) / math.ceil((limit - restart_s) / (loss + cost)) - cost - 1e-3
    problems = []
    if interval < write:
        problems.append(
            f"A write takes {write:.0f} s, but the {bound} asks for one every {bounds[bound]:.0f} s: not feasible; "
            f"faster storage, fewer bytes or a longer {bound} would help. The interval shown is one write long."
        )
        interval = write
    rule, kept = (
        max(1800, 20 * write),
        {"checkpoints": (keep + 1) * checkpoint_gb, "merged": merged_gb, "base": base_gb},
    )
    storage = kept | {"free": sum(kept.values()) / 4, "total": sum(kept.values()) * 1.25}
    return Plan(
        interval, max(1, int(interval / step_s)) if step_s else 0, bound, bounds, write, mtbf / 3600,
        1 - useful(interval, cost, mtbf, restart_s, limit), rule,
        1 - useful(rule, cost, mtbf, restart_s, limit), cost, storage,
        {name: (checkpoint_gb + nodes * base_gb) / rate for name, rate in RESTORE_GB_S.items()}, tuple(problems), io,
    )  # fmt: skip


def plan_for(recipe: Recipe, cluster: Cluster, blocked_s: float = 0) -> Plan:
    """The plan for a recipe on a cluster, from the forecast's sizes and the profile's storage and time limit.

    blocked_s: what a save of such a run has been seen to block training for, in seconds; 0 is not known.
    """
    from kit.forecast.timing import disk_rate, predict

    forecast, p = predict(recipe, cluster), recipe.parallel
    storage, wall_h = forecast.storage, forecast.time.wall_h or math.inf
    days, _, clock = cluster.slurm.time.rpartition("-")
    hours, minutes, *_ = [*map(int, clock.split(":")), 0] if ":" in clock else (0, int(clock or 0))
    limit_h, hybrid = 24 * int(days or 0) + hours + minutes / 60, p.sharding == "hybrid"
    gb, ranks = storage.checkpoint_gb, recipe.world_size
    return plan(
        gb, disk_rate(cluster, cluster.paths.runs) / 1e9, ranks, time_limit_h=limit_h if limit_h < wall_h else 0,
        keep=recipe.schedule.keep, merged_gb=storage.merged_gb, base_gb=storage.merged_gb,
        restart_s=p.nodes * storage.merged_gb * 1e9 / disk_rate(cluster, cluster.paths.hf_home),
        step_s=forecast.time.step_s or 0, nodes=p.nodes, blocked_s=blocked_s,
        io=IO_PATTERNS["hybrid" if hybrid else p.strategy].format(
            gb=gb, ranks=ranks, each=gb / ranks, shard=p.gpus_per_node, part=gb / p.gpus_per_node
        ),
    )  # fmt: skip


def save_blocks(run: Run) -> dict[int, float]:
    """Seconds for which each save blocked training, by step, from the run's W&B log."""
    metrics = Metrics(run.path)
    while metrics.poll():
        pass
    blocks = metrics.series.get("train/save_blocked_s", Series.empty())
    return dict(zip(map(int, blocks.steps), blocks.values, strict=True))


def plan_for_run(run: Run) -> Plan:
    """The plan for a run's recipe and cluster, by the median of what its saves have blocked training for."""
    return plan_for(run.recipe, run.cluster, statistics.median(save_blocks(run).values() or [0]))
