"""Everything in a folder in one table: runs, scripts, sweeps and notebooks; the best, and what it cost."""

import time
from dataclasses import replace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

import kit
from kit import files
from kit.errors import InputError
from kit.figures.palette import COLOURS
from kit.notebook.compare import LINES, Comparison, Entry, compare, ranked
from kit.slurm.run import Run
from kit.slurm.states import JobState, SlurmRecord
from tests.conftest import add_record


def entry(name, loss=None, group="g", state="COMPLETED", hours=2.0, gpus=8, **settings):
    result = {} if loss is None else {"loss": loss}
    return Entry(name, group, state, settings, result, hours, gpus)


def column(table, name):
    return [row[table.columns.index(name)] for row in table.rows]


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


def test_entries_are_sorted_by_final_eval_loss_then_train_loss():
    found = ranked(
        [
            entry("nan", float("nan")),
            entry("killed", 0.1, state="FAILED"),
            entry("second", [3.0, 0.6]),
            entry("none"),
            Entry("eval", "g", "COMPLETED", {}, {"loss": 0.2, "eval_loss_after": 0.5}, 1.0, 0),
            entry("text", "NaN"),
        ]
    )
    assert [one.name for one in found][:3] == ["eval", "second", "killed"]
    assert [one.loss for one in found] == [0.5, 0.6, 0.1, None, None, None]


def test_a_setting_lists_what_differs_within_the_group():
    entries = [entry("a", lr=1, seed=1, x=5), entry("b", lr=2, seed=1, x=5), entry("c", group="h", lr=9, y=1)]
    assert [Comparison(entries).setting(one) for one in entries] == ["lr=1", "lr=2", ""]


def test_a_thousand_entries_have_their_settings_at_once():
    keys = {f"key{number}": 1 for number in range(60)}
    found = Comparison([entry(str(number), lr=number, **keys) for number in range(1000)])
    counted = Counted(found.entries)
    assert [Comparison(counted).setting(one) for one in found.entries[:3]] == ["lr=0", "lr=1", "lr=2"]
    assert column(found.table(), "setting")[-1] == "lr=999"
    again = Comparison(counted)
    counted.rounds = 0
    again.table()
    assert counted.rounds <= 4  # not one for each entry


class Counted(list):
    """Counts how often it is gone through."""

    rounds = 0

    def __iter__(self):
        self.rounds += 1
        return super().__iter__()


def test_logs_of_the_best_runs_alone_are_read():
    read = []

    class Logged(Entry):
        @property
        def curves(self):
            read.append(self.name)
            return {"train": ([0], [1.0])}

    found = Comparison([Logged(str(n), "g", "COMPLETED", {"n": n}, {}, 1.0, 0) for n in range(200)])
    assert len(found.curves("train")) == LINES
    assert set(read) == {str(n) for n in range(LINES)}


def test_groups_have_gpu_hours_and_the_best_entry():
    entries = [
        entry("a", 2.0, lr=1),
        entry("b", 1.0, lr=2, hours=0.5),
        entry("c", group="h", state="RUNNING", hours=None),
    ]
    found = Comparison(ranked(entries))
    assert found.groups().rows == [["g", "2 COMPLETED", 1.0, "lr=2", 2.5, 20.0], ["h", "1 RUNNING", None, "", 0.0, 0.0]]
    assert column(found.table(), "GPU hours") == [4.0, 16.0, None]


def test_entries_that_failed_are_marked():
    found = Comparison(ranked([entry("a", 1.0), entry("b", state="RUNNING"), entry("c", state="OUT_OF_MEMORY")]))
    marked = [column(found.table(), "state")[row] for row in found.table().marks]
    assert marked == ["OUT_OF_MEMORY"]


def test_an_empty_comparison_has_a_message():
    assert str(Comparison([])) == "No runs and no executed notebooks were found."
    assert Comparison([]).as_dict() == {"groups": [], "runs": [], "forecasts": []}


