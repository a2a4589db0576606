"""Trainers: what each renders for a recipe, its config files and the command that starts the ranks of a node."""

from kit.config.recipe import Recipe
from kit.trainers import deepspeed, trl
from kit.trainers.base import Trainer
from kit.trainers.catalog import other


def trainer_of(recipe: Recipe) -> Trainer:
    """The trainer of a recipe. Raises InputError for one that has no renderer."""
    if recipe.trainer.is_other:
        return other(recipe.trainer.name)
    return deepspeed if recipe.parallel.strategy in deepspeed.STAGES else trl
