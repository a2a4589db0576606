"""Other trainers through `kit launch`: environments that do not fit, and training for real in those of env/trainers."""

import dataclasses
import json
import os
import shutil
import sys
import venv
from pathlib import Path

import pytest

from kit.cli import main
from kit.errors import InputError
from kit.slurm import launch as slurm
from kit.slurm.plan import plan
from kit.slurm.states import JobState
from kit.trainers import installed
from kit.trainers.catalog import OTHERS
from kit.watch.metrics import Metrics
from kit.watch.runs import LOSSES, progress_of
from tests.conftest import oracle

CACHE = os.environ.get("KIT_TRAINERS", "")
STEPS = {"schedule.max_steps": 4, "schedule.save_every": 2, "schedule.eval_every": 2, "parallel.gpus_per_node": 1}


def python_of(name):
    """The interpreter of a trainer's environment; skips the test where it is not built."""
    if not (Path(CACHE) / name / ".ready").is_file():
        pytest.skip(f"no environment of {name}: bash env/trainers/{name} CACHE, then set KIT_TRAINERS=CACHE")
    return str(Path(CACHE) / name / "bin" / "python")


@pytest.fixture
def two_nodes(local, live_slurm):
    options = dataclasses.replace(local.slurm, partition="gpu", time="20")
    return dataclasses.replace(local, nodes=dataclasses.replace(local.nodes, count=2, cpus=1), slurm=options)


def losses(run):
    """The training losses of the board, by step."""
    metrics = Metrics(run.path)
    while metrics.poll():
        pass
    name = next(name for name in LOSSES if name in metrics.series)
    return dict(zip(*metrics.series[name][:2], strict=True))


def finish(run, timeout=500):
    end = run.wait(timeout=timeout)
    assert (end.state, end.conflicts) == (JobState.COMPLETED, []), run.log.read_text()
    return losses(run)


def log_of(run, step):
    """The rows that transformers' Trainer kept in a checkpoint."""
    return json.loads((run.path / "checkpoints" / f"checkpoint-{step}" / "trainer_state.json").read_text())[
        "log_history"
    ]


@pytest.mark.slow
@pytest.mark.slurm
def test_llamafactory_trains_on_two_nodes_and_its_loss_is_on_the_board(recipe, two_nodes):
    job = recipe.override(**STEPS, **{
        "parallel.nodes": 2, "parallel.strategy": "ddp", "trainer.name": "llamafactory",
        "trainer.python": python_of("llamafactory"),
    })  # fmt: skip
    run = slurm.launch(job, two_nodes)
    first = finish(run)
    assert list(first) == [1, 2, 3, 4] and progress_of(run).step == 4
    assert progress_of(run).loss == pytest.approx(first[4])
    assert json.loads((run.path / "state" / "result.json").read_text()) == {"steps": 4, "loss": first[4]}


@pytest.mark.slow
@pytest.mark.slurm
def test_llamafactory_resumes_from_its_newest_checkpoint(recipe, two_nodes):
    # One rank, as transformers 5.6 cannot load the optimizer of several CPU ranks: it asks torch for the device cpu:0.
    job = recipe.override(**STEPS, **{
        "parallel.strategy": "ddp", "trainer.name": "llamafactory", "trainer.python": python_of("llamafactory"),
    })  # fmt: skip
    run = slurm.launch(job, two_nodes)
    first = finish(run)
    shutil.rmtree(run.path / "checkpoints" / "checkpoint-4")
    (run.path / "state" / "result.json").unlink()
    run.requeue()
    finish(run)
    assert "checkpoint-2" in run.log.read_text()
    assert [row["loss"] for row in log_of(run, 4) if "loss" in row] == pytest.approx(list(first.values()), abs=2e-3)


@pytest.mark.slow
@pytest.mark.slurm
def test_litgpt_trains_converts_its_result_back_and_its_loss_is_on_the_board(recipe, smollm2, two_nodes):
    job = recipe.override(**STEPS, **{
        "model.name": str(smollm2), "data.packing": False, "data.seq_len": 64, "trainer.name": "litgpt",
        "trainer.python": python_of("litgpt"),
    })  # fmt: skip
    run = slurm.launch(job, two_nodes)
    first = finish(run)
    assert len(first) >= 2 and all(0 < loss < 20 for loss in first.values())
    assert (run.path / "hf" / "model.pth").is_file()


