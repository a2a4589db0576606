import dataclasses
import json
import re

import pytest

from kit.config.cluster import Cluster, Nodes
from kit.config.recipe import Recipe
from kit.files import read_json
from kit.forecast.timing import predict
from kit.forecast.tune import setting, tune
from kit.slurm.launch import check
from tests.forecast.test_timing import H100, LLAMA_8B, h100s, measured, recipe
from tests.truth import blind, measure


def sweep(model: str, method: str) -> dict[tuple[object, ...], tuple[Recipe, float]]:
    """The measured rows of an exhaustive sweep: 4 H100s, packed rows of 4,096 tokens, 16 of them a step."""
    return {
        tuple(setting(job).values()): (job, seconds or float("inf"))
        for job, seconds in measured()
        if (job.model.name, job.tuning.method) == (model, method) and job.data.packing
        and (job.data.seq_len, job.world_size, job.batch) == (4096, 4, 16)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "method", "rows"),
    [("meta-llama/Llama-3.1-8B-Instruct", "lora", 17), ("meta-llama/Llama-3.2-1B-Instruct", "full", 12)],
)
def test_what_it_picks_is_within_five_percent_of_the_best_of_a_measured_sweep(model, method, rows):
    swept = sweep(model, method)
    assert len(swept) == rows
    start = next(iter(swept.values()))[0]
    picked = tune(start, h100s())[0]
    seconds = swept[tuple(setting(picked.recipe).values())][1]
    assert min(s for _, s in swept.values()) / seconds >= 0.95


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen2.5-1.5B"])
def test_on_the_compiled_path_what_it_picks_is_within_five_percent_of_the_best_as_well(model):
    """Six settings of each model on one H200; the fastest ones are compiled and recompute nothing."""
    whole = {row["what"]["micro_batch"]: row["truth"] for row in blind.THIRD.rows() if _is_swept(row["what"], model)}
    start = next(
        measure.recipe_of(entry["case"])
        for entry in read_json(blind.FOLDER / "blind_third.json")
        if entry["case"]["shape"] == model and entry["case"]["gpus"] == 1
    )
    open_choices = {"schedule.max_steps": 1000, "parallel.compile": "auto", "model.attention": "auto"}
    cluster = dataclasses.replace(blind.H200, nodes=dataclasses.replace(blind.H200.nodes, gpus=1))
    picked = tune(start.override(**open_choices), cluster)[0]
    assert picked.compiled and not picked.recipe.parallel.recomputes
    seconds = {micro_batch: float(truth["step_s"]) for micro_batch, truth in whole.items()}
    assert min(seconds.values()) / seconds[str(picked.recipe.schedule.micro_batch)] >= 0.95


def _is_swept(what, model):
    """Whether a row is one of the compiled settings of the sweep, whose step has eight rows."""
    rows = int(what["micro_batch"]) * int(what["grad_accum"])
    compiled = (what["compile"], what["checkpointing"]) == ("on", "False")
    return (what["model"], what["gpus"], rows) == (model, "1", 8) and compiled


def test_every_choice_keeps_the_batch_fits_and_can_be_launched():
    start = recipe(schedule__micro_batch=3, schedule__grad_accum=4, tuning__method="lora", data__seq_len=8192)
    choices = tune(start, H100)
    assert {c.recipe.schedule.micro_batch for c in choices} <= {1, 2, 3, 4, 6, 12}
    for c in choices:
        assert c.recipe.batch == start.batch == 96
        assert predict(c.recipe, H100).memory.verdict == "fits"
        assert start.override(**c.override) == c.recipe
        assert c.recipe.parallel.strategy in ("ddp", "fsdp1", "fsdp2") and c.spare_gib > 0
    assert len({tuple(setting(c.recipe).values()) for c in choices}) == len(choices)


