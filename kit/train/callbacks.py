"""Callbacks of the Trainer: rows for W&B, progress lines in the job's log, and the save before a stop."""

import contextlib
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import wandb
from accelerate.utils import reduce
from transformers import TrainerCallback
from transformers.integrations import WandbCallback
from transformers.integrations.integration_utils import rewrite_logs

from kit import files
from kit.checkpoints.inspect import TRAINER_STATE
from kit.show import format_duration
from kit.slurm.folder import RunFolder
from kit.slurm.states import Phase, StepReport
from kit.train import patches
from kit.train.pace import Wait, Waits
from kit.watch.metrics import Metrics

STEP_NAME = "train/global_step"  # of WandbCallback
# Keys of the log history that are no metric of a step: "step" itself, and what WandbCallback puts into the summary.
SUMMARY = {
    "step", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos",
}  # fmt: skip


class WandbRows(WandbCallback):  # type: ignore[misc]
    """Logs rows to W&B.

    Training goes on without it where W&B's service has ended, as by Slurm's SIGTERM to the job's step, or where W&B
    cannot start. The checkpoint's trainer_state.json has the rows as well: those that were not on disk when the job was
    killed are logged again when it resumes.
    """

    def __init__(self, run: RunFolder, say: Callable[[str], None]) -> None:
        super().__init__()
        self.folder = run.path
        self.say = say

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start W&B, and log the rows up to the checkpoint that the logs of earlier starts lack."""
        with self._without_wandb_on_error():
            lost = lost_rows(self.folder, state.log_history) if state.is_world_process_zero else []
            super().on_train_begin(args, state, control, **kwargs)
            for row in lost:
                wandb.log(row)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One row."""
        with self._without_wandb_on_error():
            super().on_log(args, state, control, **kwargs)

    @contextlib.contextmanager
    def _without_wandb_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._wandb = None
            self.say(f"W&B does not log any more ({type(error).__name__}); training goes on")


def lost_rows(folder: Path, history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a trainer's log history from the first one on that the W&B logs in `folder` lack.

    A reader lets the rows of a later start replace those of the same steps, so the rows after the first missing one are
    repeated.
    """
    if not history:
        return []
    metrics = Metrics(folder)
    while metrics.poll():
        pass
    recorded = {name: set(series.steps) for name, series in metrics.series.items()}
    rows = [
        (entry["step"], rewrite_logs({key: entry[key] for key in entry if key not in SUMMARY})) for entry in history
    ]
    for index, (step, row) in enumerate(rows):
        if any(step not in recorded.get(name, ()) for name, value in row.items() if isinstance(value, int | float)):
            return [row | {STEP_NAME: step} for step, row in rows[index:] if row]
    return []


class Progress(TrainerCallback):  # type: ignore[misc]
    """Writes progress to the job's log and to state/progress.json, and ends training early when that is asked for.

    console: the job's log. terminated: whether this rank has caught a SIGTERM.
    """

    def __init__(self, run: RunFolder, rank: int, console: TextIO) -> None:
        self.rank = rank
        self.console = console
        self.state_folder = run.state_folder
        self.terminated = False
        self.began = 0.0
        self.first_step = 0
        self.progress_is_written = True
        self.waits = Waits()
        self.phase = Phase.STARTING
        self.compiles = False

    def enter(self, phase: Phase) -> None:
        """Write down what training does from now on; only displays read it."""
        self.phase = phase
        if self.rank == 0:
            facts = {"phase": phase.value, "since": time.time(), "compiles": self.compiles}
            with contextlib.suppress(OSError):
                files.write_json(self.state_folder.phase, facts)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """A phase, after which the one before goes on."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Time, and the peak of memory, count from here, without loading; a SIGTERM no longer ends the process."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.began, self.first_step = time.monotonic(), state.global_step
        self.enter(Phase.FIRST_STEP)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self.terminated = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop on all ranks after this step if any rank was asked to stop.

        The job script asks rank 0, which runs on the same node, by the file state/stop. Slurm preempts with a SIGTERM
        to every process of a step. A save also logs, so that a resumed run averages its losses over the same steps.
        """
        if self.phase is Phase.FIRST_STEP:
            self.enter(Phase.TRAINING)
        asked = self.terminated or (self.rank == 0 and self._stop_exists())
        with self.waits.timed(Wait.GPU):  # which the next line would do as well
            if args.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        with self.waits.timed(Wait.RANKS):
            anyone_asked = reduce(torch.tensor(float(asked), device=args.device)).item()
        self.waits.steps += 1
        if anyone_asked:
            control.should_save = control.should_training_stop = True
        control.should_log |= control.should_save

    def _stop_exists(self) -> bool:
        try:
            return self.state_folder.stop.exists()
        except OSError:  # a file system that does not answer now; it is looked at again after the next step
            return False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """A line for an evaluation, a save or a training loss."""
        at = f"step {state.global_step}/{state.max_steps}"
        if "eval_loss" in logs:
            self.say(f"{at}  eval loss {logs['eval_loss']:.4f}")
        elif "save_blocked_s" in logs:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            word = "saved" if (path / TRAINER_STATE).exists() else "writing"
            self.say(f"{at}  {word} {path.name} (training blocked {logs['save_blocked_s']:.2f} s)")
        elif "base_load_gb" in logs:
            gigabytes, rate = logs["base_load_gb"], logs["base_load_gb_s"]
            self.say(f"base read into the shards: {gigabytes:.2f} GB in {logs['base_load_s']:.2f} s ({rate:.2f} GB/s)")
        elif "loss" in logs:
            self._report_loss(at, state, logs["loss"])

    def _report_loss(self, at: str, state: Any, loss: float) -> None:
        pace = (time.monotonic() - self.began) / max(1, state.global_step - self.first_step)
        left = pace * (state.max_steps - state.global_step)
        self.say(f"{at}  loss {loss:.4f}  {pace:.2f} s/step on average  {format_duration(left)} left")
        if self.rank == 0:
            next_s = pace * state.logging_steps
            self._write_progress(StepReport(state.global_step, state.max_steps, left, time.time(), next_s))

    def _write_progress(self, report: StepReport) -> None:
        """Nothing but displays reads this file, so training goes on where it cannot be written; that is said once."""
        try:
            files.write_json(self.state_folder.progress, asdict(report))
            self.progress_is_written = True
        except OSError as error:
            if self.progress_is_written:
                self.say(f"{self.state_folder.progress} cannot be written ({error.strerror}); training goes on")
            self.progress_is_written = False

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """See the patch."""
        patches.forget_pending_forwards(model)

    def report_complete(self, checkpoint: Path, seconds: float) -> None:
        """A line for a checkpoint that was written in the background, this long after training went on."""
        self.say(f"{checkpoint.name} is complete ({seconds:.2f} s in the background)")

    def say(self, text: str) -> None:
        """A line in the job's log, from rank 0; lost where the log cannot be written."""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                print(text, file=self.console, flush=True)
