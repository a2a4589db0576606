"""Host: the memory that the processes of one node take, as they load the weights and while they train; no torch."""

from dataclasses import dataclass

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.layout import GIB, Job, Layout
from kit.forecast.shape import Shape

PROCESS_GIB = 1.2  # libraries of a process: the upper end of what CPU processes take (kit.forecast.fit)


@dataclass(frozen=True)
class HostMemory:
    """GiB of one node of a job on GPUs.

    loading: the weights while they are loaded. offloaded: weights, gradients and optimizer state that FSDP keeps there
    in pinned memory. saving: the copies of a save in the background, whose memory stays. processes: libraries.
    """

    loading: float
    offloaded: float
    saving: float
    processes: float

    def terms(self) -> dict[str, float]:
        """By the names that results show, without those that are 0."""
        return {name: size for name, size in vars(self).items() if size}

    @property
    def peak(self) -> float:
        """At its fullest: loading is over when training begins."""
        return max(self.loading, self.offloaded + self.saving) + self.processes

    @property
    def fullest(self) -> str:
        """What the processes do at the peak."""
        if self.loading >= self.offloaded + self.saving:
            return "load the weights"
        return "keep what is offloaded" if self.offloaded else "keep the copies of a save"

    @classmethod
    def of(cls, shape: Shape, recipe: Recipe, cluster: Cluster) -> "HostMemory":
        """Of the node that has most."""
        job, ranks = Job(shape, recipe, Layout.of(recipe, cluster)), recipe.parallel.gpus_per_node
        by_rank = (_offloaded(job) * ranks / GIB, _saving(job) * ranks / GIB)
        return cls(_loading(job) / GIB, *by_rank, PROCESS_GIB * ranks)


def _loading(job: Job) -> float:
    """Bytes of the weights that a node's processes read, by how kit.train.load and accelerate load them.

    FSDP2: each rank reads its shards of safetensors files. FSDP1: one process of each node reads all (accelerate's
    cpu_ram_efficient_loading). Else each process does, before they go to its GPU.
    """
    recipe, ranks = job.recipe, job.recipe.parallel.gpus_per_node
    model = job.shape.total * job.layout.frozen_bytes
    if recipe.model.name.endswith(".json") or not job.sharded or job.zero:  # random weights are made by each process
        return model * ranks
    if recipe.parallel.strategy == "fsdp2":
        return model * ranks / job.layout.weight_ranks
    return model


def _offloaded(job: Job) -> float:
    """Bytes of one rank's shards, with their gradients and optimizer state (FSDP's CPUOffloadPolicy)."""
    if not job.offloaded or not job.sharded:
        return 0.0
    layout = job.layout
    trained = job.trained * (2 * layout.trained_bytes + layout.optimizer_bytes)
    return (job.frozen.model + trained) / layout.weight_ranks


def _saving(job: Job) -> float:
    """Bytes of one rank's copies of what it trains and of the optimizer's state (kit.train.background)."""
    if job.recipe.schedule.save != "async":
        return 0.0
    return job.trained * (job.layout.trained_bytes + job.layout.optimizer_bytes) / job.layout.weight_ranks
