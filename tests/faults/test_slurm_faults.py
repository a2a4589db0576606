"""Faults on a live Slurm: no state is false, and no job is lost or doubled. Prints tried, held and failed.

test_training_faults.py plays faults of a training. Other tests play lost answers, kills during a launch, an absent
controller, a lost node, time limits, full disks, moved and damaged folders, and runs of other users.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kit.slurm import launch as slurm
from kit.slurm import watcher
from kit.slurm.ledger import read_records
from kit.slurm.run import Run
from kit.slurm.states import SlurmRecord
from tests.conftest import REPOSITORY, until
from tests.faults.played import Played
from tests.faults.test_damaged_folders import DAMAGES, ended

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
SCRIPT = "#!/bin/bash\n#SBATCH --mem=10\n{body}\n"
STARTED_AT_ONCE = 10
played = Played()
fault = played.fault
counted = played.print_at_end("faults on a live Slurm")


@pytest.fixture
def one_node(local, tmp_path):
    slurm_settings = dataclasses.replace(local.slurm, partition="gpu", time="20")
    paths = dataclasses.replace(local.paths, runs=str(tmp_path / "runs"))
    return dataclasses.replace(local, slurm=slurm_settings, paths=paths)


@pytest.fixture
def launch(live_slurm, one_node):
    return lambda body: slurm.launch_script(SCRIPT.format(body=body), one_node, "own")


def started(run, restart=0):
    until((run.path / "state" / f"start.{restart}.json").exists, 200)
    return run


def processes_of(run):
    found = []
    for process in psutil.process_iter(["environ", "cmdline"]):
        if (process.info["environ"] or {}).get("KIT_RUN") == str(run.path):
            found.append(process)
    return found


def script_of(run):
    return next(p for p in processes_of(run) if "slurm_script" in " ".join(p.info["cmdline"] or []))


def step_daemons_of(run):
    return {above for p in processes_of(run) for above in p.parents() if above.name() == "slurmstepd"}


def in_processes(code, *words, count):
    """Run Python code in so many processes at once; the exit code and the output of each."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    running = [
        subprocess.Popen([sys.executable, *code, *words], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(count)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in running]
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]


def test_the_death_of_the_jobs_script_is_its_cause(launch):
    with fault("SIGKILL of the job's script"):
        run = started(launch("sleep 600"))
        script_of(run).kill()
        end = run.wait(timeout=60)
        assert end.state == "FAILED" and "script was killed" in end.cause, str(end)
        until(lambda: not any(p.name() == "bash" for p in processes_of(run)))  # the heartbeat ends with the script


def test_a_job_without_its_daemons_is_never_told_to_run_for_certain(launch):
    with fault("SIGKILL of all step daemons"):
        run = started(launch("sleep 300"))
        until((run.path / "state" / "heartbeat").exists)
        for process in [*step_daemons_of(run), *processes_of(run)]:
            process.kill()
        os.utime(run.path / "state" / "heartbeat", (1, 1))
        os.utime(run.log, (1, 1))
        state = run.state
        assert state.ended or state.confidence != "high", str(state)
        if not state.ended:
            run.cancel()
        assert run.wait(timeout=90).state in ("CANCELLED", "FAILED", "NODE_FAIL")


def test_the_exit_code_is_known_without_the_daemon_of_the_batch_step(launch):
    with fault("SIGKILL of the batch step's daemon"):
        run = started(launch("sleep 6; exit 3"))
        for daemon in step_daemons_of(run):
            daemon.kill()
        until(lambda: (run.path / "state" / "exit.0.json").exists())
        assert run.state.state != "COMPLETED", str(run.state)


