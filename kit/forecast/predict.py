"""`kit.predict`: the forecast of a recipe, with the sizes of its prepared dataset where there is one."""

from pathlib import Path

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import find_prepared
from kit.forecast import timing
from kit.forecast.timing import Prediction


def predict(recipe: Recipe, cluster: Cluster, prepared: Path = Path("prepared")) -> Prediction:
    """Memory, time and storage of a run; rows and tokens are those of the dataset under `prepared`, if it is there.

    Raises InputError for a model, strategy or link that cannot be forecast.
    """
    dataset = find_prepared(recipe, prepared)
    return timing.predict(recipe, cluster, dataset.manifest if dataset else None)
