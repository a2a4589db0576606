"""Interrupted runs go on: what the job's script decides, then whole stories on a live Slurm."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess

import psutil
import pytest

from kit.slurm import launch as slurm
from kit.slurm.run import Run
from kit.slurm.script import render_script
from kit.slurm.states import ScriptEnd, parse_record
from kit.slurm.submit import submit
from tests.slurm.test_run import ranks_of, wait_for

# Stand-ins. The step stops at state/stop, as training does; the script is its parent's parent at most.
STEP = 'for _ in $(seq 50); do [ ! -e "$KIT_RUN/state/stop" ] || break; sleep 0.1; done\n'
SAVES = STEP + 'echo checkpoint-7 > "$KIT_RUN/state/saved"\n'
SCONTROL = """#!/bin/sh
case "$1 $2" in
"show hostnames") echo node1 ;;
"show node") echo "NodeName=node1 NodeAddr=127.0.0.1" ;;
"show job") echo "JobId=7 {record} Reason=None" ;;
*) echo "$2" >> "$KIT_RUN/requeued"; {requeue} ;;
esac
"""


@pytest.fixture
def run(recipe, local, tmp_path):
    run = Run.create(recipe, local, tmp_path, "digest")
    run.note(job_id="7")
    return run


def play(run, step, record="JobState=RUNNING", requeue="exit 0", told=None, **environment):
    """Run the job's script on stand-ins for srun and scontrol: its exit record, and the ids that were requeued."""
    bin_ = run.path / "bin"
    bin_.mkdir()
    for name, text in (("srun", f"#!/bin/bash\n{step}"), ("scontrol", SCONTROL.format(record=record, requeue=requeue))):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    (run.path / "job.sbatch").write_text(render_script(run))
    env = os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"}
    with run.log.open("w") as log:
        script = subprocess.Popen(["bash", run.path / "job.sbatch"], env=env | environment, stdout=log, stderr=log)
    if told == "stop":
        wait_for(lambda: list((run.path / "state").glob("start.*.json")))
        (run.path / "state" / "stop").touch()
    elif told:
        wait_for(lambda: (run.path / "up").exists())
        script.send_signal(told)
    code = script.wait(timeout=30)
    requeued = run.path / "requeued"
    left = json.loads(max((run.path / "state").glob("exit.*.json")).read_text())
    assert left["exit_code"] == code, run.log.read_text()
    assert left.keys() == {"version", "job_id", "time", "exit_code", "signal", "end", "requeued", "reason"}
    return parse_record(left | {"source": "exit"}), requeued.read_text().split() if requeued.exists() else []


UP = ': > "$KIT_RUN/up"\n'
PREEMPTED = "JobState=RUNNING PreemptTime=2026-11-28T03:58:32"
ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}


@pytest.mark.parametrize(
    ("step", "more", "expected"),
    [
        (UP + SAVES, {"told": signal.SIGUSR2},
         (75, "USR2", ScriptEnd.TIME_LIMIT, "time limit near, saved checkpoint-7, requeued", ["7"])),
        (UP + SAVES, {"told": signal.SIGUSR2} | ARRAY,
         (75, "USR2", ScriptEnd.TIME_LIMIT, "time limit near, saved checkpoint-7, requeued", ["5_1"])),
        (UP + SAVES, {"told": signal.SIGUSR2, "record": "JobState=CANCELLED"},
         (75, "USR2", ScriptEnd.TIME_LIMIT, "time limit near, saved checkpoint-7", [])),
        (SAVES, {"record": PREEMPTED, "told": "stop"},
         (75, "", ScriptEnd.PREEMPTED, "preempted, saved checkpoint-7, requeued", ["7"])),
        ("exit 1", {"record": PREEMPTED},  # preempted while it loaded
         (75, "", ScriptEnd.PREEMPTED, "preempted, requeued", ["7"])),
        (SAVES, {"told": "stop"}, (75, "", ScriptEnd.STOP_REQUESTED, "asked to stop, saved checkpoint-7", [])),
        ("trap 'exit 0' TERM\n" + 'echo checkpoint-7 > "$KIT_RUN/state/saved"\n' + UP + "sleep 20 & wait",
         {"told": signal.SIGTERM}, (75, "TERM", ScriptEnd.SIGNAL, "ended from outside, saved checkpoint-7", [])),
        ("trap 'exit 9' TERM\n" + UP + "sleep 20 & wait",
         {"told": signal.SIGTERM}, (9, "TERM", ScriptEnd.SIGNAL, "", [])),
        ("exit 3", {}, (3, "", ScriptEnd.FAILED, "", [])),
        ('echo {} > "$KIT_RUN/state/result.json"', {"record": PREEMPTED}, (0, "", ScriptEnd.FINISHED, "", [])),
        ("exit 0", {}, (1, "", ScriptEnd.FAILED, "the training step ended without a result", [])),
    ],
)  # fmt: skip
def test_a_job_is_requeued_only_after_a_save_or_a_preemption_and_not_after_a_signal(run, step, more, expected):
    exit_, requeued = play(run, step, **more)
    assert (exit_.exit_code, exit_.signal, exit_.end, exit_.reason, requeued) == expected
    assert exit_.requeued is exit_.reason.endswith(", requeued")


