"""How jobs ended, on live two-node Slurms that forget a job after ten seconds: accounting off, then on.

All jobs of a world run side by side, each in a thread that does to it what the case says. They are judged when Slurm
has forgotten them. "unwatched": the watcher was killed and no kernel looked before Slurm forgot.

The watcher asks three times within the time for which Slurm remembers a job, which is 300 s by default. Ten seconds
are few enough to wait for, and enough for a machine on which a process waits for seconds until it runs.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from kit.config.cluster import Cluster
from kit.slurm import client, ledger, watcher
from kit.slurm import launch as slurm
from kit.slurm.run import Run
from kit.slurm.states import SlurmRecord
from tests.conftest import REPOSITORY, until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
PROFILE = 'name = "two"\n[nodes]\ncount = 2\n[slurm]\npartition = "gpu"\n[paths]\nruns = "{runs}"\n'
CRASH = f"{sys.executable} -c \"raise ValueError('bad lr')\" 2>&1"
SLEEP = "sleep 100 & wait $!"
TERM = f"trap 'exit 143' TERM\n{SLEEP}"
NO_NOTE = "from kit.slurm import evidence; evidence.note_job = die"
DEAF = "trap '' TERM; while :; do sleep 99; done"  # Slurm may kill sleep before the shell, which must not end then
AGAIN = "[ ${SLURM_RESTART_COUNT:-0} -lt %d ] || exit %d\n" + SLEEP
MIXED = "case $SLURM_ARRAY_TASK_ID in 1) exit 3;; 2) kill -9 $$;; 3) " + SLEEP + ";; esac"


def script(body, *options, shell="/bin/bash"):
    return "".join([f"#!{shell}\n", *(f"#SBATCH {o}\n" for o in options), body, "\n"])


def scancel(key):
    subprocess.run(["scancel", key], check=True)


def scontrol(*words):
    subprocess.run(["scontrol", *words], check=True)


def started(run, restart=0):
    until(lambda: list((run.path / "state").glob(f"start.{restart}.*")))


def seen_by_watcher(run):
    return any(isinstance(record, SlurmRecord) for record in ledger.read_records(run))


class World:
    """One live Slurm, the folder of its runs, and the cases that are played in it."""

    def __init__(self, root, name="watched"):
        self.root, self.name = root, name
        (root / "two.toml").write_text(PROFILE.format(runs=root / "runs"))
        self.cluster = Cluster.load(root / "two.toml")

    def job(self, body, *options, where="node1", **more):
        text = script(body, f"--nodelist={where}", "--mem=100", *options, shell=more.pop("shell", "/bin/bash"))
        return slurm.launch_script(text, self.cluster, self.name, **more)

    def after_start(self, body, *options, act, **more):
        run = self.job(body, *options, **more)
        started(run)
        act(run.job_id)
        return run

    def follower(self, **more):
        """A run after one that fails, but not before Slurm has both."""
        go = self.root / f"go-{more.get('when', '')}"
        first = self.job(f"until [ -e {go} ]; do sleep 0.2; done; exit 1")
        run = self.job("exit 0", after=first, **more)
        go.touch()
        return run

    def requeued(self, times, code):
        run = self.job(AGAIN % (times, code), "--open-mode=append", "--requeue")
        for restart in range(times):
            started(run, restart)
            scontrol("requeue", run.job_id)
        started(run, times)
        return run

    def killed_kernel(self, name, then=""):
        """A kernel that dies right after it submitted, or between sbatch's answer and writing it down."""
        made = script("sleep 1; exit 6", "--nodelist=node1", "--mem=100")
        code = (
            "import os, sys; from kit.slurm import launch as slurm; from kit.config.cluster import Cluster\n"
            f"die = lambda *a: os.kill(os.getpid(), 9)\n{then}\n"
            f"slurm.launch_script({made!r}, Cluster.load({str(self.root / 'two.toml')!r}), {name!r})\ndie()"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
        assert done.returncode == -9, done.stderr
        return Run(next((self.root / "runs").glob(f"{name}-*")))

    def array(self, cancelled, *options, body=MIXED):
        run = self.job(body, *options, count=4)
        key = f"{run.job_id}_{cancelled}"
        until(lambda: list((run.path / "state").glob(f"start.0.{cancelled}.json")) or seen_by_watcher(run))
        scancel(key)
        return run


def recycled(run, other):
    """The id of the run's job was given again, to another job."""
    run.note(job_id=other.job_id, submitted=time.time() - 90)
    return run


def damaged(run):
    until(lambda: list((run.path / "state").glob("exit.*")))
    shutil.rmtree(run.path / "state")
    return run


def moved(run):
    return Run(run.path.rename(run.path.with_name(run.path.name + "-moved")))


def end_at_once(job):
    scontrol("update", f"jobid={job}", "EndTime=now+1")


NODE2 = {}  # cases that need all of node2, one after the other


def node2_story(world):
    for requeue in ("--no-requeue", "--requeue"):
        low = world.job(AGAIN % (1, 0), "-p low", "--exclusive", requeue, where="node2")
        NODE2[f"preempted {requeue}"] = low
        started(low)
        world.job("sleep 1", "--exclusive", where="node2").wait(60)
    low.wait(60)
    once, again = (world.job(AGAIN % (1, 0), option, where="node2") for option in ("--no-requeue", "--requeue"))
    started(once)
    started(again)
    scontrol("update", "nodename=node2", "state=down", "reason=test")  # it answers, so Slurm takes it back by itself
    NODE2["node down --no-requeue"], NODE2["node down --requeue"] = once, again
    return once


LIMIT = {"act": end_at_once}
# name: (what to do in the world; state, exit code, cause, conflicts)
WATCHED = {
    "exit 0": (lambda w: w.job("exit 0"), "COMPLETED", 0, "", 0),
    "exit 1": (lambda w: w.job("exit 1"), "FAILED", 1, "exited with code 1 on node1", 0),
    "exit 137": (lambda w: w.job("exit 137"), "FAILED", 137, "killed by signal 9", 0),
    "SIGKILL": (lambda w: w.job("kill -9 $$"), "FAILED", 0, "killed by signal 9 on node1", 0),
    "no bash": (lambda w: w.job("exit(5)", shell=sys.executable), "FAILED", 5, "code 5", 0),
    "a trap of its own": (lambda w: w.job("trap : EXIT; exit 4"), "FAILED", 4, "code 4", 0),
    "traceback": (lambda w: w.job(CRASH), "FAILED", 1, "ValueError: bad lr", 0),
    "traceback under tee": (lambda w: w.job(CRASH + " | tee -i /dev/null"), "FAILED", 0, "ValueError: bad lr", 1),
    "traceback, then echo": (lambda w: w.job(CRASH + "; echo done"), "COMPLETED", 0, "ValueError: bad lr", 1),
    "step 3, then echo": (lambda w: w.job("srun bash -c 'exit 3'; echo x"), "COMPLETED", 0, "task 0 on node1: Exit", 1),
    "time limit": (lambda w: w.after_start(TERM, **LIMIT), "TIMEOUT", 143, "DUE TO TIME LIMIT", 0),
    "time limit, deaf": (lambda w: w.after_start(DEAF, **LIMIT), "TIMEOUT", 0, "TIME LIMIT", 0),
    "time limit, exit 0": (
        lambda w: w.after_start("trap 'exit 0' TERM; while :; do sleep 1; done", **LIMIT), "TIMEOUT", 0, "LIMIT", 1),
    "cancelled running": (
        lambda w: w.after_start(TERM, act=lambda job: Run.attach(job).cancel()), "CANCELLED", 143, "CANCELLED", 0),
    "scancel running": (lambda w: w.after_start(TERM, act=scancel), "CANCELLED", 143, "Slurm ended it on node1", 0),
    "requeued twice": (lambda w: w.requeued(2, 0), "COMPLETED", 0, "", 0),
    "requeued, then 7": (lambda w: w.requeued(1, 7), "FAILED", 7, "exited with code 7", 0),
    "no log folder": (
        lambda w: w.job("exit 0", "--output=nowhere/%j.out"), "FAILED", 0, "never started on node1: the folder", 0),
    "kernel killed": (lambda w: w.killed_kernel("killed-after"), "FAILED", 6, "code 6", 0),
    "kernel killed amid": (lambda w: w.killed_kernel("killed-amid", NO_NOTE), "FAILED", 6, "code 6", 0),
    "follows a failure": (lambda w: w.follower(), "CANCELLED", 0, "to follow did not end well", 0),
    "follows any end": (lambda w: w.follower(when="any"), "COMPLETED", 0, "", 0),
    "array": (lambda w: w.array(3), "FAILED", 3, "4 tasks: .*1 COMPLETED", 0),
    "moved": (lambda w: moved(ended(w.job("exit 2"))), "FAILED", 2, "code 2", 0),
    "id given again": (
        lambda w: recycled(Run.create_for_script("", w.cluster, "old"), w.job("exit 0")), "LOST", None, "Nothing", 0),
}  # fmt: skip
PENDING = {"cancelled waiting": lambda job: Run.attach(job).cancel(), "scancel waiting": scancel}
STORIES = {
    "preempted --no-requeue": ("PREEMPTED", None, "DUE TO PREEMPTION"),
    "preempted --requeue": ("COMPLETED", 0, ""),
    "node down --no-requeue": ("NODE_FAIL", None, "node"),
    "node down --requeue": ("COMPLETED", 0, ""),
}
UNWATCHED = {
    "unwatched exit 0": (lambda w: w.job("exit 0"), "COMPLETED", 0, ""),
    "unwatched exit 5": (lambda w: w.job("exit 5"), "FAILED", 5, "code 5"),
    "unwatched time limit": (lambda w: w.after_start(TERM, **LIMIT), "TIMEOUT", 143, "TIME LIMIT"),
    "unwatched time limit, deaf": (
        lambda w: w.after_start(DEAF, **LIMIT),
        "TIMEOUT",
        None,
        "TIME LIMIT",
    ),
    "unwatched scancel running": (lambda w: w.after_start(TERM, act=scancel), "CANCELLED", 143, "CANCELLED"),
    "unwatched SIGKILL": (lambda w: w.job("kill -9 $$"), "LOST", None, "the last sign is (start|submit)"),
    "unwatched no bash": (lambda w: w.job("exit(0)", shell=sys.executable), "LOST", None, "the last sign is submit"),
    "unwatched damaged": (lambda w: damaged(w.job("exit 2")), "LOST", None, "Nothing recorded"),
    "unwatched traceback under tee": (
        lambda w: w.job(CRASH + " | tee -i /dev/null"),
        "FAILED",
        0,
        "ValueError: bad lr",
    ),
}
ACCOUNTED = UNWATCHED | {
    "unwatched time limit, deaf": (*UNWATCHED["unwatched time limit, deaf"][:2], 0, "TIME LIMIT"),
    "unwatched SIGKILL": (lambda w: w.job("kill -9 $$"), "FAILED", 0, "signal 9"),
    "unwatched damaged": (lambda w: damaged(w.job("exit 2")), "FAILED", 2, "code 2"),
    "unwatched no bash": (lambda w: w.job("exit(5)", shell=sys.executable), "FAILED", 5, "code 5"),
    "no bash, exit 0": (lambda w: w.job("exit(0)", shell=sys.executable), "COMPLETED", 0, ""),
    "scancel pending": (
        lambda w: [r := w.job("exit 0", "--begin=now+1hour"), scancel(r.job_id)][0], "CANCELLED", 0, ""),
    "no log folder": (lambda w: w.job("exit 0", "--output=nowhere/%j.out"), "FAILED", 0, "never started"),
    "requeued, then 7": (lambda w: w.requeued(1, 7), "FAILED", 7, "exited with code 7"),
    "array": (lambda w: w.array(3), "FAILED", 3, "4 tasks"),
}  # fmt: skip


def ended(run):
    run.wait(60)
    return run


@pytest.fixture(scope="module")
def make_slurm(tmp_path_factory):
    """A function that starts a Slurm which forgets a job after ten seconds."""
    roots = []

    def make(name, **environment):
        root = tmp_path_factory.mktemp(name)
        up = subprocess.run(
            ["bash", REPOSITORY / "env/slurm/up", root / "slurm"], capture_output=True, text=True,
            env=os.environ | {"MIN_JOB_AGE": "10"} | environment,
        )  # fmt: skip
        if up.returncode == 3:
            pytest.skip(f"no live Slurm: {up.stderr.strip()}")
        assert up.returncode == 0, up.stderr
        roots.append(root / "slurm")
        return root

    yield make
    for root in roots:
        subprocess.run(["bash", REPOSITORY / "env/slurm/down", root], check=True)


def judged(root, unwatched, watched):
    """The run and the state of every case, read by somebody who comes when Slurm has forgotten all."""
    watch = watcher.enlist
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(64) as pool:
        patch.chdir(root)
        patch.setenv("SLURM_CONF", str(root / "slurm" / "slurm.conf"))
        patch.setenv("XDG_STATE_HOME", str(root / "first"))
        patch.setattr(watcher, "enlist", lambda run: None if run.path.name.startswith("unwatched") else watch(run))
        made = {name: pool.submit(case[0], World(root, "unwatched")) for name, case in unwatched.items()}
        made |= {name: pool.submit(case[0], World(root)) for name, case in watched.items()}
        runs = {name: future.result() for name, future in made.items()} | NODE2
        until(lambda: not client.squeue("-u", str(os.getuid())).rows, 180)
        for sign in (*root.glob("runs/*/state/heartbeat*"), *root.glob("runs/*/logs/*")):
            os.utime(sign, (1, 1))  # as if it were days later
        patch.setenv("XDG_STATE_HOME", str(root / "second"))
        return {name: (run, run.state) for name, run in runs.items()}


@pytest.fixture(scope="module")
def off(make_slurm):
    watched = WATCHED | {"node2": (node2_story,)}
    for name, act in PENDING.items():
        watched[name] = (lambda w, act=act: [r := w.job("exit 0", "--begin=now+1hour"), act(r.job_id)][0],)
    watched["array that waited"] = (lambda w: w.array(1, "--begin=now+20", body=MIXED.replace("3)", "4)")),)
    return judged(make_slurm("off"), UNWATCHED, watched)


@pytest.fixture(scope="module")
def on(make_slurm):
    return judged(make_slurm("on", ACCOUNTING="1"), ACCOUNTED, {})


def tells(found, state, code, cause, conflicts=0):
    run, now = found
    assert (now.state, now.exit_code) == (state, code), f"{now}\n{run.tail()}"
    assert re.search(cause, now.cause) and bool(now.cause) == bool(cause), str(now)
    assert len(now.conflicts) == conflicts, str(now)


@pytest.mark.parametrize("name", WATCHED)
def test_final_states_without_accounting_after_slurm_forgot_the_jobs(off, name):
    tells(off[name], *WATCHED[name][1:])


@pytest.mark.parametrize("name", STORIES)
def test_a_job_that_lost_its_node_has_ended_only_if_it_is_not_requeued(off, name):
    now = off[name][1]
    state, code, cause = STORIES[name]
    assert now.state == state and (code is None or now.exit_code == code), str(now)
    assert cause in now.cause, str(now)


@pytest.mark.parametrize("name", PENDING)
def test_cancelled_before_it_started(off, name):
    tells(off[name], "CANCELLED", 0, "")


def test_every_array_task_has_a_final_state(off):
    assert off["array"][1].tasks == {0: "COMPLETED", 1: "FAILED", 2: "FAILED", 3: "CANCELLED"}
    assert off["array that waited"][1].tasks == {0: "COMPLETED", 1: "CANCELLED", 2: "FAILED", 3: "COMPLETED"}


@pytest.mark.parametrize("name", UNWATCHED)
def test_final_states_without_accounting_and_without_the_watcher(off, name):
    tells(off[name], *UNWATCHED[name][1:], conflicts=int("tee" in name))


@pytest.mark.parametrize("name", ACCOUNTED)
def test_final_states_with_accounting_and_without_the_watcher(on, name):
    tells(on[name], *ACCOUNTED[name][1:], conflicts=int("tee" in name))


def test_the_watcher_exits_when_no_run_is_left(off):
    def watchers():
        found = [
            p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-2:] == ["-m", "kit.slurm.watcher"]
        ]
        return [
            p for p in found if p.environ().get("XDG_STATE_HOME", "").startswith(str(off["node2"][0].path.parents[1]))
        ]

    until(lambda: not watchers(), 10)
