"""Adapters: out of a checkpoint's shards, into the base shard by shard, onto a hub."""

import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kit import files
from kit.checkpoints import inspect as checkpoint
from kit.checkpoints import weights
from kit.checkpoints.formats.base import ProblemKind, Weights, join_messages
from kit.config import models as model
from kit.errors import KitError
from kit.slurm.run import Run

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's own names
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_OWNED = re.compile(r"\.(lora_\w+|modules_to_save)\.(?!weight$|bias$)([^.]+)")  # by whom, in a full checkpoint


def peft_name(key: str) -> str:
    """PEFT's own name of a checkpoint's tensor: no wrappers, no "model." of accelerate's, no adapter's name."""
    key = re.sub(r"^model\.(?=base_model\.)", "", _WRAPPERS.sub("", key))
    key = _OWNED.sub(r".\1", key).replace(".modules_to_save.", ".")
    return key.removesuffix(".weight") if key.endswith("lora_magnitude_vector.weight") else key


def export(source: Path, out: Path, name: str = "") -> Path:
    """A new folder with PEFT's two files from a checkpoint-N folder, or from a run's newest complete checkpoint.

    Of DCP shards only the adapter's bytes are read. `name` picks one of several adapters; the config of any but
    "default" lies in a folder of that name, as PEFT saves it. Raises KitError, and leaves nothing, where there is no
    adapter, a tensor is missing, misshapen or not finite; warns where the adapter is untrained.
    """
    source = _newest(Path(source))
    config = source / ("" if name == "default" else name) / CONFIG
    if not config.is_file():
        raise KitError(f"{config} is not there; save the PEFT config so, as kit's training does.")
    held = weights.read_headers(source)
    if held.problems:
        raise KitError(f"The adapter in {source} cannot be exported: {join_messages(held.problems)}")
    settings, expected = files.read_json(config), _expected(config)
    names = _adapter_names(held, source, name, expected or {})
    _check(names, held, expected or _paired(names.values(), settings, settings["target_modules"]), source)
    tensors = {names[key]: tensor.contiguous() for key, tensor in weights.read_tensors(held, names)}
    for problem in checkpoint.check_values(tensors.items()):
        if problem.kind is not ProblemKind.UNTRAINED:
            raise KitError(f"{source}: {problem} Export an earlier checkpoint.")
        warnings.warn(f"{source}: {problem}", stacklevel=2)
    with files.new_folder(Path(out)) as folder:
        _save(tensors, folder / WEIGHTS)
        shutil.copyfile(config, folder / CONFIG)
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


def _adapter_names(held: Weights, source: Path, name: str, expected: dict[str, Any]) -> dict[str, str]:
    """{key in the checkpoint: PEFT's name}; all keys, or where the base lies there too, those of the adapter."""
    owners = {key: owned[2] if (owned := _OWNED.search(key)) else "" for key in held.tensors}
    there = sorted(set(owners.values()) - {""})
    if there and name not in there and (name or len(there) > 1):
        raise KitError(f"{source} holds the adapters {', '.join(there)}; name one of them.")
    owner = name or "".join(there)
    names = {key: peft_name(key) for key in owners}
    names = {k: n for k, n in names.items() if owners[k] == owner or (not owners[k] and (not there or n in expected))}
    if not any("lora_" in n for n in names.values()):
        raise KitError(f"{source} holds no LoRA tensors among its {len(held.tensors)}: not an adapter's checkpoint.")
    if len(set(names.values())) < len(names):
        twice = next(n for n in names.values() if list(names.values()).count(n) > 1)
        raise KitError(f"{source}: two tensors would both be named {twice}, so nothing is exported.")
    return names


