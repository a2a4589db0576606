"""The loss through a frozen LM head: TRL's numbers with one projection less."""

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

from kit.train import patches
from kit.train.loss import CHUNK, FrozenHead
from kit.train.patches import FrozenHeadWhereFrozen

OUTPUTS = ("log_probs", "entropy", "is_top1")


@pytest.fixture
def original(monkeypatch):
    monkeypatch.setattr(patches.trl_utils, "_ChunkedLogProbFunction", ChunkedLogProbFunction)
    patches.project_frozen_head_once()
    return ChunkedLogProbFunction


def inputs(tokens=CHUNK + 30, width=24, vocabulary=97, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator)


def apply(function, hidden, weight, labels, softcap=None):
    return function.apply(hidden, weight, None, labels, 1.0, 64, softcap, 1.0, OUTPUTS)


def test_everything_is_what_trl_computes(original):
    hidden, weight, labels = inputs()
    scale = torch.linspace(0.1, 2.0, len(hidden))
    results = []
    for function in (original, patches.trl_utils._ChunkedLogProbFunction):
        log_probabilities, entropy, _, _, top = apply(function, hidden, weight, labels)
        (gradient,) = torch.autograd.grad((log_probabilities * scale).sum(), hidden)
        results.append((log_probabilities, entropy, gradient, top))
    for expected, found in zip(results[0][:3], results[1][:3], strict=True):
        torch.testing.assert_close(found, expected)
    assert torch.equal(results[0][3], results[1][3])


def test_the_gradient_in_bf16_is_as_near_to_fp32_as_trls(original):
    exact, weight, labels = inputs()
    (expected,) = torch.autograd.grad(apply(original, exact, weight, labels)[0].sum(), exact)
    errors = []
    for function in (original, FrozenHeadWhereFrozen):
        hidden = exact.detach().bfloat16().requires_grad_()
        log_probabilities = apply(function, hidden, weight.bfloat16(), labels)[0]
        assert log_probabilities.dtype == torch.float32  # the logged loss
        (gradient,) = torch.autograd.grad(log_probabilities.sum(), hidden)
        errors.append(float((gradient.float() - expected).norm() / expected.norm()))
    assert errors[1] < 1.05 * errors[0]


def test_a_head_that_is_trained_or_caps_its_logits_keeps_trls_function(original, monkeypatch):
    calls = []
    monkeypatch.setattr(FrozenHead, "apply", lambda *inputs: calls.append(inputs))
    hidden, weight, labels = inputs()
    assert apply(FrozenHeadWhereFrozen, hidden, weight.requires_grad_(), labels)[0].requires_grad
    assert apply(FrozenHeadWhereFrozen, hidden, weight.detach(), labels, softcap=30.0)[0].requires_grad
    assert calls == []


def test_an_evaluation_makes_no_gradient_and_a_batch_without_labels_has_one_of_zeros(original):
    hidden, weight, labels = inputs()
    with torch.no_grad():
        assert not FrozenHead.apply(hidden, weight, labels)[0].requires_grad
    (gradient,) = torch.autograd.grad(FrozenHead.apply(hidden[:0], weight, labels[:0])[0].sum(), hidden)
    assert not gradient.any()
