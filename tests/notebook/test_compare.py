"""Everything in a folder in one table: runs, scripts, sweeps and notebooks; the best, and what it cost."""

import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from kit import files
from kit.chart import COLOURS
from kit.notebook.compare import Entry, differing, forecasts, gather, losses, ranked, summary, table
from kit.slurm.run import Run
from kit.slurm.states import JobState, SlurmRecord
from tests.conftest import add_record


def entry(name, loss=None, group="g", state="COMPLETED", hours=2.0, gpus=8, **settings):
    left = {} if loss is None else {"loss": loss}
    return Entry(name, group, state, settings, left, hours, gpus)


@pytest.fixture
def ended(recipe, local, tmp_path):
    """A run that trained from 100 s to 3700 s ago, on what its cluster has."""

    def make(cluster=local, **changes):
        from kit.data.dataset import prepare

        job = recipe.override(**changes)
        dataset = prepare(job)
        run = Run.create(job, cluster, dataset.path, dataset.manifest["digest"])
        now = time.time()
        run.note(job_id="7", submitted=now - 3800)
        for kind, ago, fact in (("start", 3700, {"nodes": "n"}), ("exit", 100, {"exit_code": 0, "signal": ""})):
            files.write_json(run.path / "state" / f"{kind}.0.json", {"job_id": "7", "time": now - ago, **fact})
        add_record(run, SlurmRecord, state=JobState.COMPLETED, exit_code=0)
        files.write_json(
            run.path / "state" / "result.json", {"steps": 4, "loss": 2.0, "eval_loss_after": 1.5, "step_s": 3}
        )
        return run

    return make


def test_the_best_is_the_lowest_loss_that_ended_well_by_eval_where_there_is_any():
    found = [
        entry("nan", float("nan")), entry("killed", 0.1, state="FAILED"), entry("second", [3.0, 0.6]), entry("none"),
        Entry("eval", "g", "COMPLETED", {}, {"loss": 0.2, "eval_loss_after": 0.5}, 1.0, 0), entry("text", "NaN"),
    ]  # fmt: skip
    assert [e.name for e in ranked(found)][:3] == ["eval", "second", "killed"]
    assert [e.loss for e in ranked(found)] == [0.5, 0.6, 0.1, None, None, None]


def test_settings_are_those_that_differ_within_the_group():
    found = [entry("a", lr=1, seed=1, x=5), entry("b", lr=2, seed=1, x=5), entry("c", group="h", lr=9, y=1)]
    assert [differing(e, found) for e in found] == ["lr=1", "lr=2", ""]


def test_cost_is_gpus_times_hours_and_each_group_has_its_best():
    found = [
        entry("a", 2.0, lr=1),
        entry("b", 1.0, lr=2, hours=0.5),
        entry("c", group="h", state="RUNNING", hours=None),
    ]
    assert summary(found).split("\n") == [
        "g: 2 COMPLETED; lowest loss 1.0000: lr=2; 2.50 hours, 20.00 GPU hours",
        "h: 1 RUNNING; 0.00 hours, 0.00 GPU hours",
    ]
    assert list(table(found)["GPU hours"]) == [4.0, 16.0, ""]
    assert summary([]) == "" and len(table([])) == 0


def test_the_best_keep_their_colours_in_both_pictures_and_the_rest_share_one():
    found = [
        Entry(f"n{n}", "notebook", "COMPLETED", {}, {"loss": [9.0, float(n)], "eval_loss": [8.0, float(n)]}, 1.0, 0)
        for n in range(9)
    ]
    pictures = [losses(found, split) for split in ("train", "eval")]
    names = [[line.name for line in picture.lines] for picture in pictures]
    assert names[0] == names[1] == [*(f"n{n}" for n in range(5)), *["the others"] * 4]
    assert [drawn.colour for drawn in pictures[0].drawn()] == [*COLOURS[:5], *[COLOURS[5]] * 4]


def test_a_run_of_a_recipe_and_one_of_a_script_and_a_notebook_stand_in_one_table(ended, local, tmp_path):
    run = ended()
    own = Run.create_for_script("#!/bin/sh\n", local, "own")
    notebook = new_notebook(cells=[new_code_cell("1")])
    notebook.metadata.update(
        papermill={"exception": False},
        kit={"duration": 1800.0, "parameters": {"a": 1}, "result": {"loss": [2.0, 1.25]}, "gpus": ["A", "A"]},
    )
    nbformat.write(notebook, str(tmp_path / "done.ipynb"))
    (tmp_path / "other.ipynb").write_text("no notebook")
    damaged = Run.create_for_script("#!/bin/sh\n", local, "damaged")
    (damaged.path / "run.json").write_text("{")
    found = gather("runs", ".")
    assert {e.name: (e.group, e.state, e.loss, e.gpus) for e in found} == {
        run.path.name: ("run", "COMPLETED", 1.5, 0), own.path.name: ("script", "NOT SUBMITTED", None, 0),
        "done": ("notebook", "COMPLETED", 1.25, 2),
    }  # fmt: skip
    assert {e.name: e.hours for e in found}[run.path.name] == pytest.approx(1.0)
    assert list(table(found)["name"]) == ["done", run.path.name, own.path.name]
    assert [e.name for e in gather("runs", ".", only="own")] == [own.path.name]
    assert gather("nowhere") == []
    assert [line.name for line in losses(found).lines] == ["done"]


def test_the_forecast_stands_beside_what_happened(ended):
    run = ended()
    (row,) = forecasts(gather("runs")).to_dict("records")
    assert row["run"] == run.path.name
    assert (row["s a step, actual"], row["hours, actual"]) == (3, 1.0)
    assert row["s a step, forecast"] > 0 and row["hours, forecast"] > 0 and row["peak GiB, forecast"] > 0


def test_two_runs_of_a_recipe_are_told_apart_by_what_was_changed(ended):
    ended(**{"schedule.lr": 1e-3}), ended(**{"schedule.lr": 1e-4})
    assert sorted(table(gather("runs"))["setting"]) == ["lr=0.0001", "lr=0.001"]
