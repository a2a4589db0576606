"""`kit.tune` with measure=True runs the settings that the forecast finds fastest, and puts failures into the table."""

import json
from dataclasses import replace

import pytest

import kit
from kit.config.recipe import Recipe
from kit.data.dataset import prepare
from kit.forecast import tune as forecast
from kit.notebook.measure import LIMIT, Measurement, _read, _setting, _short
from kit.notebook.sweep import RunTask
from kit.slurm import launch as slurm


def test_without_measuring_it_is_the_forecast_and_makes_nothing(recipe, local, tmp_path):
    found = kit.tune(recipe, local)
    assert found.as_dict() == forecast.tune(recipe, local).as_dict()
    assert not (tmp_path / "runs").exists() and not (tmp_path / "prepared").exists()


def test_the_sizes_of_a_prepared_dataset_count(recipe, local):
    data = prepare(recipe)
    assert kit.tune(recipe, local).as_dict() == forecast.tune(recipe, local, manifest=data.manifest).as_dict()
    assert kit.tune(recipe, local)[0].tokens_per_s != forecast.tune(recipe, local)[0].tokens_per_s


def test_choices_are_made_for_the_whole_run_and_not_for_the_few_steps_of_a_measurement(monkeypatch):
    cluster, recipe = kit.Cluster.load("h100-8x8"), Recipe.load("llama8b", **{"schedule.max_steps": 5000})
    monkeypatch.setattr("kit.slurm.launch.available", lambda: True)
    choice = forecast.tune(recipe, cluster)[0]
    setting = _setting(choice, cluster, 6, {"splits": {"train": {"rows": 100, "tokens": 100 * 2000}}})
    assert setting["parallel.compile"] == "on" and setting["model.attention"] == "varlen"
    assert setting["schedule.max_steps"] == 6
    short = recipe.override(**setting)
    assert short.batch == recipe.batch and slurm.choose(short, cluster).recipe == short


def test_a_measurement_asks_for_little_time(local):
    assert _short(local).slurm.time == LIMIT
    brief = replace(local, slurm=replace(local.slurm, time="00:10:00"))
    assert _short(brief) == brief


def test_a_setting_that_failed_is_a_row_with_its_reason(recipe, local, tmp_path):
    choice = forecast.tune(recipe, local)[0]
    data = prepare(recipe)
    run = slurm.freeze(slurm.choose(recipe, local), local, data, None, measures=True)
    failed = _read(choice, RunTask(0, {}, run.path, "FAILED"), data.manifest)
    assert failed.tokens_per_s is None and failed.reason
    (run.path / "state" / "result.json").write_text(json.dumps({"step_s": 0.5, "peak_gib": 3.0}))
    good = _read(choice, RunTask(0, {}, run.path, "COMPLETED"), data.manifest)
    table = Measurement((good, failed), forecast.tune(recipe, local))
    assert good.tokens_per_s == pytest.approx(recipe.batch * data.manifest["splits"]["train"]["tokens"]
                                              / data.manifest["splits"]["train"]["rows"] / 0.5)  # fmt: skip
    assert failed.reason in str(table) and "as measured" in str(table)
    assert json.loads(json.dumps(table.as_dict()))["measured"][1]["failed"] == failed.reason
    assert "No setting could be measured" in str(Measurement((failed,), forecast.tune(recipe, local)))


@pytest.mark.slow
def test_the_fastest_setting_is_measured_in_a_job_that_saves_nothing(recipe, local):
    found = kit.tune(recipe.override(**{"parallel.gpus_per_node": 1}), local, measure=True, top=1, steps=3)
    assert isinstance(found, Measurement) and len(found) == 1 and len(found.choices) > 1
    row = found[0]
    assert not row.reason and row.tokens_per_s > 0 and row.peak_gib is None
    run = kit.Run(row.run)
    assert run.measures and run.recipe.model.attention == "varlen"
    assert not list((run.path / "checkpoints").glob("checkpoint-*"))
