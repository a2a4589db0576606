import bisect
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.config.models import load_tokenizer
from kit.data.encode import Encoder
from kit.data.pack import lower_bound, pack
from kit.data.sources import open_source
from tests.llama31 import llama31  # noqa: F401 - a fixture

LENGTHS = st.lists(st.integers(1, 64), max_size=60)


def rows_of(lengths, size, seed=0):
    documents, starts = pack(lengths, size, seed)
    return [part.tolist() for part in np.split(documents, starts[1:-1])] if len(starts) > 1 else []


def one_by_one(lengths, size):
    """Best-fit decreasing as textbooks have it: the rows' sums."""
    rooms, rows = [], []
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(rooms, (length, -1))
        room, row = rooms.pop(at) if at < len(rooms) else (size, len(rows))
        rows += [0] * (row == len(rows))
        rows[row] += length
        bisect.insort(rooms, (room - length, row))
    return sorted(rows)


@given(LENGTHS, st.integers(0, 3))
def test_every_document_is_packed_once_and_rows_fit(lengths, seed):
    rows = rows_of(lengths, 64, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 64 for row in rows)


@given(LENGTHS)
def test_packing_equals_best_fit_decreasing(lengths):
    assert sorted(sum(lengths[i] for i in row) for row in rows_of(lengths, 64)) == one_by_one(lengths, 64)


@given(LENGTHS)
def test_no_packing_is_below_the_lower_bound(lengths):
    bound = lower_bound(lengths, 64)
    assert -(-sum(lengths) // 64) <= bound <= len(rows_of(lengths, 64))


def test_documents_above_half_a_row_need_a_row_each():
    # 2,566 rows hold that many tokens, but no two documents share one.
    assert lower_bound([1025] * 5125, 2048) == len(rows_of([1025] * 5125, 2048)) == 5125


def test_the_oasst_length_distribution_packs_within_6_in_1000_of_the_lower_bound(llama31, real_trees):  # noqa: F811
    encoder = Encoder(load_tokenizer(str(llama31)))
    found = [c.messages for _, c in open_source(str(real_trees)).read("en", lambda row, reason: None)]
    real = [min(2048, len(encoded.ids)) for encoded in encoder(found)]
    for seed in range(3):
        lengths = np.random.RandomState(seed).choice(real, 5125)
        assert len(rows_of(lengths, 2048)) <= 1.006 * lower_bound(lengths, 2048)


def test_only_the_seed_determines_the_order():
    lengths = list(range(1, 50))
    assert rows_of(lengths, 64, 1) == rows_of(lengths, 64, 1) != rows_of(lengths, 64, 2)


def test_ten_documents_of_4096_fill_five_rows_of_8193():
    # A size of 2^k + 1 once kept TRL's packing from joining documents (huggingface/trl#3887).
    assert len(rows_of([4096] * 10, 8193)) == 5


def test_a_million_documents_take_seconds():
    lengths = np.clip(np.random.RandomState(0).lognormal(5.8, 0.9, 10**6).astype(int) + 1, 1, 2048)
    start = time.process_time()
    assert len(pack(lengths, 2048, 0)[1]) - 1 <= 1.001 * lower_bound(lengths, 2048)
    assert time.process_time() - start < 5  # about 0.7 s


def test_a_document_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="1 documents are longer than 8"):
        pack([4, 9], 8, 0)
