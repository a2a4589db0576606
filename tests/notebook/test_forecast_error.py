"""What a finished run says about the rates in its cluster profile."""

import re

import pytest

from kit.config.cluster import Cluster, Link, Links
from kit.config.recipe import Recipe
from kit.forecast.timing import predict
from kit.notebook.forecast_error import forecast_error

REFERENCE = Recipe.load("llama405b-oasst2")
PCIE = Cluster.load("two-node-pcie")
H100 = Cluster.load("h100-8x8")
ONE_NODE = {"model.name": "meta-llama/Llama-3.1-8B", "parallel.nodes": 1, "parallel.gpus_per_node": 8}


def one_node(**changes):
    """A full fine-tune of 8B parameters on eight GPUs."""
    return Recipe.load("llama8b", **{**ONE_NODE, "tuning.method": "full", **changes})


def step_of(recipe, cluster):
    step_s = predict(recipe, cluster).time.step_s
    assert step_s
    return step_s


def test_a_run_that_waits_for_its_link_gives_the_rate_of_the_link():
    """A step as it would be at an efficiency of 0.40, with a profile that says 0.47."""
    slower = Cluster("slower", PCIE.nodes, Links(PCIE.links.intra, Link("100GbE", 12.5, 0.40)), storage=PCIE.storage)
    found = forecast_error(REFERENCE, PCIE, step_s=step_of(REFERENCE, slower), peak_gib=80.0)
    assert found.correction.values == {"links.inter.efficiency": pytest.approx(0.40, abs=0.002)}
    expected = (
        r"links.inter.efficiency = 0.4 \(0.39\d to 0.4\d+\) instead of 0.47 in the cluster profile would explain it"
    )
    assert re.search(expected, found.correction.advice)
    assert found.step_s == (pytest.approx(step_of(REFERENCE, PCIE)), step_of(REFERENCE, slower))
    assert found.peak_gib.actual == 80.0 and found.hours.actual is None


def test_a_step_that_its_link_could_not_carry_is_called_impossible():
    found = forecast_error(REFERENCE, PCIE, step_s=200.0)
    assert not found.correction.values and "is impossible" in found.correction.advice


def test_a_run_bound_by_its_gpus_gives_their_rates_and_nothing_about_the_link():
    job = one_node(**{"schedule.micro_batch": 4})
    found = forecast_error(job, H100, step_s=1.3 * step_of(job, H100))
    assert set(found.correction.values) == {"nodes.gpu_efficiency", "nodes.gpu_memory_gb_s"}


def test_a_run_bound_by_nothing_in_particular_gives_no_rate():
    job = one_node(**{"tuning.method": "lora", "schedule.micro_batch": 1, "data.seq_len": 2048})
    found = forecast_error(job, H100, step_s=step_of(job, H100))
    assert not found.correction.values and "No part is clearly the longest" in found.correction.advice


def test_without_a_timed_step_there_is_a_forecast_and_no_correction(recipe, local):
    found = forecast_error(recipe, local, hours=0.5)
    assert found.correction is None and found.step_s.forecast > 0
    assert found.step_s.actual is None and found.hours.actual == 0.5
