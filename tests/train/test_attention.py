"""Variable-length attention on CPUs: the same numbers as sdpa with a mask, compiled or not."""

import pytest
import torch

from kit.errors import KitError
from kit.train.attention import attend, boundaries
from kit.train.compile import compile_layers
from tests.train.small import COMPILES, adapted, loss_and_gradients, packed, relative_error

VARLEN = {"model.attention": "varlen"}
pytestmark = COMPILES


@pytest.mark.parametrize(("kind", "compiled"), [("llama", False), ("mistral", False), ("mistral", True)])
def test_losses_and_gradients_are_those_of_sdpa(recipe, kind, compiled):
    expected, gradients = loss_and_gradients(adapted(kind), packed(recipe))
    model = adapted(kind, "varlen")
    if compiled:
        compile_layers(model, backend="aot_eager")
    loss, found = loss_and_gradients(model, packed(recipe.override(**VARLEN)))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert relative_error(found, gradients) < 1e-5


def test_the_model_gets_no_mask_and_no_positions_are_needed_to_find_documents(recipe, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "kit.train.attention.attend_by_document", lambda query, *rest: (seen.append(rest), (query, None))[1]
    )
    batch = packed(recipe.override(**VARLEN))
    adapted("llama", "varlen")(**batch, use_cache=False)
    assert len(seen) == 2  # layers
    assert seen[0][2].tolist() == [0, 20, 50, 60, 64, 65, 110, 128]


def test_the_padding_of_a_row_is_one_document_and_the_bound_of_lengths_is_the_width():
    batch = boundaries([[5, 3], [8], [2]], 8)
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8, 16, 18, 24]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 8
    assert torch.equal(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"])


def test_rows_without_boundaries_are_one_document_each():
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    found, _ = attend(torch.nn.Module(), query, key, key)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_values_may_have_narrower_heads_than_queries():
    query, value = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 5)
    found, _ = attend(torch.nn.Module(), query, query, value, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, value, is_causal=True, scale=0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_queries_take_the_type_of_values():
    query, value = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8, dtype=torch.bfloat16)
    found, _ = attend(torch.nn.Module(), query, query, value, sliding_window=3)
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "words"),
    [({"dropout": 0.1}, "no dropout"), ({"softcap": 50.0}, "cap"), ({"s_aux": torch.zeros(2)}, "attention sinks")],
)
def test_what_the_kernel_cannot_do_is_refused(options, words):
    heads = torch.randn(1, 2, 6, 8)
    with pytest.raises(KitError, match=words):
        attend(torch.nn.Module(), heads, heads, heads, **options)
