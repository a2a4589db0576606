"""Training: TRL's trainer for a recipe, from the newest complete checkpoint to the last step."""

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import PartialState
from peft import LoraConfig
from transformers import AutoTokenizer
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTConfig, SFTTrainer

from kit import files
from kit.config import models
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset
from kit.slurm.folder import RunFolder
from kit.train import patches
from kit.train.callbacks import Progress, WandbRows
from kit.train.isolation import check_isolation, collate, count_tokens
from kit.train.saves import check_finite, finish_checkpoint, resume_point


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


class Trainer(SFTTrainer):  # type: ignore[misc]
    """TRL's trainer, which also logs its pace and checks what it saves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.pace = Pace(torch.tensor(0))
        self.values_checked = False
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One micro-batch."""
        if self.pace.tokens_before is None:
            self.pace.tokens_before = self.state.num_input_tokens_seen
        self.pace.add(count_tokens(inputs["position_ids"]))
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds step_s and tokens_per_s (of all ranks, since the last log), and corrects TRL's num_tokens."""
        if "loss" in logs:
            total = (self.pace.tokens_before or 0) + int(self.accelerator.reduce(self.pace.tokens).item())
            self.state.num_input_tokens_seen = total  # saved with the checkpoint, so a resumed run counts on
            self._metrics["train"]["num_tokens"] = [total]
            logs |= self.pace.at_loss(self.state.global_step, total)
        else:
            self.pace.leave_out(logs.get("eval_runtime", 0) + logs.get("save_blocked_s", 0))
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save, check what was saved, log the seconds that training was blocked, and only then delete older ones.

        Raises KitError for weights that are not finite, before anything is written, and for an unusable checkpoint.
        """
        begun, args = time.monotonic(), self.args
        check_finite(self.model, self.state.global_step)
        keep, args.save_total_limit = args.save_total_limit, None
        super()._save_checkpoint(model, trial)
        args.save_total_limit = keep
        PartialState().wait_for_everyone()
        if self.is_world_process_zero():
            path = Path(args.output_dir) / f"checkpoint-{self.state.global_step}"
            finish_checkpoint(path, self.model, values=not self.values_checked)
            rotate_checkpoints(args.output_dir, save_total_limit=keep, use_mtime=True)
        self.values_checked = True
        self.log({"save_blocked_s": time.monotonic() - begun})


def is_sharded(recipe: Recipe) -> bool:
    """Whether FSDP shards the weights; accelerate does not use it for a single CPU process."""
    return recipe.parallel.strategy in ("fsdp1", "fsdp2") and (torch.cuda.is_available() or recipe.world_size > 1)


def settings(path: Path, recipe: Recipe, steps: int) -> SFTConfig:
    """The recipe as arguments of TRL's trainer, for a run in the folder `path`."""
    schedule, on_gpu = recipe.schedule, torch.cuda.is_available()
    # FSDP has its own activation checkpointing, which accelerate.yaml switches on.
    checkpointing = recipe.parallel.activation_checkpointing and not is_sharded(recipe)
    return SFTConfig(
        output_dir=str(path / "checkpoints"),
        run_name=path.name,
        report_to="none",  # callbacks.WandbRows
        disable_tqdm=True,
        max_steps=steps,
        per_device_train_batch_size=schedule.micro_batch,
        per_device_eval_batch_size=schedule.eval_batch,
        gradient_accumulation_steps=schedule.grad_accum,
        optim=schedule.optimizer,
        learning_rate=schedule.lr,
        weight_decay=schedule.weight_decay,
        lr_scheduler_type=schedule.scheduler,
        warmup_steps=math.ceil(schedule.warmup_ratio * steps),
        seed=schedule.seed,
        logging_steps=schedule.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # a NaN must be seen
        eval_strategy="steps" if schedule.eval_every else "no",
        eval_steps=schedule.eval_every or None,
        save_strategy="steps",
        save_steps=schedule.save_every or steps,
        save_total_limit=schedule.keep,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        tf32=on_gpu or None,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )


