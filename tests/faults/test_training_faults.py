"""Faults of a training on a live Slurm: after each the run goes on, and has the losses of an undisturbed one."""

import dataclasses
import os
import shutil
import subprocess
import time

import pytest

from kit.checkpoints.inspect import complete
from kit.slurm import launch as slurm
from kit.slurm import signs
from kit.slurm.states import Phase
from kit.watch.metrics import Metrics
from tests.conftest import until
from tests.faults.played import Played
from tests.slurm.test_resume import story
from tests.slurm.test_run import ranks_of
from tests.train import forked

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
played = Played()
fault = played.fault
counted = played.print_at_end("faults of a training on a live Slurm")
STEPS = 12
LIMIT_S = 400  # for what takes seconds on a machine that does nothing else


def until_phase(run, phase, began):
    """Waits until training is in a phase that it has entered after that time."""

    def reached():
        now = run.state_folder.read_phase()
        return now is not None and now.since > began and now.phase is phase

    until(reached, LIMIT_S, pause=0.005)


def freeze_in_save(run):
    """Stops all ranks while they write a checkpoint; returns that and the ranks."""
    before, ranks = set(run.checkpoints()), list(until(lambda: len(r := ranks_of(run)) == 2 and r, LIMIT_S).values())

    def writing():
        for path in set(run.checkpoints()) - before:
            for rank in ranks:
                rank.suspend()
            if not (path / "trainer_state.json").exists():
                return path
            before.add(path)  # it was complete already: wait for the next one
            for rank in ranks:
                rank.resume()
        return None

    return until(writing, LIMIT_S, pause=0.002), ranks


def cancelled(run):
    """The run's state after scancel, whose record of the end has the signal."""
    subprocess.run(["scancel", run.job_id], check=True)
    end = run.wait(LIMIT_S)
    assert (end.state, end.confidence) == ("CANCELLED", "high"), str(end)
    return end


def requeued(run):
    """Requeue the run; returns when that was."""
    now = time.time()
    run.requeue()
    return now


def fill(folder):
    """A file that leaves less of the disk than a checkpoint takes, but enough for the job's last words."""
    free = shutil.disk_usage(folder).free
    (folder / "filler").write_bytes(bytes(free - 2**16))
    return folder / "filler"


def stop_in_training(run, began):
    """Stops rank 1 between two saves; returns its process."""
    rank = until(lambda: len(r := ranks_of(run)) == 2 and r, LIMIT_S)[1]
    while True:
        until_phase(run, Phase.TRAINING, began)
        rank.suspend()
        time.sleep(0.3)
        if run.state_folder.read_phase().phase is Phase.TRAINING:
            return rank
        began = time.time()  # rank 0 has come to the save
        rank.resume()


@pytest.fixture
def disk(tmp_path):
    """A file system of 64 MiB for the run."""
    (folder := tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
def test_a_training_has_the_losses_of_an_undisturbed_one_after_each_fault(live_slurm, recipe, local, disk, monkeypatch):
    job = recipe.override(**{"schedule.max_steps": STEPS, "schedule.save_every": 2, "schedule.lr": 1e-3})
    settings = dataclasses.replace(local.slurm, partition="gpu", time="20")
    paths = dataclasses.replace(local.paths, runs=str(disk / "runs"))
    run = slurm.launch(job, dataclasses.replace(local, slurm=settings, paths=paths))
    with fault("scancel just after the launch"):
        cancelled(run)
    began = requeued(run)
    with fault("scancel while the model loads"):
        until_phase(run, Phase.LOADING, began)
        assert cancelled(run).signal == "TERM" and not run.checkpoints()
    began = requeued(run)
    with fault("scancel at the first step"):
        until_phase(run, Phase.FIRST_STEP, began)
        cancelled(run)
        assert [path.name for path in run.checkpoints()] == ["checkpoint-1"]
    began = requeued(run)
    with fault("SIGSTOP of a rank"):
        rank = stop_in_training(run, began)
        monkeypatch.setattr(signs, "STALLED_AFTER", 1.0)
        monkeypatch.setattr(signs, "STALLED_FACTOR", 1.0)
        found = until(lambda: (now := run.state).stalled_s and now, LIMIT_S)
        assert (found.state, found.ended) == ("RUNNING", False) and "Training stalls" in found.cause, str(found)
        rank.resume()
        until_phase(run, Phase.SAVING, began)  # it goes on
    with fault("scancel during a save"):
        path, _ = freeze_in_save(run)
        cancelled(run)  # Slurm has stopped processes go on
        assert complete(path, 2) and "resuming from checkpoint-1\n" in run.log.read_text()
    requeued(run)
    with fault("SIGKILL of all ranks during a save"):
        path, ranks = freeze_in_save(run)
        newest = run.checkpoints()[-2].name
        for process in {below for rank in ranks for below in [*rank.children(recursive=True), rank]}:
            process.kill()
        end = run.wait(LIMIT_S)
        assert (end.state, end.exit_code) == ("FAILED", 137) and "killed by signal 9" in end.cause, str(end)
        assert not complete(path, 2)
    requeued(run)
    with fault("a full disk during a save"):
        again, ranks = freeze_in_save(run)
        _, set_aside, since = run.log.read_text().partition(f"{path.name} is not complete: renamed to incomplete-")
        assert set_aside and f"resuming from {newest}\n" in since
        filler = fill(disk)
        for rank in ranks:
            rank.resume()
        end = run.wait(LIMIT_S)
        assert end.state == "FAILED" and "No space left on device" in end.cause, str(end)
        assert not complete(again, 2) and complete(run.path / "checkpoints" / newest, 2)
        filler.unlink()
    requeued(run)
    with fault("losses and rows after all of these"):
        end = run.wait(LIMIT_S)
        assert (end.state, end.cause, end.conflicts) == ("COMPLETED", "", []), str(end)
        calm = forked.freeze(job, local)
        forked.train(calm)
        assert story(run) == story(calm)
        metrics = Metrics(run.path)
        while metrics.poll():
            pass
        assert list(metrics.series["train/loss"].steps) == list(range(1, STEPS + 1))
