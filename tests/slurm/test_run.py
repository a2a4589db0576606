import json
import os
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from kit.errors import InputError
from kit.slurm import launch as slurm
from kit.slurm.run import Run, find_runs
from kit.slurm.runs import format_tasks, runs
from kit.slurm.states import JobState, SlurmRecord
from kit.slurm.submit import submit
from tests.conftest import add_record, until

wait_for = partial(until, seconds=120)


def ranks_of(run):
    """Live training processes of a run, by rank."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and process.info["cmdline"][-3:] == ["-m", "kit.train", str(run.path)]:
            try:
                if "LOCAL_RANK" in (env := process.environ()):
                    found[int(env["RANK"])] = process
            except psutil.Error:
                continue
    return found


def test_a_name_is_never_used_twice(recipe, local, tmp_path):
    made = [Run.create(recipe, local, tmp_path, "d").path for _ in range(3)]
    assert len(set(made)) == 3 and all((p / "run.json").is_file() for p in made)


def test_a_run_is_found_by_folder_name_or_job_from_anywhere(recipe, local, tmp_path, monkeypatch):
    run = Run.create(recipe, local, tmp_path, "d")
    run.note(job_id="4711")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Run.attach(run.path) == Run.attach(run.path.name) == Run.attach("4711") == run
    assert Run.attach(run.path).recipe == recipe
    with pytest.raises(InputError, match=r"No run '9': .* job id in "):
        Run.attach("9")


def test_a_damaged_run_hides_no_other_and_says_what_is_wrong(recipe, local, tmp_path):
    good, bad = (Run.create(recipe, local, tmp_path, "d") for _ in range(2))
    good.note(job_id="4711")
    (bad.path / "run.json").write_text("{")
    assert Run.attach("4711") == good and [run.path for run in find_runs()] == [good.path]
    with pytest.raises(InputError, match=r"run.json is not valid JSON"):
        Run.attach(bad.path).state  # noqa: B018


def test_a_job_id_that_was_given_again_finds_the_newer_run(recipe, local, tmp_path):
    old, new = (Run.create(recipe, local, tmp_path, "d") for _ in range(2))
    for second, run in enumerate((old, new)):
        run.note(job_id="7")
        os.utime(run.path / "run.json", (second, second))
    assert Run.attach("7") == new


def test_a_run_of_ones_own_script_has_no_recipe_and_keeps_the_script_byte_for_byte(local):
    script = "#!/bin/bash\n#SBATCH --time=5\necho $((1 + 1))\n"
    run = Run.create_for_script(script, local, "mine")
    assert (run.path / "job.sbatch").read_text() == script and run.cluster == local
    with pytest.raises(InputError, match=r"has no recipe.toml: it runs a script of your own"):
        run.recipe  # noqa: B018


def test_a_run_of_ones_own_script_has_metrics_like_another(recipe, local, tmp_path):
    from kit.watch.metrics import Metrics

    trains, own = Run.create(recipe, local, tmp_path, "d"), Run.create_for_script("#!/bin/sh\n", local, "mine")
    assert trains.trains and not own.trains
    assert (
        Metrics(trains.path).expected_nodes == 1 and Metrics(own.path).expected_nodes == 0
    )  # nobody said how many nodes


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_and_leaves_a_cancelled_run(recipe, local, tmp_path):
    (tmp_path / "long.toml").write_text(recipe.override(**{"schedule.max_steps": 5000}).toml())
    command = [sys.executable, "-m", "kit.cli", "launch", "long.toml", "--cluster", "local", "--wait"]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = Run(wait_for(lambda: next((tmp_path / "runs").glob("*"), None) if (tmp_path / "runs").exists() else None))
    wait_for(lambda: (run.path / "state" / "progress.json").exists())
    ranks = ranks_of(run)
    assert set(ranks) == {0, 1}
    waiting.send_signal(2)
    assert waiting.wait(timeout=60) == 130
    waiting.communicate()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks.values())
    assert run.state.state == "CANCELLED"


@pytest.mark.slow
def test_a_dead_rank_ends_the_job_with_its_code_and_is_named_and_the_run_resumes(recipe, local):
    run = slurm.launch(recipe.override(**{"schedule.max_steps": 300, "schedule.save_every": 5}), local)
    wait_for(lambda: len(run.checkpoints()) > 1)  # so the first is complete
    with pytest.raises(InputError, match=r"is RUNNING as job local-\d+; cancel it"):
        submit(run)
    ranks_of(run)[1].kill()
    end = run.wait(timeout=120)
    assert (end.state, end.exit_code) == ("FAILED", 128 + 9)
    assert end.cause == "rank 1 killed by signal 9"
    log = run.log.read_text()
    assert "The job failed: rank 1 killed by signal 9" in log and "Last lines of logs/rank-001.log:" in log

    from kit.checkpoints.inspect import complete

    newest = [c for c in run.checkpoints() if complete(c)][-1]
    steps = int(newest.name.rpartition("-")[2]) + 3
    (run.path / "recipe.toml").write_text(run.recipe.override(**{"schedule.max_steps": steps}).toml())
    again = Run.attach(run.path)
    submit(again)
    assert again.wait(timeout=240).state == "COMPLETED", again.log.read_text()
    assert f"resuming from {newest.name}" in again.log.read_text()
    logs = list((run.path / "wandb").rglob(f"run-{run.info['wandb_id']}.wandb"))
    assert len(logs) == 2  # the same W&B run, in two segments


def test_only_folders_named_after_a_step_are_checkpoints(recipe, local, tmp_path):
    run = Run.create(recipe, local, tmp_path, "d")
    for name in ("checkpoint-20", "checkpoint-3", "checkpoint-20-copy", "checkpoint-best", "checkpoint-"):
        (run.path / "checkpoints" / name).mkdir()
    assert [path.name for path in run.checkpoints()] == ["checkpoint-3", "checkpoint-20"]


def test_a_run_and_its_state_show_themselves(recipe, local, tmp_path):
    run = Run.create(recipe, local, tmp_path, "d")
    assert run.as_dict() == {"run": str(run.path), "job_id": None} and str(run) == f"{run.path}\nnot submitted"
    state = run.state
    assert str(state) == f"{run.name}: NOT SUBMITTED (confidence high)\n  run.json has no job id"
    assert set(state.as_dict()) == {
        "run", "job_id", "state", "exit_code", "signal", "cause", "confidence", "evidence", "conflicts", "tasks",
        "provisional", "pending",
    }  # fmt: skip
    assert json.loads(json.dumps(state.as_dict()))["state"] == "NOT SUBMITTED"
    assert "NOT SUBMITTED" in state._repr_mimebundle_()["text/html"]


def test_the_table_of_runs_shows_each_state_and_the_tasks_of_arrays(recipe, local, tmp_path):
    run = Run.create(recipe, local, tmp_path, "d")
    assert runs().as_dict() == {"runs": [{"run": str(run.path), "job_id": None, "state": "NOT SUBMITTED", "tasks": {}}]}
    assert run.name in str(runs())
    states = {0: JobState.COMPLETED, 1: JobState.COMPLETED, 2: JobState.FAILED, 4: JobState.COMPLETED}
    assert format_tasks(states) == "0-1 4 COMPLETED, 2 FAILED"


def test_without_runs_the_table_says_so():
    assert str(runs()) == "No runs were found."


def test_no_lines_of_a_log_are_none_and_fewer_are_refused(recipe, local, tmp_path):
    run = Run.create(recipe, local, tmp_path, "d")
    (run.path / "logs" / "rank-000.log").write_text("a\nb\n")
    assert run.tail(lines=0).as_dict()["logs"] == {"rank-000.log": []}
    with pytest.raises(InputError, match="-5 lines were asked for"):
        run.tail(lines=-5)


def test_a_run_that_follows_a_slurm_job_is_refused_where_no_slurm_answers(local):
    before, after = (Run.create_for_script("#!/bin/sh\n", local, name) for name in ("before", "after"))
    before.note(job_id="7", submitted=time.time())
    add_record(before, SlurmRecord, state=JobState.RUNNING)
    with pytest.raises(InputError, match=r"before-.* is job 7 of Slurm, which does not answer here"):
        submit(after, after=before)
    assert after.job_id is None


def test_a_script_runs_here_again_when_it_requeues_itself(local):
    again = '[ "$SLURM_RESTART_COUNT" = 1 ] || { scontrol requeue "$SLURM_JOB_ID"; exit 75; }\necho second; exit 4\n'
    run = slurm.launch_script(f"#!/bin/bash\n{again}", local, "own")
    end = run.wait(timeout=60, every=0.1)
    assert (end.state, end.exit_code, run.is_local) == ("FAILED", 4, True)
    assert str(run.tail()).endswith("\nsecond")
    with pytest.raises(InputError, match=r"is FAILED: there is nothing to cancel"):
        run.cancel()


def test_a_run_here_is_cancelled(local):
    run = slurm.launch_script("#!/bin/bash\nsleep 100\n", local, "own")
    run.cancel()
    assert run.state.state == "CANCELLED" and run.state.ended
