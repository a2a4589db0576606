"""Adapters: out of a checkpoint's shards, into the base shard by shard, onto a hub."""

import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kit import checkpoint, files, model, weights
from kit.checkpoint import NOT_FINITE, UNTRAINED
from kit.errors import KitError
from kit.run import Run
from kit.weights import Weights

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's own names
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_MUTATING = ("pissa", "olora", "corda", "loftq", "lora_ga")  # these change the base's weights before training


def peft_name(key: str) -> str:
    """The name that PEFT gives a tensor in its file, from a key in a checkpoint.

    Wrapper names, the "model." of accelerate's {"model": state} and the adapter's name "default" go.
    """
    key = _WRAPPERS.sub("", key)
    if key.startswith("model.base_model."):
        key = key.removeprefix("model.")
    key = key.replace(".modules_to_save.default.", ".")
    key = re.sub(r"\.(lora_\w+)\.default(?=\.|$)", r".\1", key)
    return key.removesuffix(".weight") if key.endswith("lora_magnitude_vector.weight") else key


def export(source: Path, out: Path) -> Path:
    """A new folder with PEFT's two files from a checkpoint-N folder, or from a run's newest complete checkpoint.

    Of DCP shards only the adapter's bytes are read. Raises KitError, and leaves nothing, where there is no adapter, a
    tensor is missing, misshapen or not finite; warns where the adapter is untrained.
    """
    source = _newest(Path(source))
    if not (source / CONFIG).is_file():
        raise KitError(f"{source} has no {CONFIG}; save the PEFT config there, as kit's training does.")
    held = weights.weights(source)
    if held.faults:
        raise KitError(f"The adapter in {source} cannot be exported: {' '.join(held.faults)}")
    names = _adapter_names(held, source)
    _check(names, held, source / CONFIG)
    tensors = {names[key]: tensor.contiguous() for key, tensor in weights.read(held, names)}
    bad, untrained = checkpoint.judge(tensors.items())
    if bad:
        raise KitError(f"{source}: {NOT_FINITE.format(len(bad), ', '.join(bad[:3]))} Export an earlier checkpoint.")
    if untrained:
        warnings.warn(f"{source}: {UNTRAINED}", stacklevel=2)
    with files.new_folder(Path(out)) as folder:
        _save(tensors, folder / WEIGHTS)
        shutil.copyfile(source / CONFIG, folder / CONFIG)
    return Path(out)


def _newest(source: Path) -> Path:
    if not (source / "run.json").is_file():
        return source
    for folder in reversed(Run(source).checkpoints()):
        if checkpoint.complete(folder):
            return folder
    raise KitError(f"{source} holds no complete checkpoint yet; `kit checkpoint inspect` says what is wrong with one.")


def _save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(files.umask_mode())  # safetensors writes 0600


def _adapter_names(held: Weights, source: Path) -> dict[str, str]:
    """{key in the checkpoint: PEFT's name}; all keys, or where the base lies there too, those of the adapter."""
    with_base = any(".base_layer." in key for key in held.tensors)
    keys = [k for k in held.tensors if not with_base or "lora_" in k or "modules_to_save" in k]
    names = {key: peft_name(key) for key in keys}
    if not any("lora_" in name for name in names.values()):
        raise KitError(f"{source} holds no LoRA tensors among its {len(held.tensors)}: not an adapter's checkpoint.")
    foreign = [n for n in names.values() if re.search(r"lora_[AB]\.(?!weight$|bias$)|modules_to_save\.", n)]
    if foreign:
        raise KitError(f"{source} holds an adapter with a name of its own ({foreign[0]}); only 'default' is exported.")
    if len(set(names.values())) < len(names):
        twice = next(n for n in names.values() if list(names.values()).count(n) > 1)
        raise KitError(f"{source}: two tensors would both be named {twice}, so nothing is exported.")
    return names


