"""`kit.explore`: the forecast of a recipe with a control for each setting; without JupyterLab, the figures alone."""

import asyncio
import html
import shlex
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import find_prepared
from kit.errors import InputError, KitError
from kit.figures import Figure
from kit.forecast import explore as forecast
from kit.forecast import tune
from kit.forecast.explore import Setting
from kit.forecast.gpus import GPU_TYPES
from kit.forecast.timing import Prediction
from kit.show import HTML_COLOURS, Mark, Part, Result, format_duration, has_widgets, html_text, in_lab
from kit.slurm.launch import check_settings, compiler_here
from kit.watch.display import publish

TITLES: dict[str, tuple[Mark, str]] = {  # of the verdicts
    "fits": ("good", "Fits"),
    "tight": ("warning", "Tight"),
    "unknown": ("warning", "Unknown whether it fits"),
    "does not fit": ("bad", "Does not fit"),
}


def explore(recipe: Recipe, cluster: Cluster) -> "Explorer":
    """Show memory by phase, time and verdict, computed again at each change of a control in JupyterLab.

    What the result shows in later cells follows the controls. The output is saved with the notebook, so without
    JavaScript, and headless, that of the recipe stays. Raises InputError as `kit.predict` does.
    """
    dataset = find_prepared(recipe, cluster=cluster)
    explorer = Explorer(Setting(recipe, cluster, dataset.manifest if dataset else None))
    explorer.show()
    return explorer


class Explorer(Result):
    """The chosen setting, and what other settings would take; in JupyterLab each part follows the controls."""

    def __init__(self, setting: Setting) -> None:
        self.start = self.setting = setting
        self._compiler = compiler_here(setting.cluster)
        self._shown: list[Callable[[], None]] = []  # draw again what cells show of it
        self._version = 0  # of the choices; drawing of an older one is given up

    @property
    def recipe(self) -> Recipe:
        """The recipe with the chosen settings."""
        return self.setting.recipe

    @property
    def memory_map(self) -> Any:
        """Memory over row length and micro-batch."""
        return self._follow(forecast.memory_map)

    @property
    def time_by_nodes(self) -> Any:
        """Time by the number of nodes."""
        return self._follow(forecast.time_by_nodes)

    @property
    def strategies(self) -> Any:
        """Each strategy and sharding."""
        return self._follow(forecast.strategies)

    @property
    def sizes(self) -> Any:
        """Memory by the number of GPUs."""
        return self._follow(forecast.sizes)

    @property
    def fastest(self) -> Any:
        """The settings that fit, fastest first, as `kit.tune` finds them."""
        return self._follow(lambda setting: tune.tune(setting.recipe, setting.cluster, manifest=setting.manifest))

    def as_dict(self) -> dict[str, Any]:
        """The options, and the tables as lists of rows."""
        return {"options": self.options(), **forecast.alternatives(self.setting).as_dict()}

    def parts(self) -> Iterator[Part]:
        """The verdict, the map, the node counts, the strategies and the GPU counts."""
        yield from self.setting.predict().parts()
        yield from forecast.alternatives(self.setting).parts()

    def choose(self, gpu: str = "", **changes: Any) -> None:
        """Replace dotted keys of the recipe, and the GPUs by those of another type; what is shown follows."""
        types = {one.name: one for one in GPU_TYPES}
        setting = self.start.changed(**changes)
        self.setting = setting.on_gpus(types[gpu]) if gpu in types else setting
        self._draw_again()

    def options(self) -> str:
        """The changes as options of `kit launch`: empty where nothing was changed."""
        before, after = self.start.recipe, self.recipe
        values = {key: value_of(after, key) for key in Recipe.keys(after)}
        changed = [
            f"-s {key}={shlex.quote(text_of(value))}" for key, value in values.items() if value != value_of(before, key)
        ]
        return " ".join(changed)

    def save(self, path: str | Path) -> Path:
        """Write the recipe with the chosen settings. Raises InputError where there is such a file."""
        path = Path(path)
        if path.exists():
            raise InputError(f"{path} exists, and nothing is overwritten: give another name.")
        files.write(path, self.recipe.toml())
        return path

    def refusal(self) -> str:
        """Why the chosen setting cannot be launched on the cluster, or an empty string."""
        if self.setting.cluster != self.start.cluster:
            return f"{self.start.cluster.name} has no {self.setting.cluster.nodes.gpu}."
        return self.refusal_of(self.recipe)

    def refusal_of(self, recipe: Recipe) -> str:
        """Why a recipe cannot be launched on the cluster, or an empty string; its weights are not looked for."""
        try:
            check_settings(recipe, self.start.cluster, self._compiler)
        except KitError as error:
            return str(error)
        return ""

    def show(self) -> None:
        """Show the forecast in the running cell; in JupyterLab below its controls. Raises InputError."""
        self.setting.predict()
        if has_widgets():
            from IPython.display import display

            from kit.notebook.explorer_controls import Controls

            display(Controls(self).widget)
        self._display(lambda setting: Verdict.of(setting.predict(), self.refusal()))
        self._display(lambda setting: setting.predict().figure)
        self._display(lambda setting: "\n".join(one for one in setting.predict().parts() if isinstance(one, str)))

    def _follow(self, make: Callable[[Setting], Any]) -> Any:
        """What `make` returns; in JupyterLab something that shows it and is drawn again after each choice."""
        return Following(lambda: self._display(make)) if in_lab() else make(self.setting)

    def _display(self, make: Callable[[Setting], Any]) -> None:
        display_id = uuid.uuid4().hex

        def draw(update: bool = True) -> None:
            publish(display_id, *mime_data(make, self.setting), update=update)

        draw(update=False)
        self._shown.append(draw)

    def _draw_again(self) -> None:
        """Draw all that is shown, one after the other, until the next choice: a map takes a second."""
        self._version += 1
        version, waiting = self._version, list(self._shown)

        def draw_next() -> None:
            if waiting and version == self._version:
                waiting.pop(0)()
                later(draw_next)

        draw_next()


