"""`kit.checkpoints(run)`: the table, the newest complete checkpoint, and what is done with it."""

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest

import kit
from kit.checkpoints.formats.base import ProblemKind
from kit.checkpoints.plan import plan_for_run
from kit.config.cluster import Cluster
from kit.config.models import load_model
from kit.config.recipe import Recipe
from kit.deploy import outputs
from kit.deploy.generate import answer
from kit.errors import InputError
from kit.slurm.run import Run
from tests.checkpoints.test_inspect import fsdp2_saves


@pytest.fixture
def run(tmp_path, recipe, local) -> Run:
    """A run folder of the tiny model with two ranks and without checkpoints."""
    return make_run(tmp_path, recipe, local)


def make_run(tmp_path: Path, recipe: Recipe, cluster: Cluster) -> Run:
    return Run.create(recipe, cluster, tmp_path / "prepared", "digest")


def add_checkpoint(run: Run, step: int) -> Path:
    import torch

    saved = fsdp2_saves() / "adapter" / "checkpoint-2"
    folder = Path(shutil.copytree(saved, run.path / "checkpoints" / f"checkpoint-{step}"))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for rank in (0, 1):
        torch.save({}, folder / f"rng_state_{rank}.pth")
    return folder


def test_a_run_without_a_checkpoint_says_what_to_do(run):
    found = kit.checkpoints(run)
    assert "has no checkpoint yet" in str(found)
    with pytest.raises(InputError, match=r"has no checkpoint yet; wait for the first save \(schedule.save_every\)"):
        _ = found.newest
    (run.path / "checkpoints" / "checkpoint-2").mkdir()
    with pytest.raises(InputError, match=r"no complete checkpoint among 1; `kit checkpoint inspect .*checkpoint-2`"):
        _ = kit.checkpoints(run).newest


def test_the_newest_is_complete_and_the_table_names_the_problems_of_others(run):
    add_checkpoint(run, 2)
    add_checkpoint(run, 4)
    damaged = add_checkpoint(run, 10)
    os.truncate(damaged / "optimizer_0" / "__1_0.distcp", 100)
    (run.path / "checkpoints" / "checkpoint-12").mkdir()
    found = outputs.checkpoints(str(run.path))
    assert [(one.path.name, one.complete) for one in found.checkpoints] == [
        ("checkpoint-2", True), ("checkpoint-4", True), ("checkpoint-10", False), ("checkpoint-12", False),
    ]  # fmt: skip
    assert found.newest.name == "checkpoint-4"
    assert found.checkpoints[2].kinds == {ProblemKind.TRUNCATED_FILE}
    assert found.checkpoints[3].kinds == {ProblemKind.NO_TENSORS}
    assert "is truncated" in str(found) and "holds no weights" in str(found)
    value = json.loads(json.dumps(found.as_dict()))
    assert [one["step"] for one in value["checkpoints"]] == [2, 4, 10, 12]
    assert [one["complete"] for one in value["checkpoints"]] == [True, True, False, False]
    assert value["checkpoints"][0]["tensors"] == 16


def test_the_newest_checkpoint_is_inspected_with_its_values(run):
    add_checkpoint(run, 2)
    add_checkpoint(run, 4)
    found = kit.checkpoints(run)
    assert found.inspect().path.name == "checkpoint-4"
    assert found.inspect().all_finite is True
    assert found.inspect(values=False).all_finite is None


def test_the_adapter_is_exported_and_merged_into_the_runs_folder(run):
    add_checkpoint(run, 2)
    found = kit.checkpoints(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the base that was trained on has another folder's name
        merged = found.merge(base=str(fsdp2_saves() / "base"))
    assert merged.path == found.merged == run.path / "merged"
    assert (found.adapter / "adapter_model.safetensors").is_file()
    assert merged.tensors == 20
    assert (merged.path / "config.json").is_file()
    with pytest.raises(InputError, match="exists already"):
        found.export()
    exported = found.export(run.path / "second")
    assert (exported.tensors, exported.checkpoint.name) == (16, "checkpoint-2")
    assert "all finite" in str(exported)


def test_a_full_fine_tune_has_no_adapter(tmp_path, recipe, local):
    run = make_run(tmp_path, recipe.override(**{"tuning.method": "full"}), local)
    add_checkpoint(run, 2)
    with pytest.raises(InputError, match="A full fine-tune has no adapter: its checkpoint is the model"):
        kit.checkpoints(run).export()


def test_a_base_of_random_weights_has_no_files_to_time(tmp_path, recipe, local, tiny):
    run = make_run(tmp_path, recipe.override(**{"model.name": str(tiny / "config.json")}), local)
    times = kit.checkpoints(run).time_base(cold=True)
    assert times.as_dict() == {"methods": [], "separable": [], "left_out": {}}
    assert "random weights: there are no files to time" in str(times)


def test_no_cold_figures_where_the_storage_keeps_files_in_memory(run, monkeypatch):
    add_checkpoint(run, 2)
    monkeypatch.setattr(outputs, "evictable", lambda _: False)
    times = kit.checkpoints(run).time(cold=True)
    assert times.methods == ()
    assert "keeps its files in memory" in str(times)


@pytest.mark.slow
def test_the_newest_checkpoint_and_the_base_are_timed(run, tiny):
    add_checkpoint(run, 2)
    found = kit.checkpoints(run)
    (checkpoint,) = found.time(methods=["kit"], repeats=1).methods
    assert (checkpoint.path, checkpoint.residency_before) == (str(found.newest), pytest.approx(1, abs=0.01))
    (base,) = found.time_base(methods=["load_file"], repeats=1).methods
    assert base.path == str(tiny)


def test_the_plan_is_that_of_the_run(run):
    found = kit.checkpoints(run).plan()
    assert found == plan_for_run(run)
    assert found.storage_gb["total"] > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.20 still reads it
def test_the_base_and_the_adapter_answer_side_by_side(run, tiny):
    """An adapter of random weights changes the answer; the base's answer is that of the base without it."""
    import torch
    from peft import LoraConfig, get_peft_model

    found = kit.checkpoints(run)
    assert "no exported adapter" in str(found.answer("Hello?"))
    config = LoraConfig(r=8, lora_alpha=400, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(load_model(str(tiny), torch.float32), config).save_pretrained(found.adapter)
    reply = found.answer("Hello?")
    replies, shown = reply.as_dict(), reply.parts()[0]
    assert replies["base"] == answer(tiny, "Hello?") != replies["reply"]
    assert shown.columns == ("the base answers", "with the adapter")
    assert shown.rows == [[replies[name].strip() or "(no text)" for name in ("base", "reply")]]
