"""`kit.predict`: the forecast of a recipe, with the sizes of its prepared dataset where there is one."""

from dataclasses import replace
from pathlib import Path

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import find_prepared
from kit.data.sources import check_place
from kit.errors import InputError
from kit.forecast import timing
from kit.forecast.timing import Prediction


def predict(recipe: Recipe, cluster: Cluster, prepared: Path = Path("prepared")) -> Prediction:
    """Memory, time and storage of a run; rows and tokens are those of the dataset under `prepared`, if it is there.

    Raises InputError for a model, strategy or link that cannot be forecast.
    """
    dataset = find_prepared(recipe, prepared, cluster)
    found = timing.predict(recipe, cluster, dataset.manifest if dataset else None)
    try:
        check_place(recipe.data.source)
    except InputError as problem:  # the data may come later
        return replace(found, warnings=(str(problem), *found.warnings))
    return found
