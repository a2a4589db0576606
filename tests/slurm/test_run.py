import dataclasses
import getpass
import grp
import itertools
import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from kit import files
from kit.checkpoints.inspect import complete
from kit.cli import main
from kit.config.cluster import Paths
from kit.errors import InputError, KitError
from kit.slurm import launch as slurm
from kit.slurm.local import is_running
from kit.slurm.run import Run, find_runs
from kit.slurm.runs import format_tasks, runs
from kit.slurm.script import render_script
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


def test_launches_at_the_same_time_do_not_remove_or_stumble_over_each_others_folders(recipe, local, tmp_path):
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: Run.create(recipe, local, tmp_path, "d").path, range(64)))
    assert len(set(made)) == 64 and all((path / "run.json").is_file() for path in made)


def test_a_run_is_found_by_folder_name_or_job_from_anywhere(recipe, local, tmp_path, monkeypatch):
    run = Run.create(recipe, local, tmp_path, "d")
    run.note(job_id="4711")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Run.attach(run.path) == Run.attach(run.path.name) == Run.attach("4711") == run
    assert Run.attach(run.path).recipe == recipe
    with pytest.raises(InputError, match=r"No run '9': .* job id in "):
        Run.attach("9")


def test_a_damaged_run_is_reported_and_other_runs_are_found(recipe, local, tmp_path):
    good, bad = (Run.create(recipe, local, tmp_path, "d") for _ in range(2))
    good.note(job_id="4711")
    (bad.path / "run.json").write_text("{")
    assert Run.attach("4711") == good and [run.path for run in find_runs()] == [good.path]
    with pytest.raises(InputError, match=r"run.json is not valid JSON"):
        Run.attach(bad.path).state  # noqa: B018


def test_a_reused_job_id_finds_the_newer_run(recipe, local, tmp_path):
    old, new = (Run.create(recipe, local, tmp_path, "d") for _ in range(2))
    for second, run in enumerate((old, new)):
        run.note(job_id="7")
        os.utime(run.path / "run.json", (second, second))
    assert Run.attach("7") == new


def test_a_run_of_a_users_script_has_no_recipe_and_keeps_the_script_unchanged(local):
    script = "#!/bin/bash\n#SBATCH --time=5\necho $((1 + 1))\n"
    run = Run.create_for_script(script, local, "mine")
    assert (run.path / "job.sbatch").read_text() == script and run.cluster == local
    with pytest.raises(InputError, match=r"has no recipe.toml: it runs a script of your own"):
        run.recipe  # noqa: B018


def test_a_run_of_a_users_script_has_metrics(recipe, local, tmp_path):
    from kit.watch.status import RunStatus

    trains, own = Run.create(recipe, local, tmp_path, "d"), Run.create_for_script("#!/bin/sh\n", local, "mine")
    assert trains.trains and not own.trains
    statuses = [RunStatus(run.path) for run in (trains, own)]
    for status in statuses:
        status.update()
    assert [status.expected_nodes for status in statuses] == [1, 0]


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
def test_a_failed_rank_ends_the_job_with_its_exit_code_and_the_run_resumes_from_its_newest_complete_save(recipe, local):
    run = slurm.launch(recipe.override(**{"schedule.max_steps": 300, "schedule.save_every": 5}), local)
    wait_for(lambda: len(run.checkpoints()) > 2)  # so that two of them are complete
    with pytest.raises(InputError, match=r"is RUNNING as job local-\d+; cancel it"):
        submit(run)
    ranks_of(run)[1].kill()
    end = run.wait(timeout=120)
    assert (end.state, end.exit_code) == ("FAILED", 128 + 9)
    assert end.cause == "rank 1 killed by signal 9"
    log = run.log.read_text()
    assert "The job failed: rank 1 killed by signal 9" in log and "Last lines of logs/rank-001.log:" in log

    older, truncated = [path for path in run.checkpoints() if complete(path)][-2:]
    shard = truncated / "optimizer_0" / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    step = truncated.name.rpartition("-")[2]
    (run.path / "recipe.toml").write_text(run.recipe.override(**{"schedule.max_steps": int(step)}).toml())
    again = Run.attach(run.path)
    submit(again)
    assert again.wait(timeout=240).state == "COMPLETED", again.log.read_text()
    log = again.log.read_text()
    assert f"{truncated.name} is not complete: renamed to incomplete-{step}" in log
    assert f"resuming from {older.name}" in log
    assert run.checkpoints()[-1].name == truncated.name and complete(run.checkpoints()[-1], world=2)
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
        "provisional", "pending", "stalled_s",
    }  # fmt: skip
    assert json.loads(json.dumps(state.as_dict()))["state"] == "NOT SUBMITTED"
    assert "NOT SUBMITTED" in state._repr_mimebundle_()["text/html"]


