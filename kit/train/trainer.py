"""Training: the job's side, started on every rank by `accelerate launch -m kit.train RUN_FOLDER`."""

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import socket
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed.checkpoint
import wandb
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import broadcast_object_list, reduce
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer, TrainerCallback
from transformers.integrations import WandbCallback
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTConfig, SFTTrainer

from kit import files
from kit.checkpoints import inspect as checkpoint
from kit.checkpoints import sharded as shards
from kit.checkpoints.formats.base import ProblemKind
from kit.config import models as model
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset
from kit.errors import KitError
from kit.slurm.run import Run
from kit.train.isolation import check_isolation, collate, count_tokens

RANK = int(os.environ.get("RANK", 0))
ON_GPU = torch.cuda.is_available()
READ_BACK = 8e9  # bytes; rank 0 reads about 1 GB/s while the others wait


def enable_cpu_fsdp() -> None:
    """Let accelerate shard CPU processes: 1.15 picks MULTI_CPU for gloo ranks and drops the FSDP plugin."""
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


class Trainer(SFTTrainer):  # type: ignore[misc]
    """TRL's trainer, with the pace logged beside the loss."""

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One micro-batch; its tokens are counted on the device, without waiting for it."""
        if not hasattr(self, "tokens"):
            self.tokens, self.tokens_before = torch.tensor(0), self.state.num_input_tokens_seen
        self.tokens = self.tokens.to(inputs["position_ids"].device) + count_tokens(inputs["position_ids"])
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds step_s and tokens_per_s (of all ranks, since the last log) and corrects TRL's num_tokens."""
        now, step = time.monotonic(), self.state.global_step
        before, at_step, tokens_then = getattr(self, "last_log", (now, step, 0))
        if "loss" in logs:
            total = self.tokens_before + int(self.accelerator.reduce(self.tokens).item())
            self.state.num_input_tokens_seen = total  # goes into the checkpoint, so that a resumed run counts on
            self._metrics["train"]["num_tokens"] = [total]
            if step > at_step:
                seconds = now - before
                logs |= {"step_s": seconds / (step - at_step), "tokens_per_s": (total - tokens_then) / seconds}
            self.last_log = (now, step, total)
        elif hasattr(self, "last_log"):  # neither evaluation nor saving is part of the pace
            away = logs.get("eval_runtime", 0) + logs.get("save_blocked_s", 0)
            self.last_log = (before + away, at_step, tokens_then)
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save, look at what was saved, log for how long that blocked training, and only then delete older ones.

        Raises KitError for weights that are not finite, before anything is written, and for a checkpoint of no use.
        """
        begun, args = time.monotonic(), self.args
        check_finite(self.model, self.state.global_step)
        keep, args.save_total_limit = args.save_total_limit, None
        super()._save_checkpoint(model, trial)
        args.save_total_limit = keep
        PartialState().wait_for_everyone()
        if RANK == 0:
            path = Path(args.output_dir) / f"checkpoint-{self.state.global_step}"
            finish_checkpoint(path, self.model, values=not hasattr(self, "saved"))
            rotate_checkpoints(args.output_dir, save_total_limit=keep, use_mtime=True)
        self.saved = True
        self.log({"save_blocked_s": time.monotonic() - begun})


class Rows(WandbCallback):  # type: ignore[misc]
    """Rows for W&B. Its service may end, as by Slurm's SIGTERM to all processes of a step: training goes on without."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One row; the checkpoint's trainer_state.json holds it too."""
        try:
            super().on_log(args, state, control, **kwargs)
        except Exception:
            traceback.print_exc()
            self._wandb = None


class Watcher(TrainerCallback):  # type: ignore[misc]
    """Tells how far the run is."""

    def __init__(self, run: Run, console: TextIO) -> None:
        self.run, self.console, self.terminated = run, console, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first moment at which the pace can be measured; memory counts from here, not from loading."""
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        self.began, self.first_step = time.monotonic(), state.global_step
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "terminated", True))  # until here it ends the rank

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Once any rank is told to stop, all save after this very step and stop.

        The job's script tells rank 0, which runs beside it, by the file state/stop; Slurm preempts with a SIGTERM to
        every process of a step. A save also logs, so that a resumed run averages its losses over the same steps.
        """
        told = self.terminated or (RANK == 0 and (self.run.path / "state" / "stop").exists())
        if reduce(torch.tensor(float(told), device=args.device)).item():
            control.should_save = control.should_training_stop = True
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """A line in the job's log and state/progress.json, from rank 0."""
        if "eval_loss" in logs:
            self.say(f"step {state.global_step}/{state.max_steps}  eval loss {logs['eval_loss']:.4f}")
        elif "save_blocked_s" in logs:
            saved = f"saved checkpoint-{state.global_step}, for which training waited {logs['save_blocked_s']:.2f} s"
            self.say(f"step {state.global_step}/{state.max_steps}  {saved}")
        elif "loss" in logs:
            pace = (time.monotonic() - self.began) / max(1, state.global_step - self.first_step)
            left = pace * (state.max_steps - state.global_step)
            self.say(
                f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  {pace:.2f} s/step  "
                f"{_duration(left)} left"
            )
            if RANK == 0:
                progress = {"step": state.global_step, "max_steps": state.max_steps, "eta_s": left, "time": time.time()}
                files.write_json(self.run.path / "state" / "progress.json", progress)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Let FSDP2 forget that lm_head is still to run: TRL's loss reads its weight and never calls it.

        torch before 2.13 would otherwise not gather that group again after a save, and a tied model's next step fails.
        """
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module._get_fsdp_state()._modules_to_run_forward.clear()

    def say(self, text: str) -> None:
        """A line in the job's log, from rank 0."""
        if RANK == 0:
            print(text, file=self.console, flush=True)


