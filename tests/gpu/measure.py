"""One arm of speed.py, in a process: `python tests/gpu/measure.py SPEC.json`, also under accelerate's launcher.

The slow imports come first; then the process waits until speed.py says that the GPU is free. Model and adapters are
random, of the shape in the spec's config.json; the rows are those that speed.py has packed. Nothing of the kit is
imported at the top, since Unsloth's packages and an older kit are on the path of some arms instead.
"""

import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

RANK = int(os.environ.get("RANK", 0))
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "liger-kernel", "bitsandbytes", "unsloth", "triton")
KERNELS = {  # classes of GPU kernels by parts of their names, the first that is found
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "xmma"),
    "nccl": ("nccl",),
    "triton": ("triton", "_liger", "_rms_norm", "_rope", "_swiglu"),
    "optimizer": ("multi_tensor_apply", "adam"),
    "copies": ("copy", "memcpy", "memset", "cat", "fill"),
    "elementwise": ("elementwise", "reduce", "softmax"),
}


def read_rows(path: Path) -> Any:
    """The packed rows that speed.py wrote, as a datasets.Dataset."""
    import datasets

    stored = np.load(path)
    documents, rows = np.split(stored["lengths"], stored["row_starts"][1:]), []
    bounds = np.cumsum([0, *(int(lengths.sum()) for lengths in documents)])
    for lengths, begin, end in zip(documents, bounds[:-1], bounds[1:], strict=True):
        tokens = {name: stored[name][begin:end].tolist() for name in ("input_ids", "labels")}
        rows.append(tokens | {"seq_lengths": lengths.tolist()})
    return datasets.Dataset.from_list(rows)


def random_model(spec: dict[str, Any], attention: str | None = None) -> Any:
    """The model of the spec with random weights, made on this process's GPU; the same in every arm. On CPUs in fp32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(spec["model"])
    torch.manual_seed(0)
    with torch.device(device()):
        return AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16 if spec["on_gpu"] else torch.float32,
            attn_implementation=attention or spec.get("attention") or "sdpa",
        )


def device() -> str:
    """This process's device."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


# ---- trainers -------------------------------------------------------------------------------------------------------


def kit_trainer(spec: dict[str, Any], rows: Any) -> Any:
    """kit.train's trainer for the spec's recipe, with the settings of a run; nothing is saved."""
    from transformers import AutoTokenizer
    from transformers.trainer_utils import SaveStrategy

    from kit.config.recipe import Recipe
    from kit.train import trainer

    recipe = Recipe.load(Path(spec["recipe"]))
    arguments = trainer.settings(Path(spec["work"]), recipe, spec["steps"])
    arguments.save_strategy = SaveStrategy.NO
    tokenizer = AutoTokenizer.from_pretrained(Path(spec["model"]).parent)
    return trainer.build_trainer(recipe, arguments, rows, None, tokenizer, _kit_base(recipe, spec))


def _kit_base(recipe: Any, spec: dict[str, Any]) -> Any:
    """The recipe's base model, made on the GPU, where the kit would take it there by way of the CPU."""
    from kit.config import models
    from kit.train import trainer

    models.load_model = lambda name, dtype, attention=None, seed=0: random_model(spec, attention)
    if not hasattr(trainer, "load_base"):  # the kit before has it there
        from kit.train import load

        return load.load_base(recipe)
    return trainer.load_base(recipe)


def trl_trainer(spec: dict[str, Any], rows: Any) -> Any:
    """TRL's own trainer with its own collator for packed rows."""
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    model = nf4_model(spec) if spec.get("base") == "nf4" else random_model(spec)
    return SFTTrainer(
        model=model,
        args=SFTConfig(**_arguments(spec), use_liger_kernel=spec.get("liger", False)),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(Path(spec["model"]).parent),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=spec["targets"]
        ),
    )


def _arguments(spec: dict[str, Any]) -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    checkpointing = {} if spec.get("checkpointing") is None else {"gradient_checkpointing": spec["checkpointing"]}
    return checkpointing | {
        "output_dir": spec["work"],
        "packing": True,
        "max_length": spec["seq_len"],
        "per_device_train_batch_size": spec["batch"],
        "gradient_accumulation_steps": 1,  # Unsloth's default is 2
        "max_steps": spec["steps"],
        "learning_rate": 1e-4,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "tf32": on_gpu or None,
        "remove_unused_columns": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }


def nf4_model(spec: dict[str, Any]) -> Any:
    """The random model with every linear layer but lm_head in nf4 with double quantisation, by bitsandbytes."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    model = random_model(spec)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if type(linear) is not torch.nn.Linear:
                    continue
                small = Linear4bit(
                    linear.in_features, linear.out_features, bias=False, device="meta", quant_type="nf4",
                    compute_dtype=torch.bfloat16, compress_statistics=True,
                )  # fmt: skip
                small.weight = Params4bit(
                    linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                ).to(linear.weight.device)
                setattr(parent, name, small)
    model.is_loaded_in_4bit = model.is_quantized = True
    model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model.hf_quantizer = AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=True)
    return model


def unsloth_trainer(spec: dict[str, Any], rows: Any) -> Any:
    """Unsloth's model and trainer, without checkpointing; its from_pretrained is given random weights."""
    import torch
    import unsloth
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    def weights(*_: Any, attn_implementation: str | None = None, **__: Any) -> Any:
        return random_model(spec, attn_implementation)

    AutoModelForCausalLM.from_pretrained = staticmethod(weights)
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        str(Path(spec["model"]).parent), max_seq_length=spec["seq_len"], dtype=torch.bfloat16, load_in_4bit=False,
        use_gradient_checkpointing=False, local_files_only=True,
    )  # fmt: skip
    model = unsloth.FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, bias="none", target_modules=spec["targets"],
        use_gradient_checkpointing=False, random_state=0,
    )  # fmt: skip
    arguments = SFTConfig(**_arguments(spec))
    return SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)