def test_the_table_of_runs_shows_each_state_and_the_tasks_of_arrays(recipe, local, tmp_path):
    run = Run.create(recipe, local, tmp_path, "d")
    owner = {"owner": getpass.getuser(), "own": True, "step": None, "loss": None}
    assert runs().as_dict() == {
        "runs": [{"run": str(run.path), "job_id": None, "state": "NOT SUBMITTED", "tasks": {}} | owner]
    }
    assert run.name in str(runs())
    states = {0: JobState.COMPLETED, 1: JobState.COMPLETED, 2: JobState.FAILED, 4: JobState.COMPLETED}
    assert format_tasks(states) == "0-1 4 COMPLETED, 2 FAILED"


def test_an_empty_table_of_runs_says_so():
    assert str(runs()) == "No runs were found."


def test_zero_lines_of_a_log_are_empty_and_a_negative_number_is_refused(recipe, local, tmp_path):
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


def test_a_run_is_running_while_its_local_runner_starts(local):
    run = Run.create_for_script("#!/bin/sh\n", local, "own")
    run.note(job_id="local-1", submitted=time.time())
    assert run.state.state == "RUNNING"
    run.note(submitted=time.time() - 60)
    assert run.state.state == "LOST"


def test_the_local_runner_restarts_a_script_that_requeues_itself(local):
    again = '[ "$SLURM_RESTART_COUNT" = 1 ] || { scontrol requeue "$SLURM_JOB_ID"; exit 75; }\necho second; exit 4\n'
    run = slurm.launch_script(f"#!/bin/bash\n{again}", local, "own")
    end = run.wait(timeout=60, every=0.1)
    assert (end.state, end.exit_code, run.is_local) == ("FAILED", 4, True)
    assert str(run.tail()).endswith("\nsecond")
    with pytest.raises(InputError, match=r"is FAILED: there is nothing to cancel"):
        run.cancel()


def test_a_local_run_is_cancelled(local):
    run = slurm.launch_script("#!/bin/bash\nsleep 100\n", local, "own")
    run.cancel()
    assert run.state.state == "CANCELLED" and run.state.ended


def test_a_run_is_cancelled_also_where_that_cannot_be_recorded(local):
    run = slurm.launch_script("#!/bin/bash\nsleep 100\n", local, "own")
    run.state_folder.ledger.unlink(missing_ok=True)
    run.state_folder.ledger.mkdir()
    with pytest.raises(KitError, match=r"ledger.jsonl cannot be written \(Is a directory\)"):
        run.cancel()
    assert not is_running(run)


@pytest.mark.slow
def test_nothing_of_a_local_run_outlives_its_script_and_its_runner(recipe, local, tmp_path):
    """As where the kernel kills them for their memory: the loop that writes the heartbeat ends as well."""
    run = Run.create(recipe, local, tmp_path, "digest")
    run.note(job_id=None)
    script = render_script(run)
    (run.path / "job.sbatch").write_text(script[: script.index("# ---- Training")] + "sleep 300\n")
    submit(run)
    wait_for((run.path / "state" / "start.0.json").exists)
    runner = psutil.Process(json.loads(run.state_folder.runner.read_text())["pid"])
    (bash,) = runner.children()
    (heartbeat,) = (child for child in bash.children() if child.name() == "bash")
    for process in (runner, *(child for child in bash.children() if child != heartbeat), bash):
        process.kill()
    psutil.wait_procs([heartbeat], timeout=30)
    assert not heartbeat.is_running()
    for sign in (*run.logs(), *(path for path, _ in run.state_folder.heartbeats())):
        os.utime(sign, (1, 1))  # as if it were minutes later
    assert (run.state.state, run.state.confidence) == ("LOST", "low")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_run_of_another_user_is_not_the_latest_and_is_never_executed_or_cancelled(local, tmp_path):
    own, foreign = (Run.create_for_script("#!/bin/sh\ntouch executed\n", local, name) for name in ("own", "foreign"))
    foreign.note(job_id="7", submitted=time.time())
    for path in (foreign.path, foreign.path / "run.json"):
        os.chown(path, 65534, 65534)
    assert Run.attach("latest") == own and [run.path for run in find_runs()] == [own.path]
    assert {run.path for run in find_runs(everyone=True)} == {own.path, foreign.path}
    for ref in (foreign.name, "7"):
        with pytest.raises(InputError, match="no run of yours has that name or job id"):
            Run.attach(ref)
    there = Run.attach(foreign.path)  # a folder can be looked at
    for act in (there.cancel, there.requeue, lambda: submit(there)):
        with pytest.raises(InputError, match="belongs to another user"):
            act()
    own.path.joinpath("job.sbatch").chmod(0o666)
    with pytest.raises(InputError, match=r"job.sbatch can be written by everybody"):
        submit(own)
    owners = {row["run"]: (row["owner"], row["own"]) for row in runs(everyone=True).as_dict()["runs"]}
    assert owners == {str(own.path): ("root", True), str(foreign.path): (pwd.getpwuid(65534).pw_name, False)}
    assert "owner" in str(runs(everyone=True)) and "owner" not in str(runs())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_run_that_this_user_may_not_read_hides_no_other(local, monkeypatch, capsys):
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are closed to others
        team = Path(name)
        team.chmod(0o755)
        monkeypatch.setenv("XDG_STATE_HOME", str(team / "state"))
        cluster = dataclasses.replace(local, paths=dataclasses.replace(local.paths, runs=str(team / "runs")))
        private, shared = (Run.create_for_script("#!/bin/sh\n", cluster, name) for name in ("private", "shared"))
        (private.path / "run.json").chmod(0o600)
        closed = team / "closed" / "runs"  # remembered as a folder of runs, and closed since
        Run.create_for_script("#!/bin/sh\n", dataclasses.replace(local, paths=Paths(runs=str(closed))), "own")
        closed.parent.chmod(0o700)
        monkeypatch.chdir(team)
        os.seteuid(65534)
        try:
            assert [run.path for run in find_runs(everyone=True)] == [shared.path]
            assert main(["state", str(private.path)]) == 1 and "Permission denied" in capsys.readouterr().err
            assert [row["run"] for row in runs(everyone=True).as_dict()["runs"]] == [str(shared.path)]
            for ref in ("latest", private.name, "7"):
                with pytest.raises(InputError, match="No run"):
                    Run.attach(ref)
        finally:
            os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to any group")
