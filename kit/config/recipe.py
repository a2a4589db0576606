"""Recipe: what to train. Model, data, tuning method, parallelism and schedule, from one TOML file."""

import hashlib
import json
import math
import re
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Le
from pydantic import AfterValidator, Field, model_validator

from kit.config import schema
from kit.config.schema import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, table
from kit.errors import InputError

FOLDER_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"  # with date, time and suffixes below the 255 bytes of a file's name


def _folder_name(name: str) -> str:
    if not re.fullmatch(FOLDER_NAME, name):
        raise ValueError("it names folders, so use letters, digits, dots, dashes and underscores, 128 at most.")
    return name


@table
class Model:
    """The base model."""

    name: str
    """Hub id, folder with config.json, or path of a config.json (random weights of that shape)."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the frozen weights and of the computation; CPU ranks always use float32."""
    attention: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """transformers' attn_implementation, or varlen: PyTorch's variable-length attention, one call for all documents of
    a batch. auto: the fastest that the model and the cluster have, chosen when the job is planned."""
    base: Literal["bf16", "fp8", "nf4"] = "bf16"
    """Type of the frozen weights of the linear layers under LoRA: bf16 is model.dtype; fp8 is faster, with noisier
    gradients; nf4 is what tuning.method qlora sets."""

    @property
    def attention_used(self) -> str:
        """The attention of a job: sdpa where auto has not been resolved."""
        return "sdpa" if self.attention == "auto" else self.attention


@table
class Data:
    """The conversations or documents."""

    source: str
    """Hub id, file or folder."""
    source_format: Literal[
        "auto", "oasst_trees", "oasst_messages", "messages", "sharegpt", "alpaca", "prompt_completion", "text"
    ] = "auto"
    """Format of the rows; auto recognises it by their keys."""
    lang: str = ""
    """Drop conversations in another language than this one, such as en; empty keeps all."""
    seq_len: Annotated[int, Ge(8)] = 2048
    """Tokens of a packed row."""
    packing: bool = True
    """Put several conversations into one row, isolated from each other by position ids."""
    loss: Literal["assistant", "all"] = "assistant"
    """Tokens that the loss counts."""
    overlong: Literal["truncate", "split", "drop"] = "truncate"
    """What happens to a conversation of more than seq_len tokens."""
    eval_fraction: Annotated[float, Ge(0), Le(0.5)] = 0.05
    """Part of the conversations that is held out for evaluation."""
    tokens: NonNegativeInt = 0
    """Known tokens of the train split, for forecasts before anything is prepared; 0 is unknown."""
    eval_tokens: NonNegativeInt = 0
    """Known tokens of the eval split, for forecasts before anything is prepared; 0 is unknown."""


@table
class Tuning:
    """How the weights change. All keys but method apply to lora and qlora alone."""

    method: Literal["full", "lora", "qlora"] = "lora"
    """Which weights are trained."""
    r: PositiveInt = 16
    """Rank of the LoRA matrices."""
    alpha: PositiveInt = 32
    """LoRA scale: the update is multiplied by alpha / r."""
    dropout: Fraction = 0.0
    """Dropout on the input of the LoRA matrices; above 0 it takes time and memory."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the linear layers that get LoRA matrices."""


@table
class Parallel:
    """How the work is spread over ranks."""

    strategy: Literal["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"] = "fsdp2"
    """How the model is replicated or sharded."""
    sharding: Literal["full", "grad_op", "hybrid"] = "full"
    """FSDP: shard parameters too (full), only gradients and optimizer state (grad_op), or within a node (hybrid)."""
    nodes: PositiveInt = 1
    """Nodes of the job."""
    gpus_per_node: PositiveInt = 1
    """GPUs of each node; processes of each node where there are no GPUs."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass instead of keeping them; auto: only where the job does not fit
    without it."""
    tensor: PositiveInt = 1
    """Ranks of a node that split each layer and train on the same rows (tensor parallelism); full fine-tunes only."""
    expert: PositiveInt = 1
    """Ranks of a node that split the experts of each layer, and hand each other tokens; full fine-tunes only."""
    offload: bool | Literal["none", "cpu", "nvme"] = "none"
    """Where parameters, gradients and optimizer state are kept, if not on the GPU; false means none, and true cpu.
    nvme: the frozen weights of LoRA under zero3; the rest is on the CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of each decoder layer; auto: where it makes the job faster."""

    @model_validator(mode="after")
    def _named_offload(self) -> "Parallel":
        if isinstance(self.offload, bool):
            object.__setattr__(self, "offload", "cpu" if self.offload else "none")
        return self

    @model_validator(mode="after")
    def _groups_of_ranks(self) -> "Parallel":
        for key, size in (("tensor", self.tensor), ("expert", self.expert)):
            if self.gpus_per_node % size:
                raise ValueError(
                    f"{key} is {size}, and ranks that split a layer are on one node: it has to divide gpus_per_node, "
                    f"which is {self.gpus_per_node}."
                )
        if self.expert > 1 and self.expert % self.tensor:
            raise ValueError(
                f"expert is {self.expert}, which is not a multiple of tensor {self.tensor}: experts are split over all "
                "groups of the ranks that split a layer."
            )
        return self

    @property
    def offloads(self) -> bool:
        """Whether anything is kept outside of the GPU's memory."""
        return self.offload != "none"

    @property
    def split(self) -> bool:
        """Whether each layer, or its experts, is split over ranks that compute it together."""
        return self.tensor > 1 or self.expert > 1

    @property
    def recomputes(self) -> bool:
        """Whether a job checkpoints activations: also where auto has not been resolved."""
        return self.activation_checkpointing is not False

    @property
    def compiles(self) -> bool:
        """Whether a job compiles the layers: not where auto has not been resolved."""
        return self.compile == "on"


