"""A sweep is checked before anything is submitted; every task has its state; only failed tasks are submitted again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from kit.cli import main
from kit.config.cluster import Cluster
from kit.errors import InputError
from kit.notebook.compare import compare
from kit.notebook.grid import read_grid
from kit.notebook.sweep import Sweep, submit_notebook, sweep
from kit.slurm.run import Run

GRID = "lr = [1e-3, 1e-2, 3e-2]\nseed = [0, 1]\n"
TRAIN = """
import pathlib
assert not (lr == 3e-2 and seed == 1 and not pathlib.Path("fixed").exists()), "diverged"
result = {"loss": [seed + 1 / (1 + 1000 * lr * step) for step in range(5)]}
"""


@pytest.fixture
def notebook(tmp_path):
    """A toy training whose loss is known, and which fails at lr 0.03, seed 1."""
    parameters = new_code_cell("lr: float = 1e-3  # rate\nseed: int = 0  # seed", metadata={"tags": ["parameters"]})
    path = tmp_path / "toy.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Toy"), parameters, new_code_cell(TRAIN)]), str(path))
    return path


@pytest.fixture
def two_nodes(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(
        'name = "two"\n[nodes]\ncount = 2\ncpus = 2\nram_gib = 10\n[slurm]\npartition = "gpu"\ntime = "00:20:00"\n'
        'options = ["--mem=500"]\n[environment]\nGLOO_SOCKET_IFNAME = "lo"\n'
    )
    return path


@pytest.fixture
def grid(tmp_path):
    def write(text):
        (tmp_path / "grid.toml").write_text(text)
        return read_grid(tmp_path / "grid.toml")

    return write


def states(run):
    return [task.state for task in Sweep(run).tasks()]


# Grids


def test_lists_are_a_product_and_points_are_single_settings(grid):
    assert grid("a = [1, 2]\nb = [true, false]\nc = 'x'") == [
        {"a": a, "b": b, "c": "x"} for a in (1, 2) for b in (True, False)
    ]
    assert grid("[[points]]\na = 1\nmodules = ['q', 'v']\n[[points]]\na = 2") == [
        {"a": 1, "modules": ["q", "v"]},
        {"a": 2},
    ]
    assert grid("s = [1, 2]\n[[points]]\na = 3\n[[points]]\na = 4") == [
        {"s": 1, "a": 3}, {"s": 2, "a": 3}, {"s": 1, "a": 4}, {"s": 2, "a": 4},
    ]  # fmt: skip
    assert grid("[schedule]\nlr = [1e-3]\n[tuning]\ntarget_modules = [['q_proj'], ['v_proj']]") == [
        {"schedule.lr": 1e-3, "tuning.target_modules": [name]} for name in ("q_proj", "v_proj")
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = []", "has 0 settings"),
        ("points = 3", r"under a line \[\[points\]\]"),
        ("a = [1, ", "not valid TOML"),
        ("\n".join(f"x{n} = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for n in range(12)), "has 1000000000000 settings"),
    ],
)
def test_an_invalid_grid_is_an_error(grid, text, words):
    with pytest.raises(InputError, match=words):
        grid(text)


def test_a_missing_grid_is_an_error_that_names_it(tmp_path):
    with pytest.raises(InputError, match=r"none.toml: there is no such grid"):
        read_grid(tmp_path / "none.toml")


# Checked before anything is made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lrr = [1e-3, 1e-2]", r"Setting 0 \(lrr=0.001\): Unknown parameter 'lrr'; did you mean 'lr'"),
        ("lr = [1e-3, 'fast']", r"Setting 1 \(lr=fast\): Parameter lr is 'fast'; it must be a number"),
        ("seed = [1, 1.5]", r"Setting 1 \(seed=1.5\): Parameter seed is 1.5; it must be a whole number"),
        ("lr = [1e-3, 0.001]", r"Settings 0 and 1 are the same \(lr=0.001\)"),
        ("[[points]]\n[[points]]\nlr = 1e-3", r"Settings 0 and 1 are the same"),  # 1e-3 is the default
    ],
)
def test_a_wrong_setting_is_an_error_before_anything_is_made(notebook, local, grid, tmp_path, text, words):
    with pytest.raises(InputError, match=words):
        sweep(notebook, grid(text), local)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[schedule]\nlrs = [1e-3]", r"Setting 0 \(lrs=0.001\): override: unknown key 'schedule.lrs'; did you mean"),
        ("[schedule]\nlr = ['fast']", r"it must be a number"),
        ("[schedule]\nseed = [42, 42]", r"Settings 0 and 1 are the same \(seed=42\)"),
        ("[parallel]\ngpus_per_node = [1, 2]", "ask for the same nodes and GPUs"),
        ("[model]\nbase = ['bf16', 'fp8']", "fp8 needs GPUs"),
    ],
)
def test_a_wrong_setting_of_a_recipe_is_an_error(recipe, local, grid, tmp_path, text, words):
    (tmp_path / "tiny.toml").write_text(recipe.toml())
    with pytest.raises(InputError, match=words):
        sweep(tmp_path / "tiny.toml", grid(text), local)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "prepared").exists()


def test_other_files_and_an_existing_out_are_errors(notebook, local, tmp_path):
    (tmp_path / "words.ipynb").write_text("words")
    with pytest.raises(InputError, match="is not a notebook"):
        sweep(tmp_path / "words.ipynb", [{}], local)
    with pytest.raises(InputError, match=r"toy.ipynb exists"):
        submit_notebook(notebook, {}, notebook, local)
    with pytest.raises(InputError, match="did you mean 'seed'"):
        submit_notebook(notebook, {"sed": "1"}, tmp_path / "out.ipynb", local)
    assert not (tmp_path / "runs").exists()


def test_a_notebook_job_has_the_environment_of_the_profile(local, tmp_path):
    source = "import os\nassert len(os.environ['SITE_TOKEN']) == 12"
    cells = [new_code_cell("n: int = 1", metadata={"tags": ["parameters"]}), new_code_cell(source)]
    nbformat.write(new_notebook(cells=cells), str(tmp_path / "asks.ipynb"))
    (tmp_path / "tokens").write_text("SITE_TOKEN=" + "x" * 12)
    (tmp_path / "tokens").chmod(0o600)
    cluster = replace(local, slurm=replace(local.slurm, env_file=str(tmp_path / "tokens")))
    assert submit_notebook(tmp_path / "asks.ipynb", {}, tmp_path / "out.ipynb", cluster).wait(120).state == "COMPLETED"


def test_a_sweep_with_a_partition_never_runs_on_the_login_node(notebook, two_nodes, tmp_path):
    with pytest.raises(InputError, match=r"No Slurm answers here, and two names the partition gpu"):
        sweep(notebook, [{}], Cluster.load(two_nodes))
    assert not (tmp_path / "runs").exists()


def test_a_wrong_call_lists_what_is_missing(notebook, local, capsys):
    assert main(["sweep", str(notebook)]) == 2
    assert "takes a notebook or a recipe, and a grid" in capsys.readouterr().err
    plain = Run.create_for_script("#!/bin/sh\n", local, "own")
    assert main(["sweep", "--rerun", str(plain.path)]) == 2
    assert "is a run, but not a sweep" in capsys.readouterr().err


# Without Slurm


def test_without_slurm_tasks_run_in_order_and_only_failed_ones_rerun(notebook, tmp_path, capfd):
    (tmp_path / "grid.toml").write_text("[[points]]\nlr = 0.03\nseed = 1\n[[points]]\nlr = 0.01")
    assert main(["sweep", str(notebook), "grid.toml", "--wait", "--json"]) == 1
    shown = json.loads(capfd.readouterr().out)
    assert [(t["task"], t["values"], t["state"]) for t in shown["tasks"]] == [
        (0, {"lr": 0.03, "seed": 1}, "FAILED"), (1, {"lr": 0.01}, "COMPLETED"),
    ]  # fmt: skip
    run = Run(tmp_path / shown["sweep"])
    assert run.state.state == "FAILED" and "task 0: lr=0.03, seed=1" in run.log.read_text()
    before = (run.path / "notebooks" / "0001.ipynb").stat().st_mtime_ns
    (tmp_path / "fixed").touch()
    notebook.write_text("changed meanwhile, which is nothing to a sweep")
    assert Sweep(run).rerun() == [0]
    assert run.wait(timeout=60).state == "COMPLETED"
    assert states(run) == ["COMPLETED"] * 2 and Sweep(run).rerun() == []
    assert (run.path / "notebooks" / "0001.ipynb").stat().st_mtime_ns == before


def test_a_killed_sweep_continues_with_the_remaining_tasks(notebook, local, tmp_path):
    slow = nbformat.read(notebook, 4)
    slow.cells.append(
        new_code_cell("import time\nwhile seed == 1 and not pathlib.Path('fixed').exists(): time.sleep(0.1)")
    )
    nbformat.write(slow, str(notebook))
    run = sweep(notebook, [{"seed": n} for n in range(3)], local).run
    until = time.monotonic() + 60
    while states(run) != ["COMPLETED", "RUNNING", "PENDING"]:
        assert time.monotonic() < until, states(run)
        time.sleep(0.2)
    with pytest.raises(InputError, match="cancel it, or wait for its end"):
        Sweep(run).rerun()
    run.cancel()
    assert states(run) == ["COMPLETED", "FAILED", "NOT RUN"]
    stopped = nbformat.read(run.path / "notebooks" / "0001.ipynb", 4)
    assert stopped.metadata.kit.reason == "SIGTERM stopped the notebook."
    (tmp_path / "fixed").touch()
    assert Sweep(run).rerun() == [1, 2]
    run.wait(timeout=60)
    assert states(run) == ["COMPLETED"] * 3


@pytest.mark.slow
def test_a_recipe_sweep_has_a_run_for_each_setting(recipe, local, grid, tmp_path):
    changes = {"schedule.max_steps": 2, "schedule.save_every": 0, "parallel.gpus_per_node": 1}
    (tmp_path / "tiny.toml").write_text(recipe.override(**changes).toml())
    run = sweep(tmp_path / "tiny.toml", grid("[schedule]\nlr = [1e-3, 1e-2]"), local).run
    run.wait(timeout=600)
    found = Sweep(run).tasks()
    assert [task.state for task in found] == ["COMPLETED"] * 2
    assert [Run(task.out).recipe.schedule.lr for task in found] == [1e-3, 1e-2]
    assert all((task.out / "state" / "result.json").exists() for task in found)


# On a live Slurm


@pytest.mark.slow
@pytest.mark.slurm
def test_of_six_tasks_only_the_failed_one_is_rerun(live_slurm, notebook, two_nodes, tmp_path, capfd):
    (tmp_path / "grid.toml").write_text(GRID)
    words = ["sweep", str(notebook), "grid.toml", "--cluster", str(two_nodes), "--limit", "3", "--wait", "--json"]
    assert main(words) == 1
    shown = json.loads(capfd.readouterr().out)
    run = Run(tmp_path / shown["sweep"])
    assert [t["state"] for t in shown["tasks"]] == ["COMPLETED"] * 5 + ["FAILED"]
    assert "--array=" not in (run.path / "job.sbatch").read_text()  # the rerun's differs, so it is sbatch's option
    assert run.state.tasks == {n: "FAILED" if n == 5 else "COMPLETED" for n in range(6)}
    assert "diverged" in (run.path / "logs" / f"slurm-{run.job_id}_5.out").read_text()

    found = compare("runs").as_dict()
    best, worst = found["runs"][0], found["runs"][-1]
    assert best["setting"] == "lr=0.03, seed=0"
    assert best["loss"] == pytest.approx(1 / (1 + 1000 * 0.03 * 4), abs=5e-5)
    assert [row["state"] for row in found["runs"]].count("COMPLETED") == 5 and worst["state"] == "FAILED"
    (group,) = found["groups"]
    assert (group["group"], group["states"]) == (run.path.name, "5 COMPLETED, 1 FAILED")
    assert (group["lowest loss"], group["of"]) == (best["loss"], "lr=0.03, seed=0")

    first, written = run.job_id, {t.number: t.out.stat().st_mtime_ns for t in Sweep(run).tasks()}
    (tmp_path / "fixed").touch()
    assert main(["sweep", "--rerun", str(run.path), "--wait"]) == 0
    assert run.job_id != first and run.state.tasks == {5: "COMPLETED"}
    assert [t.number for t in Sweep(run).tasks() if t.out.stat().st_mtime_ns != written[t.number]] == [5]
    assert states(run) == ["COMPLETED"] * 6


@pytest.mark.slow
@pytest.mark.slurm
def test_a_recipe_sweep_is_one_array_of_ordinary_runs(live_slurm, recipe, two_nodes, grid, tmp_path):
    changes = {"schedule.max_steps": 2, "schedule.save_every": 0, "parallel.gpus_per_node": 1}
    (tmp_path / "tiny.toml").write_text(recipe.override(**changes).toml())
    run = sweep(tmp_path / "tiny.toml", grid("[schedule]\nlr = [1e-3, 1e-2]"), Cluster.load(two_nodes), limit=1).run
    first, second = (Run(task.out) for task in Sweep(run).tasks())
    assert (first.job_id, second.job_id) == (f"{run.job_id}_0", f"{run.job_id}_1")
    assert Run.attach(f"{run.job_id}_1") == second
    second.cancel()  # while it waits
    assert run.wait(timeout=600).state == "CANCELLED"
    assert states(run) == ["COMPLETED", "CANCELLED"]
    assert first.state.state == "COMPLETED" and second.state.state == "CANCELLED"
    assert "step 2/2  eval loss" in first.log.read_text()
    assert Sweep(run).rerun() == [1]
    run.wait(timeout=600)
    assert states(run) == ["COMPLETED"] * 2 and second.job_id == f"{run.job_id}_1" and first.job_id != second.job_id


@pytest.mark.slurm
def test_a_notebook_job_has_the_kernels_exit_code_and_a_short_log(live_slurm, notebook, two_nodes, tmp_path, capfd):
    bar = "for i in range(1000): print(f'\\r{i}', end='', flush=True)"
    ends = nbformat.read(notebook, 4)
    ends.cells += [new_code_cell(bar), new_code_cell("import os, time; time.sleep(1); os._exit(7)")]
    nbformat.write(ends, str(notebook))
    assert main(["run", str(notebook), "out.ipynb", "-p", "lr=1e-2", "--cluster", str(two_nodes)]) == 0
    path, line = capfd.readouterr().out.split("\n")[:2]
    run = Run(tmp_path / path)
    assert line == f"job {run.job_id}"
    end = run.wait(timeout=60)
    assert (end.state, end.exit_code) == ("FAILED", 7)
    said = str(run.tail())
    assert "The kernel died (exit code 7)" in said and re.findall(r"^\d+$", said, re.MULTILINE) == ["999"]
    saved = nbformat.read(tmp_path / "out.ipynb", 4)
    assert saved.metadata.kit.slurm_job_id == run.job_id and saved.metadata.kit.parameters == {"lr": 0.01}


@pytest.mark.slurm
def test_a_cancelled_notebook_job_saves_its_output(live_slurm, notebook, two_nodes, tmp_path):
    ends = nbformat.read(notebook, 4)
    ends.cells.append(new_code_cell("import time\nprint('so far', flush=True)\ntime.sleep(100)"))
    nbformat.write(ends, str(notebook))
    run = submit_notebook(notebook, {}, tmp_path / "out.ipynb", Cluster.load(two_nodes))
    until = time.monotonic() + 60
    while "so far" not in str(run.tail()):
        assert time.monotonic() < until
        time.sleep(0.2)
    run.cancel()
    assert run.wait(timeout=60).state == "CANCELLED"
    until = time.monotonic() + 20
    while (saved := nbformat.read(tmp_path / "out.ipynb", 4)).metadata.kit.end_time is None:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert saved.metadata.kit.reason == "SIGTERM stopped the notebook."
    assert saved.cells[-1].outputs[0].text == "so far\n"


@pytest.mark.slurm
def test_the_sweep_continues_where_its_waiting_process_is_killed(live_slurm, notebook, two_nodes, tmp_path):
    (tmp_path / "grid.toml").write_text("lr = [1e-3, 1e-2]")
    notebook = notebook.rename(tmp_path / "a name's spaces.ipynb")
    words = ["sweep", str(notebook), "grid.toml", "--cluster", str(two_nodes), "--wait"]
    waiting = subprocess.Popen([sys.executable, "-m", "kit.cli", *words], stderr=subprocess.PIPE, text=True)
    path = waiting.stderr.readline().split(",")[0]
    os.kill(waiting.pid, signal.SIGKILL)
    waiting.communicate()
    run = Run(tmp_path / path)
    assert run.wait(timeout=60).state == "COMPLETED"
    assert states(run) == ["COMPLETED"] * 2