def test_what_a_group_of_others_could_change_is_not_executed(local, monkeypatch):
    """A user's private group, which has the user's name and no other member, is no group of others."""
    run = Run.create_for_script("#!/bin/sh\n", local, "own")
    script = run.path / "job.sbatch"
    script.chmod(0o664)
    run.check_own()  # the group of root is private
    os.chown(script, 0, grp.getgrnam("users").gr_gid)
    with pytest.raises(InputError, match=r"job.sbatch can be written by the group users, .* chmod -R g-w"):
        submit(run)
    os.chown(script, 0, 54321)  # a group without a name
    with pytest.raises(InputError, match=r"can be written by the group 54321"):
        submit(run)
    script.chmod(0o644)
    run.check_own()


def test_a_run_in_a_folder_of_a_team_is_not_made_writable_for_the_group(recipe, local, tmp_path):
    before = os.umask(0o002)
    try:
        run = Run.create(recipe, local, tmp_path, "digest")
    finally:
        os.umask(before)
    paths = [run.path, *run.path.iterdir()]
    assert [path for path in paths if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize("job", ["--me", "7 8", "7;8", "", "0", "local-", "7_", "7_x", "７"])
def test_a_job_id_of_another_form_is_refused_where_it_is_read(local, job):
    run = Run.create_for_script("#!/bin/sh\n", local, "own")
    run.note(job_id=job)
    with pytest.raises(InputError, match=r"run.json: .* is not the id of a job"):
        run.cancel()


@pytest.mark.parametrize("file", range(4))
def test_a_launch_that_is_killed_leaves_no_folder_without_its_run_json(local, tmp_path, file):
    """Killed before the file of that number is written; the next launch removes what it left, an hour later."""
    child = os.fork()
    if not child:
        written, write = itertools.count(), files.write
        files.write = lambda *it: os.kill(os.getpid(), 9) if next(written) == file else write(*it)
        Run.create_for_script("#!/bin/sh\n", local, "killed")
        os._exit(0)
    os.waitpid(child, 0)
    left = [path for path in (tmp_path / "runs").iterdir() if not (path / "run.json").exists()]
    assert all(path.name.startswith(".killed-") for path in left) and len(left) == (file < 3)
    for path in left:
        os.utime(path, (1, 1))
    Run.create_for_script("#!/bin/sh\n", local, "next")
    assert [path for path in (tmp_path / "runs").iterdir() if not (path / "run.json").exists()] == []


def test_a_run_whose_launch_was_killed_before_its_script_was_written_says_so(recipe, local, tmp_path):
    run = Run.create(recipe, local, tmp_path, "digest")
    with pytest.raises(InputError, match=r"has no job.sbatch, since its launch was interrupted: launch the recipe"):
        run.requeue()


@pytest.mark.parametrize("sign", ["%", "\\", '"'])
def test_a_runs_folder_whose_path_sbatch_would_change_is_refused(recipe, local, tmp_path, sign):
    paths = dataclasses.replace(local.paths, runs=f"{tmp_path}/a{sign}b")
    cluster = dataclasses.replace(local, paths=paths)
    for act in (lambda: slurm.launch(recipe, cluster), lambda: Run.create_for_script("", cluster, "own")):
        with pytest.raises(InputError, match=r"paths.runs: .* which sbatch does not take as it is in the path of a lo"):
            act()
    assert list(tmp_path.glob("a*")) == []
