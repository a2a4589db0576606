"""Bytes per GPU (weights, activations, gradients, optimizer) in each phase of a step, without torch.

Only a model's shape and a recipe are needed. The formulas are a closed form of what transformers 5, PEFT 0.20,
accelerate 1.15 and TRL 1.16 allocate on each rank, read off their source tensor by tensor; README.md of this folder
lists them. Measured, and not derived: the intervals of kit.forecast.fit, and an adapter's casts under FSDP1. How far
they are from measured peaks: tests/truth/README.md and tests/truth/blind.md.
"""

from dataclasses import dataclass

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.activations import LayerActivations, LossBytes, Terms
from kit.forecast.allocator import rounding
from kit.forecast.layout import Job, Layout
from kit.forecast.shape import Shape
from kit.forecast.sharding import ZERO_BUCKET, Gathered, Gradients

WORKSPACE = 64 * 2**20  # cuBLAS takes 32 MiB on Hopper for each of two threads, forward and autograd


@dataclass(frozen=True)
class Moment:
    """Bytes that a rank holds at one moment of a phase, in addition to what it always holds."""

    gradients: float = 0
    gathered: float = 0
    saved: float = 0
    temporaries: float = 0
    unsharded: float = 0

    @property
    def total(self) -> float:
        """All of it."""
        return self.gradients + self.gathered + self.saved + self.temporaries + self.unsharded

    def terms(self) -> Terms:
        """By the names that results show."""
        return {
            "gradients": self.gradients,
            "gathered weights": self.gathered,
            "saved activations": self.saved,
            "temporaries": self.temporaries,
            "unsharded gradients": self.unsharded,
        }


def _fullest(*moments: Moment) -> Terms:
    return max(moments, key=lambda moment: moment.total).terms()