@table
class Schedule:
    """Steps, batches and the optimizer."""

    epochs: NonNegativeFloat = 1.0
    """Passes over the train split, where max_steps is 0."""
    max_steps: NonNegativeInt = 0
    """Optimizer steps of the run; 0 takes them from epochs."""
    micro_batch: PositiveInt = 1
    """Rows of a rank in one forward pass."""
    grad_accum: PositiveInt = 1
    """Forward passes of an optimizer step."""
    eval_batch: PositiveInt = 1
    """Rows of a rank in one forward pass of an evaluation."""
    optimizer: str = "adamw_torch_fused"  # foreach AdamW over DTensors ran out of 80 GB on an 8B full fine-tune
    """transformers' optim."""
    lr: NonNegativeFloat = 5e-5
    """Peak learning rate."""
    scheduler: str = "cosine"
    """transformers' lr_scheduler_type."""
    warmup_ratio: Fraction = 0.03
    """Part of the steps in which the learning rate rises to lr."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of the optimizer."""
    eval_every: NonNegativeInt = 0
    """Optimizer steps between evaluations; 0 evaluates at the end."""
    save_every: NonNegativeInt = 0
    """Optimizer steps between checkpoints; 0 saves at the end."""
    save: Literal["sync", "async"] = "sync"
    """async: training goes on while the shards are written from a copy in host memory; fsdp2 on several ranks only."""
    keep: PositiveInt = 3
    """Newest checkpoints that are kept."""
    log_every: PositiveInt = 1
    """Optimizer steps between logged rows."""
    seed: NonNegativeInt = 42
    """Seed of the weights, of dropout and of the order of rows."""

    @model_validator(mode="after")
    def _has_a_length(self) -> "Schedule":
        if not self.epochs and not self.max_steps:
            raise ValueError("epochs and max_steps are both 0, so no step is trained: set one of them.")
        return self


@table
class TrainerChoice:
    """Which trainer runs the recipe, and where that is installed."""

    name: Literal["trl", "litgpt", "llamafactory", "axolotl", "automodel", "torchtitan", "megatron"] = "trl"
    """trl is the kit's own; the others run in an environment apart from the kit's, `trainer.python`."""
    python: str = ""
    """Interpreter of another trainer's environment on the nodes. `kit launch` needs it, as it asks for its versions."""

    @property
    def is_other(self) -> bool:
        """Whether the trainer has packages of other versions, and so an environment apart from the kit's."""
        return self.name != "trl"


# Keys that recorded digests do not count, with the value under which a recipe means what it meant before they existed.
ADDED_LATER = {
    ("model", "base"): "bf16", ("parallel", "compile"): "auto", ("trainer", "name"): "trl", ("trainer", "python"): "",
    ("schedule", "save"): "sync", ("parallel", "tensor"): 1, ("parallel", "expert"): 1,
}  # fmt: skip
RECORDED_OFFLOAD = {"none": False, "cpu": True}  # how recorded digests count values of parallel.offload


def _contradiction(base: str, method: str) -> str:
    """What is wrong with this type of the frozen weights under this tuning method; empty where they agree."""
    if (base == "nf4") != (method == "qlora"):
        return (
            f'tuning.method {method} and model.base {base} contradict each other: for QLoRA write method = "qlora" '
            'and leave model.base out (it is nf4 then); otherwise write method = "lora" and base = "bf16" or "fp8".'
        )
    if base == "fp8" and method == "full":
        return (
            'model.base fp8 is for frozen weights, and tuning.method full freezes none: write base = "bf16", or '
            'method = "lora".'
        )
    return ""