def test_a_requeue_that_slurm_refuses_is_recorded_with_slurms_words(run):
    exit_, requeued = play(run, UP + SAVES, told=signal.SIGUSR2, requeue='echo "is \\"off\\""; exit 1')
    assert (exit_.exit_code, exit_.end, exit_.requeued, requeued) == (75, ScriptEnd.TIME_LIMIT, False, ["7"])
    assert exit_.reason == (
        "time limit near, saved checkpoint-7, but Slurm did not requeue the job (is off): submit the run again"
    )
    assert not exit_.starts_again  # although the sentence contains the word


def test_a_job_without_a_new_checkpoint_stops_after_three_starts(run):
    for step in (20, 40):
        (run.path / "checkpoints" / f"checkpoint-{step}").mkdir()
    facts = '{{"job_id": "7", "time": {0}, "nodes": "node1", "checkpoint": "{1}"}}'
    for restart, newest in enumerate((20, 40, 40)):
        (run.path / "state" / f"start.{restart}.json").write_text(facts.format(restart, newest))
    (run.path / "state" / "start.0.copy.json").write_text(facts.format(0, 40))  # not a record of a start
    (run.path / "checkpoints" / "checkpoint-60-copy").mkdir()
    exit_, requeued = play(run, "exit 0", SLURM_RESTART_COUNT="3")
    assert (exit_.exit_code, exit_.end, requeued) == (1, ScriptEnd.NO_PROGRESS, [])
    assert exit_.reason.startswith("no new checkpoint in three starts: save more often")
    assert exit_.reason in run.log.read_text()


def test_the_local_runner_starts_a_job_again_too(run):
    script = f"export KIT_RUN={run.path}\necho start $SLURM_RESTART_COUNT\n"
    script += "[ $SLURM_RESTART_COUNT -gt 1 ] || { scontrol requeue $SLURM_JOB_ID; exit 75; }\n"
    (run.path / "job.sbatch").write_text(script)
    run.note(job_id=None)
    submit(run)
    assert run.wait(timeout=30).state == "COMPLETED"
    assert run.log.read_text().splitlines() == ["start 0", "start 1", "start 2"]


def story(run):
    """Every logged value that a resume might change."""
    history = json.loads((run.checkpoints()[-1] / "trainer_state.json").read_text())["log_history"]
    return [
        [h["step"], *(h[k] for k in ("loss", "grad_norm", "learning_rate", "num_tokens"))]
        for h in history
        if "loss" in h
    ]


def step(run):
    path = run.path / "state" / "progress.json"
    return json.loads(path.read_text())["step"] if path.exists() else 0


def said(run, kind, restart):
    path = run.path / "state" / f"{kind}.{restart}.json"
    return json.loads(wait_for(lambda: path.exists() and path, seconds=200).read_text())


def scontrol(*words):
    subprocess.run(["scontrol", *words], check=True)


@pytest.fixture
def two_nodes(local):
    nodes = dataclasses.replace(local.nodes, count=2)
    return dataclasses.replace(local, nodes=nodes, slurm=dataclasses.replace(local.slurm, partition="low", time="20"))


def waits_for_its_limit(recipe, cluster, folder):
    """The job's script with a stand-in for training, whose time limit is near as soon as it has started."""
    run = Run.create(recipe, cluster, folder, "digest")
    script = render_script(run)
    assert "#SBATCH --signal=B:USR2@120\n" in script
    node = script[script.index("bash -c '") : script.index("' &\nstep=$!")]
    done = '[ -e "$KIT_RUN/up" ] && echo {} > "$KIT_RUN/state/result.json" && exit 0'
    stub = f"bash -c '{done}\n{UP}{SAVES.replace('seq 50', 'seq 600')}"
    (run.path / "job.sbatch").write_text(script.replace(node, stub))
    submit(run)
    wait_for(lambda: (run.path / "up").exists())
    scontrol("update", f"jobid={run.job_id}", "EndTime=now+2minutes")
    return run