def test_what_it_offers_a_cpu_cluster_passes_the_launch_s_own_check(smollm2, local):
    start = Recipe.load("demo", **{"model.name": str(smollm2), "schedule.grad_accum": 4})
    choices = tune(start, local)
    assert {c.recipe.parallel.strategy for c in choices} == {"ddp", "fsdp2"}
    for c in choices:
        check(c.recipe, local)


def test_forecasts_that_tie_are_ordered_by_memory_to_spare():
    choices = tune(recipe(tuning__method="lora", schedule__grad_accum=8), H100)
    fastest = min(c.step_s for c in choices)
    tied = [c for c in choices if c.step_s <= 1.02 * fastest]
    assert len(tied) > 1
    assert choices[0].spare_gib == max(c.spare_gib for c in tied)


def test_a_full_fine_tune_keeps_its_masters():
    """FSDP trains fp32 masters and DDP bf16 weights, so a swap would be another run, not a faster one."""
    strategies = {c.recipe.parallel.strategy for c in tune(recipe(model__name="Qwen/Qwen2.5-0.5B"), H100)}
    assert strategies == {"fsdp1", "fsdp2"}
    plain = recipe(model__name="Qwen/Qwen2.5-0.5B", parallel__strategy="ddp")
    assert {c.recipe.parallel.strategy for c in tune(plain, H100)} == {"ddp"}


def test_node_counts_are_tried_when_asked_for():
    start = recipe(tuning__method="lora", schedule__grad_accum=8)
    assert {c.recipe.parallel.nodes for c in tune(start, H100)} == {1}
    choices = tune(start, H100, nodes=True)
    assert {c.recipe.parallel.nodes for c in choices} == {1, 2, 4, 8}  # that divide a batch of 64 rows over 8 GPUs each
    assert choices[0].recipe.parallel.nodes == 8
    assert "8 nodes, not 1" in choices[0].reason


def test_a_choice_says_why_in_seconds_and_gibibytes():
    start = recipe(tuning__method="lora", schedule__grad_accum=2)
    off = next(c for c in tune(start, H100) if c.override == {"parallel.activation_checkpointing": False})
    assert re.fullmatch(r"checkpointing off: compute [\d.]+ to [\d.]+ s", off.reason)
    assert json.loads(json.dumps(off.as_dict()))["setting"]["parallel.activation_checkpointing"] is False
    assert any(c.reason.startswith("the recipe's own setting") for c in tune(start, H100))


def test_the_text_has_the_fastest_settings_and_options_to_copy():
    choices = tune(recipe(tuning__method="lora", schedule__grad_accum=2), H100)
    text = str(choices)
    assert f"{choices[0].tokens_per_s:,.0f}" in text.splitlines()[1]
    assert f"kit launch RECIPE {choices[0].options()}" in text
    assert choices[0].options().startswith("-s ")


def test_where_nothing_fits_there_is_no_choice_and_the_closest_is_named():
    small = Cluster("small", Nodes(gpus=8, gpu_memory_gib=12.0, gpu_bf16_tflops=989.0, ram_gib=1900.0))
    found = tune(recipe(), small)
    assert len(found) == 0
    assert re.match(r"No setting is sure to fit small with 8 rows per step. Closest: .* with up to", found.reason)
    assert str(found) == found.reason


def test_the_published_405b_run_gives_a_reason_and_not_an_error():
    found = tune(Recipe.load("llama405b-oasst2"), Cluster.load("two-node-pcie"))
    assert not found.choices and "No setting is sure to fit" in found.reason


def test_what_cannot_be_tuned_gives_a_reason():
    bare = dataclasses.replace(H100, nodes=dataclasses.replace(H100.nodes, gpu_bf16_tflops=0.0))
    assert "set nodes.gpu_bf16_tflops in the profile of" in tune(recipe(model__name=LLAMA_8B), bare).reason
    bare = dataclasses.replace(H100, nodes=dataclasses.replace(H100.nodes, gpu_memory_gib=0.0))
    assert "set nodes.gpu_memory_gib in the profile of" in tune(recipe(model__name=LLAMA_8B), bare).reason
