"""The controls of `kit.explore` in JupyterLab: sliders and dropdowns with labels in words."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ipywidgets

from kit import files
from kit.config.recipe import Recipe
from kit.errors import KitError
from kit.forecast.gpus import GPU_TYPES
from kit.notebook.explorer import Explorer, value_of
from kit.notebook.lab import button, message

POWERS = (1, 2, 4, 8, 16)
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
REFUSED = " (forecast only)"
OWN_GPUS = ""  # the cluster's


@dataclass(frozen=True)
class Spec:
    """A control of a recipe's key: its label, and its values with their words; a slider where they have an order."""

    key: str
    label: str
    words: Mapping[Any, str]
    slider: bool = False


def _numbers(key: str, label: str, values: Iterable[int]) -> Spec:
    return Spec(key, label, {value: f"{value:,}" for value in values}, slider=True)


SPECS = (
    Spec("tuning.method", "Method", {"lora": "LoRA", "full": "full fine-tune", "qlora": "QLoRA (4-bit weights)"}),
    _numbers("tuning.r", "LoRA rank", (4, 8, 16, 32, 64, 128, 256)),
    Spec(
        "tuning.target_modules", "LoRA on",
        {ATTENTION[::2]: "q and v", ATTENTION: "q, k, v and o", (*ATTENTION, *MLP): "attention and MLP",
         ("all-linear",): "all linear layers"},
    ),
    Spec("model.base", "Frozen weights", {"bf16": "as the model (bf16)", "fp8": "fp8", "nf4": "4-bit (nf4)"}),
    _numbers("parallel.nodes", "Nodes", POWERS),
    _numbers("parallel.gpus_per_node", "GPUs per node", (1, 2, 4, 8)),
    Spec("parallel.strategy", "Strategy", {"ddp": "DDP", "fsdp2": "FSDP2", "fsdp1": "FSDP1", "zero1": "ZeRO 1",
                                           "zero2": "ZeRO 2", "zero3": "ZeRO 3"}),
    Spec("parallel.sharding", "Sharding", {"full": "all", "grad_op": "gradients and optimizer",
                                           "hybrid": "within each node"}),
    _numbers("data.seq_len", "Tokens per row", (512, 1024, 2048, 4096, 8192, 16384, 32768)),
    _numbers("schedule.micro_batch", "Rows per GPU", POWERS),
    _numbers("schedule.grad_accum", "Accumulated", POWERS),
    Spec("parallel.activation_checkpointing", "Checkpointing", {"auto": "automatic", True: "on", False: "off"}),
    Spec("parallel.compile", "Compiled layers", {"auto": "automatic", "on": "on", "off": "off"}),
)  # fmt: skip


class Controls:
    """The controls of an explorer, as `widget`."""

    def __init__(self, explorer: Explorer) -> None:
        self._explorer, recipe = explorer, explorer.recipe
        self._busy = False
        known = json.loads((files.REPOSITORY / "kit" / "forecast" / "shapes.json").read_text())
        self.model = ipywidgets.Combobox(
            value=recipe.model.name, options=sorted(known), description="Model", continuous_update=False,
            tooltip="A hub id, a folder with config.json, or a config.json",
        )  # fmt: skip
        own = explorer.setting.cluster.nodes.gpu or "unknown"
        types = [(one.name, one.name) for one in GPU_TYPES if one.name != own]
        self.gpu = ipywidgets.Dropdown(options=[(f"{own} (this cluster)", OWN_GPUS), *types], description="GPU")
        self.controls = {spec.key: self._control(spec, value_of(recipe, spec.key)) for spec in SPECS}
        for control in (self.model, self.gpu, *self.controls.values()):
            control.style.description_width, control.layout.width = "9em", "auto"
            control.observe(self._changed, "value")
        self._options, self._message = ipywidgets.HTML(), ipywidgets.HTML()
        self._path = ipywidgets.Text(value=f"{recipe.name}-explored.toml", description="Recipe file")
        save = button("Use these settings", self._save, self._report, "Write them as a recipe", "primary")
        grid = ipywidgets.GridBox([self.model, self.gpu, *self.controls.values()])
        grid.layout.grid_template_columns = "repeat(auto-fill, minmax(24em, 1fr))"
        use = ipywidgets.HBox([self._path, save, self._message], layout=ipywidgets.Layout(flex_flow="row wrap"))
        self.widget = ipywidgets.VBox([grid, use, self._options])
        self.widget.add_class("kit-explorer")
        self._settle()

    def _control(self, spec: Spec, value: Any) -> Any:
        words = dict(spec.words) | ({} if value in spec.words else {value: _text(value)})
        if spec.slider:
            options = [(words[option], option) for option in sorted(words)]
            return ipywidgets.SelectionSlider(
                options=options, value=value, description=spec.label, tooltip=spec.key, continuous_update=False
            )
        options = [(text, option) for option, text in words.items()]
        return ipywidgets.Dropdown(options=options, value=value, description=spec.label, tooltip=spec.key)

    def changes(self) -> dict[str, Any]:
        """The keys of the recipe whose control has another value than it, without those that have no effect."""
        before = self._explorer.start.recipe
        found = {"model.name": self.model.value} | {
            key: control.value for key, control in self.controls.items() if not control.disabled
        }
        return {key: value for key, value in found.items() if value != value_of(before, key)}

    def _changed(self, _: Any) -> None:
        if self._busy:
            return
        self._disable()
        try:
            self._explorer.choose(self.gpu.value, **self.changes())
        except KitError as error:
            self._report(message(str(error), "bad"))
            return
        self._report("")
        self._settle()

    def _disable(self) -> None:
        """Disable what has no effect."""
        method, strategy = self.controls["tuning.method"].value, self.controls["parallel.strategy"].value
        for key in ("tuning.r", "tuning.target_modules"):
            self.controls[key].disabled = method == "full"
        self.controls["model.base"].disabled = method != "lora"
        self.controls["parallel.sharding"].disabled = not strategy.startswith("fsdp")

    def _settle(self) -> None:
        """Mark what cannot be launched, and show the options."""
        self._disable()
        self._busy, base = True, self._launchable()
        for spec in SPECS:
            if not spec.slider:
                self._mark(self.controls[spec.key], spec, base)
        self._busy = False
        options = self._explorer.options()
        gpu = " (the type of GPU belongs to the cluster profile)" if self.gpu.value else ""
        self._options.value = message(f"kit launch RECIPE {options}{gpu}" if options else "the recipe as it is")

    def _mark(self, control: Any, spec: Spec, base: Recipe | None) -> None:
        """Add words to the options with which the cluster would refuse the base."""
        marked = []
        for text, option in control.options:
            plain = text.removesuffix(REFUSED)
            marked.append(
                (plain if base is None or self._launches(base, spec.key, option) else plain + REFUSED, option)
            )
        if marked != list(control.options):
            value = control.value
            control.options = marked
            control.value = value

    def _launchable(self) -> Recipe | None:
        """The chosen recipe where it can be launched, else the one that the explorer began with, else None."""
        candidates = (self._explorer.recipe, self._explorer.start.recipe)
        return next((recipe for recipe in candidates if not self._explorer.refusal_of(recipe)), None)

    def _launches(self, base: Recipe, key: str, option: Any) -> bool:
        try:
            return not self._explorer.refusal_of(base.override(**{key: option}))
        except KitError:  # they contradict each other
            return False

    def _save(self) -> None:
        path = self._explorer.save(self._path.value)
        self._report(message(f"wrote {path}: kit launch {path}", "good"))

    def _report(self, text: str) -> None:
        self._message.value = text


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else f"{value:,}" if isinstance(value, int) else str(value)
