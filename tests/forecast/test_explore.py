"""The figures and tables of notebook 02 agree with the forecast of each setting."""

from dataclasses import replace

import numpy as np
import pytest

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.explore import (
    Setting,
    alternatives,
    memory,
    memory_map,
    sizes,
    strategies,
    time_by_nodes,
)
from kit.forecast.gpus import GPU_TYPES, capability, vendor_peak


@pytest.fixture
def llama():
    return Setting(Recipe.load("llama8b"), Cluster.load("h100-8x8"))


def test_the_map_agrees_with_the_forecast_of_each_cell_and_marks_the_recipe(llama):
    found = memory_map(llama)
    changed = llama.changed(**{"data.seq_len": 4096, "schedule.micro_batch": 8})
    assert found.values[found.ys.index(8)][found.xs.index(4096)] == memory(changed).device_gib[1]
    assert found.here == (llama.recipe.data.seq_len, llama.recipe.schedule.micro_batch)


def test_a_map_without_a_known_capacity_has_no_cell_above_it(llama):
    cluster = replace(llama.cluster, nodes=replace(llama.cluster.nodes, gpu_memory_gib=0.0))
    found = memory_map(replace(llama, cluster=cluster))
    assert np.max(found.values) <= found.limit


def test_more_nodes_keep_the_batch_where_accumulation_can_be_lowered(llama):
    setting = llama.changed(**{"schedule.grad_accum": 4})
    labels = list(time_by_nodes(setting).rows)
    assert labels[:3] == ["1 node", "2 nodes", "4 nodes"]
    assert labels[3] == f"8 nodes, batch {2 * setting.recipe.batch}"


def test_every_strategy_has_a_row(llama):
    names = [row[0] for row in strategies(llama).rows]
    assert len(set(names)) == len(names) == 8


def test_the_smallest_number_of_gpus_agrees_with_what_was_measured(llama):
    """h100.csv: a LoRA of Llama-3.1-70B ran on four H100s, and of Llama-3.1-8B on one."""
    verdicts = {}
    for name in ("8B", "70B"):
        setting = llama.changed(**{"model.name": f"meta-llama/Llama-3.1-{name}", "tuning.method": "lora"})
        verdicts[name] = {row[0]: row[3] for row in sizes(setting).rows}
    assert verdicts["8B"][1] == "fits"
    assert verdicts["70B"][1] == "does not fit"
    assert verdicts["70B"][4] == "fits"


def test_other_gpus_keep_nothing_that_was_measured_on_the_clusters_own(llama):
    types = {one.name: one for one in GPU_TYPES}
    measured = replace(llama.cluster, nodes=replace(llama.cluster.nodes, launch_us=11.6, gpu_efficiency=0.7))
    other = replace(llama, cluster=measured).on_gpus(types["H200"])
    assert (other.cluster.nodes.gpu_memory_gib, other.cluster.nodes.launch_us) == (139.8, 0.0)
    assert other.predict().memory.capacity_gib > llama.predict().memory.capacity_gib
    assert [one.name for one in GPU_TYPES if capability(one.name) is None] == []


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", None), ("NVIDIA H200", 989.0), ("NVIDIA H200 NVL", None),
    ("NVIDIA A100-SXM4-40GB", 312.0), ("NVIDIA A100 80GB PCIe", 312.0), ("NVIDIA GB200", None), ("NVIDIA B200", 2250.0),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8), ("NVIDIA RTX PRO 6000 Blackwell Max-Q Edition", None),
])  # fmt: skip
def test_the_peak_of_a_gpu_is_known_by_its_full_name_alone(name, peak):
    assert vendor_peak(name) == peak


def test_longer_rows_of_prepared_data_are_fewer(llama):
    splits = {"train": {"rows": 1000, "tokens": 2_000_000}, "eval": {"rows": 11, "tokens": 20_000}}
    prepared = replace(llama, manifest={"splits": splits})
    longer = prepared.changed(**{"data.seq_len": 4 * llama.recipe.data.seq_len})
    assert longer.manifest["splits"] == {
        "train": {"rows": 250, "tokens": 2_000_000}, "eval": {"rows": 3, "tokens": 20_000}
    }  # fmt: skip
    assert longer.predict().time.optimizer_steps < prepared.predict().time.optimizer_steps


def test_all_alternatives_are_plain_values(llama):
    found = alternatives(llama)
    assert found.as_dict()["strategies"][0]["strategy"] == "ddp"
    assert "tokens per row" in str(found)