def _check(names: dict[str, str], held: Weights, config: Path) -> None:
    """Raises KitError unless the tensors are those that PEFT would make for this config."""
    found = {name: held.tensors[key].shape for key, name in names.items()}
    expected = _expected(config) or _paired(found, config)
    faults = {
        "missing": [n for n in expected if n not in found],
        "not expected": [n for n in found if n not in expected and "lora_" in n],  # PEFT may add embeddings
        "misshapen": [n for n, shape in expected.items() if shape and found.get(n, shape) != shape],
    }
    for fault, which in faults.items():
        if which:
            raise KitError(
                f"{config.parent} holds {len(found)} adapter tensors, {len(expected)} were expected from {CONFIG}: "
                f"{len(which)} {fault}, such as {which[0]}. Nothing is exported."
            )


def _expected(config: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes that PEFT would save, from an empty model of the base's shape; None if no base is at hand."""
    import torch
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = PeftConfig.from_pretrained(config.parent)
    base = _base_config(settings.base_model_name_or_path or "")
    if not base:
        return None
    settings.base_model_name_or_path = base
    settings.init_lora_weights = False  # only shapes are asked
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.20 asks transformers 5.24 by an older name
        empty = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)), settings)
    return {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(empty).items()}


def _base_config(name: str) -> str:
    """The folder of the base's config.json on this machine, or nothing."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if (Path(name) / "config.json").is_file():
        return name
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a folder that is not here
        return ""
    return str(Path(cached).parent) if isinstance(cached, str) else ""


def _paired(found: dict[str, tuple[int, ...]], config: Path) -> dict[str, tuple[int, ...]]:
    """Without the base: an A for every B, a B for every A, each target module at least once; shapes unknown."""
    names = {n.replace("lora_A", "lora_B") for n in found} | {n.replace("lora_B", "lora_A") for n in found}
    targets = files.read_json(config)["target_modules"]
    for target in targets if isinstance(targets, list) else ():
        if not any(f".{target}.lora_" in name for name in found):
            names.add(f"{target}.lora_A.weight")
    return dict.fromkeys(names, ())


@dataclass(frozen=True)
class Update:
    """What an adapter does to one tensor of the base."""

    shape: tuple[int, ...]
    apply: Callable[[Any], Any]


def merge(adapter: Path, base: str | Path, out: Path, shard_gb: float = 5.0) -> Path:
    """A model folder with W + scaling B A in fp32, cast back to the base's dtype, at most shard_gb (1e9) a file.

    Holds one shard and the adapter in memory, never the base. Raises KitError for a base that does not fit the
    adapter, for settings that are not merged here, and where the disk is too small; nothing is left then.
    """
    updates, origin, out = _updates(Path(adapter)), Path(model.source(str(base))), Path(out)
    held = weights.weights(origin)
    if held.format != "safetensors" or held.faults:
        raise KitError(f"{origin} cannot be merged into: {' '.join(held.faults) or 'it holds no safetensors files.'}")
    _check_base(updates, held, origin)
    out.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(out.parent).free) < held.bytes:
        raise KitError(f"The merged model takes {held.bytes / 1e9:.1f} GB; {out.parent} has {free / 1e9:.1f} GB free.")
    with files.new_folder(out) as folder:
        _write_shards(updates, held, folder, shard_gb * 1e9)
        for path in origin.iterdir():
            if path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
    return out


def _write_shards(updates: dict[str, Update], held: Weights, folder: Path, limit: float) -> None:
    shards, stream = list(_shards(held, limit)), weights.read(held, held.tensors)
    where: dict[str, str] = {}
    for number, count in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {n: updates[n].apply(t) if n in updates else t for n, t in islice(stream, count)}
        where |= dict.fromkeys(tensors, name)
        _save(tensors, folder / name)
        del tensors  # before the next shard is gathered
    if len(shards) > 1:
        index = {"metadata": {"total_size": held.bytes}, "weight_map": where}
        files.write_json(folder / "model.safetensors.index.json", index)


def _shards(held: Weights, limit: float) -> Iterator[int]:
    """How many tensors go into each file, in the base's order."""
    count, size = 0, 0
    for entry in held.tensors.values():
        if count and size + entry.bytes > limit:
            yield count
            count, size = 0, 0
        count, size = count + 1, size + entry.bytes
    yield count


