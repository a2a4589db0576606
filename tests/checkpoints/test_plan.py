"""The interval against a simulation of failures and time limits, and what the plan says."""

import dataclasses
import json
import math
import random
import re
import typing

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kit.checkpoints.plan import (
    IO_PATTERNS,
    Bound,
    SavePlan,
    best_interval,
    plan_for_recipe,
    plan_saves,
    useful_part,
)
from kit.config.cluster import Cluster
from kit.config.recipe import Parallel, Recipe
from kit.forecast import timing
from tests.conftest import REPOSITORY

HOUR = 3600


# Llama 3's failure rate gives 64 GPUs 792 h between failures and 16,384 GPUs 3.09 h; minutes by Young's sqrt(2 C M).
@pytest.mark.parametrize(("gpus", "write_s", "minutes", "waste"), [
    (64, 14, 149, 0.0031), (64, 98, 394, 0.0083), (1024, 98, 98.5, 0.033), (16384, 14, 9.3, 0.050),
])  # fmt: skip
def test_the_interval_equals_youngs_where_his_formula_holds(gpus, write_s, minutes, waste):
    found = plan_saves(checkpoint_gb=write_s * 10, write_gb_s=10, gpus=gpus)
    assert found.bound == "Young/Daly"
    assert found.interval_s / 60 == pytest.approx(minutes, rel=0.02)
    assert found.waste == pytest.approx(waste, rel=0.02)