def check_finite(trained: Any, step: int) -> None:
    """Raises KitError on every rank where a weight that is trained holds NaN or infinity on any: none comes back."""
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in trained.parameters() if p.requires_grad]
    bad = torch.stack([~torch.isfinite(part.detach()).all() for part in parts]).sum()
    if count := int(reduce(bad, "sum").item()):
        raise KitError(
            f"The weights hold NaN or infinity at step {step} (in {count} tensors, over all ranks), so the run stops "
            "here and saves nothing; older checkpoints stay. Look where the loss rose first, and lower schedule.lr."
        )


def finish_checkpoint(path: Path, trained: Any, values: bool = False) -> None:
    """Adds adapter_config.json, gives every file the umask's mode, and checks keys, bytes and ranks.

    `values` reads it back as well, where that takes seconds. Raises KitError: better now than in 8 hours.
    """
    config = getattr(trained, "peft_config", None)
    if config:
        config["default"].save_pretrained(path)  # a sharded checkpoint holds none
    for file in path.rglob("*"):
        file.chmod(files.umask_mode(0o777 if file.is_dir() else 0o666))  # safetensors 0.8 writes 0600
    world = PartialState().num_processes
    found = checkpoint.inspect(path, world=world)
    if values and not found.problems and found.bytes < READ_BACK:
        found = checkpoint.inspect(path, values=True, world=world)
    # untrained, as it is while the learning rate warms up
    problems = [p.message for p in found.problems if p.kind is not ProblemKind.UNTRAINED]
    expected = sum("lora_" in name for name, _ in trained.named_parameters()) if config else 0
    if found.lora_tensors != expected:
        problems.append(f"it holds {found.lora_tensors} of {expected} adapter tensors")
    if problems:
        raise KitError(
            f"The checkpoint {path} is not usable, so the run stops here: {'; '.join(problems)}. "
            "A known cause: peft 0.21 with FSDP1 saves an empty adapter; use fsdp2 or peft 0.20."
        )


