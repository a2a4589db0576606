"""4-bit weights that are quantised as they are read: every bit as when each rank quantises the whole base."""

import importlib.util

import pytest

from kit.checkpoints.weights import read_headers
from tests.train.strategies import base_model, train_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]
QLORA = {
    "tuning.method": "qlora", "schedule.lr": 1e-2, "schedule.save_every": 0,
    "model.attention": "sdpa", "parallel.activation_checkpointing": False,
}  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2])
def test_shards_and_scales_are_those_of_a_base_that_each_rank_quantises(recipe, tiny, tmp_path, nodes):
    folder, sharding = base_model("odd", tiny), "hybrid" if nodes > 1 else "full"
    changes = {"model.name": str(folder), "parallel.nodes": nodes, "parallel.sharding": sharding}
    job = recipe.override(**QLORA | changes)
    steps = {"steps": 2}
    sharded, whole = train_ranks(job, tmp_path / "run", steps | {"read_at_once": 1 << 20}, steps | {"whole": True})
    assert len(set(sharded["losses"])) == 2
    for key in ("losses", "norms", "digest", "elements"):
        assert sharded[key] == whole[key]
    assert sharded["said"] == []
    stored = read_headers(folder).bytes
    assert sharded["load"]["base_load_gb"] == pytest.approx(stored / 1e9, rel=1e-3)
    assert sum(sharded["bytes"]) == pytest.approx(stored, rel=1e-3)
    assert max(sharded["peaks"]) < 2 * stored  # each rank would have all of it, in fp32
