import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.pack import pack


@given(st.lists(st.integers(1, 64), max_size=60), st.integers(0, 3))
def test_every_document_lands_once_and_no_row_overflows(lengths, seed):
    rows = pack(lengths, 64, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)


def test_best_fit_comes_within_one_percent_of_the_lower_bound():
    rng = random.Random(0)
    lengths = [min(2048, int(rng.lognormvariate(5.8, 0.8)) + 1) for _ in range(5000)]
    assert len(pack(lengths, 2048, 0)) <= -(-sum(lengths) // 2048) * 1.01


def test_the_seed_orders_the_rows_and_nothing_else_does():
    lengths = list(range(1, 50))
    assert pack(lengths, 64, 1) == pack(lengths, 64, 1) != pack(lengths, 64, 2)


def test_ten_documents_of_4096_fill_five_rows_of_8193():
    # A size of 2^k + 1 once kept TRL's packing from joining documents (huggingface/trl#3887).
    assert len(pack([4096] * 10, 8193, 0)) == 5


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="1 documents are longer than 8"):
        pack([4, 9], 8, 0)
