"""Export a full fine-tune as a model folder of Hugging Face's format, from a checkpoint's shards."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.checkpoints.formats.base import Weights, join_messages
from kit.checkpoints.inspect import check_values
from kit.checkpoints.weights import read_headers, read_tensors
from kit.config import models
from kit.deploy.adapter import newest_complete
from kit.deploy.merge import COPIED_SUFFIXES
from kit.errors import InputError, KitError
from kit.show import Gigabytes, Part, Result, Table, progress_bar
from kit.slurm.run import Run

DCP_ROOT = "model."  # accelerate and kit.train save a state dict by this name


@dataclass(frozen=True)
class ExportedModel(Result):
    """A model folder that transformers loads. `bytes` are those of its tensors, which have the type `dtype`."""

    path: Path
    checkpoint: Path
    tensors: int
    bytes: int
    dtype: str

    def parts(self) -> Iterable[Part]:
        """One table; all values were read and are finite."""
        columns = ("model", "from", "tensors", "size", "type", "values")
        size = Gigabytes(self.bytes / 1e9)
        yield Table(columns, [(str(self.path), self.checkpoint.name, self.tensors, size, self.dtype, "all finite")])


def export_model(source: Path, out: Path, dtype: str = "", progress: bool = False) -> ExportedModel:
    """Write a new model folder from a run's newest complete checkpoint, or from a checkpoint-N folder of a run.

    dtype: of the weights; empty: the recipe's model.dtype. This process holds all of it in memory meanwhile.
    Raises InputError where the run is not a full fine-tune, and KitError, leaving nothing, where a tensor is missing
    or holds NaN or infinity.
    """
    is_run = (source / "run.json").is_file()
    run = Run(source if is_run else source.resolve().parent.parent)
    if not (run.path / "run.json").is_file():
        raise InputError(f"{source} is neither a run nor a checkpoint in the folder checkpoints/ of a run.")
    if run.recipe.tuning.method != "full":
        raise InputError(f"{run.path} trains an adapter: see kit adapter export and kit adapter merge.")
    checkpoint = newest_complete(run) if is_run else source
    with models.use_hf_home(run.cluster.paths.hf_home):
        base = Path(models.source(run.recipe.model.name))
    weights = read_headers(checkpoint)
    if weights.problems:
        raise KitError(f"The model in {checkpoint} cannot be exported: {join_messages(weights.problems)}")
    kept = dtype or run.recipe.model.dtype
    model = _filled(base, weights, checkpoint, kept, progress)
    with files.new_folder(out) as folder:
        for path in base.iterdir():
            if path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        model.save_pretrained(folder)
        for path in folder.iterdir():
            path.chmod(files.umask_mode())  # safetensors writes 0600
        stored = read_headers(folder)
    return ExportedModel(out, checkpoint, len(stored.tensors), stored.bytes, kept)


def _filled(base: Path, weights: Weights, checkpoint: Path, dtype: str, progress: bool) -> Any:
    """The model of the base's config.json with the values of the checkpoint. Raises KitError."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config, kind = AutoConfig.from_pretrained(base), getattr(torch, dtype)
    if (checkpoint / "config.json").is_file():  # of ranks that each had the model: it is in Hugging Face's format
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=kind)
        _check_finite(model.state_dict().items(), checkpoint)
        return model
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=kind)
    model.tie_weights()
    if (base / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(base)
    names = {name: name for name in model.state_dict() if name in weights.tensors}
    names |= {DCP_ROOT + name: name for name in model.state_dict() if DCP_ROOT + name in weights.tensors}
    values = {}
    with progress_bar(
        sum(weights.tensors[key].bytes for key in names), "export", "B", progress, unit_scale=True
    ) as bar:
        for key, tensor in read_tensors(weights, names):
            _check_finite([(key, tensor)], checkpoint)
            values[names[key]] = tensor.to(kind)
            bar.update(tensor.nbytes)
    missing = model.load_state_dict(values, strict=False, assign=True).missing_keys
    model.tie_weights()
    if lost := [name for name in missing if model.state_dict()[name].is_meta]:
        raise KitError(f"{checkpoint} lacks {len(lost)} tensors of the model, such as {lost[0]}: export another one.")
    return model


def _check_finite(tensors: Iterable[tuple[str, Any]], checkpoint: Path) -> None:
    for problem in check_values(tensors):
        raise KitError(f"{checkpoint}: {problem} Export an earlier checkpoint.")
