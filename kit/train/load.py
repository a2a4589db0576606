"""The base model of a training run: loaded as a whole, or to be read into the shards of FSDP2."""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, TrainerCallback
from transformers.core_model_loading import build_glob_alternation

from kit.checkpoints.formats.base import Weights, join_messages
from kit.checkpoints.weights import read_headers, read_tensors
from kit.config import models
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.train import attention, patches
from kit.train.packed import outline_nf4
from kit.train.shards import Load, ShardedBase
from kit.train.sources import Sources, check_sources, find_sources
from kit.train.split import load_split
from kit.trainers.deepspeed import STAGES
from kit.trainers.trl import shards


class LogLoad(TrainerCallback):  # type: ignore[misc]
    """Logs a Load when training begins, which is after the shards are filled. Add it after the callbacks that log."""

    def __init__(self, trainer: Any, load: Load) -> None:
        self.trainer, self.load = trainer, load

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One row."""
        self.trainer.log(self.load.row())


def load_base(recipe: Recipe, checkpoint: str = "") -> Any:
    """The base model, in the recipe's dtype on GPUs and in fp32 on CPUs; its weights may be those of a checkpoint."""
    attention.register()
    dtype = getattr(torch, recipe.model.dtype) if torch.cuda.is_available() else torch.float32
    attention_used, seed = recipe.model.attention_used, recipe.schedule.seed
    return models.load_model(recipe.model.name, dtype, attention_used, seed, weights=checkpoint)


def lora_config(recipe: Recipe) -> LoraConfig:
    """PEFT's configuration of a recipe's adapters."""
    tuning = recipe.tuning
    all_linear = "all-linear" in tuning.target_modules  # PEFT takes this word only as text, not in a list
    return LoraConfig(
        r=tuning.r,
        lora_alpha=tuning.alpha,
        lora_dropout=tuning.dropout,
        task_type="CAUSAL_LM",
        target_modules="all-linear" if all_linear else list(tuning.target_modules),
    )


def prepare_base(recipe: Recipe, checkpoint: str | None, say: Callable[[str], None]) -> tuple[Any, Load]:
    """The base, to be read into the shards where that is possible, else loaded; and how, which is logged later.

    Where layers are split, transformers has each rank read its part. checkpoint: from which training resumes; a full
    fine-tune needs no base then: its weights come from the checkpoint, at once where each rank has all of them.
    """
    on_gpus = torch.cuda.is_available()
    if recipe.tuning.method != "full":
        checkpoint = None
    if recipe.world_size > 1 and shards(recipe, on_gpus):
        sharded, reason = open_base(recipe, reads=checkpoint is None)
        if sharded:
            if sharded.unused:
                say(sharded.unused)
            return sharded, sharded.load
        say(f"the base is not read into the shards: {reason}")
    begun = time.monotonic()
    if recipe.parallel.split:
        return load_split(recipe), Load(time.monotonic() - begun)
    if shards(recipe, on_gpus) or recipe.parallel.strategy in STAGES:  # their checkpoints are not model folders
        checkpoint = None
    base = load_base(recipe, checkpoint or "")
    return base, Load(time.monotonic() - begun, from_checkpoint=checkpoint is not None)


def why_not_sharded(recipe: Recipe) -> str:
    """Why the base of a recipe that FSDP shards is read by one process as a whole; empty where it need not be."""
    if recipe.parallel.strategy != "fsdp2":
        return f"parallel.strategy {recipe.parallel.strategy} reads the whole base in one process of each node"
    if recipe.model.base == "fp8":
        return "model.base fp8 is made from the whole base"
    if recipe.model.name.endswith(".json"):
        return "random weights are made on every rank"
    if not patches.applies(patches.REQUIREMENTS["fill_shards"]):
        return f"this release of accelerate is not one of {patches.REQUIREMENTS['fill_shards'].specifier}"
    folder = Path(models.source(recipe.model.name))
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no safetensors files"
    return ""


