"""Checkpoints that are written while training goes on (schedule.save = "async")."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.checkpoint.state_dict_saver import async_save

from kit.checkpoints.inspect import TRAINER_STATE

PENDING = f"{TRAINER_STATE}.pending"
FOLDERS = 2  # of a checkpoint, each written by one save: weights, and optimizer


class BackgroundSaves:
    """The sharded saves of one checkpoint at a time, which threads write from copies in host memory.

    Each save has its own group of gloo ranks, so that its messages and those of training do not mix. Rank 0 completes a
    checkpoint when all ranks have written, and only then gives trainer_state.json its name: a checkpoint without it is
    not complete.
    """

    def __init__(self) -> None:
        self.groups = [distributed.new_group(backend="gloo") for _ in range(FOLDERS)]
        self.writes: list[Future[Any]] = []
        self.thread = ThreadPoolExecutor(1)
        self.completion: Future[None] | None = None
        self.on_complete: Callable[[Path, float], None] = lambda checkpoint, seconds: None

    def save(self, state_dict: Any, *, storage_writer: Any, planner: Any) -> None:
        """Stands in for torch.distributed.checkpoint.save: returns when this rank's part is copied."""
        group = self.groups[len(self.writes)]
        options = {"storage_writer": storage_writer, "planner": planner, "process_group": group}
        written: Any = async_save(state_dict, **options)
        self.writes.append(written)

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
        for write in self.writes:
            write.result()
        self.writes = []
        if self.completion is not None:
            self.completion.result()
