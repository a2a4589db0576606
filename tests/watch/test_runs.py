"""The table of runs: step and loss from their logs, their age, and nothing where nothing is logged."""

import pytest

import kit
from kit import files
from kit.slurm.runs import Progress, format_age
from kit.slurm.states import JobState, SlurmRecord
from kit.watch.runs import progress_of
from tests.conftest import add_record
from tests.watch.test_board import log, steps


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (59, "59 s"), (90, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_an_age_has_one_unit(seconds, text):
    assert format_age(seconds) == text


def test_the_table_has_the_newest_step_and_loss_of_each_run(recipe, local, tmp_path):
    run, silent = (kit.Run.create(recipe, local, tmp_path, "digest") for _ in range(2))
    log(run.path, steps(1, 40))
    found = kit.runs()
    assert found.progress == {run: progress_of(run), silent: Progress()}
    assert found.progress[run].step == 39 and found.progress[run].loss == pytest.approx(3 / 39)
    assert str(found).splitlines()[0].split() == ["run", "job", "state", "step", "loss", "age", "tasks"]
    rows = {row["run"]: row for row in found.as_dict()["runs"]}
    assert rows[str(run.path)]["step"] == 39 and rows[str(silent.path)]["loss"] is None


@pytest.mark.parametrize("text", ['{"steps": 12, "loss": 1.5}', '{"steps": 12}', "[]", "{"])
def test_a_completed_run_has_the_step_and_loss_of_its_result_or_where_that_is_odd_of_its_log(
    recipe, local, tmp_path, text
):
    completed, failed = (kit.Run.create(recipe, local, tmp_path, "digest") for _ in range(2))
    for run, state in ((completed, JobState.COMPLETED), (failed, JobState.FAILED)):
        run.note(job_id="7", submitted=0.0)
        add_record(run, SlurmRecord, state=state)
        files.write(run.state_folder.result, text)
        log(run.path, steps(1, 3))
    of_log = progress_of(failed)
    found = kit.runs().progress
    assert found[completed] == (Progress(12, 1.5) if "loss" in text else of_log)
    assert found[failed] == of_log != Progress()
