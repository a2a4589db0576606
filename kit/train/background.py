"""Checkpoints that are written while training goes on (schedule.save = "async")."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from transformers import TrainerCallback

from kit.checkpoints.inspect import TRAINER_STATE

PENDING = f"{TRAINER_STATE}.pending"
FOLDERS = 2  # of a checkpoint, each written by one save: weights, and optimizer


class Copies(AsyncStager):
    """Copies of a state dict in host memory, made by a thread into the memory of the copy before.

    torch's DefaultStager does so as well, but that of torch 2.11 frees the memory after its first copy, and fails at
    the second one with KeyError.
    """

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        self.stager = StateDictStager(pin_memory=on_gpu, share_memory=False)
        self.stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.thread = ThreadPoolExecutor(1)

    def stage(self, state_dict: Any, **kwargs: Any) -> Future[Any]:
        """Start the copy; its stream does not wait for work that was given to the GPU before."""
        return self.thread.submit(self._copy, state_dict)

    def _copy(self, state_dict: Any) -> Any:
        if self.stream is None:
            return self.stager.stage(state_dict, non_blocking=False)
        with torch.cuda.stream(self.stream):
            copied = self.stager.stage(state_dict, non_blocking=True)
        self.stream.synchronize()
        return copied

    def close(self) -> None:
        """Free the memory."""
        self.thread.shutdown()
        self.stager.close()  # type: ignore[no-untyped-call]

    def synchronize_staging(self) -> None:
        """Nothing: `stage` returns a Future, which the caller waits for."""
        return


class BackgroundSaves(TrainerCallback):  # type: ignore[misc]
    """The sharded saves of one checkpoint at a time, which threads write from copies in host memory.

    The copies are made while the next step computes its gradients, and the optimizer waits for them. Their memory is
    pinned on GPUs, and used again by the next save: pinning it takes longer than the copy.

    Each save has its own group of gloo ranks, so that its messages and those of training do not mix. Rank 0 completes a
    checkpoint when all ranks have written, and only then gives trainer_state.json its name: a checkpoint without it is
    not complete.
    """

    def __init__(self) -> None:
        self.groups = [distributed.new_group(backend="gloo") for _ in range(FOLDERS)]
        self.stagers = [Copies() for _ in range(FOLDERS)]
        self.copies: list[Future[None]] = []
        self.writes: list[Future[Any]] = []
        self.thread = ThreadPoolExecutor(1)
        self.completion: Future[None] | None = None
        self.blocked_s = 0.0  # by the last save, so far
        self.on_copied: Callable[[float], None] = lambda blocked_s: None
        self.on_complete: Callable[[Path, float], None] = lambda checkpoint, seconds: None

    def save(self, state_dict: Any, *, storage_writer: Any, planner: Any) -> None:
        """Stands in for torch.distributed.checkpoint.save: returns at once.

        The copies start on a stream that does not wait for the last step; check_finite has waited for it.
        """
        number = len(self.writes)
        options = {"storage_writer": storage_writer, "planner": planner, "process_group": self.groups[number]}
        started: Any = async_save(state_dict, **options, async_stager=self.stagers[number])
        self.copies.append(started.staging_completion)
        self.writes.append(started.upload_completion)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait until the weights and the optimizer's state are copied, before the optimizer changes them."""
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        if not self.copies:
            return
        begun = time.monotonic()
        for copy in self.copies:
            copy.result()
        self.copies = []
        self.on_copied(self.blocked_s + time.monotonic() - begun)

    @contextmanager
    def hold_back(self, state: Any) -> Iterator[None]:
        """Have the Trainer write its state under the name PENDING meanwhile. state: a TrainerState."""

        def save_to_json(path: str) -> None:
            type(state).save_to_json(state, str(Path(path).with_name(PENDING)))

        state.save_to_json = save_to_json
        try:
            yield
        finally:
            del state.save_to_json

    def complete(self, checkpoint: Path, check: Callable[[], None], tidy: Callable[[], None]) -> None:
        """When all ranks have written: check the checkpoint, name its state, and tidy up. Only rank 0 calls it.

        `check` raises KitError for a checkpoint that is not usable; that is raised again by `wait` and `stop_on_error`.
        """
        self.completion = self.thread.submit(self._complete, checkpoint, list(self.writes), check, tidy)

    def _complete(
        self, checkpoint: Path, writes: list[Future[Any]], check: Callable[[], None], tidy: Callable[[], None]
    ) -> None:
        begun = time.monotonic()
        for write in writes:
            write.result()  # on rank 0 after the last rank has flushed its files
        check()
        (checkpoint / PENDING).replace(checkpoint / TRAINER_STATE)
        tidy()
        self.on_complete(checkpoint, time.monotonic() - begun)

    def stop_on_error(self) -> None:
        """Raises what went wrong with the last checkpoint, as far as that is known yet."""
        if self.completion is not None and self.completion.done():
            self.completion.result()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises what went wrong."""
        self._wait_for_copies()
        for write in self.writes:
            write.result()
        self.writes = []
        if self.completion is not None:
            self.completion.result()

    def close(self) -> None:
        """Wait for the last checkpoint, and free the memory of the copies. Raises what went wrong."""
        self.wait()
        for stager in self.stagers:
            stager.close()