def _updates(adapter: Path) -> dict[str, Update]:
    """{base tensor: update}."""
    config = files.read_json(adapter / CONFIG)
    _check_mergeable(config, adapter)
    tensors = dict(weights.read(held := weights.weights(adapter), held.tensors))
    updates = {}
    for name, tensor in tensors.items():
        target = name.removeprefix("base_model.model.")
        if "lora_" not in name:  # trained whole: modules_to_save, biases
            updates[target] = Update(tuple(tensor.shape), partial(_replaced, tensor))
        elif name.endswith(".lora_A.weight"):
            b, module = tensors[name.replace("lora_A", "lora_B")], target.removesuffix(".lora_A.weight")
            sum_ = partial(_added, tensor, b, _scaling(config, module, len(tensor)))
            updates[f"{module}.weight"] = Update((b.shape[0], tensor.shape[1]), sum_)
        elif not name.endswith(".lora_B.weight"):
            raise KitError(f"{adapter}: merging knows no tensor like {name}; merge with PEFT's merge_and_unload.")
    return updates


def _replaced(saved: Any, weight: Any) -> Any:
    return saved.to(weight.dtype)


def _added(a: Any, b: Any, scaling: float, weight: Any) -> Any:
    return (b.float() @ a.float()).mul_(scaling).add_(weight).to(weight.dtype)  # one fp32 copy at a time


def _scaling(config: dict[str, Any], module: str, r: int) -> float:
    """alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), config["lora_alpha"])
    return float(alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r)


def _check_mergeable(config: dict[str, Any], adapter: Path) -> None:
    start = str(config.get("init_lora_weights", True)).lower()
    reason = {
        f"peft_type {config.get('peft_type')}": config.get("peft_type") != "LORA",
        "use_dora (a direction and a magnitude, not a sum)": config.get("use_dora"),
        "fan_in_fan_out (weights stored transposed)": config.get("fan_in_fan_out"),
        f"init_lora_weights {start} (it changes the base before training)": start.startswith(_MUTATING),
    }
    if found := [what for what, there in reason.items() if there]:
        raise KitError(f"{adapter} is not merged here: {', '.join(found)}. Use it as an adapter, or PEFT's own merge.")


def _check_base(updates: dict[str, Update], held: Weights, origin: Path) -> None:
    for name, update in updates.items():
        entry = held.tensors.get(name)
        if entry is None:
            raise KitError(f"{origin} has no tensor {name}: another base than the adapter's, or one tied to another.")
        if entry.shape != update.shape or "float" not in entry.dtype or "8" in entry.dtype:
            raise KitError(
                f"{origin}: {name} is {entry.dtype} {list(entry.shape)}; the adapter needs an unquantised tensor of "
                f"shape {list(update.shape)}. Name the base that it was trained on."
            )
        if "embed_tokens" in name and "lm_head.weight" not in held.tensors:
            raise KitError(f"{origin} ties lm_head to {name}, which the adapter changes alone; merge with PEFT.")


def push(adapter: Path, repo: str) -> str:
    """The address on the hub of an adapter or model folder, uploaded. Raises KitError without repo or HF_TOKEN."""
    from huggingface_hub import upload_folder

    token = os.environ.get("HF_TOKEN")
    if not repo or not token:
        missing = "a repository (owner/name)" if not repo else "HF_TOKEN to a token that may write"
        raise KitError(f"Nothing was pushed: set {missing}.")
    if problems := checkpoint.inspect(Path(adapter), values=True).problems:
        raise KitError(f"Nothing was pushed: {' '.join(problems)}")
    try:
        return str(upload_folder(repo_id=repo, folder_path=adapter, token=token))
    except Exception as error:  # no network, no such repository, no right to write: the hub's own words follow
        raise KitError(f"Nothing was pushed to {repo}: {str(error).splitlines()[0]}") from None
