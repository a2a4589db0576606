"""Recipe: what to train. Model, data, tuning method, parallelism and schedule, from one TOML file."""

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from kit.config import schema
from kit.config.schema import at_least
from kit.errors import InputError


@dataclass(frozen=True)
class Model:
    """The base model. `name` is a hub id, a folder with config.json, or a config.json."""

    name: str
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"


@dataclass(frozen=True)
class Data:
    """The conversations. `tokens` and `eval_tokens` are known sizes, for forecasts before anything is prepared."""

    source: str
    source_format: Literal[
        "auto", "oasst_trees", "oasst_messages", "messages", "sharegpt", "alpaca", "prompt_completion", "text"
    ] = "auto"
    lang: str = ""
    seq_len: int = at_least(8, 2048)
    packing: bool = True
    loss: Literal["assistant", "all"] = "assistant"
    overlong: Literal["truncate", "split", "drop"] = "truncate"
    eval_fraction: float = at_least(0, 0.05, most=0.5)
    tokens: int = at_least(0, 0)
    eval_tokens: int = at_least(0, 0)


@dataclass(frozen=True)
class Tuning:
    """How the weights change. r, alpha, dropout and target_modules count for lora and qlora alone."""

    method: Literal["full", "lora", "qlora"] = "lora"
    r: int = at_least(1, 16)
    alpha: int = at_least(1, 32)
    dropout: float = at_least(0, 0.05, most=1)
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Parallel:
    """How the work is spread. gpus_per_node counts processes where there are no GPUs."""

    strategy: Literal["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"] = "fsdp2"
    sharding: Literal["full", "grad_op", "hybrid"] = "full"
    nodes: int = at_least(1, 1)
    gpus_per_node: int = at_least(1, 1)
    activation_checkpointing: bool = True
    offload: bool = False


@dataclass(frozen=True)
class Schedule:
    """Steps, batches and the optimizer. max_steps = 0 takes them from the epochs; save_every = 0 saves at the end."""

    epochs: float = at_least(0, 1.0)
    max_steps: int = at_least(0, 0)
    micro_batch: int = at_least(1, 1)
    grad_accum: int = at_least(1, 1)
    eval_batch: int = at_least(1, 1)
    optimizer: str = "adamw_torch_fused"  # foreach AdamW over DTensors ran out of 80 GB on an 8B full fine-tune
    lr: float = at_least(0, 5e-5)
    scheduler: str = "cosine"
    warmup_ratio: float = at_least(0, 0.03, most=1)
    weight_decay: float = at_least(0, 0.01)
    eval_every: int = at_least(0, 0)
    save_every: int = at_least(0, 0)
    keep: int = at_least(1, 3)
    log_every: int = at_least(1, 1)
    seed: int = at_least(0, 42)


@dataclass(frozen=True)
class Recipe:
    """What to train. Raises InputError for an unknown key or a bad value, naming it and the valid ones."""

    name: str
    model: Model
    data: Data
    tuning: Tuning = field(default_factory=Tuning)
    parallel: Parallel = field(default_factory=Parallel)
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise InputError(
                f"name is {self.name!r}; it names folders, so use letters, digits, dots, dashes and underscores."
            )

    @classmethod
    def load(cls, name: "str | Path | Recipe", /, **overrides: Any) -> "Recipe":
        """From a file or the name of a shipped recipe; overrides as in `override`."""
        if isinstance(name, Recipe):
            return name.override(**overrides)
        path = schema.find(name, "recipes")
        return schema.build(cls, schema.read_toml(path), str(path)).override(**overrides)

    def override(self, /, **changes: Any) -> "Recipe":
        """A copy with dotted keys replaced, such as {"schedule.max_steps": 20}; text is read by the field's type."""
        tables = schema.as_dict(self)
        for key, value in changes.items():
            table, _, name = key.rpartition(".")
            section: Any = getattr(self, table, None) if table else self
            known = [f.name for f in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []
            if name not in known:
                beside = [k for k in self.keys() if table and k.startswith(f"{table}.")]
                raise InputError(f"override: unknown key {key!r}; {schema.nearest(key, beside or self.keys())}")
            kind = schema.types_of(type(section))[name]
            value = schema.parse(value, kind, f"override: {key}") if isinstance(value, str) else value
            (tables[table] if table else tables)[name] = value
        return schema.build(type(self), tables, "override") if changes else self

    def keys(self) -> list[str]:
        """Every key, dotted."""
        tables = schema.as_dict(self)
        return ["name"] + [f"{t}.{k}" for t, v in tables.items() if isinstance(v, dict) for k in v]

    def toml(self) -> str:
        """The recipe as a file that loads to an equal recipe."""
        return tomli_w.dumps(schema.as_dict(self))

    def digest(self) -> str:
        """sha256 over every value."""
        return hashlib.sha256(json.dumps(schema.as_dict(self), sort_keys=True).encode()).hexdigest()

    @property
    def world_size(self) -> int:
        """Ranks: nodes x GPUs of each."""
        return self.parallel.nodes * self.parallel.gpus_per_node

    def optimizer_steps(self, rows: int) -> int:
        """Steps of the whole run for a train split of this many rows, as transformers' Trainer counts them."""
        if self.schedule.max_steps:
            return self.schedule.max_steps
        batches = math.ceil(rows / (self.world_size * self.schedule.micro_batch))
        return math.ceil(self.schedule.epochs * max(1, math.ceil(batches / self.schedule.grad_accum)))

    @property
    def batch(self) -> int:
        """Rows an optimizer step: ranks x micro batch x accumulation."""
        return self.world_size * self.schedule.micro_batch * self.schedule.grad_accum
