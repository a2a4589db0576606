"""The arms of speed.py: what each measures."""

from dataclasses import dataclass, field
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Arm:
    """What one process measures.

    kind: kit, before, trl, unsloth, or launch for a run of `kit launch`. recipe: keys of a recipe, for the kit's arms.
    more: keys of the spec, for the others. layers: of the model; 0 is all. shape: keys of its config.json. warm: steps
    before the timed ones; steps: all of them; 0 is the number that speed.py was called with. task: in agreement.py;
    empty trains and measures speed. profile: whether one step more is profiled.
    """

    kind: str
    recipe: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ATTENTION
    batch: int = 2
    seq_len: int = 4096
    gpus: int = 1
    layers: int = 0
    shape: dict[str, Any] = field(default_factory=dict)
    warm: int = 0
    steps: int = 0
    task: str = ""
    profile: bool = False


SDPA = {"model.attention": "sdpa"}  # what a recipe had before there was a choice
AC = SDPA | {"parallel.activation_checkpointing": True}
NO_AC = SDPA | {"parallel.activation_checkpointing": False}
FSDP2, FULL = {"parallel.strategy": "fsdp2"}, {"tuning.method": "full"}
FP8, QLORA = {"model.base": "fp8"}, {"tuning.method": "qlora"}
EAGER, COMPILED = {"parallel.compile": "off"}, {"parallel.compile": "on"}
LEARNS = {"schedule.lr": 1e-3}
NF4 = {"base": "nf4", "checkpointing": False}
FLASH_2 = {"attention": "flash_attention_2", "checkpointing": False, "flash": True}
LIGER = FLASH_2 | {"liger": True}
SLIDING = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 256}
UNSLOTH_WARM = 6  # it compiles again in the first steps
SDPA_WARM = 10  # cuDNN plans each new length of a row, which TRL does not pad, for up to 3 s

ARMS = {
    "before, default, q,k,v,o": Arm("before", AC, batch=1),
    "before, default, all linear": Arm("before", AC, targets=ALL, batch=1),
    "before, best, q,k,v,o": Arm("before", NO_AC),
    "before, best, all linear": Arm("before", NO_AC, targets=ALL),
    "TRL + liger + FlashAttention 2, q,k,v,o": Arm("trl", more=LIGER),
    "TRL + liger + FlashAttention 2, all linear": Arm("trl", more=LIGER, targets=ALL),
    "Unsloth, q,k,v,o": Arm("unsloth", more=FLASH_2, warm=UNSLOTH_WARM),
    "Unsloth, all linear": Arm("unsloth", more=FLASH_2, targets=ALL, warm=UNSLOTH_WARM),
    "now, q,k,v,o": Arm("kit", profile=True),
    "now, all linear": Arm("kit", targets=ALL, profile=True),
    "now, fp8, q,k,v,o": Arm("kit", FP8, profile=True),
    "now, fp8, all linear": Arm("kit", FP8, targets=ALL, profile=True),
    "TRL + bitsandbytes, all linear": Arm("trl", more=NF4, targets=ALL, batch=1, warm=SDPA_WARM),
    "now, nf4, all linear": Arm("kit", QLORA, targets=ALL, profile=True),
    "TRL defaults, q,k,v,o": Arm("trl", batch=1, warm=SDPA_WARM),
    "now, rows of 16,384": Arm("kit", batch=1, seq_len=16384, steps=8),
    "before, best, rows of 16,384": Arm("before", NO_AC, batch=1, seq_len=16384, steps=8),
    "before, default, rows of 16,384": Arm("before", AC, batch=1, seq_len=16384, steps=8),
    "TRL defaults, all linear": Arm("trl", targets=ALL, batch=1, warm=SDPA_WARM),
    "now, q,k,v,o, batch 1": Arm("kit", batch=1),
    "now, all linear, batch 1": Arm("kit", targets=ALL, batch=1),
    "gradients, before": Arm("before", NO_AC, targets=ALL, layers=4, task="gradients"),
    "gradients, now, eager": Arm("kit", EAGER, targets=ALL, layers=4, task="gradients"),
    "gradients, now, compiled": Arm("kit", COMPILED, targets=ALL, layers=4, task="gradients"),
    "gradients, now, fp8, compiled": Arm("kit", FP8 | COMPILED, targets=ALL, layers=4, task="gradients"),
    "gradients, now, fp8, eager": Arm("kit", FP8 | EAGER, targets=ALL, layers=4, task="gradients"),
    "gradients, now, nf4": Arm("kit", QLORA | COMPILED, targets=ALL, layers=4, task="gradients"),
    "isolation, eager": Arm("kit", EAGER, layers=2, task="isolation"),
    "isolation, compiled": Arm("kit", COMPILED, layers=2, task="isolation"),
    "isolation, sliding window, eager": Arm("kit", EAGER, layers=2, shape=SLIDING, task="isolation"),
    "isolation, sliding window, compiled": Arm("kit", COMPILED, layers=2, shape=SLIDING, task="isolation"),
    "2 GPUs, before, DDP": Arm("before", NO_AC, gpus=2),
    "2 GPUs, now, DDP": Arm("kit", gpus=2),
    "2 GPUs, before, FSDP2": Arm("before", NO_AC | FSDP2, gpus=2),
    "2 GPUs, now, FSDP2": Arm("kit", FSDP2, gpus=2),
    "2 GPUs, before, full, FSDP2": Arm("before", AC | FSDP2 | FULL, gpus=2),
    "2 GPUs, before, full, FSDP2, no AC": Arm("before", NO_AC | FSDP2 | FULL, gpus=2),
    "2 GPUs, now, full, FSDP2": Arm("kit", FSDP2 | FULL, gpus=2),
    "losses, before": Arm("before", NO_AC | LEARNS, layers=6, steps=50),
    "losses, now, eager": Arm("kit", EAGER | LEARNS, layers=6, steps=50),
    "losses, now, compiled": Arm("kit", COMPILED | LEARNS, layers=6, steps=50),
    "losses, now, fp8": Arm("kit", FP8 | COMPILED | LEARNS, layers=6, steps=50),
    "losses, now, eager, FSDP2": Arm("kit", EAGER | FSDP2 | LEARNS, batch=1, gpus=2, layers=6, steps=50),
    "losses, now, compiled, FSDP2": Arm("kit", COMPILED | FSDP2 | LEARNS, batch=1, gpus=2, layers=6, steps=50),
    "kit launch, q,k,v,o": Arm("launch", steps=24),
    "kit launch, all linear": Arm("launch", targets=ALL, steps=24),
    "2 GPUs, kit launch, DDP": Arm("launch", gpus=2, steps=16),
}