def simulated_waste(interval, cost, mtbf, restart, limit, attempts=20_000):
    """The part of the time that no save keeps, over attempts that failures or the limit end (common random numbers)."""
    draw, kept, total = random.Random(7), 0.0, 0.0
    for _ in range(attempts):
        alive = min(draw.expovariate(1 / mtbf), limit)
        kept += max(0, (alive - restart) // (interval + cost)) * interval
        total += alive
    return 1 - kept / total


SITUATIONS = {  # cost, mtbf, restart, limit; seconds
    "16,384 GPUs": (14, 3.09 * HOUR, 60, math.inf),
    "1,024 GPUs, slow storage": (98, 49.5 * HOUR, 200, math.inf),
    "16 GPUs, 4 h jobs": (98, 3167 * HOUR, 300, 4 * HOUR),
    "16 GPUs, 48 h jobs": (98, 3167 * HOUR, 300, 48 * HOUR),
    "8 GPUs, 1 h jobs": (60, 6335 * HOUR, 60, 1 * HOUR),
    "64 GPUs, 12 h jobs, preempted every 6 h": (30, 6 * HOUR, 120, 12 * HOUR),
    "preempted every hour, 2 h jobs": (30, 1 * HOUR, 60, 2 * HOUR),
    "a limit of two intervals": (14, 100 * HOUR, 0, 5.7 * HOUR),
}


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
def test_no_interval_wastes_two_percent_less_in_a_simulation(situation):
    cost, mtbf, restart, limit = SITUATIONS[situation]
    mine = best_interval(cost, mtbf, restart, limit)
    span = min(limit - restart, 30 * mtbf)
    tried = [mine * factor for factor in (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 3, 5)]
    tried += [span / n - cost - 1 for n in (1, 2, 3, 4, 5, 6, 8, 12)] if limit < math.inf else []
    least = min(simulated_waste(t, cost, mtbf, restart, limit) for t in tried if 0 < t <= span - cost)
    waste = simulated_waste(mine, cost, mtbf, restart, limit)
    assert waste <= 1.02 * least
    assert waste == pytest.approx(1 - useful_part(mine, cost, mtbf, restart, limit), rel=0.05)


@settings(max_examples=200, deadline=None)
@given(st.floats(0.1, 1000), st.floats(3600, 1e8), st.floats(0, 1000), st.floats(600, 1e6))
def test_no_interval_is_expected_to_waste_two_percent_less(cost, mtbf, restart, limit):
    assume(mtbf > 10 * cost and limit > restart + 2 * cost)
    mine, span = best_interval(cost, mtbf, restart, limit), limit - restart
    tried = [span * 10 ** (-n / 60) for n in range(300)] + [span / n - cost - 1e-3 for n in range(1, 200)]
    least = min(1 - useful_part(t, cost, mtbf, restart, limit) for t in tried if t > 0)
    assert 1 - useful_part(mine, cost, mtbf, restart, limit) <= 1.02 * least


def test_the_deciding_bound_is_named():
    # one GPU pair fails once in 25,000 h: only the limit of 1 h less 300 s counts, less one write and a millisecond
    found = plan_saves(checkpoint_gb=1, write_gb_s=1, gpus=2, time_limit_s=HOUR)
    assert (found.bound, found.interval_s) == ("time limit", pytest.approx(3600 - 300 - 1 - 1e-3))
    found = plan_saves(checkpoint_gb=1, write_gb_s=1, gpus=2, time_limit_s=48 * HOUR)
    assert set(found.bounds_s) == {"Young/Daly", "time limit"}


def test_a_background_save_costs_what_it_blocks():
    found = plan_saves(checkpoint_gb=60, write_gb_s=1, gpus=1024, blocked_s=2)
    assert found.interval_s == pytest.approx(best_interval(2, found.mtbf_h * 3600))


def test_a_limit_without_room_for_one_save_is_a_problem():
    found = plan_saves(checkpoint_gb=4000, write_gb_s=1, gpus=8, time_limit_s=HOUR)
    assert "the time limit asks for one every" in found.problems[0]
    assert found.waste == 1


# The rule takes the larger of a bound from above (30 min to redo) and one from below (20 writes).
def test_the_common_rule_wastes_more_time():
    large = plan_saves(checkpoint_gb=140, write_gb_s=10, gpus=16384)
    assert large.rule_s == 1800
    assert large.rule_waste == pytest.approx(0.0863, rel=0.01)  # 1 - T / (M (exp((T + C) / M) - 1)), M = 3.09 h
    assert large.waste < 0.6 * large.rule_waste
    slow = plan_saves(checkpoint_gb=980, write_gb_s=10, gpus=64)  # 98 s a write: 33 min, though 30 were promised
    assert slow.rule_s == 20 * 98
    assert "loses more than the 30 min" in str(slow)
    assert slow.waste < slow.rule_waste / 5


def test_storage_counts_one_checkpoint_more_than_are_kept():
    found = plan_saves(checkpoint_gb=10, write_gb_s=1, gpus=8, keep=3, merged_gb=20, base_gb=20).storage_gb
    assert found == {"checkpoints": 40, "merged": 20, "base": 20, "free": 20, "total": 100}


def test_a_restart_reads_the_checkpoint_and_the_base_on_each_node():
    # 70B at 14 bytes a parameter: 98 s through one 80 Gb/s mount target, 24.5 s through four
    found = plan_saves(checkpoint_gb=980, write_gb_s=10, gpus=64).restore_s
    assert found["one 80 Gb/s mount target, or a RAID of NVMe"] == 98
    assert found["four 80 Gb/s mount targets"] == 24.5
    adapter = plan_saves(checkpoint_gb=2, write_gb_s=10, gpus=16, base_gb=812, nodes=2).restore_s
    assert adapter["NFS over 100 GbE"] == pytest.approx((2 + 2 * 812) / 12)


def test_a_plan_for_a_recipe_gives_steps_and_the_pattern_of_its_parallelism():
    recipe = Recipe.load(REPOSITORY / "env" / "recipes" / "llama405b-oasst2.toml")
    cluster = Cluster.load("two-node-pcie")
    found = plan_for_recipe(recipe, cluster)
    assert found.steps >= 1
    assert "each of 16 ranks writes" in found.io
    assert f"save_every = {found.steps}" in str(found)


def test_every_strategy_has_a_pattern():
    assert set(typing.get_args(typing.get_type_hints(Parallel)["strategy"])) <= set(IO_PATTERNS)


# Slurm's formats of a time limit (man sbatch, --time). The limit less 300 s holds an integer number of saves.
@pytest.mark.parametrize(("written", "seconds"), [
    ("30", 1800), ("30:00", 1800), ("01:30:00", 5400), ("1-12", 36 * HOUR), ("1-12:30", 36.5 * HOUR),
])  # fmt: skip
def test_the_profiles_time_limit_is_read_as_slurm_reads_it(monkeypatch, tmp_path, written, seconds):
    found = plan_of_a_long_job(monkeypatch, tmp_path, written)
    assert Bound.TIME_LIMIT in found.bounds_s
    saves = (seconds - 300) / (found.bounds_s[Bound.TIME_LIMIT] + found.blocked_s + 1e-3)
    assert saves == pytest.approx(round(saves), abs=1e-3)


def plan_of_a_long_job(monkeypatch, tmp_path, limit: str) -> SavePlan:
    """The plan of a job that takes 1,000 h, with this time limit and nothing to read at a restart."""
    recipe = Recipe.load(REPOSITORY / "env" / "recipes" / "llama405b-oasst2.toml")
    profile = (REPOSITORY / "env" / "clusters" / "two-node-pcie.toml").read_text()
    (tmp_path / "cluster.toml").write_text(re.sub('(?m)^time = ".*"', f'time = "{limit}"', profile))
    cluster = Cluster.load(str(tmp_path / "cluster.toml"))
    assert cluster.slurm.time == limit
    forecast = timing.predict(recipe, cluster)
    long = dataclasses.replace(
        forecast,
        time=dataclasses.replace(forecast.time, wall_h=1000),
        storage=dataclasses.replace(forecast.storage, merged_gb=0),
    )
    monkeypatch.setattr(timing, "predict", lambda *_: long)
    return plan_for_recipe(recipe, cluster)


@pytest.mark.parametrize("written", ["UNLIMITED", "INFINITE", ""])
def test_an_unlimited_job_has_no_time_limit_bound(monkeypatch, tmp_path, written):
    assert set(plan_of_a_long_job(monkeypatch, tmp_path, written).bounds_s) == {Bound.FAILURES}


def test_a_time_limit_shorter_than_its_margin_is_a_problem_not_a_crash():
    found = plan_saves(checkpoint_gb=1, write_gb_s=1, gpus=8, time_limit_s=60, restart_s=30)
    assert found.bound == Bound.TIME_LIMIT
    assert "not feasible" in found.problems[0]
    assert found.waste == 1


def test_the_json_keys_are_plain_strings():
    found = json.loads(json.dumps(plan_saves(checkpoint_gb=1, write_gb_s=1, gpus=8).as_dict()))
    assert (found["bound"], list(found["bounds_s"]), found["problems"]) == ("Young/Daly", ["Young/Daly"], [])


def test_a_run_that_is_shorter_than_the_interval_saves_at_its_end():
    found = plan_saves(checkpoint_gb=0.02, write_gb_s=1, gpus=2, step_s=30, run_s=840)
    assert (found.bound, found.interval_s, found.steps) == (Bound.RUN_LENGTH, 840, 0)
    assert "Saving at the end is enough (save_every = 0): the run takes 14 min, less than the " in str(found)
    assert plan_saves(checkpoint_gb=0.02, write_gb_s=1, gpus=2, run_s=1e9).bound is Bound.FAILURES


def test_a_cpu_cluster_compares_restarts_with_no_storage_of_gpu_clusters():
    demo = plan_for_recipe(Recipe.load("demo"), Cluster.load("local"))
    assert list(demo.restore_s) == ["the storage of this run"]
    llama = plan_for_recipe(Recipe.load("llama8b"), Cluster.load("h100-8x8"))
    assert "NFS over 100 GbE" in llama.restore_s
