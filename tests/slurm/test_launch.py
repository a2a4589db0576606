import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kit import files
from kit.config.cluster import Cluster
from kit.data.dataset import prepare
from kit.errors import InputError, KitError, SubmitError
from kit.forecast.shape import shipped
from kit.slurm import client as client_module
from kit.slurm import launch as slurm
from kit.slurm.ledger import read_records
from kit.slurm.run import Run, find_runs
from kit.slurm.script import render_script
from kit.slurm.states import GoneRecord, JobState, SlurmRecord, SubmitRecord
from kit.slurm.submit import advice, options_for_own_script, submit
from kit.trainers.trl import render_accelerate
from tests.conftest import REPOSITORY, add_record, until


@pytest.fixture
def two_nodes(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(
        'name = "two"\n[nodes]\ncount = 2\ncpus = 2\nram_gib = 10\n[slurm]\npartition = "gpu"\ntime = "00:20:00"\n'
        '[environment]\nGLOO_SOCKET_IFNAME = "lo"\n[paths]\nruns = "runs"\n'
    )
    return Cluster.load(path)


@pytest.fixture
def spread(recipe):
    return recipe.override(**{"parallel.nodes": 2, "parallel.gpus_per_node": 1})


@pytest.mark.slow
@pytest.mark.slurm
def test_the_demos_fine_tune_runs_on_both_nodes_of_a_live_slurm(live_slurm, spread, two_nodes, smollm2):
    run = slurm.launch(spread.override(**{"model.name": str(smollm2), "schedule.max_steps": 3}), two_nodes)
    assert run.job_id.isdigit()
    end = run.wait(timeout=400)
    assert (end.state, end.exit_code, end.conflicts) == ("COMPLETED", 0, []), run.log.read_text()
    last = run.checkpoints()[-1] / "pytorch_model_fsdp_0"
    assert sorted(p.name for p in last.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert {p.stem for p in (run.path / "nodes").glob("*.jsonl")} == {"node1", "node2"}
    assert {p.name for p in (run.path / "logs").glob("rank-*.log")} == {"rank-000.log", "rank-001.log"}
    assert json.loads((run.path / "state" / "start.0.json").read_text())["nodes"] == "node[1-2]"
    # Days later Slurm has forgotten the job; the run still tells.
    slurm_record = [r for r in read_records(run) if isinstance(r, SlurmRecord)][-1]
    add_record(run, GoneRecord)
    assert slurm_record.state == run.state.state == "COMPLETED"


@pytest.mark.slurm
def test_a_pending_job_has_a_reason_and_a_cancelled_one_is_cancelled(live_slurm, spread, two_nodes, tmp_path):
    path = tmp_path / "drained.toml"
    path.write_text(two_nodes.toml().replace("options = []", 'options = ["--begin=now+1hour"]'))
    run = slurm.launch(spread, Cluster.load(path))
    assert run.state.state == "PENDING"
    assert run.state.pending.startswith("pending, reason BeginTime")
    run.cancel()
    assert run.wait(timeout=30).state == "CANCELLED"


@pytest.mark.slurm
def test_a_refusal_quotes_slurm_and_the_run_is_not_pending(live_slurm, spread, two_nodes, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(two_nodes.toml().replace('partition = "gpu"', 'partition = "nope"'))
    with pytest.raises(SubmitError, match="invalid partition specified: nope"):
        slurm.launch(spread, Cluster.load(path))
    from kit.slurm.run import find_runs

    assert next(find_runs()).state.state == "NOT SUBMITTED"


def test_a_job_that_does_not_fit_is_refused_with_a_way_out_unless_it_is_forced(recipe, local, tmp_path):
    small = dataclasses.replace(local, nodes=dataclasses.replace(local.nodes, ram_gib=0.5))
    job = recipe.override(**{"schedule.micro_batch": 64})
    with pytest.raises(KitError, match=r"tiny does not fit local: .* GiB allocated in .*--anyway"):
        slurm.launch(job, small)
    assert not (tmp_path / "runs").exists()
    slurm.launch(job, small, anyway=True).cancel()


def test_a_job_for_a_partition_never_runs_on_the_login_node_instead(recipe, two_nodes, tmp_path):
    refused = pytest.raises(InputError, match=r"No Slurm answers here, .* names the partition gpu")
    with refused:
        slurm.launch(recipe, two_nodes)
    with refused:
        slurm.launch_script("#!/bin/bash\ntouch ran\n", two_nodes, "own")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slurm
def test_slurm_is_asked_about_a_preempted_job_only_if_it_started_again(live_slurm, recipe, local, tmp_path):
    run = Run.create(recipe, local, tmp_path, "digest")
    run.note(job_id="999999")  # Slurm has forgotten it
    add_record(run, SlurmRecord, state=JobState.PREEMPTED)
    assert run.state.state == "PREEMPTED"
    add_record(run, SlurmRecord, state=JobState.PENDING)
    assert run.state.state == "LOST"


def test_a_model_without_weights_is_refused_before_a_job_waits_for_it(recipe, local, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no weights .*bare.*hf download"):
        slurm.launch(recipe.override(**{"model.name": str(tmp_path / "bare")}), local)
    with pytest.raises(InputError, match=r"no weights .*models--nobody--nothing"):
        slurm.launch(recipe.override(**{"model.name": "nobody/nothing"}), local)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.offload": "nvme"}, "nvme runs with parallel.strategy zero3 only"),
        ({"model.base": "fp8"}, "fp8 needs GPUs"),
        ({"parallel.strategy": "fsdp1"}, "fsdp1 needs GPUs"),
        ({"parallel.sharding": "hybrid", "parallel.nodes": 2, "parallel.gpus_per_node": 1}, "each node has one"),
        ({"parallel.nodes": 2}, "asks for 2 nodes x 2 GPUs; the cluster local has 1"),
        ({"tuning.target_modules": ["q_porj"]}, "'q_porj' matches no layer .* did you mean 'q_proj'"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_made(recipe, local, tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        slurm.launch(recipe.override(**changes), local)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "prepared").exists()


@pytest.mark.parametrize(
    ("shape", "changes", "words"),
    [
        ("google/gemma-2-2b", {}, "no sdpa for .* there is eager or flash_attention_2"),
        ("bigscience/bloom-7b1", {"model.attention": "flash_attention_2"}, "there is eager\\."),
        ("Qwen/Qwen3-30B-A3B", {"tuning.target_modules": ["all-linear"], "tuning.dropout": 0.1}, "dropout must be 0"),
    ],
)
def test_what_transformers_or_peft_would_refuse_is_refused_before_the_launch(
    recipe, local, tmp_path, shape, changes, words
):
    (tmp_path / "config.json").write_text(json.dumps(shipped()[shape]))  # random weights, made by the job
    with pytest.raises(InputError, match=words):
        slurm.launch(recipe.override(**{"model.name": str(tmp_path / "config.json")} | changes), local, anyway=True)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "prepared").exists()


@pytest.fixture
def launch(two_nodes):
    """Launch a script of a few lines on the live Slurm."""
    return lambda body, **more: slurm.launch_script(
        f"#!/bin/bash\n#SBATCH --mem=10\n{body}\n", two_nodes, "own", **more
    )


def client(folder, name, said="", code=0, complaint=""):
    """A stand-in for a Slurm client: notes what it is asked, and gives a recorded answer."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.said").write_text(said)
    answer = f'echo "$@" >> {folder}/{name}.asked\ncat {folder}/{name}.said\necho "{complaint}" >&2\nexit {code}\n'
    (folder / name).write_text(f"#!/bin/sh\n{answer}")
    (folder / name).chmod(0o755)


@pytest.mark.slurm
def test_launch_takes_under_a_second_of_cpu_time_and_another_kernel_attaches_within_two(live_slurm, launch):
    def cpu_seconds():
        return sum(os.times()[:4])  # of this process and of its children that have ended

    start, waited = cpu_seconds(), time.monotonic()
    run = launch("sleep 1")
    # CPU time, since other work on this machine slows the clock on the wall; which only shows that nothing sleeps.
    assert cpu_seconds() - start < 1
    assert time.monotonic() - waited < 10
    code = "from kit.slurm.run import Run; "
    code += f"print(Run.attach('{run.job_id}').state.state)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    start = cpu_seconds()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert cpu_seconds() - start < 2
    assert said.stdout.strip() in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED"), said.stderr


def same_slurm(process):
    return process.environ().get("SLURM_CONF") == os.environ["SLURM_CONF"]


@pytest.mark.slurm
@pytest.mark.slow
def test_three_kernels_that_watch_500_jobs_ask_slurm_four_times_a_minute_at_most(live_slurm, launch):
    def asked():
        statistics = subprocess.run(["sdiag"], capture_output=True, text=True, check=True).stdout
        return sum(map(int, re.findall(r"REQUEST_JOB\w*INFO\w*\s.*?count:(\d+)", statistics)))

    for process in psutil.process_iter(["cmdline"]):  # those of earlier tests ask the same Slurm
        with contextlib.suppress(psutil.Error):
            if (process.info["cmdline"] or [""])[-1] == "kit.slurm.watcher" and same_slurm(process):
                process.kill()
    run = launch("#SBATCH --begin=now+1hour", count=500, limit=4)
    assert set(run.state.tasks) == set(range(500))
    before = asked()
    code = "import sys, time; from kit.slurm.run import Run; end = time.time() + 15\n"
    code += "run = Run.attach(sys.argv[1])\nwhile time.time() < end: run.state; time.sleep(1)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    kernels = [subprocess.Popen([sys.executable, "-c", code, str(run.path)], env=environment) for _ in range(3)]
    codes, more = [kernel.wait() for kernel in kernels], asked() - before
    run.cancel()
    assert codes == [0, 0, 0]
    assert more <= 2  # in half a minute at the most: squeue, and scontrol for what ended
    assert run.wait(timeout=60).state == "CANCELLED"


@pytest.mark.slurm
@pytest.mark.slow
def test_an_unreachable_controller_is_reported_and_no_state_is_lost(live_slurm, launch, tmp_path):
    here = launch("sleep 3; exit 3")
    while not (here.path / "state" / "start.0.json").exists():
        time.sleep(0.1)
    controller = int((live_slurm / "run" / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        now = here.wait(timeout=60)
        assert (now.state, now.exit_code) == ("FAILED", 3)  # by the file that the job left
        assert any("Slurm does not answer, and is asked again soon" in e for e in now.evidence)
        with pytest.raises(SubmitError, match=r"timed out.*Slurm may have taken the job all the same"):
            launch("exit 5")
    finally:
        os.kill(controller, signal.SIGCONT)
    unheard = next(r for r in Run.attach("latest").path.parent.iterdir() if r != here.path)
    end = Run(unheard).wait(timeout=90)
    assert (end.state, end.exit_code) == ("FAILED", 5)
    assert here.state.confidence == "high"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--partition=nope", r"(?s)invalid partition specified: nope.*Set slurm.partition to one of: gpu\*, low"),
        ("--gres=gpu:99", r"No node has that many GPUs"),
        ("--gres=tpu:1", r"(?s)Invalid generic resource.*Set slurm.gres"),
    ],
)
@pytest.mark.slurm
def test_a_refusal_comes_with_what_to_change(live_slurm, launch, options, words):
    with pytest.raises(SubmitError, match=words):
        launch(f"#SBATCH {options}")
    assert Run.attach("latest").state.state == "NOT SUBMITTED"


def test_refusals_for_accounts_limits_and_silence_have_their_own_advice():
    said = "Batch job submission failed: "
    assert "another QOS" in advice(said + "Job violates accounting/QOS policy (job submit limit, ...)")
    assert "sacctmgr" in advice(said + "Invalid account or account/partition combination specified")
    assert "slurm.time" in advice(said + "Requested time limit is invalid (missing or exceeds some limit)")
    assert "Nothing was submitted" in advice(said + "Unable to contact slurm controller (connect failure)")
    assert advice(said + "something new") == ""


LOST_ANSWERS = {
    "an error of the connection": 'echo "Zero Bytes were transmitted or received" >&2; exit 1',
    "killed": "kill -9 $$",
    "silent": "exit 1",
}


@pytest.mark.slurm
@pytest.mark.parametrize("name", LOST_ANSWERS)
def test_a_job_whose_submission_was_not_answered_is_found_and_no_second_one_starts(
    live_slurm, launch, name, tmp_path, monkeypatch
):
    real, wrapper = shutil.which("sbatch"), tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/bash\n{real} "$@" > /dev/null\n{LOST_ANSWERS[name]}\n')
    wrapper.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
        with pytest.raises(SubmitError):
            launch("sleep 60")
    run = next(find_runs())
    assert run.state.state in ("SUBMITTING", "PENDING", "RUNNING")
    with pytest.raises(InputError, match=r"is (PENDING|RUNNING|CONFIGURING) as job \d+; cancel it"):
        submit(run)
    rows = client_module.squeue("-u", str(os.getuid())).rows.values()
    assert [row.job for row in rows if row.command == str(run.path / "job.sbatch")] == [run.job_id]
    run.cancel()


PATCHED_CLOCK = """
import time
real = time.time
time.time = lambda: real() + {ahead}
from kit.config.cluster import Cluster
from kit.slurm import launch as slurm
run = slurm.launch_script({script!r}, Cluster.load({cluster!r}), "ahead")
print(run.path, run.state.state)
"""


@pytest.mark.slurm
@pytest.mark.parametrize("ahead", [3600, 30 * 86400])
def test_a_clock_that_was_ahead_at_the_launch_hides_no_job(live_slurm, two_nodes, tmp_path, ahead):
    """The login node's clock was ahead, and was put right by NTP when the job had started."""
    script = f"#!/bin/bash\n#SBATCH --mem=10\nuntil [ -e {tmp_path}/go ]; do sleep 0.2; done; exit 3\n"
    code = PATCHED_CLOCK.format(ahead=ahead, script=script, cluster=str(tmp_path / "two.toml"))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    run = Run(Path(done.stdout.split()[0]))
    until(lambda: run.state.state == "RUNNING")
    with pytest.raises(InputError, match=r"has not ended: Slurm has job \d+ as RUNNING"):
        run.requeue()
    (tmp_path / "go").touch()
    end = run.wait(timeout=60)
    assert (end.state, end.exit_code, end.confidence) == ("FAILED", 3, "high"), str(end)


@pytest.mark.slurm
def test_a_job_that_seems_lost_and_lives_is_cancelled_and_never_requeued(live_slurm, two_nodes):
    """An answer of Slurm did not have the job. Its script is not bash, so it has no heartbeat."""
    script = f"#!{sys.executable}\n#SBATCH --mem=10\nimport time\ntime.sleep(300)\n"
    run = slurm.launch_script(script, two_nodes, "own")
    until(lambda: run.log.exists() and run.state.state == "RUNNING")
    empty = dataclasses.replace(client_module.queue(), time=time.time(), asked=time.time(), rows={}, pause=60.0)
    files.write_json(client_module.shared_file("queue"), dataclasses.asdict(empty))
    assert run.state.state == "RUNNING"  # its log is young
    os.utime(run.log, (1, 1))
    assert (run.state.state, run.state.confidence) == ("LOST", "low")
    with pytest.raises(InputError, match=r"has not ended: Slurm has job \d+ as RUNNING"):
        run.requeue()
    with pytest.raises(InputError, match=r"has not ended|is RUNNING as job"):
        submit(run)
    run.cancel()
    until(lambda: run.state.state == "CANCELLED")


@pytest.mark.slurm
def test_a_job_of_an_earlier_submission_ends_without_having_done_anything(live_slurm, launch, tmp_path):
    run = launch(f"touch {tmp_path}/ran")
    run.wait(timeout=60)
    (tmp_path / "ran").unlink()
    late = ["sbatch", "--wait", f"--output={tmp_path}/late", str(run.path / "job.sbatch")]
    witness = {"BASH_ENV": str(run.state_folder.witness_script), "KIT_RUN": str(run.path), "KIT_SUBMISSION": "earlier"}
    subprocess.run(late, env=os.environ | witness, check=False)
    assert "was submitted again after this job" in (tmp_path / "late").read_text()
    assert not (tmp_path / "ran").exists()


@pytest.mark.slurm
def test_logs_are_shown_as_they_grow_and_their_ends_at_any_time(live_slurm, launch):
    run = launch("for i in 1 2 3; do echo line $i; sleep 1; done", count=2)
    (run.path / "logs" / "rank-000.log").write_text("a\nb\nc\n")
    seen = list(run.follow())
    assert [line for line in seen if "_1]" in line] == [f"[slurm-{run.job_id}_1] line {i}" for i in (1, 2, 3)]
    assert str(run.tail(lines=2)).endswith("== rank-000.log\nb\nc") and "line 3" in str(run.tail(lines=1))
    assert str(run.tail([0], lines=1)) == "== rank-000.log\nc"


@pytest.mark.slurm
def test_a_run_that_ended_is_started_again_as_long_as_slurm_remembers_it(live_slurm, launch):
    run = launch("[ ${SLURM_RESTART_COUNT:-0} = 1 ] || exit 9")
    assert run.wait(timeout=60).exit_code == 9
    run.requeue()
    now = run.wait(timeout=60)  # for the end of the new start
    assert (now.state, now.exit_code) == ("COMPLETED", 0), str(now)
    run.note(job_id="99999")  # one that Slurm does not know: it becomes a new job
    add_record(run, SlurmRecord, state=JobState.FAILED, exit_code=9)
    with pytest.raises(KitError, match=r"does not know job 99999 any more: .* task 0"):
        run.requeue(0)
    run.requeue()
    assert run.job_id != "99999" and run.wait(timeout=60).exit_code == 9


@pytest.mark.slurm
def test_a_run_after_a_failed_run_is_refused_unless_when_is_any(live_slurm, launch):
    failed = launch("exit 1")
    failed.wait(timeout=60)
    with pytest.raises(InputError, match=r'is FAILED, so a run after it would never start; set when="any"'):
        launch("exit 0", after=failed)
    assert launch("exit 0", after=failed, when="any").wait(timeout=60).state == "COMPLETED"
    with pytest.raises(InputError, match=r"when is .later."):
        launch("exit 0", after=failed, when="later")


@pytest.mark.slurm
def test_a_run_that_was_moved_is_submitted_again_from_its_new_place(live_slurm, spread, two_nodes, tmp_path):
    path = tmp_path / "later.toml"
    path.write_text(two_nodes.toml().replace("options = []", 'options = ["--begin=now+1hour"]'))
    run = slurm.launch(spread, Cluster.load(path))
    run.cancel()
    run.wait(timeout=60)
    moved = Run(run.path.rename(tmp_path / "elsewhere"))
    assert moved.state.state == "CANCELLED"
    submit(moved)
    assert f"KIT_RUN={tmp_path / 'elsewhere'}" in (moved.path / "job.sbatch").read_text()
    moved.cancel()


def test_a_run_folder_has_the_recipe_that_is_trained_and_the_reasons_of_its_choices(recipe, local):
    chosen = slurm.choose(recipe, local)
    run = slurm.freeze(chosen, local, prepare(recipe), predicted=None)
    assert run.recipe == chosen.recipe and run.recipe.model.attention == "varlen"
    assert run.recipe.parallel.activation_checkpointing is False
    assert run.info["choices"][0] == {
        "key": "model.attention",
        "value": "varlen",
        "reason": "each document of a packed row by itself, as CPUs have no kernel for them",
    }
    assert run.info["digests"]["recipe"] == chosen.recipe.digest()


def test_what_is_named_by_hand_and_cannot_be_is_refused_before_anything_is_made(recipe, local, monkeypatch):
    monkeypatch.setattr("kit.forecast.limits.find_compiler", lambda: "")
    with pytest.raises(InputError, match="compile is on, and this machine has no C compiler"):
        slurm.launch(recipe.override(**{"parallel.compile": "on"}), local)
    with pytest.raises(InputError, match="fp8 needs GPUs"):
        slurm.launch(recipe.override(**{"model.base": "fp8"}), local)
    assert not list(find_runs())


def test_the_seconds_of_the_warning_are_stored_with_the_run_and_its_script_has_them(recipe, local, tmp_path):
    run = slurm.freeze(slurm.choose(recipe, local), local, prepare(recipe), predicted=None)
    assert run.info["warning_s"] == 120 and run.job_id is None
    assert "#SBATCH --signal=B:USR2@120\n" in (run.path / "job.sbatch").read_text()
    run.note(warning_s=333)
    assert "#SBATCH --signal=B:USR2@333\n" in render_script(run)


OLD_SCRIPT = """#!/bin/bash
export KIT_RUN={run}
exec python3 -m kit.rendezvous "$KIT_RUN"
"""


def test_a_run_from_before_the_script_had_a_version_starts_again_with_a_new_script(recipe, local, tmp_path):
    """Its script starts a module that has another name now; run.json lacks the keys that were added since."""
    run = Run.create(recipe, local, prepare(recipe).path, "digest")
    (run.path / "job.sbatch").write_text(OLD_SCRIPT.format(run=run.path))
    files.write(run.path / "accelerate.yaml", render_accelerate(recipe, local))
    run.note(job_id="local-7", submitted=time.time() - 400)
    add_record(run, SlurmRecord, state=JobState.FAILED, exit_code=1)
    assert "warning_s" not in run.info and "script_version" not in run.info
    submit(run)
    try:
        assert "-m kit.slurm.rendezvous" in (run.path / "job.sbatch").read_text()
    finally:
        run.cancel()


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("#!/bin/bash\ncat <<EOF\n#SBATCH --output=x\n#SBATCH --array=1-2\nEOF\n", ["--output={}/slurm-%j.out"]),
        ("#!/bin/bash\n#SBATCH -N 1 -o mine.out\n", []),
        ("#!/bin/bash\n#SBATCH --outp=mine.out\n", []),
        ("#!/bin/bash\n#SBATCH --array=1-2\n", ["--output={}/slurm-%A_%a.out"]),
        ("#!/bin/bash\n#SBATCH -a1-2\n#SBATCH --job-name='-o x'\n", ["--output={}/slurm-%A_%a.out"]),
        ("#!/bin/bash\n\n#SBATCH --time=1\necho\n#SBATCH --output=late\n", ["--output={}/slurm-%j.out"]),
    ],
)
def test_a_script_gets_the_kits_log_unless_a_directive_that_sbatch_reads_names_one(local, script, wanted):
    run = Run.create_for_script(script, local, "own")
    assert options_for_own_script(run) == [option.format(run.path / "logs") for option in wanted]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
def test_a_full_disk_is_a_clear_error_and_leaves_no_partial_run(recipe, local, tmp_path, monkeypatch):
    (small := tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", small], check=True)
    try:
        cluster = dataclasses.replace(local, paths=dataclasses.replace(local.paths, runs=str(small / "runs")))
        run = Run.create_for_script("#!/bin/sh\n", cluster, "before")
        client(tmp_path / "bin", "scontrol", "Slurmctld(primary) at here is UP\n")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
        with pytest.raises(OSError, match="No space left"):
            (small / "filler").write_bytes(bytes(200_000))
        with pytest.raises(InputError, match=r"No run folder can be made in .*runs: No space left on device"):
            Run.create(recipe, cluster, tmp_path, "d")
        assert [p.name for p in (small / "runs").iterdir()] == [run.path.name]
        with pytest.raises(InputError, match="Nothing was submitted: No space left on device"):
            submit(run)
        assert run.state.state == "NOT SUBMITTED"
    finally:
        subprocess.run(["umount", small], check=True)


def test_runs_that_cannot_be_written_name_the_folder(recipe, local, tmp_path):
    (tmp_path / "file").write_text("")
    cluster = dataclasses.replace(local, paths=dataclasses.replace(local.paths, runs=str(tmp_path / "file" / "runs")))
    with pytest.raises(InputError, match=r"No run folder can be made in .*file/runs: Not a directory .*paths.runs"):
        Run.create(recipe, cluster, tmp_path, "d")


# Recorded: squeue 22.05.8 for a job that failed with exit code 1 and an array task that was killed by signal 9.
ROWS = "7|FAILED|256|0|1|NonZeroExitCode|2026-11-28T03:57:34|node1|{path}/job.sbatch   \n8_2|FAILED|9|1|0|None|N/A|||\n"


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """Stand-ins for squeue, scontrol and sacct that answer as recorded; a run of job 7."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    run = Run.create_for_script("#!/bin/sh\n", Cluster("c"), "recorded")
    run.note(job_id="7", script=f"{run.path}/job.sbatch", submitted=time.time())
    add_record(run, SubmitRecord)
    client(tmp_path / "bin", "squeue")
    client(tmp_path / "bin", "scontrol", "MinJobAge               = 300 sec\n")
    return run


def test_squeue_is_called_with_a_text_format(clients, tmp_path):
    client(tmp_path / "bin", "squeue", ROWS.format(path=clients.path))
    now = clients.state
    assert (now.state, now.exit_code, now.signal) == ("FAILED", 1, "")
    assert client_module.queue().rows["8_2"].said.signal == "9"
    asked = (tmp_path / "bin" / "squeue.asked").read_text()
    assert asked.count("\n") == 1 and "json" not in asked and "-t all" in asked


def test_sacct_is_not_called_without_accounting(clients, tmp_path):
    client(tmp_path / "bin", "sacct", code=1, complaint="Slurm accounting storage is disabled")
    clients.note(submitted=time.time() - 400)  # longer ago than Slurm remembers
    (clients.path / "state" / "ledger.jsonl").unlink()
    add_record(clients, SubmitRecord, time=time.time() - 400)
    assert clients.state.state == "LOST"
    assert not (tmp_path / "bin" / "sacct.asked").exists()


def test_a_database_that_does_not_answer_changes_nothing(clients, tmp_path):
    client(tmp_path / "bin", "scontrol", "MinJobAge = 300 sec\nAccountingStorageType = accounting_storage/slurmdbd\n")
    client(tmp_path / "bin", "sacct", code=1, complaint="sacct: error: Problem talking to the database")
    (clients.path / "state" / "exit.0.json").write_text(
        json.dumps({"job_id": "7", "time": time.time(), "exit_code": 3})
    )
    now = clients.state
    assert (now.state, now.exit_code) == ("FAILED", 3)
    assert (tmp_path / "bin" / "sacct.asked").exists()