@pytest.mark.slow
@pytest.mark.slurm
def test_the_same_lora_ends_with_the_same_loss_in_trl_deepspeed_and_llamafactory(
    recipe, smollm2, two_nodes, monkeypatch
):
    python, package = python_of("llamafactory"), oracle("deepspeed-0.19.8")
    monkeypatch.syspath_prepend(package)
    variables = two_nodes.environment | {"PYTHONPATH": str(package)}
    job = recipe.override(**{
        "model.name": str(smollm2), "model.attention": "sdpa", "schedule.max_steps": 20, "schedule.eval_every": 20,
        "schedule.save_every": 20, "schedule.lr": 1e-3,
    })  # fmt: skip
    ends = {}
    for name, changes in {
        "trl": {"parallel.strategy": "ddp"},
        "deepspeed": {"parallel.strategy": "zero2"},
        "llamafactory": {"parallel.strategy": "ddp", "trainer.name": "llamafactory", "trainer.python": python},
    }.items():
        cluster = two_nodes if name == "llamafactory" else dataclasses.replace(two_nodes, environment=variables)
        run = slurm.launch(job.override(**changes), cluster)
        assert len(finish(run, timeout=1200)) == 20
        (ends[name],) = {row["eval_loss"] for row in log_of(run, 20) if row.get("eval_loss") and row["step"] == 20}
    assert ends == pytest.approx(dict.fromkeys(ends, ends["trl"]), rel=0.02)


@pytest.mark.slow
@pytest.mark.slurm
def test_a_run_of_another_trainer_can_be_cancelled(recipe, two_nodes):
    job = recipe.override(**STEPS | {
        "parallel.strategy": "ddp", "trainer.name": "llamafactory", "trainer.python": python_of("llamafactory"),
        "schedule.max_steps": 10_000, "schedule.save_every": 5_000, "schedule.eval_every": 5_000,
    })  # fmt: skip
    run = slurm.launch(job, two_nodes)
    for line in run.follow(seconds=300):
        if "'loss'" in line:
            break
    run.cancel()
    assert run.wait(timeout=120).state == JobState.CANCELLED
    assert progress_of(run).step >= 1


@pytest.fixture
def bare_python(tmp_path):
    """The interpreter of an environment without packages."""
    venv.create(tmp_path / "bare", with_pip=False)
    return str(tmp_path / "bare" / "bin" / "python")


def test_an_environment_that_is_absent_or_has_other_versions_is_refused_before_anything_is_written(
    recipe, local, bare_python, tmp_path
):
    job = recipe.override(**STEPS, **{"trainer.name": "llamafactory", "parallel.strategy": "ddp"})
    cluster = dataclasses.replace(local, paths=dataclasses.replace(local.paths, runs=str(tmp_path / "runs")))
    known = OTHERS["llamafactory"].KNOWN["llamafactory"]
    for python, words in {
        "": "No interpreter is named: set trainer.python",
        "/absent/python": "/absent/python is not an interpreter on this machine",
        "/bin/false": "/bin/false does not tell its versions",
        bare_python: f"no llamafactory {known}",
        sys.executable: f"no llamafactory {known}, transformers ",
    }.items():
        with pytest.raises(InputError, match=words):
            slurm.launch(job.override(**{"trainer.python": python}), cluster)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "prepared").exists()


def test_a_container_is_refused_as_the_trainer_has_its_own_environment(recipe, local):
    container = dataclasses.replace(local.slurm.container, kind="apptainer", image="/images/kit.sif")
    cluster = dataclasses.replace(local, slurm=dataclasses.replace(local.slurm, container=container))
    with pytest.raises(InputError, match=r"slurm\.container is for the kit's own trainer"):
        slurm.launch(recipe.override(**STEPS, **{"trainer.name": "llamafactory"}), cluster)


def test_a_plan_says_what_the_trainer_does_otherwise(recipe, local):
    job = recipe.override(**STEPS, **{
        "trainer.name": "litgpt", "trainer.python": "/envs/litgpt/bin/python", "data.packing": False,
    })  # fmt: skip
    found = plan(job, local)
    assert "/envs/litgpt/bin/python" in found.facts["trainer"] and "does not pack" in found.facts["trainer"]
    assert "-m kit.slurm.rendezvous" in found.script and "kit.train.other" in found.script


def test_the_command_compares_versions_and_exits_1_where_they_differ(bare_python, capsys):
    assert main(["check", "--trainer", "litgpt", "--python", bare_python, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["known"] == dict(OTHERS["litgpt"].KNOWN) and set(answer["installed"].values()) == {""}
    assert main(["check", "--trainer", "litgtp", "--python", bare_python]) == 2
    assert "has no renderer" in capsys.readouterr().err


def test_the_versions_of_an_environment_are_those_that_python_imports():
    import torch

    assert installed.versions(sys.executable, ["torch", "absent"]) == {"torch": torch.__version__.partition("+")[0]}


@pytest.mark.parametrize("name", OTHERS)
def test_the_environments_of_env_trainers_have_the_versions_that_the_renderers_know(name):
    assert installed.differences(name, python_of(name)) == {}
