"""Variable-length attention: each document of a packed batch is one sequence, and no mask is made.

Registered with transformers under the name VARLEN. transformers makes no mask for an attention that has no mask
function, and passes the boundaries of the documents, which the collator puts into the batch, down to `attend`. On GPUs
it is one call of PyTorch's FlashAttention-2 for a batch; on CPUs, sdpa on one document after the other.
"""

import inspect
import itertools
import math
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad
from transformers import AttentionInterface

from kit.errors import KitError

VARLEN = "varlen"
# torch 2.12 needs this where keys have fewer heads than queries; 2.11 takes them without.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
NO_WINDOW = -1
aten = torch.ops.aten
REFUSED = {"softcap": "a cap on its scores", "s_aux": "attention sinks", "position_bias": "a position bias"}


def register() -> None:
    """Make VARLEN an attn_implementation of transformers in this process."""
    AttentionInterface.register(VARLEN, attend)


def boundaries(lengths: list[list[int]], width: int) -> dict[str, Any]:
    """What `attend` needs of a batch, from the lengths of the documents in each row, of `width` tokens with padding.

    The padding of a row is one more document. cu_seq_lens: where each document begins in the flattened batch, and where
    the last one ends, int32 of shape (documents + 1,). max_length: an upper bound of the lengths, which is the same for
    all batches of this width, so that torch.compile has one graph for them.
    """
    ends, end = [0], 0
    for row in lengths:
        padding = width - sum(row)
        for length in [*row, *([padding] if padding else [])]:
            end += length
            ends.append(end)
    positions = torch.tensor(ends, dtype=torch.int32)
    return {"cu_seq_lens_q": positions, "cu_seq_lens_k": positions, "max_length_q": width, "max_length_k": width}


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document; transformers' attention interface.

    query, key, value: (batch, heads, length, head size), of which keys and values may have fewer heads. Returns
    (batch, length, heads, head size). Without boundaries, each row is one document. Raises KitError for what the kernel
    cannot do.
    """
    for name, words in REFUSED.items():
        if options.get(name) is not None:
            raise KitError(f"model.attention varlen cannot run this model: it has {words}. Write sdpa or eager.")
    if dropout:
        raise KitError(f"model.attention varlen has no dropout, and this model drops {dropout:g}. Write sdpa or eager.")
    batch, _, length, size = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    window = NO_WINDOW if sliding_window is None else sliding_window - 1
    # Rotary embeddings and norms may have made fp32 of queries and keys; values come straight from a matmul.
    narrow = size - value.shape[-1]
    flat_query, flat_key, flat_value = (
        tensor.transpose(1, 2).reshape(batch * length, tensor.shape[1], tensor.shape[-1]).to(value.dtype)
        for tensor in (query, key, pad(value, (0, narrow)) if narrow else value)
    )
    scale = size**-0.5 if scaling is None else scaling
    if query.is_cuda:
        longest = length if max_length_q is None else max_length_q
        out = _kernel(flat_query, flat_key, flat_value, cu_seq_lens_q, longest, scale, window)
    else:
        out, _ = attend_by_document(flat_query, flat_key, flat_value, cu_seq_lens_q, scale, window)
    return out.view(batch, length, -1, size)[..., : value.shape[-1]], None


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """PyTorch's kernel on GPUs; tensors as in `attend_by_document`."""
    options: dict[str, Any] = {"scale": scale, "window_size": (window, 0)} | GROUPED
    out = varlen_attn(query, key, value, cu_seq_lens, cu_seq_lens, longest, longest, **options)
    assert isinstance(out, torch.Tensor)  # a pair only where more is asked for
    return out


@torch.library.custom_op("kit::attend_by_document", mutates_args=(), device_types="cpu")
def attend_by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention inside each document, on CPUs: sdpa's own kernel, on one document after the other.

    Tensors: (tokens, heads, head size). window: how many tokens back a token sees at most; NO_WINDOW is all. Returns
    the output, and the logarithm of the sum of exponentials of each token's scores, (tokens, heads), for the backward.
    One operator, as varlen_attn is, so that a compiled layer has no loop over documents in its graph.
    """
    out, normalizer = torch.empty_like(query), _normalizer(query)
    for document in _documents(cu_seq_lens):
        parts = _heads_first(query[document], key[document], value[document])
        one, sums = aten._scaled_dot_product_flash_attention_for_cpu(*parts, scale=scale, **_mask(document, window))
        out[document], normalizer[document] = one[0].transpose(0, 1), sums[0].t()
    return out, normalizer


@attend_by_document.register_fake
def _(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), _normalizer(query)


def _normalizer(query: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty(query.shape[:2], dtype=wide, device=query.device)


def _documents(cu_seq_lens: torch.Tensor) -> list[slice]:
    ends = cu_seq_lens.tolist()
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _heads_first(query: torch.Tensor, *keys_and_values: torch.Tensor) -> list[torch.Tensor]:
    """(1, heads, tokens, head size) of each, with keys and values repeated for the queries that share them."""
    repeated = [tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in keys_and_values]
    return [tensor.transpose(0, 1)[None] for tensor in (query, *repeated)]


def _mask(document: slice, window: int) -> dict[str, Any]:
    """Options of the kernel. A mask is made only for a document that is longer than the window."""
    length = document.stop - document.start
    if window == NO_WINDOW or length <= window + 1:
        return {"is_causal": True}
    position = torch.arange(length)
    back = position[:, None] - position
    seen = (back >= 0) & (back <= window)
    return {"is_causal": False, "attn_mask": torch.zeros(length, length).masked_fill_(~seen, -math.inf)[None, None]}


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


@torch.library.custom_op("kit::attend_by_document_backward", mutates_args=(), device_types="cpu")
def attend_by_document_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    out: torch.Tensor,
    normalizer: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, from that of the output."""
    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    for document in _documents(cu_seq_lens):
        parts = _heads_first(query[document], key[document], value[document])
        outputs = [tensor[document].transpose(0, 1)[None] for tensor in (grad, out, normalizer)]
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            outputs[0], *parts, *outputs[1:], dropout_p=0.0, scale=scale, **_mask(document, window)
        )
        for gradient, part in zip(grads, found, strict=True):
            by_token = part[0].transpose(0, 1)
            gradient[document] = by_token.unflatten(1, (gradient.shape[1], -1)).sum(2)  # over queries that share a key
    return grads[0], grads[1], grads[2]


@attend_by_document_backward.register_fake
def _(_grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    grads = attend_by_document_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.window)
    return *grads, None, None, None


attend_by_document.register_autograd(_backward, setup_context=_save)