def test_the_best_entries_have_the_same_colours_in_both_figures():
    entries = [
        Entry(f"n{n}", "notebook", "COMPLETED", {}, {"loss": [9.0, float(n)], "eval_loss": [8.0, float(n)]}, 1.0, 0)
        for n in range(9)
    ]
    figures = [Comparison(entries).losses(split) for split in ("train", "eval")]
    drawn = [figure.plotly_dict()["data"] for figure in figures]
    colours = [{line["name"]: line["line"]["color"] for line in lines} for lines in drawn]
    expected = [*COLOURS[:5], *[COLOURS[5]] * 4]
    assert colours[0] == colours[1] == dict(zip([f"n{n}" for n in range(9)], expected, strict=True))
    assert figures[1].chart.drawn()[3].y.tolist() == [8.0, 3.0]


def test_two_entries_with_the_same_setting_are_two_lines():
    lists = {"loss": [2.0, 1.0]}
    entries = [Entry(name, "g", "COMPLETED", {"lr": lr}, lists, 1.0, 0) for name, lr in (("a", 1), ("b", 1), ("c", 2))]
    assert list(Comparison(entries).curves("train")) == ["a", "b", "c"]


def test_runs_scripts_and_notebooks_are_in_one_table(ended, local, tmp_path):
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
    found = compare("runs", ".")
    assert {e.name: (e.group, e.state, e.loss, e.gpus) for e in found.entries} == {
        run.path.name: ("run", "COMPLETED", 1.5, 0), own.path.name: ("script", "NOT SUBMITTED", None, 0),
        "done": ("notebook", "COMPLETED", 1.25, 2),
    }  # fmt: skip
    assert {e.name: e.hours for e in found.entries}[run.path.name] == pytest.approx(1.0)
    assert column(found.table(), "name") == ["done", run.path.name, own.path.name]
    assert [e.name for e in compare("runs", ".", only="own").entries] == [own.path.name]
    assert list(found.curves("train")) == ["done"] and run.path.name in str(found)
    with pytest.raises(InputError, match="nowhere is not a folder"):
        compare("nowhere")


def test_every_known_runs_folder_is_compared_by_default(ended, local, tmp_path):
    """The runs folder of a cluster profile is known once a run was created there."""
    here = ended()
    pool = replace(local, paths=replace(local.paths, runs=str(tmp_path / "pool" / "checkpoints")))
    there = ended(pool)
    assert {e.name for e in compare().entries} == {here.path.name, there.path.name}
    assert [e.name for e in compare(tmp_path / "pool" / "checkpoints").entries] == [there.path.name]


def test_a_run_of_a_sweep_is_compared_once(ended, local, recipe):
    """The inner runs folder of a sweep is one of the folders in which this user launched a run."""
    sweep = Run.create_for_script("", local, "lr-sweep")
    inside = replace(local, paths=replace(local.paths, runs=str(sweep.path / "runs")))
    run = ended(inside)
    files.write_json(sweep.path / "sweep.json", [{"values": {"schedule.lr": 1e-3}, "out": f"runs/{run.path.name}"}])
    assert [(e.name, e.group) for e in compare().entries] == [(f"{sweep.path.name} 0", sweep.path.name)]


def test_forecast_and_actual_values_are_in_one_row(ended):
    run = ended()
    found = compare("runs")
    (row,) = found.as_dict()["forecasts"]
    assert row["run"] == run.path.name
    assert (row["s/step, actual"], row["ran for, actual"]) == (3, pytest.approx(1.0))
    assert row["s/step, forecast"] > 0 and row["ran for, forecast"] > 0 and row["peak GiB, forecast"] > 0
    assert row["peak GiB, actual"] is None


def test_compare_is_in_the_face():
    assert kit.compare is compare


def test_two_runs_of_a_recipe_differ_in_the_changed_setting(ended):
    ended(**{"schedule.lr": 1e-3}), ended(**{"schedule.lr": 1e-4})
    assert sorted(column(compare("runs").table(), "setting")) == ["lr=0.0001", "lr=0.001"]