@pytest.mark.slow
@pytest.mark.slurm
def test_a_run_interrupted_three_times_has_the_losses_of_an_uninterrupted_one(live_slurm, recipe, two_nodes, tmp_path):
    """Its time limit, a requeue by hand that also leaves a half-written checkpoint, and a job that preempts it."""
    changes = {"tuning.dropout": 0.1, "schedule.max_steps": 14, "schedule.save_every": 3, "schedule.lr": 1e-3}
    job = recipe.override(**changes)
    gpu = dataclasses.replace(two_nodes, slurm=dataclasses.replace(two_nodes.slurm, partition="gpu"))
    limited = waits_for_its_limit(recipe, gpu, tmp_path)
    run, calm = slurm.launch(job, two_nodes), slurm.launch(job, gpu)
    wait_for(lambda: step(run) >= 1)
    subprocess.run(["scancel", "--signal=USR2", "--batch", run.job_id], check=True)  # as Slurm does: see `limited`
    first = said(run, "exit", 0)
    saved = run.checkpoints()[-1]
    assert first["reason"] == f"time limit near, saved {saved.name}, requeued" and first["exit_code"] == 75

    said(run, "start", 1)
    wait_for(lambda: step(run) > int(saved.name.rpartition("-")[2]))
    scontrol("requeue", run.job_id)
    assert said(run, "exit", 1)["signal"] == "TERM"
    wait_for(lambda: run.state.state == "PENDING")
    half = run.path / "checkpoints" / "checkpoint-99"
    shutil.copytree(run.checkpoints()[-1], half)
    (half / "trainer_state.json").unlink()

    said(run, "start", 2)
    before = step(run)
    wait_for(lambda: (run.path / "checkpoints" / "incomplete-99").exists() and step(run) != before)
    urgent = ["sbatch", "--partition=gpu", "--nodes=2", "--cpus-per-task=7", "--output=/dev/null", "--wrap=sleep 1"]
    subprocess.run(urgent, check=True)
    third = said(run, "exit", 2)
    assert third["reason"].startswith("preempted, saved checkpoint-") and third["reason"].endswith(", requeued")

    assert run.wait(timeout=200).state == "COMPLETED", run.log.read_text()
    assert calm.wait(timeout=200).state == "COMPLETED", calm.log.read_text()
    assert story(run) == story(calm)  # bit for bit, with dropout
    assert [row[0] for row in story(run)] == list(range(1, 15))
    parts = [p.name for p in (run.path / "wandb").glob("offline-run-*")]
    assert len(parts) == 4 and all(name.endswith(f"-{run.info['wandb_id']}") for name in parts)
    assert "checkpoint-99 is not complete: renamed to incomplete-99" in run.log.read_text()
    assert said(limited, "exit", 0)["reason"] == "time limit near, saved checkpoint-7, requeued"
    assert limited.wait(timeout=60).state == "COMPLETED"


def lose(root, node, run):
    """Everything of a node ends at once, and Slurm takes it for dead."""
    inside = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("KIT_RUN") == str(run.path)]
    steps = {above for p in inside for above in p.parents() if above.name() == "slurmstepd"}
    daemon = psutil.Process(int((root / "run" / f"slurmd-{node}.pid").read_text()))
    for process in [daemon, *steps, *(below for one in steps for below in one.children(recursive=True))]:
        process.kill()
    scontrol("update", f"nodename={node}", "state=down", "reason=test")


@pytest.mark.slow
@pytest.mark.slurm
def test_a_run_survives_its_node_and_a_killed_rank_ends_it_with_the_cause(live_slurm, recipe, two_nodes):
    run = slurm.launch(recipe.override(**{"schedule.max_steps": 400, "schedule.save_every": 2}), two_nodes)
    wait_for(lambda: len(run.checkpoints()) > 1)
    lost = said(run, "start", 0)["nodes"]
    lose(live_slurm, lost, run)
    try:
        again = said(run, "start", 1)
        assert again["nodes"] != lost and int(again["checkpoint"]) >= 2
        wait_for(lambda: step(run) > int(again["checkpoint"]) and "resuming from checkpoint-" in run.log.read_text())
        ranks_of(run)[1].kill()
        end = run.wait(timeout=100)
        assert (end.state, end.exit_code, end.cause) == ("FAILED", 137, "rank 1 killed by signal 9")
    finally:
        subprocess.run(["slurmd", "-N", lost], env=os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin"}, check=True)