def _check(names: dict[str, str], held: Weights, expected: dict[str, tuple[int, ...]], source: Path) -> None:
    """Raises KitError unless the tensors are those that PEFT would make for this config."""
    found = {name: held.tensors[key].shape for key, name in names.items()}
    faults = {
        "missing": [n for n in expected if n not in found],
        "not expected": [n for n in found if n not in expected and "lora_" in n],  # PEFT may add embeddings
        "misshapen": [n for n, shape in expected.items() if shape and found.get(n, shape) != shape],
    }
    for fault, which in faults.items():
        if which:
            raise KitError(
                f"{source} holds {len(found)} adapter tensors, {len(expected)} were expected from {CONFIG}: "
                f"{len(which)} {fault}, such as {which[0]}."
            )


def _expected(config: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes that PEFT would save, from an empty model of the base's shape; None if no base is at hand."""
    import torch
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    base = _base_config(files.read_json(config).get("base_model_name_or_path") or "")
    if not base:
        return None
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT itself: a newer one's settings, an older name in transformers
        settings = PeftConfig.from_pretrained(config.parent)
        settings.base_model_name_or_path, settings.init_lora_weights = base, False  # only shapes are asked
        empty = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)), settings)
    return {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(empty).items()}


def _base_config(name: str) -> str:
    """The folder of the base's config.json on this machine, or nothing."""
    config = model.find_config(name) if name else None
    return str(config.parent) if config else ""


def _paired(found: Iterable[str], config: dict[str, Any], targets: Any = None) -> dict[str, tuple[int, ...]]:
    """Without the base: an A for every B, a B for every A, each target module at least once; shapes unknown."""
    names = {n.replace("lora_A", "lora_B") for n in found} | {n.replace("lora_B", "lora_A") for n in found}
    names |= {n.replace("lora_A.weight", "lora_magnitude_vector") for n in found if config.get("use_dora")}
    listed = targets if isinstance(targets, list) else []
    names |= {f"{t}.lora_A.weight" for t in listed if not any(f".{t}.lora_" in name for name in found)}
    return dict.fromkeys(names, ())


Update = Callable[[Any], Any]  # the new values of a tensor from the base's; these may be overwritten
Outputs = dict[str, dict[str, Update | None]]  # {the base's tensor: {the merged model's: update}}
HEAD = "lm_head.weight"
_TURNED = ("gpt2", "imagegpt", "openai-gpt")  # their Conv1D keeps weights as in x out (transformers.pytorch_utils)
# Other starts, such as pissa, change the base before training.
_VALUES = {"peft_type": ("lora",), "init_lora_weights": ("true", "false", "gaussian", "eva", "orthogonal")}
# What a config may set: the sum needs it or does not see it. Anything else set changes what is merged.
_KNOWN = re.compile(
    r"(alpha|rank|layers)_pattern|auto_mapping|base_model_name_or_path|bias|eva_config|exclude_modules|fan_in_fan_out|"
    r"inference_mode|init_lora_weights|layers_to_transform|lora_(alpha|dropout)|megatron_core|modules_to_save|"
    r"peft_(type|version)|qalora_group_size|r|revision|target_modules|task_type|use_(dora|rslora)"
)


def merge(adapter: Path, base: str | Path, out: Path, shard_gb: float = 5.0) -> Path:
    """A model folder with W + scaling B A in fp32, cast back to the base's dtype, at most shard_gb (1e9) a file.

    Holds one shard and the adapter in memory, never the base. Unties lm_head where the adapter changes one of the two.
    Raises KitError for a base that does not fit the adapter, for settings that are not merged here, and where the disk
    is too small; nothing is left then. Warns where the base goes by another name.
    """
    adapter, origin, out = Path(adapter), Path(model.source(str(base))), Path(out)
    config, settings = files.read_json(adapter / CONFIG), files.read_json(origin / "config.json")
    _check_mergeable(config, adapter)
    held = weights.read_headers(origin)
    if held.format != "safetensors" or held.problems:
        reason = join_messages(held.problems) or "it holds no safetensors files."
        raise KitError(f"{origin} cannot be merged into: {reason}")
    _check_base(config.get("base_model_name_or_path") or "", str(base), origin, settings)
    turned = bool(config.get("fan_in_fan_out")) or settings.get("model_type") in _TURNED
    updates = _updates(adapter, config, origin, held, turned)
    outputs = {name: {name: updates.get(name)} for name in held.tensors}
    if (tied := _tied(held)) and (tied in updates or HEAD in updates):
        outputs[tied][HEAD] = updates.get(HEAD)
    need = sum(sizes := [held.tensors[source].bytes for source, made in outputs.items() for _ in made])
    out.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(out.parent).free) < need:
        raise KitError(f"The merged model takes {need / 1e9:.1f} GB; {out.parent} has {free / 1e9:.1f} GB free.")
    with files.new_folder(out) as folder:
        _write_shards(_stream(outputs, held), list(_shards(sizes, shard_gb * 1e9)), need, folder)
        for path in origin.iterdir():
            if path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        if len(sizes) > len(outputs):
            files.write_json(folder / "config.json", settings | {"tie_word_embeddings": False})
    return out


