"""`kit.tune`: the settings that the forecast finds fastest, and on request a short job that measures them."""

from pathlib import Path
from typing import TYPE_CHECKING

from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import find_prepared, prepare
from kit.forecast import tune as forecast
from kit.forecast.tune import Choices

if TYPE_CHECKING:
    from kit.notebook.measure import Measurement

TOP = 4  # settings that are measured
STEPS = 6  # of each; the first is not timed, since it includes compilation


def tune(
    recipe: Recipe,
    cluster: Cluster,
    nodes: bool = False,
    measure: bool = False,
    top: int = TOP,
    steps: int = STEPS,
    prepared: Path = Path("prepared"),
) -> "Choices | Measurement":
    """Every setting that can be launched and whose forecast fits, fastest first; empty with a reason where none does.

    nodes: try other numbers of nodes as well. measure: prepare the data, run the `top` settings for `steps` optimizer
    steps each in a short job that saves nothing, and wait for it; one that fails is a row with its reason. Raises as
    `kit.launch` does where the job cannot be submitted.
    """
    with models.use_hf_home(cluster.paths.hf_home):
        dataset = prepare(recipe, prepared) if measure else find_prepared(recipe, prepared)
    choices = forecast.tune(recipe, cluster, nodes, dataset.manifest if dataset else None)
    if not measure or not choices or dataset is None:
        return choices
    from kit.notebook.measure import measure_choices  # loads papermill

    return measure_choices(recipe, cluster, choices, dataset.manifest, top, steps)