def test_a_job_survives_daemons_that_are_killed_and_started(live_slurm, launch):
    with fault("SIGKILL of both slurmd"):
        run = started(launch("sleep 8; exit 3"))
        for node in ("node1", "node2"):
            psutil.Process(int((live_slurm / "run" / f"slurmd-{node}.pid").read_text())).kill()
        time.sleep(2)
        path = {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
        for node in ("node1", "node2"):
            subprocess.run(["slurmd", "-N", node], env=os.environ | path, check=True)
        end = run.wait(timeout=90)
        assert (end.state, end.exit_code, end.confidence) == ("FAILED", 3, "high"), str(end)


def test_of_two_commands_at_once_one_acts(launch):
    with fault("two requeues at once"):
        run = launch("sleep 600")
        started(run).cancel()
        run.wait(timeout=60)
        done = in_processes(["-m", "kit.cli"], "requeue", str(run.path), count=2)
        assert sorted(code for code, _ in done) == [0, 2] or sorted(code for code, _ in done) == [0, 1], done
        assert not any("Traceback" in text for _, text in done)
        found = subprocess.run(["squeue", "-h", "-o", "%o"], capture_output=True, text=True, check=True).stdout
        assert found.split().count(str(run.path / "job.sbatch")) == 1
    with fault("two cancels at once"):
        done = in_processes(["-m", "kit.cli"], "cancel", str(run.path), count=2)
        assert 0 in [code for code, _ in done] and not any("Traceback" in text for _, text in done), done
        assert run.wait(timeout=60).state == "CANCELLED"


OTHER_CLOCK = """
import sys, time
real = time.time
time.time = lambda: real() + {ahead}
from pathlib import Path
from kit.slurm.run import Run
from kit.slurm.states import SlurmRecord
print(Run(Path(sys.argv[1])).state.state)
"""


@pytest.mark.parametrize("ahead", [3600, -3600, -86400, 30 * 86400])
def test_the_clock_of_the_asking_machine_changes_no_state(launch, ahead):
    with fault(f"a clock that is {ahead} s ahead"):
        run = started(launch("sleep 600"))
        ((code, said),) = in_processes(["-c", OTHER_CLOCK.format(ahead=ahead)], str(run.path), count=1)
        assert (code, said.strip()) == (0, "RUNNING")
        assert (run.state.state, run.state.confidence) == ("RUNNING", "high")
        run.cancel()
        assert run.wait(timeout=60).state == "CANCELLED"


LAUNCHED = """
import sys
from pathlib import Path
from kit.config.cluster import Cluster
from kit.slurm import launch
print(launch.launch_script("#!/bin/bash\\n#SBATCH --mem=10\\nexit 3\\n", Cluster.load(sys.argv[1]), "own").path)
"""


def test_commands_of_many_processes_at_once_are_all_answered(launch, one_node, tmp_path):
    with fault("launches at once"):
        (tmp_path / "c.toml").write_text(one_node.toml())
        done = in_processes(["-c", LAUNCHED], str(tmp_path / "c.toml"), count=STARTED_AT_ONCE)
        assert [code for code, _ in done] == [0] * STARTED_AT_ONCE, done
        made = [Run(Path(text.split()[-1])) for _, text in done]
        assert len({run.job_id for run in made}) == len({run.path for run in made}) == STARTED_AT_ONCE
        assert {run.wait(timeout=100).exit_code for run in made} == {3}
    with fault("questions at once"):
        run = started(launch("sleep 600"))
        done = in_processes(["-m", "kit.cli"], "state", str(run.path), count=2 * STARTED_AT_ONCE)
        assert all(code == 0 and "RUNNING" in text for code, text in done), done
        lines = run.state_folder.ledger.read_text().splitlines()
        assert all(json.loads(line)["version"] == 1 for line in lines) and read_records(run)
        run.cancel()


def test_damaged_runs_beside_a_running_one_change_nothing_for_it(launch, one_node, recipe, tmp_path):
    with fault("damaged run folders next to a live run"):
        run = started(launch("sleep 600"))
        damaged = [ended(Run.create(recipe, one_node, tmp_path, "digest")) for _ in DAMAGES]
        for damage, other in zip(DAMAGES.values(), damaged, strict=True):
            damage(other)
        with watcher._watched() as paths:
            paths[:0] = [str(other.path) for other in damaged]
        ((code, said),) = in_processes(["-m", "kit.cli"], "runs", "--json", count=1)
        states = {row["run"]: row["state"] for row in json.loads(said)["runs"]}
        assert (code, states[str(run.path)]) == (0, "RUNNING"), said
        subprocess.run(["scancel", run.job_id], check=True)
        records = until(lambda: (found := slurm_records(run))[-1].state.final and found, 60)  # written by the watcher
        assert records[-1].state == "CANCELLED"


def slurm_records(run):
    return [record for record in read_records(run) if isinstance(record, SlurmRecord)]