@table
class Recipe:
    """What to train."""

    name: Annotated[str, AfterValidator(_folder_name), Field(json_schema_extra={"pattern": f"^{FOLDER_NAME}$"})]
    """Name of the recipe; run folders and datasets begin with it."""
    model: Model
    data: Data
    tuning: Tuning = field(default_factory=Tuning)
    parallel: Parallel = field(default_factory=Parallel)
    schedule: Schedule = field(default_factory=Schedule)
    trainer: TrainerChoice = field(default_factory=TrainerChoice)

    @model_validator(mode="after")
    def _base_of_the_method(self) -> "Recipe":
        if self.tuning.method == "qlora" and self.model.base == "bf16":  # the default
            object.__setattr__(self, "model", replace(self.model, base="nf4"))
        if problem := _contradiction(self.model.base, self.tuning.method):
            raise ValueError(problem)
        return self

    @classmethod
    def load(cls, name: "str | Path | Recipe", /, **overrides: Any) -> "Recipe":
        """Return the recipe of a file, or a shipped one by name; overrides as in `override`.

        Raises InputError for an unknown key or a bad value, with the valid ones.
        """
        if isinstance(name, Recipe):
            return name.override(**overrides)
        path = schema.find(name, "recipes")
        return cls._built(schema.read_toml(path), str(path)).override(**overrides)

    def override(self, /, **changes: Any) -> "Recipe":
        """Return a copy with dotted keys replaced, such as {"schedule.max_steps": 20}.

        Text is read as the type of its key. Raises InputError for an unknown key or a bad value.
        """
        tables = schema.as_dict(self)
        if changes.get("tuning.method", self.tuning.method) != self.tuning.method:
            del tables["model"]["base"]  # each method has its own
        for key, value in changes.items():
            section_name, _, name = key.rpartition(".")
            section: Any = getattr(self, section_name, None) if section_name else self
            kinds = schema.types_of(section)
            if name not in kinds:
                raise InputError(f"override: unknown key {key!r}; {schema.nearest(key, self._keys_of(section_name))}")
            typed = schema.parse(value, kinds[name], f"override: {key}") if isinstance(value, str) else value
            (tables[section_name] if section_name else tables)[name] = typed
        return self._built(tables, "override") if changes else self

    @classmethod
    def _built(cls, tables: dict[str, Any], where: str) -> "Recipe":
        recipe = schema.build(cls, tables, where)
        written = tables["model"].get("base", recipe.model.base)
        if written != recipe.model.base:  # bf16 was written with qlora; the validator read it as the default
            raise InputError(f"{where}: {_contradiction(written, recipe.tuning.method)}")
        return recipe

    def keys(self) -> list[str]:
        """Every key, dotted."""
        tables = schema.as_dict(self)
        return ["name"] + [f"{t}.{k}" for t, values in tables.items() if isinstance(values, dict) for k in values]

    def _keys_of(self, section: str) -> list[str]:
        """The dotted keys of a table; all keys where there is no such table."""
        return [key for key in self.keys() if section and key.startswith(f"{section}.")] or self.keys()

    def toml(self) -> str:
        """The recipe as a file that loads to an equal recipe."""
        return tomli_w.dumps(schema.as_dict(self))

    def digest(self) -> str:
        """sha256 over every value, in hexadecimal; the same as recorded by releases that had fewer keys."""
        tables = schema.as_dict(self)
        for (section, key), value in ADDED_LATER.items():
            if tables[section][key] == value:
                del tables[section][key]
        tables = {name: value for name, value in tables.items() if value != {}}
        offload = tables["parallel"]["offload"]
        tables["parallel"]["offload"] = RECORDED_OFFLOAD.get(offload, offload)
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()

    @property
    def world_size(self) -> int:
        """Ranks: nodes x GPUs of each."""
        return self.parallel.nodes * self.parallel.gpus_per_node

    @property
    def data_ranks(self) -> int:
        """Ranks that train on different rows: ranks that split a layer by parallel.tensor count as one."""
        return self.world_size // self.parallel.tensor

    @property
    def batch(self) -> int:
        """Rows of an optimizer step: ranks with different rows x micro batch x accumulation."""
        return self.data_ranks * self.schedule.micro_batch * self.schedule.grad_accum

    def optimizer_steps(self, rows: int) -> int:
        """Optimizer steps of the run for a train split of this many rows, as transformers' Trainer counts them."""
        if self.schedule.max_steps:
            return self.schedule.max_steps
        batches = math.ceil(rows / (self.data_ranks * self.schedule.micro_batch))
        return math.ceil(self.schedule.epochs * max(1, math.ceil(batches / self.schedule.grad_accum)))