class Following:
    """Shows a part of an explorer in the cell that displays it."""

    def __init__(self, show: Callable[[], None]) -> None:
        self._ipython_display_ = show


def later(action: Callable[[], None]) -> None:
    """Call it after what waits in this kernel, such as the next move of a slider; at once outside of a kernel."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        action()
    else:
        loop.call_later(0.01, action)


def mime_data(make: Callable[[Setting], Any], setting: Setting) -> tuple[dict[str, Any], dict[str, Any]]:
    """MIME data and metadata of what `make` returns; the message for settings that are not possible together."""
    try:
        made = make(setting)
    except KitError as error:
        made = f'<p style="color:{HTML_COLOURS["bad"]}">{html.escape(str(error))}</p>'
        return {"text/html": made, "text/plain": str(error)}, {}
    if isinstance(made, Figure):
        return made._repr_mimebundle_()
    if isinstance(made, str):
        return {"text/html": html_text(made), "text/plain": made}, {}
    return made._repr_mimebundle_(), {}


@dataclass(frozen=True)
class Verdict:
    """Whether a setting fits and can be launched, seen at once: green, amber or red, with numbers and reasons."""

    mark: Mark
    title: str
    numbers: str
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, prediction: Prediction, refusal: str) -> "Verdict":
        """Of a forecast; refusal: why the setting cannot be launched, or an empty string."""
        memory, time = prediction.memory, prediction.time
        mark, title = TITLES[memory.verdict]
        numbers = []
        if memory.capacity_gib:
            numbers.append(f"up to {memory.device_gib[1]:.1f} of {memory.capacity_gib:.1f} GiB on each device")
        if time.step_s is not None:
            numbers.append(f"{time.step_s:.3g} s/step")
        if time.wall_h is not None:
            numbers.append(f"{time.optimizer_steps:,} steps in {format_duration(3600 * time.wall_h)}")
        reasons = [memory.cheapest_fix] if memory.cheapest_fix else []
        if refusal:
            mark, reasons = "bad" if mark == "bad" else "warning", [f"Cannot be launched here: {refusal}", *reasons]
        return cls(mark, title, ", ".join(numbers), tuple(reasons))

    def __str__(self) -> str:
        return "\n".join([f"{self.title}: {self.numbers}", *self.reasons])

    def html(self) -> str:
        """A block in the colour of the mark, as high with a reason as without."""
        colour, escape = HTML_COLOURS[self.mark], html.escape
        return (
            f'<div class="kit-verdict" data-mark="{self.mark}" style="border-left:10px solid {colour};padding:6px 12px;'
            f'min-height:4.5em"><b style="color:{colour};font-size:1.4em">{self.title}</b>'
            + "".join(f"<div>{escape(line)}</div>" for line in (self.numbers, *self.reasons))
            + "</div>"
        )

    def _repr_mimebundle_(self) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": str(self)}


def value_of(recipe: Recipe, key: str) -> Any:
    """A recipe's value by its dotted key."""
    table, _, name = key.rpartition(".")
    return getattr(getattr(recipe, table) if table else recipe, name)


def text_of(value: Any) -> str:
    """A value as `kit launch -s` takes it."""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