def open_base(recipe: Recipe, reads: bool = True) -> tuple[ShardedBase | None, str]:
    """The base to be read into shards, or the reason why it has to be read as a whole.

    reads: False leaves the shards to a checkpoint, which is loaded later. Raises InputError where files are damaged, or
    are not those of the model that config.json describes.
    """
    if reason := why_not_sharded(recipe):
        return None, reason
    folder = Path(models.source(recipe.model.name))
    weights = read_headers(folder)
    if weights.problems:
        raise InputError(f"The base cannot be loaded: {join_messages(weights.problems)}")
    attention.register()
    model = _without_weights(recipe, folder)
    if getattr(model.config, "quantization_config", None):
        return None, "its weights are quantised"
    found = find_sources(model, weights.tensors)
    if found.unknown:
        return None, found.unknown
    placeholders, names = _add_placeholders(model, recipe), {}
    for address, tied in _names_by_address(model).items():
        held = [name for name in tied if name in found.of]
        if len(held) > 1:
            return None, f"its files hold both of {' and '.join(held)}, which are one tensor by its config.json"
        names[address] = (held or tied)[0]
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names.values()}
    check_sources(found.of, weights.tensors, shapes, str(folder))
    _read_buffers(model, found, weights)
    packed = outline_nf4(model, names) if recipe.model.base == "nf4" else {}
    names |= {weight.placeholder.data_ptr(): name for name, weight in packed.items()}
    return ShardedBase(model, weights, found.of, reads, names, placeholders, _unused(found.unused), packed), ""


def _names_by_address(model: Any) -> dict[int, list[str]]:
    """The names of each parameter: several where it is tied."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter.data_ptr()].append(name)
    return names


def _read_buffers(model: Any, found: Sources, weights: Weights) -> None:
    """Read the few buffers that files hold, on every rank: FSDP does not shard them."""
    buffers = {found.of[name][0].name: buffer for name, buffer in model.named_buffers() if name in found.of}
    for name, values in read_tensors(weights, buffers):
        buffers[name].copy_(values)


def _unused(names: list[str]) -> str:
    return f"{len(names)} tensors of the files are not in the model, such as {names[0]}" if names else ""


def _without_weights(recipe: Recipe, folder: Path) -> Any:
    """The model on meta; its buffers are real, since files do not hold them."""
    dtype = getattr(torch, recipe.model.dtype) if torch.cuda.is_available() else torch.float32
    kind = {"dtype": dtype, "attn_implementation": recipe.model.attention_used}
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **kind)
    model.tie_weights()  # which the context has untied
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _add_placeholders(model: Any, recipe: Recipe) -> list[torch.Tensor]:
    """Give each parameter one element of memory, expanded to its shape. Returns them.

    PEFT and accelerate then see weights on the CPU with an address each: PEFT would put new adapters on meta next to
    meta weights and lose their values, and accelerate finds the parameters of the optimizer by their addresses.
    """
    dtype_of = _dtypes(model, recipe)
    made: dict[int, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    dtype = dtype_of(f"{prefix}.{name}", parameter.dtype)
                    value = torch.zeros((), dtype=dtype).expand(parameter.shape)
                    made[id(parameter)] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
    return list(made.values())


def _dtypes(model: Any, recipe: Recipe) -> Callable[[str, torch.dtype], torch.dtype]:
    """The dtype of a parameter in training, from its name and its dtype.

    accelerate trains fp32 master weights under mixed precision, and would give a placeholder memory by converting it.
    transformers keeps some weights in fp32.
    """
    if recipe.tuning.method == "full" and torch.cuda.is_available():
        return lambda name, dtype: torch.float32
    plan = model._get_dtype_plan(model.dtype)
    if not plan:
        return lambda name, dtype: dtype
    in_plan, _, _ = build_glob_alternation(list(plan))
    return lambda name, dtype: torch.float32 if in_plan.search(name) else dtype