def settings(path: Path, recipe: Recipe, steps: int) -> SFTConfig:
    """The recipe in the trainer's words, for a run in the folder `path`."""
    s = recipe.schedule
    plain_checkpointing = recipe.parallel.activation_checkpointing and not is_sharded(recipe)
    return SFTConfig(
        output_dir=str(path / "checkpoints"), run_name=path.name, report_to="none", disable_tqdm=True,
        max_steps=steps, per_device_train_batch_size=s.micro_batch, per_device_eval_batch_size=s.eval_batch,
        gradient_accumulation_steps=s.grad_accum, optim=s.optimizer, learning_rate=s.lr, weight_decay=s.weight_decay,
        lr_scheduler_type=s.scheduler, warmup_steps=math.ceil(s.warmup_ratio * steps), seed=s.seed,
        logging_steps=s.log_every, logging_first_step=True,
        logging_nan_inf_filter=False,  # a NaN must be seen
        eval_strategy="steps" if s.eval_every else "no", eval_steps=s.eval_every or None,
        save_strategy="steps", save_steps=s.save_every or steps, save_total_limit=s.keep,
        use_cpu=not ON_GPU, bf16=ON_GPU, tf32=ON_GPU or None,
        gradient_checkpointing=plain_checkpointing,  # FSDP's own is switched on in accelerate.yaml
        gradient_checkpointing_kwargs={"use_reentrant": False} if plain_checkpointing else None,
        ddp_find_unused_parameters=False, remove_unused_columns=False, max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip


def is_sharded(recipe: Recipe) -> bool:
    """Whether weights are spread over ranks; a single CPU process cannot be."""
    return recipe.parallel.strategy in ("fsdp1", "fsdp2") and (ON_GPU or recipe.world_size > 1)


def load_base(recipe: Recipe) -> Any:
    """The base model: in the recipe's dtype on GPUs, in fp32 on CPUs."""
    dtype = getattr(torch, recipe.model.dtype) if ON_GPU else torch.float32
    return model.load_model(recipe.model.name, dtype, recipe.model.attention, recipe.schedule.seed)


def build_trainer(
    recipe: Recipe, arguments: SFTConfig, rows: Any, eval_rows: Any, tokenizer: Any, base: Any
) -> Trainer:
    """The trainer of a recipe, on rows of input_ids, labels and seq_lengths that are never tokenised here."""
    targets = recipe.tuning.target_modules
    lora = LoraConfig(
        r=recipe.tuning.r, lora_alpha=recipe.tuning.alpha, lora_dropout=recipe.tuning.dropout, task_type="CAUSAL_LM",
        target_modules="all-linear" if "all-linear" in targets else list(targets),  # PEFT knows the word only bare
    )  # fmt: skip
    trainer = Trainer(
        model=base, args=arguments, data_collator=collate, train_dataset=rows, eval_dataset=eval_rows,
        processing_class=tokenizer, peft_config=lora if recipe.tuning.method == "lora" else None,
    )  # fmt: skip
    if recipe.parallel.strategy == "fsdp1":
        leave_casts_to_fsdp(trainer.model)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        # With an output_dtype the loss itself is cast to bf16: steps of 1/128 near 1.1. It stays fp32 without.
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)
    return trainer


def leave_casts_to_fsdp(adapted: torch.nn.Module) -> None:
    """Have PEFT not cast what its layers read: FSDP1 does, for each unit.

    PEFT casts to the type of the adapter's weights, fp32 or, while they are gathered, bf16. When checkpointing runs a
    layer again, others are gathered than before; with dropout torch then ends the run with a CheckpointError.
    """
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.cast_input_dtype_enabled = False


