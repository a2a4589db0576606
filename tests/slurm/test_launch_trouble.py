"""What goes wrong around a launch, on a live Slurm of these tests' own: it is broken here, and made whole again.

Its job ids run from 1000 to 1019 and are then given again; accounting is on, so that accounts and QOS are enforced.
"""

import dataclasses
import hashlib
import os
import secrets
import subprocess
import sys
import threading
import time

import psutil
import pytest

from kit.config.cluster import Cluster
from kit.errors import InputError, KitError, SubmitError
from kit.notebook.execute import execute
from kit.slurm import client
from kit.slurm import launch as slurm
from kit.slurm.ledger import read_records
from kit.slurm.run import Run
from kit.slurm.states import SlurmRecord
from kit.slurm.submit import submit
from tests.conftest import REPOSITORY, until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
MORE = """
EnforcePartLimits=ALL
AccountingStorageEnforce=associations,limits,qos
FirstJobId=1000
MaxJobId=1019
PartitionName=short Nodes=node1 MaxTime=5 State=UP
"""


def say(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Own:
    """The Slurm and its daemons, which can be killed and started again."""

    def __init__(self, root):
        self.root, self.conf = root, root / "slurm.conf"
        self.settings = {"SLURM_CONF": str(self.conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def kill(self, name):
        process = psutil.Process(int((self.root / "run" / f"{name}.pid").read_text()))
        process.kill()
        process.wait(20)

    def save(self, run):
        """Have the controller write down that the run has started, which it does only now and then."""
        noted = time.time()
        say("scontrol", "update", f"jobid={run.job_id}", "comment=noted")
        until(lambda: (self.root / "state" / "job_state").stat().st_mtime > noted)

    def start(self, *command):
        subprocess.run(command, check=True, env=os.environ | self.settings, capture_output=True)
        until(lambda: "UP" in client.command("scontrol", "ping").stdout)

    def start_node2(self, *inside):
        self.start(*inside, "slurmd", "-N", "node2")
        until(lambda: set(say("sinfo", "-h", "-n", "node2", "-o", "%T").split()) & {"idle", "mixed"})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    up = subprocess.run(
        ["bash", REPOSITORY / "env/slurm/up", root],
        capture_output=True, text=True, env=os.environ | {"ACCOUNTING": "1", "MIN_JOB_AGE": "5"},
    )  # fmt: skip
    if up.returncode == 3:
        pytest.skip(f"no live Slurm: {up.stderr.strip()}")
    assert up.returncode == 0, up.stderr
    own = Own(root)
    own.conf.write_text(own.conf.read_text().replace("SlurmdTimeout=30", "SlurmdTimeout=8") + MORE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.settings.items():
            patch.setenv(name, value)
        own.kill("slurmctld")
        own.start("slurmctld")
    yield own
    subprocess.run(["bash", REPOSITORY / "env/slurm/down", root], check=True)


@pytest.fixture
def own(made, monkeypatch):
    for name, value in made.settings.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(
        f'name = "two"\n[nodes]\ncount = 2\ncpus = 2\nram_gib = 10\n[slurm]\npartition = "gpu"\ntime = "20"\n'
        f'[environment]\nGLOO_SOCKET_IFNAME = "lo"\n[paths]\nruns = "{tmp_path}/runs"\n'
    )
    return Cluster.load(path)


@pytest.fixture
def launch(own, cluster):
    return lambda body, *options, **more: slurm.launch_script(
        "".join(["#!/bin/bash\n#SBATCH --mem=10\n", *(f"#SBATCH {o}\n" for o in options), body, "\n"]),
        cluster, more.pop("name", "own"), **more,
    )  # fmt: skip


def started(run):
    until((run.path / "state" / "start.0.json").exists)
    return run


REFUSED = {
    "--partition=nope": r"invalid partition specified: nope.* Set slurm.partition to one of: gpu\*, low, short",
    "--nodes=3": r"Node count specification invalid.* Lower the number of nodes",
    "--partition=short --time=10": r"Requested time limit is invalid.* Lower slurm.time",
    "--gres=gpu:99": r"Requested node configuration is not available.* No node has that many GPUs",
    "--gres=tpu:1": r"Invalid generic resource.* Set slurm.gres to what",
    "--cpus-per-task=99": r"More processors requested than permitted.* Lower nodes.cpus",
    "--account=nobody": r"Invalid account .* Set slurm.account to one that",
    "--qos=nope": r"Invalid qos specification.* `sacctmgr show qos`",
}


@pytest.mark.parametrize("option", REFUSED)
def test_a_refusal_quotes_slurm_says_what_to_change_and_leaves_no_job(launch, option):
    with pytest.raises(SubmitError, match=f"(?s)sbatch did not take .*: {REFUSED[option]}") as told:
        launch("exit 0", option)
    assert told.value.exit_code == 1
    assert Run.attach("latest").state.state == "NOT SUBMITTED"


def test_a_refusal_for_a_qos_limit_says_so(launch):
    say("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxWall=10", "Flags=DenyOnLimit")
    try:
        with pytest.raises(SubmitError, match=r"(?s)QOSMaxWallDurationPerJobLimit.*A limit of your account or QOS"):
            until(lambda: launch("exit 0", "--time=60") and False, 10)  # the controller hears of it a little later
    finally:
        say("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxWall=-1")


def test_a_stopped_controller_is_reported_and_no_state_is_lost(own, launch, tmp_path):
    run = started(launch(f"until [ -e {tmp_path}/go ]; do sleep 0.2; done; exit 3"))
    own.save(run)
    own.kill("slurmctld")
    pauses = []
    until(lambda: pauses.append(client.queue().pause) or len(set(pauses)) > 2, 30)  # it is asked less and less often
    assert sorted(pauses) == pauses
    now = run.state
    assert now.state == "RUNNING" and "Slurm does not answer, and is asked again soon" in str(now.evidence), str(now)
    with pytest.raises(SubmitError, match=r"(?s)(controller|timed out).*(Nothing was submitted|may have taken)"):
        launch("exit 4", name="refused")
    with pytest.raises(KitError, match=r"^scancel \d+: .*controller"):
        run.cancel()
    own.start("slurmctld")
    refused = Run.attach("latest")
    assert refused.path.name.startswith("refused") and refused.state.state == "NOT SUBMITTED"
    submit(refused)  # the very same run
    assert refused.wait(60).exit_code == 4
    (tmp_path / "go").touch()
    end = run.wait(60)
    assert (end.state, end.exit_code, end.confidence) == ("FAILED", 3, "high"), str(end)


def test_a_node_failure_names_the_node_and_pending_jobs_say_what_they_wait_for(own, launch):
    run = started(launch("sleep 300", "--nodelist=node2", "--no-requeue"))
    steps = [p for p in psutil.process_iter(["cmdline"]) if f"slurmstepd: [{run.job_id}." in str(p.info["cmdline"])]
    own.kill("slurmd-node2")
    for step in steps:
        step.kill()
    end = run.wait(90)
    assert end.state == "NODE_FAIL" and "node2" in end.cause, str(end)
    waiting = launch("exit 0", "--nodes=2")
    told = until(lambda: (words := waiting.state.pending) and "None" not in words and words, 90)
    assert "node2" in told and "down, drained or reserved" in told, told
    own.start_node2()
    assert waiting.wait(90).state == "COMPLETED"


def test_a_reused_job_id_is_not_taken_for_the_old_run(launch):
    old = launch("exit 7")
    old.wait(60)
    ids = {old.job_id}
    while (new := launch("sleep 300", "--begin=now+1hour")).job_id != old.job_id:
        new.cancel()
        assert new.job_id not in ids and 1000 <= int(new.job_id) < 1019
        ids.add(new.job_id)
    assert new.state.state == "PENDING" and old.state.exit_code == 7
    assert Run.attach(old.job_id) == new
    with pytest.raises(InputError, match="is FAILED: there is nothing to cancel"):
        old.cancel()  # the id is another job's by now
    old.requeue()  # as a new job
    assert old.job_id != new.job_id and new.state.state == "PENDING"
    assert old.wait(60).exit_code == 7
    new.cancel()


@AS_ROOT
def test_a_folder_that_a_node_does_not_see_is_named_in_seconds(own, launch, cluster, recipe, tmp_path):
    (tmp_path / "runs").mkdir()
    alone = f'mount --make-rprivate / && mount -t tmpfs none {tmp_path}/runs && exec "$@"'
    own.kill("slurmd-node2")
    own.start_node2("unshare", "--mount", "sh", "-c", alone, "sh")
    try:
        spread = recipe.override(**{"parallel.nodes": 2, "parallel.gpus_per_node": 1})
        run, script = slurm.launch(spread, cluster), launch("exit 0", "--nodelist=node2")
        end = run.wait(60)
        assert end.state == "FAILED", run.tail()
        assert f"[start on node2] {run.path} is not here: every node must see paths.runs" in end.cause
        assert "never started on node2: the folder of its log does not exist" in script.wait(60).cause
    finally:
        own.kill("slurmd-node2")
        own.start_node2()


@pytest.fixture
def seen():
    """All that others can see of this user's programs and jobs, gathered in a thread until it is asked for."""
    found, stop = [], threading.Event()

    def look():
        while not stop.wait(0.1):
            for process in psutil.process_iter(["cmdline"]):
                found.append(" ".join(process.info["cmdline"] or []))
            for words in (["squeue", "-t", "all", "-o", "%all"], ["scontrol", "show", "job", "-d", "-o"]):
                found.append(client.command(*words).stdout)

    thread = threading.Thread(target=look)
    thread.start()

    def end():
        stop.set()
        thread.join()
        return "\n".join(found)

    yield end
    end()


def test_no_token_is_written_down_or_shown_anywhere_and_the_job_has_it(
    own, cluster, recipe, tmp_path, monkeypatch, seen
):
    tokens = {name: f"canary-{name}-{secrets.token_hex(12)}" for name in ("WANDB_API_KEY", "HF_TOKEN", "FILE_TOKEN")}
    for name in ("WANDB_API_KEY", "HF_TOKEN"):  # the user's own login
        monkeypatch.setenv(name, tokens[name])
    (private := tmp_path / "private").touch(mode=0o600)
    private.write_text(f"FILE_TOKEN={tokens['FILE_TOKEN']}\n")
    setup = 'printf "%s" "$WANDB_API_KEY$HF_TOKEN$FILE_TOKEN" | sha256sum > "$KIT_RUN/state/digest"'
    mine = dataclasses.replace(cluster.slurm, env_file=str(private), setup=(setup,))
    (tmp_path / "c.toml").write_text(dataclasses.replace(cluster, slurm=mine).toml())
    small = {"schedule.max_steps": 2, "parallel.gpus_per_node": 1}
    (tmp_path / "r.toml").write_text(recipe.override(**small).toml())
    values = {"recipe": str(tmp_path / "r.toml"), "cluster": str(tmp_path / "c.toml"), "tail_s": 2.0}
    with (tmp_path / "said").open("w") as said:
        execute(REPOSITORY / "notebooks/03_launch_run.ipynb", tmp_path / "03.ipynb", values, cwd=tmp_path, stream=said)
    run = Run.attach("latest")
    end = run.wait(240)
    assert end.state == "COMPLETED", run.tail()
    wanted = hashlib.sha256("".join(tokens.values()).encode()).hexdigest()
    assert (run.path / "state" / "digest").read_text().split()[0] == wanted
    everything = seen()
    assert f"JobId={run.job_id} " in everything and "kit.train" in everything
    places = [p for p in tmp_path.rglob("*") if p.is_file() and p != private] + list((own.root / "log").iterdir())
    assert {"03.ipynb", "ledger.jsonl", "run.json", "job.sbatch", "rank-000.log"} <= {p.name for p in places}
    held = [p for p in places for token in tokens.values() if token.encode() in p.read_bytes()]
    assert held == [] and not any(token in everything for token in tokens.values())


@pytest.fixture
def small(tmp_path):
    """A file system of 1 MiB of its own."""
    (folder := tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@AS_ROOT
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_the_final_state_is_known_when_the_folder_is_full_or_read_only(launch, cluster, small, trouble, tmp_path):
    there = dataclasses.replace(cluster, paths=dataclasses.replace(cluster.paths, runs=str(small / "runs")))
    script = f"#!/bin/bash\n#SBATCH --mem=10 --output={tmp_path}/out\nsleep 4\nexit 5\n"
    run = started(slurm.launch_script(script, there, "filled"))
    if trouble == "full":
        with (run.path / "state" / "ledger.jsonl").open("a") as ledger:
            ledger.write("\n" * (-ledger.tell() % 4096))  # its last page is full, too
        with pytest.raises(OSError, match="No space left"):
            (small / "filler").write_bytes(bytes(2**20))
    else:
        say("mount", "-o", "remount,ro", str(small))
    end = run.wait(60)
    assert (end.state, end.exit_code) == ("FAILED", 5) and "cannot be written" in str(end.evidence), str(end)
    with pytest.raises(InputError, match=r"No run folder can be made in .*: (No space left|Read-only file system)"):
        slurm.launch_script("#!/bin/bash\n", there, "another")
    if trouble == "full":
        (small / "filler").unlink()
    else:
        say("mount", "-o", "remount,rw", str(small))
    until(lambda: any(isinstance(one, SlurmRecord) and one.exit_code == 5 for one in read_records(run)), 30)
    assert (run.state.state, run.state.exit_code) == ("FAILED", 5)


def test_a_moved_run_is_found_and_a_partly_deleted_one_has_a_state(launch, tmp_path):
    run, half = started(launch("sleep 3; exit 6")), started(launch("sleep 3; exit 8"))
    moved = Run(run.path.rename(tmp_path / "elsewhere"))
    for name in ("logs", "state", "nodes"):
        subprocess.run(["rm", "-r", half.path / name], check=True)
    assert (moved.wait(60).state, moved.state.exit_code) == ("FAILED", 6)
    assert (half.wait(60).state, half.state.exit_code) == ("FAILED", 8)
    assert "has no such log yet" in str(half.tail())
    with pytest.raises(InputError, match="No run"):
        Run.attach(run.path)
    assert half.path.name in say(sys.executable, "-m", "kit.cli", "runs")