def _write_shards(stream: Iterator[tuple[str, Any]], shards: list[int], size: int, folder: Path) -> None:
    where: dict[str, str] = {}
    for number, count in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = dict(islice(stream, count))
        where |= dict.fromkeys(tensors, name)
        _save(tensors, folder / name)
        del tensors  # before the next shard is gathered
    index = {"metadata": {"total_size": size}, "weight_map": where}
    if len(shards) > 1:
        files.write_json(folder / "model.safetensors.index.json", index)


def _stream(outputs: Outputs, held: Weights) -> Iterator[tuple[str, Any]]:
    for source, tensor in weights.read_tensors(held, held.tensors):
        for name, update in outputs[source].items():
            copy = tensor.clone() if len(outputs[source]) > 1 else tensor
            yield name, update(copy) if update else copy


def _shards(sizes: list[int], limit: float) -> Iterator[int]:
    """How many tensors go into each file, in the base's order."""
    count, total = 0, 0
    for size in sizes:
        if count and total + size > limit:
            yield count
            count, total = 0, 0
        count, total = count + 1, total + size
    yield count


def _tied(held: Weights) -> str:
    """The embedding that is lm_head too, if one is: transformers then saves one tensor for both."""
    found = [n for n in held.tensors if n.endswith(("embed_tokens.weight", "wte.weight"))]
    return found[0] if found and HEAD not in held.tensors else ""


def _fit(origin: Path, held: Weights, name: str, *shapes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The base's own name of a tensor, and its shape. Raises KitError unless it is unquantised and of these shapes.

    A bare model's file, as GPT-2's, lacks the first word of each name.
    """
    names = [name, name.partition(".")[2], _tied(held) if name == HEAD else ""]
    found = next((n for n in names if n in held.tensors), None)
    if found is None:
        raise KitError(f"{origin} has no tensor {name}: another base than the adapter's.")
    entry = held.tensors[found]
    if entry.shape not in shapes or "float" not in entry.dtype or "8" in entry.dtype:
        raise KitError(
            f"{origin}: {found} is {entry.dtype} {list(entry.shape)}; the adapter needs an unquantised tensor of shape "
            f"{list(shapes[0])}. Name the base that it was trained on."
        )
    return HEAD if name == HEAD else found, entry.shape


def _updates(adapter: Path, config: dict[str, Any], origin: Path, held: Weights, turned: bool) -> dict[str, Update]:
    """{base tensor: update}; `turned`: weights are in x out. Raises KitError for tensors that merging does not know."""
    saved = weights.read_headers(adapter)
    if saved.problems:
        raise KitError(f"{adapter} cannot be merged: {join_messages(saved.problems)}")
    _check({name: name for name in saved.tensors}, saved, _paired(saved.tensors, config), adapter)
    tensors = {n.removeprefix("base_model.model."): t for n, t in weights.read_tensors(saved, saved.tensors)}
    updates: dict[str, Update] = {}
    for name, tensor in tensors.items():
        module, lora, part = name.partition(".lora_")
        magnitude = tensors.get(f"{module}.lora_magnitude_vector")
        if part == "A.weight" or (part == "embedding_A" and magnitude is None):
            other = tensors[f"{module}.lora_{part.replace('A', 'B')}"]
            left, right = (other, tensor) if part == "A.weight" else (tensor.T, other.T)  # r x tokens, hidden x r
            rows, columns = shape = (len(left), right.shape[1])
            target, found = _fit(origin, held, f"{module}.weight", shape, shape[::-1])
            turn = found != shape or (rows == columns and turned)
            updates[target] = partial(_added, left, right, _scaling(config, module, len(right)), magnitude, turn)
        elif not lora and not name.endswith(".base_layer.weight"):  # trained whole: modules_to_save, biases
            target, _ = _fit(origin, held, name.replace(".base_layer.", "."), tuple(tensor.shape))
            updates[target] = tensor.type_as  # in the base's dtype
        elif lora and part not in ("B.weight", "embedding_B", "magnitude_vector"):
            raise KitError(f"{adapter}: merging knows no tensor like {name}; merge with PEFT's merge_and_unload.")
    return updates


def _added(left: Any, right: Any, scaling: float, magnitude: Any, turned: bool, weight: Any) -> Any:
    """W + scaling B A, in place, in fp32 by blocks of rows; DoRA sets the norm of each row (arXiv 2402.09353)."""
    rows_of, right = weight.T if turned else weight, right.float()
    step = max(1, 2**24 // right.shape[1])  # 64 MiB of fp32
    for part in (slice(start, start + step) for start in range(0, len(left), step)):
        block = (left[part].float() @ right).mul_(scaling).add_(rows_of[part])
        if magnitude is not None:
            block.mul_((magnitude[part].float() / block.norm(dim=1))[:, None])
        rows_of[part] = block
    return weight


def _scaling(config: dict[str, Any], module: str, r: int) -> float:
    """alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), config["lora_alpha"])
    return float(alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r)