def load_base(recipe: Recipe) -> Any:
    """The base model: in the recipe's dtype on GPUs, in fp32 on CPUs."""
    dtype = getattr(torch, recipe.model.dtype) if torch.cuda.is_available() else torch.float32
    return models.load_model(recipe.model.name, dtype, recipe.model.attention, recipe.schedule.seed)


def build_trainer(
    recipe: Recipe, arguments: SFTConfig, rows: Any, eval_rows: Any, tokenizer: Any, base: Any
) -> Trainer:
    """The trainer of a recipe, on rows of input_ids, labels and seq_lengths, which are already tokenized."""
    trainer = Trainer(
        model=base,
        args=arguments,
        data_collator=collate,
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=_lora(recipe) if recipe.tuning.method == "lora" else None,
    )
    if recipe.parallel.strategy == "fsdp1":
        patches.leave_casts_to_fsdp(trainer.model)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)  # accelerate sets it only under FSDP
    if plugin is not None:
        patches.keep_loss_in_fp32(plugin)
    return trainer


def _lora(recipe: Recipe) -> LoraConfig:
    tuning = recipe.tuning
    all_linear = "all-linear" in tuning.target_modules  # PEFT takes this word only as text, not in a list
    return LoraConfig(
        r=tuning.r,
        lora_alpha=tuning.alpha,
        lora_dropout=tuning.dropout,
        task_type="CAUSAL_LM",
        target_modules="all-linear" if all_linear else list(tuning.target_modules),
    )


def train(run: RunFolder, progress: Progress) -> None:
    """Train from the newest complete checkpoint, or from step 0, to the last step, and write state/result.json.

    Where it is asked to stop earlier, it writes the name of the checkpoint that it saved to state/saved instead. Raises
    KitError where packed documents would see each other, or weights or a save are unusable.
    """
    recipe = run.recipe
    if progress.rank == 0 and recipe.data.packing:
        leak = check_isolation(recipe)
        progress.say(f"leak between packed documents: {leak:.0e} ({recipe.model.attention})")
    dataset = Dataset(Path(run.info["dataset"]))
    splits = dataset.manifest["splits"]
    trainer = build_trainer(
        recipe,
        settings(run.path, recipe, recipe.optimizer_steps(splits["train"]["rows"])),
        dataset.rows("train"),
        dataset.rows("eval") if "eval" in splits else None,
        AutoTokenizer.from_pretrained(dataset.path / "tokenizer"),
        load_base(recipe),
    )
    trainer.add_callback(WandbRows())
    trainer.add_callback(progress)
    checkpoint = resume_point(run, progress.say)
    patches.load_checkpoints_with_own_reader()
    trainer.args.eval_on_start = trainer.eval_dataset is not None and checkpoint is None
    trainer.train(resume_from_checkpoint=checkpoint)
    step = trainer.state.global_step
    if step < trainer.state.max_steps:
        if progress.rank == 0:
            files.write(run.state_folder.saved, f"checkpoint-{step}\n")
        return
    if trainer.eval_dataset is not None and step not in _evaluations(trainer):
        trainer.evaluate()
    if progress.rank == 0:
        files.write_json(run.state_folder.result, _result(trainer, resumed=checkpoint is not None))


def _evaluations(trainer: Trainer) -> dict[int, float]:
    """Eval loss by step, also of the steps before a resume."""
    return {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}


def _result(trainer: Trainer, resumed: bool) -> dict[str, Any]:
    """The content of state/result.json."""
    rows, evaluations = [row for row in trainer.state.log_history if "loss" in row], _evaluations(trainer)
    step_seconds = [row["step_s"] for row in rows if "step_s" in row]
    return {
        "steps": trainer.state.global_step,
        "loss": rows[-1]["loss"] if rows else None,
        "resumed": resumed,
        "eval_loss_before": evaluations.get(0),
        "eval_loss_after": evaluations.get(trainer.state.global_step),
        "step_s": statistics.median(step_seconds) if step_seconds else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }
