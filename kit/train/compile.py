"""Compilation of the decoder layers, each in place, so that the names of modules and weights stay as they are."""

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

# Graphs of one layer's code: kinds of layers x training and evaluation x a last batch of fewer rows. Beyond the limit
# torch runs the layers uncompiled; its own is 8.
GRAPHS = 64


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The blocks of a transformer, by the class names that transformers shards by; empty for a model without them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in base.modules() if type(module).__name__ in names]


def compile_layers(
    model: Any, recompute: bool = False, packed: bool = True, backend: str | Any = "inductor"
) -> list[torch.nn.Module]:
    """Compile the `forward` of each decoder layer; DDP, FSDP2 and FSDP1 keep their hooks outside. Returns the layers.

    recompute: checkpoint the activations of each layer, around the compiled code; the model's own checkpointing must be
    off, since it would be compiled with the layer. packed: all batches have one length, so that shapes are constants;
    otherwise torch makes a length dynamic when it sees a second one. Call it before the model is sharded.
    """
    torch._dynamo.config.recompile_limit = GRAPHS
    layers = decoder_layers(model)
    for layer in layers:
        compiled = torch.compile(layer.forward, dynamic=False if packed else None, backend=backend)
        layer.forward = functools.partial(checkpoint, compiled, use_reentrant=False) if recompute else compiled
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.base_model.register_forward_pre_hook(_mark_documents, with_kwargs=True)
    return layers


def _mark_documents(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    """Have one graph serve batches of any number of documents."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            torch._dynamo.maybe_mark_dynamic(kwargs[name], 0)


def use_cache_folder(run: Path) -> None:
    """Keep compiled code where a restarted job finds it: the user's cache folder, or the run's where that is read-only.

    An environment variable of the job has precedence. Inductor puts the code of Triton's kernels there as well.
    """
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kit" / "inductor"
    try:
        user.mkdir(parents=True, exist_ok=True)
        folder = user if os.access(user, os.W_OK) else run / "cache" / "inductor"
    except OSError:
        folder = run / "cache" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
