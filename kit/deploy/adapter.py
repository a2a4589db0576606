"""Export an adapter from a checkpoint's shards as PEFT's two files, and push it to a hub."""

import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.checkpoints.formats.base import Problem, ProblemKind, Weights, join_messages
from kit.checkpoints.inspect import check_values, complete, inspect
from kit.checkpoints.weights import read_headers, read_tensors
from kit.config import models
from kit.errors import InputError, KitError
from kit.show import Answer, Gigabytes, Part, Result, Table, progress_bar
from kit.slurm.run import Run

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's names
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
# In a full checkpoint the adapter's name comes after these, as in lora_A.default.weight.
_NAMED = re.compile(r"\.(lora_\w+|modules_to_save)\.(?!weight$|bias$)([^.]+)")

Shapes = dict[str, tuple[int, ...]]  # by tensor name; () where the shape is not known


@dataclass(frozen=True)
class ExportedAdapter(Result):
    """An adapter folder that PEFT loads. `bytes` are those of its tensors."""

    path: Path
    checkpoint: Path
    tensors: int
    bytes: int
    problems: tuple[Problem, ...]

    def as_dict(self) -> dict[str, Any]:
        """The object that `kit adapter export --json` prints."""
        return super().as_dict() | {"problems": [problem.message for problem in self.problems]}

    def parts(self) -> Iterable[Part]:
        """One table; all values were read and are finite."""
        columns = ("adapter", "from", "tensors", "size", "values")
        yield Table(
            columns, [(str(self.path), self.checkpoint.name, self.tensors, Gigabytes(self.bytes / 1e9), "all finite")]
        )
        yield from join_messages(self.problems).splitlines()


def export(source: Path, out: Path, name: str = "", progress: bool = False) -> ExportedAdapter:
    """Write a new folder with PEFT's two files from a checkpoint-N folder, or from a run's newest complete checkpoint.

    Of DCP shards only the adapter's bytes are read. `name` picks one of several adapters; the config of any but
    "default" is in a folder of that name, as PEFT saves it. Warns where the adapter is untrained.
    Raises KitError, and leaves nothing, where there is no adapter, or where a tensor is missing, has another shape than
    PEFT expects, or holds NaN or infinity.
    """
    checkpoint = newest_complete(Run(Path(source))) if (Path(source) / "run.json").is_file() else Path(source)
    config = checkpoint / ("" if name == "default" else name) / CONFIG
    if not config.is_file():
        raise KitError(f"{config} does not exist; save the PEFT config next to the weights, as kit's training does.")
    weights = read_headers(checkpoint)
    if weights.problems:
        raise KitError(f"The adapter in {checkpoint} cannot be exported: {join_messages(weights.problems)}")
    settings, expected = files.read_json(config), expected_shapes(config)
    names = _adapter_names(weights, checkpoint, name, expected or {})
    check_shapes(names, weights, expected or paired_names(names.values(), settings), checkpoint)
    tensors, problems = _read_checked(weights, names, checkpoint, progress)
    with files.new_folder(Path(out)) as folder:
        save_tensors(tensors, folder / WEIGHTS)
        shutil.copyfile(config, folder / CONFIG)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return ExportedAdapter(Path(out), checkpoint, len(tensors), size, problems)


def newest_complete(run: Run) -> Path:
    """The newest checkpoint that training could resume from. Raises InputError if no checkpoint is complete."""
    found = run.checkpoints()
    for folder in reversed(found):
        if complete(folder):
            return folder
    if not found:
        raise InputError(
            f"{run.path} has no checkpoint yet; wait for the first save (schedule.save_every), or choose another run."
        )
    raise InputError(
        f"{run.path} has no complete checkpoint among {len(found)}; `kit checkpoint inspect {found[-1]}` lists what is "
        "wrong with the newest."
    )


