"""Exactly one job for each run folder, whoever submits it, how often, and wherever the submitting process is killed."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections import Counter
from functools import partial

import psutil
import pytest

from kit import files
from kit.config.cluster import Cluster
from kit.errors import InputError, KitError
from kit.slurm import client
from kit.slurm.claim import ELSEWHERE_S, claim
from kit.slurm.run import Run
from kit.slurm.submit import submit
from tests.conftest import until

HELD = "#!/bin/bash\n#SBATCH --mem=10 --hold\nexit 0\n"  # its jobs wait in the queue, where they can be counted
ROUNDS, KILLS = 4, 9


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "one.toml").write_text(
        f'name = "one"\n[nodes]\ncount = 1\n[slurm]\npartition = "gpu"\n[paths]\nruns = "{tmp_path}/runs"\n'
    )
    return Cluster.load(tmp_path / "one.toml")


@pytest.fixture
def jobs(live_slurm, tmp_path):
    """A function that returns the ids of the jobs by the paths of their scripts; all are cancelled at the end."""

    def found():
        rows = client.squeue("-u", str(os.getuid())).rows.values()
        mine = [row for row in rows if row.command.startswith(str(tmp_path))]
        return {path: [row.job for row in mine if row.command == path] for path in {row.command for row in mine}}

    yield found
    for ids in found().values():
        subprocess.run(["scancel", *ids], check=False)


def fork(act, *ready, group=False):
    """Run `act` in a child process, once the other end of the pipe `ready` is closed. Exit code 3: KitError."""
    child = os.fork()
    if child:
        if group:
            with contextlib.suppress(OSError):  # it has done so itself, and may have ended
                os.setpgid(child, child)
        return child
    code = 1
    try:
        if group:
            os.setpgrp()
        if ready:
            os.close(ready[1])
            os.read(ready[0], 1)
        act()
        code = 0
    except KitError:
        code = 3
    finally:
        os._exit(code)


def at_once(*acts):
    """Run these at the same moment in a process each. Returns their exit codes."""
    read, write = os.pipe()
    children = [fork(act, read, write) for act in acts]
    os.close(write)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.close(read)
    return codes


@pytest.mark.slurm
@pytest.mark.parametrize("before", ["never submitted", "ended and forgotten"])
def test_of_processes_that_submit_one_run_at_once_exactly_one_starts_a_job(jobs, cluster, before):
    runs = [Run.create_for_script(HELD, cluster, "raced") for _ in range(ROUNDS)]
    for run in runs:
        if before == "ended and forgotten":
            run.note(job_id="999999", submitted=time.time() - 90)
        codes = at_once(*[run.requeue if before == "ended and forgotten" else partial(submit, run)] * 3)
        assert sorted(codes) == [0, 3, 3], codes
    assert {path: len(ids) for path, ids in jobs().items()} == {str(run.path / "job.sbatch"): 1 for run in runs}
    assert all(jobs()[str(run.path / "job.sbatch")] == [run.job_id] for run in runs)


@pytest.mark.slurm
@pytest.mark.slow
def test_wherever_the_submitting_process_is_killed_no_job_is_doubled_or_unknown(jobs, cluster):
    doubled, unknown, told = kill_while_submitting(jobs, cluster, KILLS)
    assert (doubled, unknown) == ([], []), told


def kill_while_submitting(jobs, cluster, kills):
    """Kill the process at a random moment, with and without its children; then start two of three runs again at once.

    Returns the runs with two jobs, those whose job is unknown, and how often a kill had which result.
    """
    undisturbed = Run.create_for_script(HELD, cluster, "undisturbed")
    began = time.monotonic()
    submit(undisturbed)
    took = time.monotonic() - began
    chance = random.Random(17)
    runs = [Run.create_for_script(HELD, cluster, "killed") for _ in range(kills)]
    told = Counter()
    for number, run in enumerate(runs):
        child = fork(partial(submit, run), group=True)
        time.sleep(chance.uniform(0, 1.3 * took))
        (os.killpg if number % 2 else os.kill)(child, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if number % 3:
            told[killed, until(partial(start_again, run))] += 1
    until(lambda: not any(is_being_submitted(run) for run in runs))
    for run in runs:
        until(partial(settled, run), 150)
    found = {run: jobs().get(str(run.path / "job.sbatch"), [None]) for run in runs}
    doubled = [run for run, ids in found.items() if len(ids) > 1]
    unknown = [run for run, ids in found.items() if ids[0] != run.job_id]
    unknown += [run for number, run in enumerate(runs) if number % 3 and run.job_id is None]
    return doubled, unknown, told


def start_again(run):
    """What came of a requeue: "started", or "refused" where the job is there; None while it is being submitted."""
    try:
        run.requeue()
    except KitError as refused:
        return "refused" if "has not ended" in str(refused) else None
    return "started"


def settled(run):
    return run.state.state != "SUBMITTING"


def is_being_submitted(run):
    return any(
        "sbatch" in words[0] and str(run.path / "job.sbatch") in words
        for words in (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
        if words
    )


@pytest.fixture
def run(local):
    return Run.create_for_script("#!/bin/bash\n", local, "own")


def held_by(run, **changes):
    """A claim of another process, which has not come to its end."""
    with claim(run):
        pass
    last = max(run.state_folder.submissions.iterdir(), key=lambda path: int(path.name))
    holder = files.read_json(last / "holder.json")
    (last / "holder.json").write_text(json.dumps(holder | changes))
    (last / "open").touch()
    return last


def test_a_claim_ends_with_its_submission_and_a_second_one_is_refused_before_that(run):
    held = rf"is being submitted by process {os.getpid()} on {socket.gethostname()}"
    with claim(run), pytest.raises(InputError, match=held):
        submit(run)
    with claim(run):
        pass
    assert sorted(path.name for path in run.state_folder.submissions.iterdir()) == ["1", "2"]


def test_the_claim_of_a_process_that_was_killed_ends_with_it(run):
    sleeper = subprocess.Popen(["sleep", "60"])
    held_by(run, pid=sleeper.pid, created=psutil.Process(sleeper.pid).create_time())
    with pytest.raises(InputError, match=f"being submitted by process {sleeper.pid} on"), claim(run):
        pass
    sleeper.kill()
    sleeper.wait()
    with claim(run):
        pass


def test_the_sbatch_of_a_killed_process_holds_its_claim(run):
    ended = subprocess.Popen(["true"])
    ended.wait()
    held_by(run, pid=ended.pid, created=1.0)
    orphan = subprocess.Popen(["bash", "-c", 'exec -a sbatch tail -f "$0"', str(run.path / "job.sbatch")])
    until(lambda: psutil.Process(orphan.pid).cmdline()[:1] == ["sbatch"])
    with pytest.raises(InputError, match=f"being submitted by process {ended.pid} on"), claim(run):
        pass
    orphan.kill()
    orphan.wait()
    with claim(run):
        pass


def test_a_claim_of_another_host_ends_after_a_time_by_the_clock_of_the_file_system(run):
    last = held_by(run, host="elsewhere")
    with pytest.raises(InputError, match=r"by process .* on elsewhere"), claim(run):
        pass
    long_ago = (last / "open").stat().st_mtime - ELSEWHERE_S - 1
    os.utime(last / "open", (long_ago, long_ago))
    with claim(run):
        pass
