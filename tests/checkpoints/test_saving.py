"""Save times of real saves by one and two processes."""

import json
import re
import shutil

import pytest

from kit.checkpoints import saving as savetime
from kit.cli import main
from kit.errors import InputError


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_method_is_written_after_it_blocked_and_safe_after_that(tmp_path, ranks):
    found = savetime.time_save(tmp_path, gb=0.02, ranks=ranks, repeats=1)
    assert [t.method for t in found] == list(savetime.METHODS)
    for t in found:
        assert 0 < t.blocked_s[0] <= t.done_s[0] <= t.durable_s[0]
        assert all(least <= middle <= most for middle, least, most in (t.blocked_s, t.done_s, t.durable_s))
        assert t.gb_s == pytest.approx(0.02 / t.durable_s[0])
        assert (t.ranks, t.samples) == (ranks, 1)
    (background,) = (t for t in found if "async" in t.method)
    assert background.blocked_s < background.done_s
    assert list(tmp_path.iterdir()) == []  # nothing is left


@pytest.mark.slow
def test_the_command_says_how_long_a_save_blocks_and_until_it_is_on_disk(tmp_path, capsys):
    words = ["checkpoint", "save", str(tmp_path), "--gb", "0.01", "--repeats", "1", "--method", "dcp.save, sharded"]
    assert main(words) == 0
    assert re.match(
        r"dcp\.save, sharded, 1 rank, 0\.01 GB: blocks for [\d.]+ s \(.*\), written after .*, on disk after .* GB/s\n$",
        capsys.readouterr().out,
    )
    assert main([*words, "--ranks", "1,2", "--json"]) == 0
    assert [m["ranks"] for m in json.loads(capsys.readouterr().out)["methods"]] == [1, 2]


def test_an_unknown_method_and_too_little_room_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"No method magic; there are torch.save"):
        savetime.time_save(tmp_path, methods=["magic"])
    with pytest.raises(InputError, match="GB free; saving"):
        savetime.time_save(tmp_path, gb=shutil.disk_usage(tmp_path).free / 1e9)
    assert list(tmp_path.iterdir()) == []
