"""Merge an adapter into its base model, shard by shard: W + scaling B A in fp32, cast back to the base's dtype."""

import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import split_state_dict_into_shards_factory

from kit import files
from kit.checkpoints.formats.base import Weights, join_messages
from kit.checkpoints.weights import read_headers, read_tensors
from kit.config import models
from kit.deploy.adapter import CONFIG, base_config_folder, check_shapes, paired_names, save_tensors
from kit.deploy.names import MemoryNames
from kit.errors import KitError
from kit.show import Gigabytes, Part, Result, Table, progress_bar

HEAD = "lm_head.weight"
_VOCABULARY = ("embed_tokens.weight", "wte.weight", HEAD)  # ends of the names of tensors with a row for each token
# The Conv1D of these keeps weights as in x out (transformers.pytorch_utils).
_TRANSPOSED_MODELS = ("gpt2", "imagegpt", "openai-gpt")
# Other initialisations, such as pissa, change the base before training.
_MERGEABLE = {"peft_type": ("lora",), "init_lora_weights": ("true", "false", "gaussian", "eva", "orthogonal")}
# Settings that the sum needs or does not depend on. Any other that is set would change the merged model.
_KNOWN_SETTINGS = re.compile(
    r"(alpha|rank|layers)_pattern|auto_mapping|base_model_name_or_path|bias|eva_config|exclude_modules|fan_in_fan_out|"
    r"inference_mode|init_lora_weights|layers_to_transform|lora_(alpha|dropout)|megatron_core|modules_to_save|"
    r"peft_(type|version)|qalora_group_size|r|revision|target_modules|task_type|use_(dora|rslora)"
)
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # config, tokenizer, chat template

Update = Callable[[Any], Any]  # the new values of a tensor from the base's, which it may overwrite


@dataclass(frozen=True)
class MergedModel(Result):
    """A model folder that needs no PEFT. `bytes` are those of its tensors."""

    path: Path
    adapter: Path
    base: Path
    tensors: int
    bytes: int
    weight_files: int
    head_untied: bool

    def parts(self) -> Iterable[Part]:
        """One table."""
        columns = ("merged model", "adapter", "base", "tensors", "size", "weight files")
        row = (
            str(self.path),
            str(self.adapter),
            str(self.base),
            self.tensors,
            Gigabytes(self.bytes / 1e9),
            self.weight_files,
        )
        yield Table(columns, [row])
        if self.head_untied:
            yield f"{HEAD} is no longer tied to the embedding: the adapter changes one of the two."


def merge(adapter: Path, base: str | Path, out: Path, shard_gb: float = 5.0, progress: bool = False) -> MergedModel:
    """Write a model folder with the adapter merged into its base, at most shard_gb (1e9 bytes) a file.

    Holds one shard and the adapter in memory, never the base. Unties lm_head where the adapter changes one of the two.
    Raises KitError, and leaves nothing, for a base that does not fit the adapter, for settings that are not merged
    here, and where the disk is too small. Warns where the base has another name than the one that was trained on.
    """
    adapter, origin, out = Path(adapter), Path(models.source(str(base))), Path(out)
    config, settings = files.read_json(adapter / CONFIG), files.read_json(origin / "config.json")
    _check_mergeable(config, adapter)
    base_weights = read_headers(origin)
    if base_weights.format != "safetensors" or base_weights.problems:
        reason = join_messages(base_weights.problems) or "it holds no safetensors files."
        raise KitError(f"{origin} cannot be merged into: {reason}")
    tensors = _read_adapter(adapter, config)
    _check_base(config.get("base_model_name_or_path") or "", str(base), origin, settings, _saved_heights(tensors))
    target = _Base(origin, base_weights, bool(config.get("fan_in_fan_out")) or _is_transposed(settings))
    outputs = _outputs(target, _updates(adapter, config, tensors, target))
    _check_vocabulary(config.get("base_model_name_or_path") or "", target, tensors)
    size = sum(output.bytes for output in outputs.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(out.parent).free) < size:
        raise KitError(f"The merged model takes {size / 1e9:.1f} GB; {out.parent} has {free / 1e9:.1f} GB free.")
    head_untied = len(outputs) > len(base_weights.tensors)
    with files.new_folder(out) as folder:
        shards = _write_shards(outputs, base_weights, shard_gb * 1e9, folder, progress)
        for path in origin.iterdir():
            if path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        if head_untied:
            files.write_json(folder / "config.json", _untied(settings))
    return MergedModel(out, adapter, origin, len(outputs), size, shards, head_untied)


