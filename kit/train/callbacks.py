"""Callbacks of the Trainer: rows for W&B, progress lines in the job's log, and the save before a stop."""

import signal
import time
import traceback
from typing import Any, TextIO

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback
from transformers.integrations import WandbCallback

from kit import files
from kit.show import format_duration
from kit.slurm.folder import RunFolder
from kit.train import patches


class WandbRows(WandbCallback):  # type: ignore[misc]
    """Logs rows to W&B. Training goes on where W&B's service has ended, as by Slurm's SIGTERM to the job's step."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One row; the checkpoint's trainer_state.json has it as well."""
        try:
            super().on_log(args, state, control, **kwargs)
        except Exception:
            traceback.print_exc()
            self._wandb = None


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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Time, and the peak of memory, count from here, without loading; a SIGTERM no longer ends the process."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.began, self.first_step = time.monotonic(), state.global_step
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self.terminated = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop on all ranks after this step if any rank was asked to stop.

        The job script asks rank 0, which runs on the same node, by the file state/stop. Slurm preempts with a SIGTERM
        to every process of a step. A save also logs, so that a resumed run averages its losses over the same steps.
        """
        asked = self.terminated or (self.rank == 0 and self.state_folder.stop.exists())
        if reduce(torch.tensor(float(asked), device=args.device)).item():
            control.should_save = control.should_training_stop = True
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """A line for an evaluation, a save or a training loss."""
        at = f"step {state.global_step}/{state.max_steps}"
        if "eval_loss" in logs:
            self.say(f"{at}  eval loss {logs['eval_loss']:.4f}")
        elif "save_blocked_s" in logs:
            self.say(f"{at}  saved checkpoint-{state.global_step} (training blocked {logs['save_blocked_s']:.2f} s)")
        elif "loss" in logs:
            self._report_loss(at, state, logs["loss"])

    def _report_loss(self, at: str, state: Any, loss: float) -> None:
        pace = (time.monotonic() - self.began) / max(1, state.global_step - self.first_step)
        left = pace * (state.max_steps - state.global_step)
        self.say(f"{at}  loss {loss:.4f}  {pace:.2f} s/step  {format_duration(left)} left")
        if self.rank == 0:
            facts = {"step": state.global_step, "max_steps": state.max_steps, "eta_s": left, "time": time.time()}
            files.write_json(self.state_folder.progress, facts)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """See the patch."""
        patches.forget_pending_forwards(model)

    def say(self, text: str) -> None:
        """A line in the job's log, from rank 0."""
        if self.rank == 0:
            print(text, file=self.console, flush=True)
