"""The loss through an LM head that is not trained: one projection in the forward pass and one for the backward pass."""

import functools
from typing import Any

import torch

from kit.forecast.limits import find_compiler

# Tokens whose logits exist at a time. Compiled, they exist only in 16 bits: 1 GB of a vocabulary of 128k; uncompiled,
# also in fp32, three times over.
COMPILED_CHUNK, CHUNK = 4096, 512


def statistics(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """By token, from logits of shape (tokens, vocabulary), computed in fp32.

    The label's log-probability; the entropy; whether the label has the largest logit; and the derivative of the
    log-probability by the logits, onehot - softmax, in the type of the logits.
    """
    wide = logits.float()
    log_probabilities = wide - torch.logsumexp(wide, -1, keepdim=True)
    probabilities = log_probabilities.exp()
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    return (
        log_probabilities.gather(1, labels[:, None])[:, 0],
        -(probabilities * log_probabilities).sum(-1),
        wide.argmax(-1) == labels,
        (is_label.float() - probabilities).to(logits.dtype),
    )


class FrozenHead(torch.autograd.Function):
    """Log-probability, entropy and accuracy of each label; only the log-probability is differentiable.

    Its derivative by a hidden state depends only on that token: (onehot - softmax) W. So the forward pass computes it
    while it has the logits, and the backward pass scales it by the gradient of the log-probability, where a loss over
    all tokens would project a third time to have the logits again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """hidden: (tokens, width); weight: (vocabulary, width); labels: (tokens,). Returns three of shape (tokens,)."""
        kind, dtype = hidden.device.type, hidden.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        states, head, tokens = hidden.to(dtype), weight.to(dtype), len(hidden)
        log_probabilities, entropy = torch.empty(2, tokens, device=hidden.device)
        is_top = torch.empty(tokens, device=hidden.device, dtype=torch.bool)
        slope = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        compute, chunk = _statistics_on(kind)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            found = compute(states[part] @ head.t(), labels[part])
            log_probabilities[part], entropy[part], is_top[part] = found[:3]
            if slope is not None:
                torch.mm(found[3], head, out=slope[part])
        ctx.save_for_backward(slope)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(entropy, is_top)
        return log_probabilities, entropy, is_top

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """The gradient of the hidden states."""
        (slope,) = ctx.saved_tensors
        return (slope * grad[:, None]).to(ctx.dtype), None, None


def _statistics_on(device: str) -> tuple[Any, int]:
    """`statistics` for a kind of device, and its tokens at a time. Compiling does not pay on CPUs."""
    return (_compiled(), COMPILED_CHUNK) if device == "cuda" and find_compiler() else (statistics, CHUNK)


@functools.cache
def _compiled() -> Any:
    return torch.compile(statistics, dynamic=True)
