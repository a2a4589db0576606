"""Training: TRL's trainer for a recipe, from the newest complete checkpoint to the last step."""

import json
import math
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from peft import PeftModel, get_peft_model
from transformers import AutoTokenizer, PrinterCallback, set_seed
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTConfig, SFTTrainer

from kit import files
from kit.config import models
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset
from kit.errors import KitError
from kit.forecast.attention import varlen_gap
from kit.forecast.limits import find_compiler
from kit.slurm.folder import RunFolder
from kit.slurm.states import Phase
from kit.train import patches
from kit.train.attention import VARLEN
from kit.train.background import BackgroundSaves
from kit.train.base import check_fp8_gradient, check_nf4_shards, use_fp8, use_nf4
from kit.train.batch import collator, count_tokens
from kit.train.callbacks import Progress, WandbRows
from kit.train.compile import compile_layers, use_cache_folder
from kit.train.isolation import check_isolation
from kit.train.load import LogLoad, lora_config, prepare_base
from kit.train.output import write_durably
from kit.train.pace import Pace, Wait, Waits
from kit.train.resume import ExactResumes
from kit.train.saves import check_finite, finish_checkpoint, record_ranks, resume_point, shards_saved_from_the_gpu
from kit.train.shards import ShardedBase
from kit.train.split import SplitSaves
from kit.trainers.trl import shards