def _check_mergeable(config: dict[str, Any], adapter: Path) -> None:
    found = [key for key, value in config.items() if value and not _KNOWN.fullmatch(key)]
    for key, values in _VALUES.items():
        found += [f"{key} {config.get(key)}"] if str(config.get(key, True)).lower() not in values else []
    if found:
        raise KitError(f"{adapter} is not merged here: it sets {', '.join(found)}. Use PEFT's own merge.")


def _check_base(trained_on: str, base: str, origin: Path, settings: dict[str, Any]) -> None:
    """Raises KitError where configs or hub ids tell two models apart; warns where only the folders' names differ."""
    known, told = _base_config(trained_on), f"The adapter was trained on {trained_on}, not on {base}"
    theirs = files.read_json(Path(known) / "config.json") if known else settings
    if differs := [k for k in ("model_type", "hidden_size", "vocab_size") if theirs.get(k) != settings.get(k)]:
        raise KitError(f"{told}, which has another {differs[0]}: {settings.get(differs[0])}.")
    same = Path(trained_on).name.lower() == Path(base).name.lower() or (known and Path(known).samefile(origin))
    if not same and not any(Path(name).exists() or name.count("/") != 1 for name in (trained_on, base)):
        raise KitError(f"{told}. Name that base, or a folder that holds it.")
    if not same:
        warnings.warn(f"{told}; their shapes agree, their values cannot be compared.", stacklevel=3)


def push(adapter: Path, repo: str) -> str:
    """The address on the hub of an adapter or model folder, uploaded. Raises KitError without repo or HF_TOKEN."""
    from huggingface_hub import upload_folder

    token = os.environ.get("HF_TOKEN")
    if not repo or not token:
        raise KitError(f"Nothing was pushed: set {'HF_TOKEN to a token that may write' if repo else 'a repository'}.")
    if problems := checkpoint.inspect(Path(adapter), values=True).problems:
        raise KitError(f"Nothing was pushed: {join_messages(problems)}")
    try:
        return str(upload_folder(repo_id=repo, folder_path=adapter, token=token))
    except Exception as error:  # no network, no such repository, no right to write: the hub's own words follow
        raise KitError(f"Nothing was pushed to {repo}: {str(error).splitlines()[0]}") from None
