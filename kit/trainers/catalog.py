"""The trainers whose packages have other versions, by name."""

from kit.errors import InputError
from kit.trainers import automodel, axolotl, litgpt, llamafactory, megatron, torchtitan
from kit.trainers.base import OtherTrainer

OTHERS: dict[str, OtherTrainer] = {
    "automodel": automodel, "axolotl": axolotl, "litgpt": litgpt, "llamafactory": llamafactory,
    "megatron": megatron, "torchtitan": torchtitan,
}  # fmt: skip


def other(name: str) -> OtherTrainer:
    """The trainer of that name. Raises InputError for another one."""
    if name not in OTHERS:
        raise InputError(f"trainer {name!r} has no renderer; it must be {', '.join(OTHERS)}.")
    return OTHERS[name]
