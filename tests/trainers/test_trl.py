"""What kit.train refuses, and when FSDP shards the weights."""

import importlib.util

import pytest
import yaml

from kit.config.cluster import Cluster
from kit.errors import InputError
from kit.trainers import trl

QLORA = {"tuning.method": "qlora", "parallel.strategy": "ddp"}


@pytest.fixture
def gpus():
    return Cluster.load("h100-8x8")


def test_qlora_runs_under_ddp_and_fsdp2_where_bitsandbytes_is(recipe, gpus, local, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "bitsandbytes")
    trl.check(recipe.override(**QLORA), gpus)
    trl.check(recipe.override(**QLORA | {"parallel.strategy": "fsdp2"}), gpus)
    trl.check(recipe.override(**QLORA), local)
    trl.check(recipe.override(**QLORA | {"parallel.strategy": "fsdp1", "parallel.gpus_per_node": 1}), gpus)


def test_each_rank_reads_the_base_that_it_puts_into_4_bits(recipe, gpus):
    """accelerate sends no 4-bit weights, so ranks that do not read would make them of nothing."""
    job = recipe.override(**{"parallel.strategy": "fsdp2"})
    assert "fsdp_cpu_ram_efficient_loading: true" in trl.render_accelerate(job, gpus)
    qlora = trl.render_accelerate(job.override(**{"tuning.method": "qlora"}), gpus)
    assert "fsdp_cpu_ram_efficient_loading: false" in qlora and "fsdp_sync_module_states: false" in qlora


@pytest.mark.parametrize(
    ("changes", "installed", "words"),
    [
        ({"parallel.strategy": "fsdp1"}, True, "not sharded by fsdp1 here: set parallel.strategy to ddp"),
        ({}, False, "pip install bitsandbytes"),
    ],
)
def test_qlora_is_refused_under_fsdp1_and_without_bitsandbytes(recipe, gpus, monkeypatch, changes, installed, words):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    with pytest.raises(InputError, match=words):
        trl.check(recipe.override(**QLORA | changes), gpus)


@pytest.mark.parametrize(
    ("changes", "on_gpus", "sharded"),
    [
        ({}, True, True),
        ({"parallel.gpus_per_node": 1}, True, False),
        ({"parallel.gpus_per_node": 1, "tuning.method": "full"}, True, True),
        ({"parallel.gpus_per_node": 1, "tuning.method": "full"}, False, False),
        ({"parallel.strategy": "ddp"}, True, False),
    ],
)
def test_fsdp_shards_the_weights_of_several_ranks_and_full_fine_tunes_on_one_gpu(recipe, changes, on_gpus, sharded):
    assert trl.shards(recipe.override(**changes), on_gpus) == sharded


def test_hybrid_sharding_is_a_mesh_of_replicas_under_fsdp2_and_a_sharding_strategy_under_fsdp1(recipe, gpus):
    hybrid = recipe.override(**{"parallel.nodes": 2, "parallel.gpus_per_node": 8, "parallel.sharding": "hybrid"})
    trl.check(hybrid, gpus)
    config = yaml.safe_load(trl.render_accelerate(hybrid, gpus))
    assert config["parallelism_config"] == {
        f"parallelism_config_{name}_size": size
        for name, size in {"dp_replicate": 2, "dp_shard": 8, "tp": 1, "cp": 1}.items()
    }
    assert config["fsdp_config"]["fsdp_reshard_after_forward"]
    for changes in ({"parallel.strategy": "fsdp1"}, {"parallel.nodes": 1}, {"parallel.sharding": "full"}):
        assert "parallelism_config" not in yaml.safe_load(trl.render_accelerate(hybrid.override(**changes), gpus))