def _read_checked(
    weights: Weights, names: dict[str, str], checkpoint: Path, progress: bool
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """The tensors under PEFT's names, and problems that do not prevent an export. Raises KitError."""
    tensors = {}
    size = sum(weights.tensors[key].bytes for key in names)
    with progress_bar(size, "export", "B", shown=progress, unit_scale=True) as bar:
        for key, tensor in read_tensors(weights, names):
            tensors[names[key]] = tensor.contiguous()
            bar.update(tensor.nbytes)
    problems = check_values(tensors.items())
    for problem in problems:
        if problem.kind is not ProblemKind.UNTRAINED:
            raise KitError(f"{checkpoint}: {problem} Export an earlier checkpoint.")
        warnings.warn(f"{checkpoint}: {problem}", stacklevel=3)
    return tensors, tuple(problems)


def save_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Write a safetensors file that the umask's group and others can read (safetensors writes mode 0600)."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(files.umask_mode())


def peft_name(key: str) -> str:
    """PEFT's name of a checkpoint's tensor, without wrappers, accelerate's "model." and the adapter's name."""
    key = re.sub(r"^model\.(?=base_model\.)", "", _WRAPPERS.sub("", key))
    key = _NAMED.sub(r".\1", key).replace(".modules_to_save.", ".")
    return key.removesuffix(".weight") if key.endswith("lora_magnitude_vector.weight") else key


def _adapter_names(weights: Weights, checkpoint: Path, name: str, expected: Shapes) -> dict[str, str]:
    """{key in the checkpoint: PEFT's name} of one adapter. Raises KitError for no or several adapters.

    Where no key names an adapter, all keys are the adapter's; else those with its name, and those that PEFT expects.
    """
    adapter_of = {key: match[2] if (match := _NAMED.search(key)) else "" for key in weights.tensors}
    adapters = sorted(set(adapter_of.values()) - {""})
    if adapters and name not in adapters and (name or len(adapters) > 1):
        raise KitError(f"{checkpoint} holds the adapters {', '.join(adapters)}; name one of them.")
    wanted = name or "".join(adapters)
    names = {}
    for key, adapter in adapter_of.items():
        unnamed_part = not adapter and (not adapters or peft_name(key) in expected)
        if adapter == wanted or unnamed_part:
            names[key] = peft_name(key)
    if not any("lora_" in found for found in names.values()):
        raise KitError(f"{checkpoint} holds no LoRA tensors among its {len(weights.tensors)}: it is not of an adapter.")
    repeated = [found for found, count in Counter(names.values()).items() if count > 1]
    if repeated:
        raise KitError(f"{checkpoint}: two tensors would both be named {repeated[0]}, so nothing is exported.")
    return names


def check_shapes(names: dict[str, str], weights: Weights, expected: Shapes, source: Path) -> None:
    """Raises KitError unless the tensors are those that PEFT would make for this config."""
    found = {name: weights.tensors[key].shape for key, name in names.items()}
    differences = {
        "missing": [name for name in expected if name not in found],
        # PEFT may add embeddings, which are not LoRA's
        "not expected": [name for name in found if name not in expected and "lora_" in name],
        "of another shape": [name for name, shape in expected.items() if shape and found.get(name, shape) != shape],
    }
    for difference, which in differences.items():
        if which:
            raise KitError(
                f"{source} holds {len(found)} adapter tensors, {len(expected)} were expected from {CONFIG}: "
                f"{len(which)} {difference}, such as {which[0]}."
            )


def expected_shapes(config: Path) -> Shapes | None:
    """What PEFT would save, from an empty model of the base's shape; None if the base's config is not here."""
    import torch
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    base = base_config_folder(files.read_json(config).get("base_model_name_or_path") or "")
    if not base:
        return None
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that a newer PEFT wrote, of names that transformers deprecates
        settings = PeftConfig.from_pretrained(config.parent)
        settings.base_model_name_or_path, settings.init_lora_weights = base, False  # only shapes matter
        empty = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)), settings)
    return {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(empty).items()}


def base_config_folder(name: str) -> str:
    """The folder of the base's config.json on this machine, or an empty string."""
    config = models.find_config(name) if name else None
    return str(config.parent) if config else ""


def paired_names(found: Iterable[str], config: dict[str, Any], check_targets: bool = True) -> Shapes:
    """What can be expected without the base: an A for every B, a B for every A, each target module at least once."""
    found = list(found)
    names = {name.replace("lora_A", "lora_B") for name in found} | {name.replace("lora_B", "lora_A") for name in found}
    if config.get("use_dora"):
        names |= {name.replace("lora_A.weight", "lora_magnitude_vector") for name in found}
    targets = config["target_modules"] if check_targets else None
    for target in targets if isinstance(targets, list) else []:
        if not any(f".{target}.lora_" in name for name in names):
            names.add(f"{target}.lora_A.weight")
    return dict.fromkeys(names, ())


def push(adapter: Path, repository: str) -> Answer:
    """Upload an adapter or model folder to a hub repository.

    Raises KitError without a repository or HF_TOKEN, for a folder with problems, and with the hub's reason if it
    refuses.
    """
    from huggingface_hub import upload_folder

    token = os.environ.get("HF_TOKEN")
    if not repository or not token:
        missing = "HF_TOKEN to a token that may write" if repository else "a repository"
        raise KitError(f"Nothing was pushed: set {missing}.")
    if problems := inspect(Path(adapter), values=True).problems:
        raise KitError(f"Nothing was pushed: {join_messages(problems)}")
    try:
        address = str(upload_folder(repo_id=repository, folder_path=adapter, token=token))
    except Exception as error:  # no network, no such repository, no right to write: the hub's message follows
        raise KitError(f"Nothing was pushed to {repository}: {str(error).splitlines()[0]}") from None
    values = {"path": str(adapter), "repository": repository, "address": address}
    return Answer(values, f"{adapter} is at {address}")