def _is_transposed(settings: dict[str, Any]) -> bool:
    return settings.get("model_type") in _TRANSPOSED_MODELS


def _untied(settings: dict[str, Any]) -> dict[str, Any]:
    """The config of a model whose head is a separate tensor, in the text part of a multimodal one too."""
    untied, text = {"tie_word_embeddings": False}, settings.get("text_config")
    return settings | ({"text_config": text | untied} if text else {}) | untied


class _Output(NamedTuple):
    """A tensor of the merged model: the base's tensor, and how that changes."""

    source: str
    bytes: int
    update: Update | None


@dataclass(frozen=True)
class _Base:
    """The base model; `transposed`: its weights are in x out."""

    path: Path
    weights: Weights
    transposed: bool

    @property
    def tied_embedding(self) -> str:
        """The embedding that is lm_head too, if one is: transformers then saves one tensor for both."""
        found = [name for name in self.weights.tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
        has_head = any(f".{name}".endswith(f".{HEAD}") for name in self.weights.tensors)
        return found[0] if found and not has_head else ""

    @cached_property
    def _memory_names(self) -> MemoryNames:
        return MemoryNames(self.path)

    @cached_property
    def _names_on_disk(self) -> dict[str, str]:
        """The file's name of each tensor by the one that it has in memory."""
        return {self._memory_names.of(name): name for name in self.weights.tensors}

    def _renamed(self, name: str) -> str | None:
        """The file's name of a tensor that an adapter names as memory does, or as older files do."""
        return self._names_on_disk.get(name) or self._names_on_disk.get(self._memory_names.of(name) or name)

    def find(self, name: str, *shapes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The base's name of a tensor, and its shape.

        The file of a model without a head, as GPT-2's, lacks the first word of each name. Files of multimodal models
        have names that transformers changes when it loads them.
        Raises KitError unless the tensor exists, is unquantised and has one of these shapes.
        """
        candidates = [name, name.partition(".")[2], self.tied_embedding if name == HEAD else ""]
        found = next((candidate for candidate in candidates if candidate in self.weights.tensors), None)
        found = found or self._renamed(name)
        if found is None:
            raise KitError(f"{self.path} has no tensor {name}: it is not the adapter's base.")
        tensor = self.weights.tensors[found]
        quantised = "float" not in tensor.dtype or "8" in tensor.dtype
        is_vocabulary = found.endswith(_VOCABULARY) and tensor.shape[1:] == shapes[0][1:]
        if tensor.shape not in shapes and is_vocabulary and not quantised:
            raise KitError(
                f"{self.path}: {found} has {tensor.shape[0]:,} rows, the adapter's has {shapes[0][0]:,}. Name the base "
                f"whose vocabulary was resized to {shapes[0][0]:,} tokens before the training."
            )
        if tensor.shape not in shapes or quantised:
            raise KitError(
                f"{self.path}: {found} is {tensor.dtype} {list(tensor.shape)}; the adapter needs an unquantised tensor "
                f"of shape {list(shapes[0])}. Name the base that it was trained on."
            )
        return HEAD if name == HEAD and found == self.tied_embedding else found, tensor.shape


def _outputs(base: _Base, updates: dict[str, Update]) -> dict[str, _Output]:
    """The merged model's tensors by name, in the order of the base's; an embedding that is untied gives two."""
    tied = base.tied_embedding
    untie = bool(tied) and (tied in updates or HEAD in updates)
    outputs = {}
    for name, tensor in base.weights.tensors.items():
        outputs[name] = _Output(name, tensor.bytes, updates.get(name))
        if untie and name == tied:
            outputs[HEAD] = _Output(name, tensor.bytes, updates.get(HEAD))
    return outputs


def _write_shards(outputs: dict[str, _Output], base: Weights, limit: float, folder: Path, progress: bool) -> int:
    """Write the files and their index; the number of files."""
    split = split_state_dict_into_shards_factory(
        outputs,
        get_storage_size=lambda output: output.bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(limit),
    )
    with progress_bar(split.metadata["total_size"], "merge", "B", shown=progress, unit_scale=True) as bar:
        for file, names in split.filename_to_tensors.items():
            tensors = _merged_tensors({name: outputs[name] for name in names}, base)
            save_tensors(tensors, folder / file)
            bar.update(sum(tensor.nbytes for tensor in tensors.values()))
            del tensors  # before the next shard is gathered
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        files.write_json(folder / "model.safetensors.index.json", index)
    return len(split.filename_to_tensors)


def _merged_tensors(outputs: dict[str, _Output], base: Weights) -> dict[str, Any]:
    """The values of some of the merged model's tensors."""
    made: dict[str, list[str]] = {}
    for name, output in outputs.items():
        made.setdefault(output.source, []).append(name)
    merged = {}
    for source, tensor in read_tensors(base, made):
        for name in made[source]:
            values, update = tensor.clone() if len(made[source]) > 1 else tensor, outputs[name].update
            merged[name] = update(values) if update else values
    return merged


def _read_adapter(adapter: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The adapter's tensors by the name of their module in memory. Raises KitError for an adapter with problems.

    PEFT saves a resized embedding or head by all the names of its wrapper: `modules_to_save` is the trained one,
    `original_module` the base's, and where both are, the name without either repeats the trained one.
    """
    weights = read_headers(adapter)
    if weights.problems:
        raise KitError(f"{adapter} cannot be merged: {join_messages(weights.problems)}")
    expected = paired_names(weights.tensors, config, check_targets=False)
    check_shapes({name: name for name in weights.tensors}, weights, expected, adapter)
    found = {name.removeprefix("base_model.model."): tensor for name, tensor in read_tensors(weights, weights.tensors)}
    trained = {
        name.replace(".modules_to_save.", "."): tensor for name, tensor in found.items() if ".modules_to_save." in name
    }
    rest = {name: found[name] for name in found if not re.search(r"\.(modules_to_save|original_module)\.", name)}
    return rest | trained


def _saved_heights(tensors: dict[str, Any]) -> set[int]:
    """Rows of the embeddings and the head that the adapter holds as a whole: the vocabulary that it was trained on."""
    return {len(tensor) for name, tensor in tensors.items() if name.replace(".base_layer.", ".").endswith(_VOCABULARY)}


def _check_vocabulary(trained_on: str, base: _Base, tensors: dict[str, Any]) -> None:
    """Warns where the training added rows to an embedding or a head of which the adapter holds none."""
    known = base_config_folder(trained_on)
    rows = _setting(files.read_json(Path(known) / "config.json"), "vocab_size") if known else None
    saved = [name.replace(".base_layer.", ".") for name in tensors]
    if base.tied_embedding and any(name.endswith(".base_layer.weight") for name in tensors):
        return  # the one tensor of both
    heights = _saved_heights(tensors)
    missing = [
        name
        for name in base.weights.tensors
        for end in _VOCABULARY
        if name.endswith(end) and not any(given.endswith(end) for given in saved)
    ]
    if rows and missing and any(height > rows for height in heights):
        warnings.warn(
            f"The adapter was trained on {trained_on} with a vocabulary that was resized from {rows:,} to "
            f"{max(heights):,} rows, and it does not hold {missing[0]}. The rows from {rows:,} on are those of "
            f"{base.path}: the merged model is the trained one only if the training started from these.",
            stacklevel=3,
        )


def _updates(adapter: Path, config: dict[str, Any], tensors: dict[str, Any], base: _Base) -> dict[str, Update]:
    """{base tensor: update}. Raises KitError for tensors that merging does not know."""
    updates: dict[str, Update] = {}
    for name, tensor in tensors.items():
        module, is_lora, part = name.partition(".lora_")
        magnitude = tensors.get(f"{module}.lora_magnitude_vector")
        if part == "A.weight":
            pair = (tensors[f"{module}.lora_B.weight"], tensor)
        elif part == "embedding_A" and magnitude is None:
            pair = (tensor.T, tensors[f"{module}.lora_embedding_B"].T)  # A is r x tokens, B is hidden x r
        elif not is_lora and not name.endswith(".base_layer.weight"):
            # Trained completely: modules_to_save and biases. They are cast to the base's dtype.
            target, _ = base.find(name.replace(".base_layer.", "."), tuple(tensor.shape))
            updates[target] = tensor.type_as
            continue
        elif is_lora and part not in ("B.weight", "embedding_B", "magnitude_vector"):
            raise KitError(f"{adapter}: merging does not know tensors like {name}; use PEFT's merge_and_unload.")
        else:
            continue
        left, right = pair
        shape = (len(left), right.shape[1])
        target, found = base.find(f"{module}.weight", shape, shape[::-1])
        transposed = found != shape or (shape[0] == shape[1] and base.transposed)
        scaling = _scaling(config, module, len(right))
        updates[target] = partial(_add_low_rank, left, right, scaling, magnitude, transposed)
        if (trained_on := tensors.get(f"{module}.base_layer.weight")) is not None:
            updates[target] = partial(_instead_of_base, trained_on, updates[target])
            other = HEAD if target == base.tied_embedding else base.tied_embedding
            if other and target in (HEAD, base.tied_embedding):  # the one tensor of both
                updates.setdefault(other, trained_on.type_as)
    return updates


def _instead_of_base(trained_on: Any, update: Update, weight: Any) -> Any:
    """An update of the values that PEFT saved below LoRA, as of a resized vocabulary, in place of the base's."""
    return update(trained_on.to(weight.dtype, copy=True))


def _add_low_rank(left: Any, right: Any, scaling: float, magnitude: Any, transposed: bool, weight: Any) -> Any:
    """W + scaling B A, in place, in fp32 by blocks of rows; DoRA then sets the norm of each row (arXiv 2402.09353)."""
    rows_of, right = weight.T if transposed else weight, right.float()
    step = max(1, 2**24 // right.shape[1])  # 64 MiB of fp32
    for start in range(0, len(left), step):
        part = slice(start, start + step)
        block = (left[part].float() @ right).mul_(scaling).add_(rows_of[part])
        if magnitude is not None:
            block.mul_((magnitude[part].float() / block.norm(dim=1))[:, None])
        rows_of[part] = block
    return weight


def _scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _check_mergeable(config: dict[str, Any], adapter: Path) -> None:
    """Raises KitError for settings that the sum does not cover."""
    found = [key for key, value in config.items() if value and not _KNOWN_SETTINGS.fullmatch(key)]
    for key, values in _MERGEABLE.items():
        if str(config.get(key, True)).lower() not in values:
            found.append(f"{key} {config.get(key)}")
    if found:
        raise KitError(f"{adapter} cannot be merged here: it sets {', '.join(found)}. Use PEFT's merge_and_unload.")


def _setting(settings: dict[str, Any], key: str) -> Any:
    """The value of a key, of the text part where a multimodal model has it there."""
    return settings.get(key, (settings.get("text_config") or {}).get(key))


def _check_base(trained_on: str, base: str, origin: Path, settings: dict[str, Any], heights: set[int]) -> None:
    """Raises KitError where configs or hub ids tell two models apart; warns where only the folders' names differ.

    `heights` of saved embeddings count more than the vocabulary of the model that was trained on: it may have been
    resized.
    """
    known = base_config_folder(trained_on)
    message = f"The adapter was trained on {trained_on}, not on {base}"
    trained_settings = files.read_json(Path(known) / "config.json") if known else settings
    for key in ("model_type", "hidden_size", "vocab_size"):
        expected, found = _setting(trained_settings, key), _setting(settings, key)
        if expected != found and not (key == "vocab_size" and heights):
            raise KitError(f"{message}, which has another {key}: {found}, not {expected}.")
    if Path(trained_on).name.lower() == Path(base).name.lower() or (known and Path(known).samefile(origin)):
        return
    both_hub_ids = all(name.count("/") == 1 and not Path(name).exists() for name in (trained_on, base))
    if both_hub_ids:
        raise KitError(f"{message}. Name that base, or a folder that holds it.")
    warnings.warn(f"{message}; their shapes agree, their values cannot be compared.", stacklevel=3)
