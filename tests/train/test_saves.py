"""Which checkpoint training resumes from."""

import json
import shutil

import pytest
import torch

from kit.checkpoints.inspect import inspect
from kit.checkpoints.saved_by import SavedBy
from kit.errors import KitError
from kit.slurm.run import Run
from kit.train.saves import resume_point
from tests.checkpoints.test_inspect import fsdp2_saves


@pytest.fixture
def saved_by(recipe, local, tmp_path):
    """A run of two ranks with a checkpoint that this many ranks have saved, and say so in a record unless it is old."""

    def make(ranks, record=None):
        run = Run.create(recipe, local, tmp_path / "runs", "d")
        folder = shutil.copytree(fsdp2_saves() / "adapter" / "checkpoint-2", run.path / "checkpoints" / "checkpoint-2")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
        for rank in range(ranks):
            torch.save({}, folder / f"rng_state_{rank}.pth")
        if record:
            record.write(folder)
        return run, folder

    return make


def refused(run, words):
    with pytest.raises(KitError, match=words):
        resume_point(run, lambda text: None)
    assert [path.name for path in run.checkpoints()] == ["checkpoint-2"]


@pytest.mark.slow
@pytest.mark.parametrize("record", [None, SavedBy(2, 2, reshards=True)], ids=["old", "new"])
def test_training_resumes_from_a_checkpoint_of_as_many_ranks(saved_by, record):
    run, folder = saved_by(2, record)
    said = []
    assert resume_point(run, said.append) == str(folder)
    assert said == ["resuming from checkpoint-2"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_sharded_checkpoint_resumes_on_another_number_of_ranks_with_steps_of_as_many_rows(saved_by, ranks):
    run, folder = saved_by(ranks, SavedBy(ranks, rows=2, reshards=True))
    said = []
    assert resume_point(run, said.append) == str(folder)
    assert said == [f"resuming from checkpoint-2, saved by {ranks} rank{'s' if ranks > 1 else ''}"]
    assert inspect(folder).resumes_on == "any number of ranks, with 2 rows in an optimizer step"


@pytest.mark.slow
def test_a_checkpoint_of_steps_with_other_rows_is_refused_and_stays(saved_by):
    run, _ = saved_by(4, SavedBy(4, rows=8, reshards=True))
    refused(run, r"by 4 ranks with 8 rows in an optimizer step, and on 2 ranks this recipe has 2: .* a step has 8 rows")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "record"), [(4, None), (4, SavedBy(4, 2, reshards=False))], ids=["old", "new"])
def test_a_checkpoint_that_only_its_own_number_of_ranks_can_load_is_refused_and_stays(saved_by, ranks, record):
    run, folder = saved_by(ranks, record)
    refused(run, rf"saved by {ranks} ranks, so training resumes from it on {ranks} ranks, not on 2\. Set ")
    assert inspect(folder).resumes_on == f"{ranks} ranks"


@pytest.mark.slow
def test_an_old_sharded_checkpoint_of_fewer_ranks_is_refused_and_stays(saved_by, recipe, local, tmp_path):
    _, folder = saved_by(2)
    larger = Run.create(recipe.override(**{"parallel.gpus_per_node": 4}), local, tmp_path / "larger", "d")
    shutil.copytree(folder, larger.path / "checkpoints" / "checkpoint-2")
    refused(larger, r"saved by 2 ranks, so training resumes from it on 2 ranks, not on 4")


@pytest.mark.slow
@pytest.mark.parametrize("record", [None, SavedBy(4, 2, reshards=True)], ids=["old", "new"])
def test_a_checkpoint_that_not_all_ranks_have_saved_is_put_aside(saved_by, record):
    run, folder = saved_by(1, record)
    said = []
    assert resume_point(run, said.append) is None
    assert [path.name for path in folder.parent.iterdir()] == ["incomplete-2"]
    assert said[0] == "checkpoint-2 is not complete: renamed to incomplete-2"


def test_a_damaged_record_is_none(tmp_path):
    SavedBy(2, 4, reshards=True).write(tmp_path)
    assert SavedBy.read(tmp_path) == SavedBy(2, 4, reshards=True)
    for content in ("[]", "{", '{"ranks": 2}', '{"ranks": "2", "rows": 4, "reshards": true}'):
        (tmp_path / "saved_by.json").write_text(content)
        assert SavedBy.read(tmp_path) is None