class Trainer(ExactResumes, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer, which also logs its pace and checks what it saves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.pace, self.waits = Pace(torch.tensor(0)), Waits()
        self.values_checked = False
        self.progress: Progress | None = None  # gets what training does
        self.background: BackgroundSaves | None = None
        self.sums: dict[str, torch.Tensor] = {}  # labelled tokens, entropy and hits of "train" and "eval"
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One micro-batch."""
        if self.pace.tokens_before is None:
            self.pace.tokens_before = self.state.num_input_tokens_seen
        self.pace.add(count_tokens(inputs["position_ids"]))
        return super().training_step(model, inputs, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of a step."""
        with self.waits.timed(Wait.DATA):
            return super().get_batch_samples(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the labelled tokens of all ranks and micro-batches of a step, as TRL's.

        TRL reads entropy and accuracy after each micro-batch, which waits for the GPU; here their sums stay on the
        device until the next log. Mixtures of experts with a loss for their routers keep TRL's.
        """
        if return_outputs or self.aux_loss_enabled:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs | {"use_cache": False}, fused_lm_head=True)
        labelled = outputs.label_mask.sum()
        found = torch.stack([labelled.float(), outputs.entropy.detach().sum(), outputs.is_top1.sum().float()])
        mode = "train" if self.model.training else "eval"
        self.sums[mode] = found + self.sums[mode] if mode in self.sums else found
        if num_items_in_batch is None:
            return -outputs.log_probs.sum() / labelled.clamp(min=1)
        # num_items_in_batch counts the tokens of all ranks, and gradients are averaged over the ranks.
        groups = self.accelerator.num_processes // self.get_tp_size()  # ranks that split a layer have the same tokens
        ranks = groups if self.args.average_tokens_across_devices else 1
        return -outputs.log_probs.sum() * ranks / torch.as_tensor(num_items_in_batch).clamp(min=1)

    def _average_sums(self, mode: str) -> None:
        """Hand entropy and accuracy since the last log, over the tokens of all ranks, to TRL's log."""
        if mode in self.sums:
            tokens, entropy, hits = self.accelerator.reduce(self.sums.pop(mode)).tolist()
            self._metrics[mode]["entropy"] = [entropy / max(1.0, tokens)]
            self._metrics[mode]["mean_token_accuracy"] = [hits / max(1.0, tokens)]
            if mode == "train":
                self._metrics[mode]["loss_tokens"] = [tokens / self.get_tp_size()]  # since the last log, of all ranks

    def _run_epoch(self, **options: Any) -> None:
        """transformers trains at least one step after a resume, also from the checkpoint of the last step."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds step_s and tokens_per_s (of all ranks, since the last log), and corrects TRL's num_tokens."""
        if "eval_loss" in logs:
            self._average_sums("eval")
        if self.background:
            self.background.stop_on_error()
        if "loss" in logs:
            self._average_sums("train")
            new = int(self.accelerator.reduce(self.pace.tokens).item()) // self.get_tp_size()
            total = (self.pace.tokens_before or 0) + new
            self.state.num_input_tokens_seen = total  # saved with the checkpoint, so a resumed run counts on
            self._metrics["train"]["num_tokens"] = [total]
            logs |= self.pace.at_loss(self.state.global_step, total) | self.waits.row(self.accelerator)
        else:
            self.pace.leave_out(logs.get("eval_runtime", 0) + logs.get("save_blocked_s", 0))
        super().log(logs, start_time)

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        return self.progress.during(phase) if self.progress else nullcontext()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's."""
        with self._during(Phase.EVALUATING):
            return super().evaluate(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers' own, but a checkpoint of ZeRO-3 without adapters has its weights only in DeepSpeed's files.

        transformers would write those files here, too, and again with the optimizer.
        """
        if not (_internal_call and self.is_deepspeed_enabled and _is_partitioned(self.model)):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save, check what was saved, log the seconds that training was blocked, and only then delete older ones.

        In the background this waits for the save before, and leaves the check and the rest to a thread.

        Raises KitError for weights that are not finite, before anything is written, and for an unusable checkpoint.
        """
        begun = time.monotonic()
        with self._during(Phase.SAVING):
            self._save_and_check(model, trial)
        seconds = time.monotonic() - begun
        if self.background:
            self.background.blocked_s = seconds  # it is logged when the copies are made
        else:
            self.log({"save_blocked_s": seconds})

    def _save_and_check(self, model: Any, trial: Any) -> None:
        args, saves = self.args, self.background
        check_finite(self.model, self.state.global_step)
        path = Path(args.output_dir) / f"checkpoint-{self.state.global_step}"
        if saves:
            saves.wait()
        if self.is_world_process_zero():
            record_ranks(path, self.accelerator, args, self.get_tp_size())
        keep, args.save_total_limit = args.save_total_limit, None
        with shards_saved_from_the_gpu(self.accelerator), saves.hold_back(self.state) if saves else nullcontext():
            super()._save_checkpoint(model, trial)
        args.save_total_limit = keep
        PartialState().wait_for_everyone()
        if self.is_world_process_zero():
            check = partial(finish_checkpoint, path, self.model, values=not self.values_checked)
            tidy = partial(rotate_checkpoints, args.output_dir, save_total_limit=keep, use_mtime=True)
            if saves:
                saves.complete(path, check, tidy)
            else:
                check()
                tidy()
        self.values_checked = True


class SplitTrainer(SplitSaves, Trainer):
    """The trainer of a model whose layers are split over ranks."""


def _is_partitioned(model: Any) -> bool:
    """Whether ZeRO-3 spreads a model without adapters over the ranks."""
    return not isinstance(model, PeftModel) and hasattr(next(model.parameters()), "ds_tensor")


def is_sharded(recipe: Recipe) -> bool:
    """Whether FSDP shards the weights."""
    return shards(recipe, on_gpus=torch.cuda.is_available())


def settings(path: Path, recipe: Recipe, steps: int, measures: bool = False) -> SFTConfig:
    """The recipe as arguments of TRL's trainer, for a run in the folder `path`; to measure, nothing is saved."""
    schedule, on_gpu = recipe.schedule, torch.cuda.is_available()
    # FSDP has its own activation checkpointing, which accelerate.yaml switches on; compiled layers have another.
    checkpointing = recipe.parallel.recomputes and not is_sharded(recipe) and not recipe.parallel.compiles
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
        save_strategy="no" if measures else "steps",
        save_steps=schedule.save_every or steps,
        save_total_limit=schedule.keep,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        tf32=on_gpu or None,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": _recomputes_reentrantly(recipe)} if checkpointing else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # they are the same on all ranks, and with model.base fp8 as large as the model
        remove_unused_columns=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )


def _recomputes_reentrantly(recipe: Recipe) -> bool:
    """Whether activation checkpointing needs torch's older way: ZeRO-3's hooks around frozen weights do."""
    return recipe.parallel.strategy == "zero3" and recipe.tuning.method != "full"


def build_trainer(
    recipe: Recipe, arguments: SFTConfig, rows: Any, eval_rows: Any, tokenizer: Any, base: Any
) -> Trainer:
    """The trainer of a recipe, on rows of input_ids, labels and seq_lengths, which are already tokenized.

    `base`, a model or a ShardedBase, changes: it gets the adapters, and its weights the type of model.base. Raises
    KitError where the recipe compiles a model whose layers are unknown, and InputError where bitsandbytes is needed and
    absent.
    """
    patches.project_frozen_head_once()
    sharded = base if isinstance(base, ShardedBase) else None
    trainer = (SplitTrainer if recipe.parallel.split else Trainer)(
        model=adapt(sharded.model if sharded else base, recipe),
        args=arguments,
        data_collator=collator(recipe),
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
    )
    patches.leave_casts_to_autocast(trainer.model)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)  # accelerate sets it only under FSDP
    if plugin is not None:
        patches.keep_loss_in_fp32(plugin)
    if sharded:
        sharded.attach(trainer.accelerator)
    if recipe.parallel.compiles:
        _compile(trainer.model, recipe)
    if recipe.schedule.save == "async":
        trainer.background = BackgroundSaves()
        trainer.background.on_copied = lambda blocked_s: trainer.log({"save_blocked_s": blocked_s})
        trainer.add_callback(trainer.background)
        patches.save_checkpoints_by(trainer.background.save)
    return trainer


def adapt(base: Any, recipe: Recipe) -> Any:
    """The base model with adapters, its frozen weights in the type of model.base; itself for a full fine-tune.

    Adapters begin with random numbers, which are those of schedule.seed on all ranks.
    """
    if recipe.tuning.method == "full":
        return base
    set_seed(recipe.schedule.seed)
    if recipe.model.base == "nf4":
        use_nf4(base, is_sharded(recipe))
        base.is_loaded_in_4bit = True  # PEFT asks for it
    # ZeRO-3 gathers small weights in one buffer, so adapters have the type of the base, not PEFT's fp32.
    model = get_peft_model(base, lora_config(recipe), autocast_adapter_dtype=recipe.parallel.strategy != "zero3")
    if recipe.model.base == "nf4":
        del base.is_loaded_in_4bit  # TRL would round the adapters to bf16
    if recipe.model.base == "fp8":
        use_fp8(model)
    return model


def _compile(model: Any, recipe: Recipe) -> None:
    recompute = recipe.parallel.recomputes and not is_sharded(recipe)
    if not compile_layers(model, recompute, packed=recipe.data.packing):
        raise KitError(
            f"parallel.compile is on, but transformers does not say which modules of {recipe.model.name} are its "
            "layers. Set parallel.compile to off."
        )


def without_missing_compiler(recipe: Recipe, progress: Progress) -> Recipe:
    """The recipe, without compiled layers where this node has no C compiler: the launch cannot always know that."""
    if not recipe.parallel.compiles or find_compiler():
        return recipe
    progress.say("parallel.compile is off: this node has no C compiler with Python's headers")
    return recipe.override(**{"parallel.compile": "off"})


def train(run: RunFolder, progress: Progress) -> None:
    """Train from the newest complete checkpoint, or from step 0, to the last step, and write state/result.json.

    Where it is asked to stop earlier, it writes the name of the checkpoint that it saved to state/saved instead. Raises
    KitError where packed documents would see each other, or weights or a save are unusable.
    """
    recipe = without_missing_compiler(run.recipe, progress)
    if recipe.data.packing and recipe.model.attention_used != VARLEN and (gap := _varlen_gap(recipe)):
        progress.say(f"attention {recipe.model.attention_used}, not varlen: {gap}")
    if recipe.parallel.compiles:
        use_cache_folder(run.path)
        progress.say("compiling the layers: the first step, and the first evaluation, take longer")
    if progress.rank == 0 and recipe.data.packing:
        leak = check_isolation(recipe)
        progress.say(f"leak between packed documents: {leak:.0e} ({recipe.model.attention_used})")
    if progress.rank == 0 and recipe.model.base == "fp8":
        error = check_fp8_gradient(recipe.parallel.compiles)
        progress.say(f"gradients through a layer in fp8 are off by {error:.0%}")
    progress.compiles = recipe.parallel.compiles
    progress.enter(Phase.LOADING)
    dataset = Dataset(Path(run.info["dataset"]))
    splits = dataset.manifest["splits"]
    arguments = settings(run.path, recipe, recipe.optimizer_steps(splits["train"]["rows"]), run.measures)
    if recipe.model.base == "nf4" and is_sharded(recipe):
        patches.gather_bytes()
        check_nf4_shards()
    checkpoint = resume_point(run, progress.say)
    base, load = prepare_base(recipe, checkpoint, progress.say)
    trainer = build_trainer(
        recipe,
        arguments,
        dataset.rows("train"),
        dataset.rows("eval") if "eval" in splits and not run.measures else None,
        AutoTokenizer.from_pretrained(dataset.path / "tokenizer"),
        base,
    )
    trainer.remove_callback(PrinterCallback)  # which prints each row as a dict; `progress` has a line for it
    trainer.add_callback(WandbRows(run, progress.say))
    trainer.add_callback(progress)
    trainer.add_callback(LogLoad(trainer, load))
    trainer.progress, progress.waits = progress, trainer.waits
    trainer.has_weights = load.from_checkpoint
    patches.load_checkpoints_with_own_reader()
    trainer.args.eval_on_start = trainer.eval_dataset is not None and checkpoint is None
    if trainer.background:
        trainer.background.on_complete = progress.report_complete
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.background:
        trainer.background.close()
    step = trainer.state.global_step
    if step < trainer.state.max_steps:
        if progress.rank == 0:
            write_durably(run.state_folder.saved, f"checkpoint-{step}\n", progress.say)
        return
    if trainer.eval_dataset is not None and step not in _evaluations(trainer):
        trainer.evaluate()
    if progress.rank == 0:
        result = _result(trainer, resumed=checkpoint is not None)
        write_durably(run.state_folder.result, json.dumps(result, indent=1, default=str) + "\n", progress.say)


def _varlen_gap(recipe: Recipe) -> str:
    """Why packed rows of this model cannot have variable-length attention here; empty where they could."""
    folder, on_gpus = Path(models.source(recipe.model.name)), torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if on_gpus else ""
    return varlen_gap(files.read_json(folder / "config.json"), recipe.model.dtype, gpu, on_gpus)


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