@dataclass(frozen=True)
class Step:
    """One optimizer step of a job, with what its phases share."""

    job: Job
    layer: LayerActivations
    loss: LossBytes
    gathered: Gathered
    gradients: Gradients

    @classmethod
    def of(cls, job: Job) -> "Step":
        """The step of a job."""
        return cls(job, LayerActivations.of(job), LossBytes.of(job), Gathered.of(job), Gradients.of(job))

    @property
    def _kept_per_layer(self) -> float:
        """Only its input, where the layer is recomputed."""
        return self.layer.inputs if self.job.recomputes else self.layer.kept

    @property
    def _saved(self) -> float:
        """What all layers keep; before an adapter's first norm nothing is trained, so that it keeps no fp32 input."""
        first_norm = 0.0
        if not self.job.full and not self.job.recomputes:
            first_norm = 4 * self.layer.inputs / self.job.layout.compute_bytes
        return self.job.shape.layers * self._kept_per_layer + self.layer.mask - first_norm

    def held(self) -> Terms:
        """What a rank holds all the time."""
        job, layout = self.job, self.job.layout
        weights = (job.frozen.model + job.trained * layout.trained_bytes) / layout.weight_ranks
        several = job.recipe.world_size > 1
        largest = max(linear.inputs * linear.outputs for linear in job.shape.linears)
        return {
            "weights": 0.0 if job.offloaded and job.sharded else weights,
            "optimizer": 0.0 if job.offloaded else job.trained * layout.optimizer_bytes / layout.optimizer_ranks,
            "dequantized weight": largest * layout.compute_bytes if job.path.nf4 else 0,
            # DeepSpeed: two buckets of two bytes an element
            "buckets": 2 * 2 * min(ZERO_BUCKET, job.trained) if job.zero and several else self.gradients.ddp_copy,
            "workspace": 0 if layout.on_cpu else WORKSPACE,
            "allocator rounding": rounding(job),
        }

    def load(self) -> Terms:
        """The weights, and the largest tensor as it is spread over ranks."""
        job = self.job
        largest = job.shape.embedding * job.layout.frozen_bytes if job.sharded else 0
        return {"weights": self.held()["weights"], "largest tensor": largest}

    def forward(self) -> Terms:
        """At the first layer, in a layer, as FSDP2 copies the next one out, or in the loss."""
        waiting = self.gradients.waiting
        passing = self.layer.passing if self.job.recomputes else self.layer.forward
        return _fullest(
            Moment(waiting, self.gathered.first_layer, self.layer.inputs + self.layer.mask),
            Moment(waiting, self.gathered.layers, self._saved, passing),
            Moment(waiting, self.gathered.next_layer, self._saved),
            Moment(waiting, self.gathered.loss, self._saved, self.loss.forward),
        )

    def loss_backward(self) -> Terms:
        """All activations are still there."""
        return Moment(self.gradients.waiting, self.gathered.loss_backward, self._saved, self.loss.backward).terms()

    def last_layer_backward(self) -> Terms:
        """In the last layer, or in the one before while the last one's gradients are reduced."""
        gradients, again = self.gradients, self.layer.kept if self.job.recomputes else 0.0
        temporaries, unsharded = again + self.layer.backward, gradients.embedding + gradients.largest_projection
        return _fullest(
            Moment(gradients.waiting, self.gathered.last_layer, self._saved, temporaries, unsharded),
            Moment(
                gradients.after_last_layer,
                self.gathered.last_layer,
                self._saved - self._kept_per_layer,
                temporaries,
                unsharded + gradients.layer_behind,
            ),
        )

    def first_layer_backward(self) -> Terms:
        """In the first layer, at its end with all of its gradients, or in the second."""
        gradients, saved = self.gradients, self.layer.inputs + self.layer.mask
        running, reducing = self.layer.kept + self.layer.backward, gradients.head + gradients.layer_behind
        gathered = self.gathered.first_layer_backward
        return _fullest(
            Moment(gradients.before_first_layer, gathered, saved, running, reducing + gradients.largest_projection),
            Moment(gradients.before_first_layer, gathered, saved, self.layer.inputs, reducing + gradients.layer),
            Moment(
                gradients.before_second_layer,
                self.gathered.last_layer,
                saved + self.layer.inputs,
                running,
                reducing + gradients.largest_projection,
            ),
        )

    def embedding_backward(self) -> Terms:
        """The embedding's gradient, as it is reduced."""
        gradients = self.gradients
        return Moment(gradients.all_reduced, saved=self.layer.inputs, unsharded=gradients.embedding_reduction).terms()

    def optimizer_step(self) -> Terms:
        """All gradients. DeepSpeed makes fp32 ones of its shard; foreach AdamW has a temporary of each parameter."""
        job, layout = self.job, self.job.layout
        in_fp32 = 4 * job.trained / layout.optimizer_ranks if job.zero else 0
        foreach = job.recipe.schedule.optimizer == "adamw_torch" and not layout.on_cpu and not job.zero
        temporaries = layout.trained_bytes * job.trained / layout.optimizer_ranks if foreach else 0
        return Moment(self.gradients.all_reduced + in_fp32).terms() | {"foreach temporaries": temporaries}

    def phases(self) -> dict[str, Terms]:
        """Bytes by phase and term, once the optimizer has its state; each phase at its peak."""
        held = self.held()
        return {
            "load": self.load(),
            "forward": held | self.forward(),
            "loss backward": held | self.loss_backward(),
            "last-layer backward": held | self.last_layer_backward(),
            "first-layer backward": held | self.first_layer_backward(),
            "embedding backward": held | self.embedding_backward(),
            "optimizer step": held | self.optimizer_step(),
        }


def phases(
    shape: Shape, recipe: Recipe, cluster: Cluster, fused_loss: bool = True, fp32_masters: bool = True
) -> dict[str, Terms]:
    """Bytes per GPU by phase and term, once the optimizer has its state; each phase at its peak.

    fused_loss and fp32_masters off describe older stacks: all logits in the loss, and FSDP training in pure bf16.
    """
    layout = Layout.of(recipe, cluster, fp32_masters)
    return Step.of(Job(shape, recipe, layout, fused_loss)).phases()
