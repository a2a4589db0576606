"""The trainers whose packages have other versions, by name."""

from kit.errors import InputError
from kit.trainers import axolotl, litgpt, llamafactory
from kit.trainers.base import OtherTrainer

OTHERS: dict[str, OtherTrainer] = {"litgpt": litgpt, "llamafactory": llamafactory, "axolotl": axolotl}


def other(name: str) -> OtherTrainer:
    """The trainer of that name. Raises InputError for another one."""
    if name not in OTHERS:
        raise InputError(f"trainer {name!r} has no renderer; it must be {', '.join(OTHERS)}.")
    return OTHERS[name]
