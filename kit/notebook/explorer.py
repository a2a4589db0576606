"""`kit.explore`: the forecast of a recipe with a control for each setting; without JupyterLab, the figures alone."""

from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import find_prepared
from kit.forecast.explore import CONTROLS, Alternatives, alternatives, value
from kit.forecast.timing import predict
from kit.notebook.widgets import explore as show_with_controls


def explore(recipe: Recipe, cluster: Cluster) -> Alternatives:
    """Show memory by phase, time and verdict, redrawn at each change of a control in JupyterLab.

    Returns what the other settings would take as figures and tables.
    """
    dataset = find_prepared(recipe)
    manifest = dataset.manifest if dataset else None

    def draw(**changes: Any) -> Any:
        return predict(recipe.override(**changes), cluster, manifest)

    show_with_controls(draw, {key: value(recipe, key) for key in CONTROLS}, CONTROLS)
    return alternatives(recipe, cluster)
