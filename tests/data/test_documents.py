import re
from pathlib import Path

import numpy as np
import pytest

from kit.data import documents as module
from kit.data.documents import Documents, encode_part
from kit.data.sources import open_source


@pytest.fixture
def part(recipe, tmp_path):
    """The documents of the project's own sample."""
    return encode_part(recipe, open_source(recipe.data.source), tmp_path / "parts")


def resident_kib(path):
    """Pages of a memory-mapped file that this process has in memory."""
    maps = Path("/proc/self/smaps").read_text()
    return sum(map(int, re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss:\s+(\d+) kB", maps)))


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_joined_tokens_are_those_of_each_document_in_order(part, monkeypatch, name):
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 3)
    documents = Documents([part])
    chosen = np.arange(len(documents.id))[::-1]
    wanted = np.concatenate(documents.tokens(name, chosen))
    assert np.array_equal(documents.joined_tokens(name, chosen), wanted)
    assert documents.joined_tokens(name, chosen[:0]).size == 0


def test_tokens_that_were_joined_take_no_memory_of_their_file(part):
    """The files of a large dataset are larger than memory, and conversations are packed in random order."""
    documents = Documents([part])
    assert documents.tokens("input_ids", np.arange(len(documents.id))) and resident_kib(part) > 0
    documents.joined_tokens("input_ids", np.arange(len(documents.id)))
    assert resident_kib(part) == 0
