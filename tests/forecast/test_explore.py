"""The figures and tables of notebook 02 agree with the forecast of each setting."""

from dataclasses import replace

import numpy as np
import pytest

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.explore import (
    CONTROLS,
    alternatives,
    memory_map,
    sizes,
    strategies,
    time_by_nodes,
    value,
)
from kit.forecast.memory import memory
from kit.forecast.timing import predict


@pytest.fixture
def llama():
    return Recipe.load("llama8b"), Cluster.load("h100-8x8")


def test_the_map_agrees_with_the_forecast_of_each_cell_and_marks_the_recipe(llama):
    found = memory_map(*llama)
    changed = llama[0].override(**{"data.seq_len": 4096, "schedule.micro_batch": 8})
    assert found.values[found.ys.index(8)][found.xs.index(4096)] == memory(changed, llama[1]).device_gib[1]
    assert found.here == (llama[0].data.seq_len, llama[0].schedule.micro_batch)


def test_a_map_without_a_known_capacity_has_no_cell_above_it(llama):
    cluster = replace(llama[1], nodes=replace(llama[1].nodes, gpu_memory_gib=0.0))
    found = memory_map(llama[0], cluster)
    assert np.max(found.values) <= found.limit


def test_more_nodes_keep_the_batch_where_accumulation_can_be_lowered(llama):
    recipe = llama[0].override(**{"schedule.grad_accum": 4})
    labels = list(time_by_nodes(recipe, llama[1]).rows)
    assert labels[:3] == ["1 node", "2 nodes", "4 nodes"]
    assert labels[3] == f"8 nodes, batch {2 * recipe.batch}"


def test_every_strategy_has_a_row(llama):
    names = [row[0] for row in strategies(*llama).rows]
    assert len(set(names)) == len(names) == 8


def test_the_smallest_number_of_gpus_agrees_with_what_was_measured(llama):
    """h100.csv: a LoRA of Llama-3.1-70B ran on four H100s, and of Llama-3.1-8B on one."""
    verdicts = {}
    for name in ("8B", "70B"):
        recipe = llama[0].override(**{"model.name": f"meta-llama/Llama-3.1-{name}", "tuning.method": "lora"})
        verdicts[name] = {row[0]: row[3] for row in sizes(recipe, llama[1]).rows}
    assert verdicts["8B"][1] == "fits"
    assert verdicts["70B"][1] == "does not fit"
    assert verdicts["70B"][4] == "fits"


def test_every_control_is_a_key_of_the_recipe_and_can_be_forecast(llama):
    for key, choices in CONTROLS.items():
        assert value(llama[0], key) is not None
        assert predict(llama[0].override(**{key: choices[-1]}), llama[1]).figure.rows


def test_all_alternatives_are_plain_values(llama):
    found = alternatives(*llama)
    assert found.as_dict()["strategies"][0]["strategy"] == "ddp"
    assert "tokens per row" in str(found)