# ---- measuring ------------------------------------------------------------------------------------------------------


def meter(trainer: Any, spec: dict[str, Any]) -> Any:
    """A callback on the trainer that notes the time of each step, and the tokens that its batches hold."""
    import torch
    from transformers import TrainerCallback

    class Meter(TrainerCallback):  # type: ignore[misc]
        """marks: seconds at the start and after each step, with the GPU idle. tokens: of each batch, in order."""

        def __init__(self) -> None:
            self.marks: list[float] = []
            self.tokens: list[int] = []
            self.profiler: Any = None
            self.kernels: dict[str, float] = {}

        def _mark(self) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self._mark()

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            self._mark()
            if self.profiler is not None and not self.kernels:
                self.profiler.stop()
                self.kernels = kernel_classes(self.profiler)
            if spec.get("profile") and state.global_step == spec["steps"] - 1:
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self.profiler.start()

        def counted(self, collate: Any) -> Any:
            """`collate`, which also notes the tokens of its rows."""

            def count(rows: list[dict[str, Any]]) -> Any:
                self.tokens.append(sum(sum(row["seq_lengths"]) for row in rows))
                return collate(rows)

            return count

    seen = Meter()
    if hasattr(trainer.data_collator, "torch_call"):
        trainer.data_collator.torch_call = seen.counted(trainer.data_collator.torch_call)
    else:
        trainer.data_collator = seen.counted(trainer.data_collator)
    trainer.add_callback(seen)
    return seen


def kernel_classes(profiler: Any) -> dict[str, float]:
    """GPU milliseconds of one step by class of kernel, and the longest kernels that no class knows."""
    sums: dict[str, float] = dict.fromkeys([*KERNELS, "other"], 0.0)
    unknown: dict[str, float] = {}
    for event in profiler.key_averages():
        name, milliseconds = event.key.lower(), event.self_device_time_total / 1000
        kind = next((kind for kind, parts in KERNELS.items() if any(part in name for part in parts)), "other")
        sums[kind] += milliseconds
        if kind == "other" and milliseconds > 1:
            unknown[event.key[:60]] = round(milliseconds, 2)
    return {kind: round(value, 2) for kind, value in sums.items() if value} | unknown | idle(profiler)


def idle(profiler: Any) -> dict[str, float]:
    """Milliseconds between the kernels of one step: the sum, and the longest with the kernels around them."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA")
    )
    gaps, end, before = [], spans[0][1], spans[0][2]
    for start, stop, name in spans:
        gaps.append(((start - end) / 1000, f"{before[:30]} .. {name[:30]}"))
        if stop > end:
            end, before = stop, name
    longest = sorted(gaps, reverse=True)[:6]
    total = sum(gap for gap, _ in gaps if gap > 0)
    return {"idle": round(total, 2)} | {f"idle: {place}": round(gap, 2) for gap, place in longest}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Train, and return step times, tokens per second, memory and losses."""
    import torch

    began = time.perf_counter()
    build = {"kit": kit_trainer, "trl": trl_trainer, "unsloth": unsloth_trainer}[spec["kind"]]
    trainer = build(spec, read_rows(Path(spec["rows"])))
    seen = meter(trainer, spec)
    built = time.perf_counter()
    trainer.train()
    seconds = np.diff(seen.marks)
    tokens = seen.tokens[: len(seconds)]
    timed = slice(spec["warm"], spec["warm"] + spec["timed"])
    pace = [count / second for count, second in zip(tokens[timed], seconds[timed], strict=True)]
    result = {
        "tokens_per_s": [round(float(value)) for value in (np.median(pace), min(pace), max(pace))],
        "step_s": round(float(np.median(seconds[timed])), 4),
        "first_step_s": round(float(seconds[0]), 2),
        "build_s": round(built - began, 1),
        "all_steps_s": [round(float(value), 4) for value in seconds],
        "trainable": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }
    if torch.cuda.is_available():
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        result["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 1)
    return result | ({"kernels_ms": seen.kernels} if seen.kernels else {})


# ---- the process ----------------------------------------------------------------------------------------------------

IMPORTS = {
    "kit": ("torch", "transformers", "trl", "peft", "kit.train.trainer"),
    "trl": ("torch", "transformers", "trl", "peft"),
    "unsloth": ("unsloth", "trl"),
}


def prepare(spec: dict[str, Any]) -> None:
    """Import what the arm needs, say so, and wait for the GPU."""
    for name in IMPORTS[spec["kind"]]:
        importlib.import_module(name)
    if RANK == 0:
        Path(spec["ready"]).touch()
    while not Path(spec["go"]).exists():
        time.sleep(0.05)


def versions() -> dict[str, str]:
    """Of the packages that this process can import."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Write the result, or the error, to the spec's file."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    try:
        prepare(spec)
        task = importlib.import_module(spec["module"]).TASKS[spec["task"]] if "task" in spec else measure
        result = task(spec) | {"versions": versions()}
    except BaseException as error:  # an arm that fails is a row of the table
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error).strip()[:400]}"}
    if RANK == 0:
        Path(spec["result"]).write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if "error" not in result else 1)  # neither NCCL nor a compiler's worker delays the next arm


if __name__ == "__main__":
    main()