def train(run: Run, watcher: Watcher) -> None:
    """From the newest complete checkpoint, or the start, to the last step, and leaves state/result.json.

    Told to stop before, it leaves state/saved, which names the checkpoint to go on from.
    """
    if RANK == 0 and run.recipe.data.packing:
        watcher.say(
            f"packed documents see each other: {check_isolation(run.recipe):.0e} ({run.recipe.model.attention})"
        )
    dataset = Dataset(Path(run.info["dataset"]))
    splits, recipe = dataset.manifest["splits"], run.recipe
    trainer = build_trainer(
        recipe,
        settings(run.path, recipe, recipe.optimizer_steps(splits["train"]["rows"])),
        dataset.rows("train"),
        dataset.rows("eval") if "eval" in splits else None,
        AutoTokenizer.from_pretrained(dataset.path / "tokenizer"),
        load_base(recipe),
    )
    trainer.add_callback(Rows())
    trainer.add_callback(watcher)
    last = resume_point(run, watcher.say)
    # accelerate looks it up at each load
    torch.distributed.checkpoint.FileSystemReader = shards.Reader  # type: ignore[attr-defined]
    trainer.args.eval_on_start = trainer.eval_dataset is not None and last is None
    trainer.train(resume_from_checkpoint=last)
    if (step := trainer.state.global_step) < trainer.state.max_steps:
        if RANK == 0:
            files.write(run.path / "state" / "saved", f"checkpoint-{step}\n")
        return
    if trainer.eval_dataset is not None and step not in _evaluations(trainer):
        trainer.evaluate()
    if RANK == 0:
        files.write_json(run.path / "state" / "result.json", _result(trainer, last is not None))


def resume_point(run: Run, say: Callable[[str], None]) -> str | None:
    """The newest complete checkpoint, which rank 0 picks for all; half-written ones after it are put aside."""
    found: list[str | None] = [None]
    if RANK == 0:
        for path in reversed(there := run.checkpoints()):
            if checkpoint.complete(path, run.recipe.world_size):
                found = [str(path)]
                say(f"resuming from {path.name}")
                break
            aside = path.with_name(path.name.replace("checkpoint", "incomplete"))
            say(f"{path.name} is not complete: put aside as {aside.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        if there and not found[0]:
            say("no checkpoint is complete: training starts anew")
    broadcast_object_list(found)
    return found[0]


def _evaluations(trainer: Trainer) -> dict[int, float]:
    """Eval loss by step, those before a resume too."""
    return {h["step"]: h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h}


def _result(trainer: Trainer, resumed: bool) -> dict[str, Any]:
    history, evals = [h for h in trainer.state.log_history if "loss" in h], _evaluations(trainer)
    paces = [h["step_s"] for h in history if "step_s" in h]
    return {
        "steps": trainer.state.global_step, "loss": history[-1]["loss"] if history else None, "resumed": resumed,
        "eval_loss_before": evals.get(0), "eval_loss_after": evals.get(trainer.state.global_step),
        "step_s": statistics.median(paces) if paces else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None,
    }  # fmt: skip


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def own_log(run: Run) -> TextIO:
    """Send this rank's output to logs/rank-<n>.log; returns the job's log, for lines that matter to everyone."""
    console = os.fdopen(os.dup(1), "w")
    log = os.open(run.path / "logs" / f"rank-{RANK:03}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return console


def main() -> int:
    """Exit code 0, or the error's own; what went wrong stands in the job's log and in the rank's."""
    run = Run.attach(sys.argv[1])
    console = own_log(run)
    watcher = Watcher(run, console)
    if not ON_GPU:
        enable_cpu_fsdp()
    # TRL and PEFT still use names that transformers 5.24 warns of, on every rank
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing`", FutureWarning)
    try:
        train(run, watcher)
        with contextlib.suppress(OSError):  # its service has gone
            wandb.teardown()  # finish() may return before the log is on disk
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except (Exception, CheckpointException) as error:  # DCP's is no Exception
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        traceback.print_exc()
        if watcher.terminated:  # the launcher ends all ranks when one has died: this one's error only follows from that
            os.kill(os.getpid(), signal.SIGTERM)
        where = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        first = str(error).strip().split("\n")[0]
        print(f"[rank {RANK} on {where}] {type(error).__name__}: {first} (logs/rank-{RANK:03}.log)", file=console)
        return error.exit_code if isinstance(error, KitError) else 1
    finally:
        console.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
