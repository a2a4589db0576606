"""Save times of real saves by one and two processes."""

import json
import re
import shutil

import pytest

from kit.checkpoints import saving
from kit.checkpoints.processes import fresh_ranks
from kit.checkpoints.weights import read_headers
from kit.cli import main
from kit.errors import InputError


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_method_blocks_before_it_is_on_disk_and_leaves_no_files(tmp_path, ranks):
    found = saving.time_saves(tmp_path, gb=0.02, ranks=[ranks], repeats=1).methods
    assert [t.method for t in found] == list(saving.Method)
    for t in found:
        assert 0 < t.blocked_s.median < t.durable_s.median
        assert t.gb_s == pytest.approx(0.02 / t.durable_s.median)
        assert (t.ranks, t.samples) == (ranks, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def run_sample():
    with fresh_ranks("kit.checkpoints.saving") as run:
        yield run


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("method", list(saving.Method))
def test_a_sample_writes_all_bytes_of_the_state(run_sample, tmp_path, method, world):
    gb = 64 * 4096 * 4 * 8 / 1e9  # eight rows of each of the 64 fp32 matrices
    rows = run_sample(world, method, str(tmp_path), str(gb))
    assert len(rows) == world
    held = read_headers(tmp_path)
    assert held.problems == ()
    assert (len(held.tensors), held.bytes) == (64, round(gb * 1e9))


def test_times_are_of_the_slowest_rank_with_median_and_range(tmp_path, monkeypatch):
    seconds = iter([(0.1, 1.0), (0.5, 3.0), (0.3, 2.0)])

    class Ranks:
        def __enter__(self):
            return lambda world, *words: self.rows(world, *next(seconds))

        def __exit__(self, *_):
            pass

        def rows(self, world, blocked, durable):
            slow = {"blocked_s": blocked, "durable_s": durable}
            return [{"blocked_s": 0.0, "durable_s": 0.0}] * (world - 1) + [slow]

    monkeypatch.setattr(saving, "fresh_ranks", lambda *_: Ranks())
    (found,) = saving.time_saves(tmp_path, gb=0.001, ranks=[2], methods=["sharded"], repeats=3).methods
    assert found.blocked_s == (0.3, 0.1, 0.5)
    assert found.durable_s == (2.0, 1.0, 3.0)
    assert found.gb_s == pytest.approx(0.001 / 2)


@pytest.mark.slow
def test_the_command_prints_how_long_a_save_blocks_and_when_it_is_on_disk(tmp_path, capsys):
    words = ["checkpoint", "save", str(tmp_path), "--gb", "0.01", "--repeats", "1", "--method", "sharded"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "blocks training for" in printed and "on disk after" in printed
    assert re.search(r"sharded +1 +[\d.]+ MB +[\d.]+ m?s \(", printed)
    assert main([*words, "--ranks", "1,2", "--json"]) == 0
    assert [m["ranks"] for m in json.loads(capsys.readouterr().out)["methods"]] == [1, 2]


def test_an_unknown_method_and_a_full_disk_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"No method magic; there are sharded, consolidated, asynchronous"):
        saving.time_saves(tmp_path, methods=["magic"])
    with pytest.raises(InputError, match="GB free; saving"):
        saving.time_saves(tmp_path, gb=shutil.disk_usage(tmp_path).free / 1e9)
    assert list(tmp_path.iterdir()) == []
