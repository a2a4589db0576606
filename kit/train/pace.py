"""How fast training goes, and what each rank waits for: measured on the host, a few microseconds a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch


class Mark(NamedTuple):
    """A moment at which the training loss was logged. tokens: of all ranks, since the start of the run."""

    time: float
    step: int
    tokens: int


@dataclass
class Pace:
    """Seconds and tokens between two logs of the training loss, without evaluations and saves.

    tokens: of this rank, since this process started; on the device, so that counting does not wait for it.
    tokens_before: of all ranks, before this process started; None until the first step.
    """

    tokens: torch.Tensor
    tokens_before: int | None = None
    last: Mark | None = None

    def add(self, tokens: torch.Tensor) -> None:
        """Count the tokens of a micro-batch."""
        self.tokens = self.tokens.to(tokens.device) + tokens

    def at_loss(self, step: int, tokens: int) -> dict[str, float]:
        """step_s and tokens_per_s since the last call; empty at the first call, and twice at one step."""
        now, before = Mark(time.monotonic(), step, tokens), self.last
        self.last = now
        if before is None or step == before.step:
            return {}
        seconds = now.time - before.time
        return {
            "step_s": seconds / (step - before.step),
            "tokens_per_s": (tokens - before.tokens) / seconds,
        }

    def leave_out(self, seconds: float) -> None:
        """Seconds in which training waited for something else."""
        if self.last is not None:
            self.last = self.last._replace(time=self.last.time + seconds)


class Wait(IntEnum):
    """What a rank waits for: its next batches, its own GPU at the end of a step, and then the slowest rank."""

    DATA = 0
    GPU = 1
    RANKS = 2


@dataclass
class Waits:
    """Seconds in which this rank waited since the last log, and the steps of that time.

    A rank that never waits for its GPU starts kernels more slowly than the GPU runs them. Collectives inside of a step
    make the GPUs of all ranks wait for the slowest one as well; that time is in Wait.GPU.
    """

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(Wait))
    steps: int = 0

    @contextmanager
    def timed(self, kind: Wait) -> Iterator[None]:
        """The block is a wait."""
        begun = time.monotonic()
        yield
        self.seconds[kind] += time.monotonic() - begun

    def row(self, accelerator: Any) -> dict[str, float]:
        """Seconds a step since the last call, for W&B, equal on all ranks; empty without a step. Call it on all ranks.

        wait_data_s and wait_ranks_s are those of the rank that waited longest, wait_gpu_s those of the rank that waited
        least; slowest_rank waited least for the others.
        """
        own = torch.tensor([*self.seconds, self.steps], dtype=torch.float64)
        self.seconds, self.steps = [0.0] * len(Wait), 0
        on_gpu = accelerator.device.type == "cuda"
        every = accelerator.gather(own.float().to(accelerator.device).unsqueeze(0)).cpu()
        if not every[0, -1]:
            return {}
        each = every[:, :-1] / every[:, -1:]
        row = {"wait_data_s": float(each[:, Wait.DATA].max())}
        if len(each) > 1:
            row["wait_ranks_s"] = float(each[:, Wait.RANKS].max())
            row["slowest_rank"] = float(each[:, Wait.RANKS].argmin())
        if on_gpu:
            row["wait_gpu_s"] = float(each[:, Wait.GPU].min())
        return row
