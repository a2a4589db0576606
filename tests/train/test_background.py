"""Checkpoints in the background: complete only when durable and checked, with the values of their step."""

import json
import shutil
import threading

import pytest
import torch
import torch.distributed
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from transformers import AutoModelForCausalLM, TrainerState

from kit.checkpoints.inspect import complete, inspect
from kit.checkpoints.sharded import load_sharded
from kit.deploy.model import export_model
from kit.errors import InputError, KitError
from kit.slurm.run import Run
from kit.train.background import BackgroundSaves
from kit.train.saves import resume_point
from kit.trainers import trl
from tests.train.strategies import STEPS, base_model, train_ranks

FULL = {
    "tuning.method": "full", "schedule.lr": 1e-2, "schedule.max_steps": STEPS, "schedule.save_every": 2,
    "schedule.keep": 9, "model.attention": "sdpa",
}  # fmt: skip


@pytest.mark.slow
def test_a_checkpoint_of_the_background_holds_its_step_though_training_went_on(recipe, tiny, local, tmp_path):
    job = recipe.override(**FULL | {"model.name": str(base_model("tied", tiny))})
    run = Run.create(job.override(**{"schedule.save": "async"}), local, tmp_path, "d")
    resume = {"resume": str(run.path / "checkpoints" / "checkpoint-4")}
    (waited,) = train_ranks(job, tmp_path / "sync", {})
    background, resumed = train_ranks(run.recipe, run.path, {}, resume)
    assert background["losses"] == waited["losses"] == resumed["losses"]
    assert background["sum"] == waited["sum"] == resumed["sum"]
    for step in (2, 4, 6):
        folders = [folder / "checkpoints" / f"checkpoint-{step}" for folder in (run.path, tmp_path / "sync")]
        assert inspect(folders[0], values=True, world=2).problems == ()
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            ours, theirs = (load_sharded(folder / part) for folder in folders)
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    export_model(run.path, tmp_path / "model", dtype="float32")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert sum(parameter.double().sum().item() for parameter in exported.parameters()) == background["sum"]
    newest = run.path / "checkpoints" / "checkpoint-6"
    (newest / "trainer_state.json").rename(newest / "trainer_state.json.pending")  # as when it was killed while writing
    assert resume_point(run, lambda text: None) == str(newest.with_name("checkpoint-4"))


@pytest.mark.slow
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_that_the_save_had_waited_for(
    recipe, tiny, local, tmp_path
):
    job = recipe.override(**FULL | {"model.name": str(base_model("tied", tiny)), "schedule.save": "async"})
    run = Run.create(job, local, tmp_path, "d")
    with pytest.raises(AssertionError, match=r"exit codes \[-?\d+, -9\]"):
        train_ranks(job, run.path, {"dies_at": 4})
    assert json.loads((run.path / "killed.json").read_text()) is True
    killed = run.path / "checkpoints" / "checkpoint-4"
    assert list((killed / "pytorch_model_fsdp_0").glob("*.distcp")) and not complete(killed)
    assert resume_point(run, lambda text: None) == str(killed.with_name("checkpoint-2"))


class SlowWriter(FileSystemWriter):
    """Writes when it is allowed to."""

    def __init__(self, path, allowed):
        super().__init__(path)
        self.allowed = allowed

    def write_data(self, plan, planner):
        self.allowed.wait(60)
        return super().write_data(plan, planner)


@pytest.fixture
def saves(tmp_path):
    """Background saves of the only rank of a process group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    saves = BackgroundSaves()
    yield saves
    for stager in saves.stagers:
        stager.close()
    torch.distributed.destroy_process_group()


def begin(saves, folder, check):
    """Start a save of two parts, as the Trainer does; returns what lets the writers write."""
    allowed = threading.Event()
    for part in ("model", "optimizer"):
        (folder / part).mkdir(parents=True)
        writer = SlowWriter(folder / part, allowed)
        saves.save({part: torch.arange(9.0)}, storage_writer=writer, planner=DefaultSavePlanner())
    state = TrainerState(global_step=2)
    with saves.hold_back(state):
        state.save_to_json(str(folder / "trainer_state.json"))
    saves.complete(folder, check, lambda: (folder.parent / "old").rmdir())
    return allowed


def test_the_state_gets_its_name_when_all_is_written_and_checked_and_older_ones_go_then(saves, tmp_path):
    folder, order, done = tmp_path / "checkpoint-2", [], []
    (tmp_path / "old").mkdir()
    saves.on_complete = lambda path, seconds: done.append((path, seconds > 0))
    allowed = begin(saves, folder, lambda: order.append((folder / "optimizer" / ".metadata").exists()))
    saves.stop_on_error()
    assert not (folder / "trainer_state.json").exists() and not order and (tmp_path / "old").exists()
    assert not complete(folder)
    allowed.set()
    saves.wait()
    assert order == [True] and done == [(folder, True)]
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    assert not (tmp_path / "old").exists()
    assert torch.equal(load_sharded(folder / "model")["model"], torch.arange(9.0))
    shutil.rmtree(folder)
    (tmp_path / "old").mkdir()
    begin(saves, folder, lambda: None).set()  # the next one
    saves.wait()
    assert (folder / "trainer_state.json").exists()


class Gate:
    """Its copy is made when it is opened."""

    def __init__(self, opened):
        self.opened = opened

    def __deepcopy__(self, memo):
        self.opened.wait(60)
        return "copied"


def test_a_save_returns_before_its_copies_are_made_and_the_optimizer_waits_for_them(saves, tmp_path):
    opened, blocked = threading.Event(), []
    saves.on_copied = blocked.append
    options = {"storage_writer": FileSystemWriter(tmp_path / "model"), "planner": DefaultSavePlanner()}
    saves.save({"gate": Gate(opened)}, **options)
    saves.blocked_s = 5.0
    optimizer = threading.Thread(target=saves.on_pre_optimizer_step, args=(None, None, None))
    optimizer.start()
    optimizer.join(0.2)
    assert optimizer.is_alive() and not blocked
    opened.set()
    optimizer.join(60)
    assert not optimizer.is_alive()
    assert len(blocked) == 1 and blocked[0] > 5.1  # with the wait
    saves.wait()
    assert (tmp_path / "model" / ".metadata").exists()


def test_a_checkpoint_that_is_not_usable_stops_training_and_stays_incomplete(saves, tmp_path):
    def check():
        raise KitError("not usable")

    (tmp_path / "old").mkdir()
    begin(saves, tmp_path / "checkpoint-2", check).set()
    with pytest.raises(KitError, match="not usable"):
        saves.wait()
    with pytest.raises(KitError, match="not usable"):
        saves.stop_on_error()
    assert (tmp_path / "old").exists() and not (tmp_path / "checkpoint-2" / "trainer_state.json").exists()


@pytest.mark.parametrize("changes", [{"parallel.strategy": "ddp"}, {"parallel.gpus_per_node": 1}])
def test_what_is_not_sharded_by_fsdp2_is_not_saved_in_the_background(recipe, local, changes):
    trl.check(recipe.override(**{"schedule.save": "async"}), local)
    with pytest.raises(InputError, match=r"schedule\.save async writes the shards of fsdp2"):
        trl.check(recipe.override(**changes | {"schedule.save": "async"}), local)
