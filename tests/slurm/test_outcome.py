import pytest

from kit.slurm import outcome
from kit.slurm.ledger import read_records
from kit.slurm.logs import find_cause, find_dead_rank
from kit.slurm.outcome import RULES, RunState, combine_tasks
from kit.slurm.run import Run
from kit.slurm.signs import Evidence
from kit.slurm.states import GoneRecord, JobState, SlurmRecord, parse_record
from tests.conftest import add_record

AGENT = """
Failures:
[1]:
  time      : 2026-11-28_00:06:08
  host      : node2
  rank      : 1 (local_rank: 0)
  exitcode  : -15 (pid: 9177)  (SIGTERM)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_00:06:08
  host      : node1
  rank      : 0 (local_rank: 0)
  exitcode  : {code} (pid: 9176)
  error_file: <N/A>
"""
LIMIT = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-28T00:10:00 DUE TO TIME LIMIT ***\n"
SCANCEL = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-28T00:10:00 ***\n"


def resolve(run, job_id, found, log, now):
    """Judge records as the ledger of a run has them; those of the first version, which have no `version`."""
    return outcome.resolve(run, job_id, [parse_record(record) for record in found], log, now)


def start(t=0):
    return {"source": "start", "restart": 0, "time": t}


def left(code, t=50, signal=""):
    return {"source": "exit", "restart": 0, "exit_code": code, "signal": signal, "time": t}


def trapped(code, t=50):
    """What the EXIT trap in a user's own script leaves."""
    return {"source": "exit", "restart": 0, "exit_code": code, "time": t}


def said(state, t=60, **more):
    return {"source": "slurm", "state": state, "time": t, **more}


GONE = {"source": "gone", "time": 1000}
KILLED = "/var/spool/slurmd/job00007/slurm_script: line 4: 31 Killed  python train.py\n"
# Recorded from slurmstepd 22.05 and 23.11 on clusters that enforce memory with cgroups.
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch. Some of the step tasks have been OOM Killed.\n"
OOM_OLD = (
    "slurmstepd: error: Detected 1 oom-kill event(s) in step 7.0 cgroup. Some of your processes may have been killed\n"
)
REQUEUE = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 1970-01-01T00:00:10 DUE TO JOB REQUEUE ***\n"
PREEMPTED = REQUEUE.replace("JOB REQUEUE", "PREEMPTION")
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\nValueError: bad lr\n'
SILENT = {"source": "queue", "note": "Slurm does not answer", "time": 1000}
BEAT = {"source": "heartbeat", "time": 45}


# Records, the job's log, and the state and exit code that they prove.
CASES = [
    ([], "", "LOST", None),
    ([said("PENDING")], "", "PENDING", None),
    ([said("RUNNING"), start()], "", "RUNNING", None),
    ([said("PENDING", t=5), start(10)], "", "RUNNING", None),  # it has begun since Slurm was asked
    ([start(), left(0), said("COMPLETED", exit_code=0)], "", "COMPLETED", 0),
    ([start(), left(0), GONE], "", "COMPLETED", 0),
    ([start(), left(3), GONE], "", "FAILED", 3),
    ([start(), left(137), GONE], "", "FAILED", 137),
    ([start(), left(143, signal="TERM"), GONE], LIMIT, "TIMEOUT", 143),
    ([start(), left(143, signal="TERM"), GONE], SCANCEL, "CANCELLED", 143),
    ([start(), {"source": "cancel", "time": 40}, left(143), GONE], "", "CANCELLED", 143),
    ([said("PENDING"), {"source": "cancel", "time": 70}, GONE], "", "CANCELLED", None),
    ([said("TIMEOUT", exit_code=0), start()], "", "TIMEOUT", 0),
    ([said("RUNNING"), start(), BEAT, GONE], "", "LOST", None),
    ([said("RUNNING"), start(), BEAT | {"time": 1990}, GONE], "", "RUNNING", None),
    ([left(1, t=10), start(20) | {"restart": 1}, BEAT | {"time": 1990}, GONE], "", "RUNNING", None),
    # Slurm has not spoken yet: the script has ended, but what ended it is not known.
    ([start(), left(0)], "", "COMPLETING", 0),
    ([said("RUNNING"), start(), left(143)], "", "COMPLETING", 143),
    ([{"source": "submit", "time": 0}], "", "PENDING", None),
    ([{"source": "submit", "time": 0}, start()], "", "RUNNING", None),
    # It is silent: the script's word is taken.
    ([said("RUNNING"), start(), left(3), SILENT], "", "FAILED", 3),
    # Memory: Slurm's own word, or its line in the log. Here memory is not enforced, so these are recorded.
    ([start(), left(137), said("OUT_OF_MEMORY", exit_code=0)], OOM, "OUT_OF_MEMORY", 137),
    ([start(), left(137), GONE], KILLED + OOM, "OUT_OF_MEMORY", 137),
    ([start(), left(137), GONE], OOM_OLD, "OUT_OF_MEMORY", 137),
    ([start(), left(137), GONE], KILLED, "FAILED", 137),
    # A later start says what counts; what an earlier one left does not.
    ([start(), left(143), said("PENDING", restart=1)], REQUEUE, "PENDING", None),
    ([start(), left(143), start(20) | {"restart": 1}, left(0) | {"restart": 1}, GONE], REQUEUE, "COMPLETED", 0),
    ([start(), said("PREEMPTED", restart=0), start(90) | {"restart": 1}], PREEMPTED, "RUNNING", None),
    ([start(), left(75) | {"reason": "time limit near, saved checkpoint-40, requeued"}, GONE], "", "LOST", 75),
    # A signal that ends bash leaves the exit code of the command before it, in the script of a user.
    ([start(), trapped(0), GONE], SCANCEL, "CANCELLED", 0),
    ([start(), {"source": "cancel", "time": 40}, trapped(0), GONE], "", "CANCELLED", 0),
    ([start(), trapped(0), GONE], "", "COMPLETED", 0),
    # No exit file: the log's line is the only witness; without one it is lost, whatever the rest of the log says.
    ([start(), GONE], LIMIT, "TIMEOUT", None),
    ([start(), GONE], PREEMPTED.replace("1970", "2026"), "PREEMPTED", None),
    ([start(), GONE], "step 40/40  saved checkpoint-40\n", "LOST", None),
    # Accounting, asked when Slurm has forgotten.
    ([start(), GONE, {"source": "sacct", "state": "FAILED", "exit_code": 1, "time": 1001}], "", "FAILED", 1),
    ([start(), GONE, {"source": "sacct", "state": "RUNNING", "time": 1001}], "", "LOST", None),
]  # fmt: skip


@pytest.mark.parametrize(("found", "log", "state", "exit_code"), CASES)
def test_the_final_state_follows_from_the_records(found, log, state, exit_code):
    found = resolve("r", "7", found, log, now=2000)
    assert (found.state, found.exit_code) == (state, exit_code)


def test_every_row_of_the_table_decides_a_case():
    def deciding(found, log):
        signs = Evidence.of([parse_record(record) for record in found], log, now=2000).signs
        return next(rule for rule in RULES if rule.matches(signs))

    assert {deciding(found, log) for found, log, *_ in CASES} == set(RULES)


def test_a_job_without_a_heartbeat_that_slurm_has_as_running_is_doubtful():
    """All slurmstepd of a job were killed: Slurm has it as RUNNING until its time limit."""
    found = resolve("r", "7", [said("RUNNING"), start(), BEAT], "", now=2000)
    assert (found.state, found.confidence) == ("RUNNING", "medium")
    assert "has not done so for 1955 s" in found.conflicts[0]
    for young in (BEAT | {"time": 1990}, {"source": "log", "time": 1990}):
        found = resolve("r", "7", [said("RUNNING"), start(), BEAT, young], "", now=2000)
        assert (found.confidence, found.conflicts) == ("high", [])


def test_a_training_that_writes_nothing_while_its_script_lives_stalls():
    job, wrote = [said("RUNNING"), start(), BEAT | {"time": 1000}], {"source": "progress", "time": 500, "step": 5}
    found = resolve("r", "7", [*job, wrote | {"next_s": 2.0}], "", 1010)
    assert (found.state, found.stalled_s, found.ended) == ("RUNNING", 500, False)
    assert "written nothing for 500 s, and before that a line every 2 s" in found.cause
    slow, silent = wrote | {"next_s": 60.0}, wrote | {"phase": "saving"}  # it may take long
    for known in (slow, silent):
        assert resolve("r", "7", [*job, known], "", 1010).stalled_s == 0
    ended = [start(), left(3), GONE, BEAT | {"time": 1000}, wrote | {"next_s": 2.0}]
    assert resolve("r", "7", ended, "", 2000).stalled_s == 0


def test_the_answer_about_a_local_job_is_not_called_slurms():
    record = [start(), said("RUNNING")]
    assert any(line.startswith("slurm: ") for line in resolve("run", "7", record, "", 61).evidence)
    local = resolve("run", "local-7", record, "", 61).evidence
    assert any(line.startswith("local runner: ") for line in local) and not any("slurm" in line for line in local)


def test_a_young_log_holds_back_that_a_job_is_lost():
    """Also where the script is not written in bash, and so has no heartbeat."""
    records = [said("RUNNING"), GONE]
    assert resolve("r", "7", [*records, {"source": "log", "time": 1990}], "", now=2000).state == "RUNNING"
    assert resolve("r", "7", [*records, {"source": "log", "time": 1800}], "", now=2000).state == "LOST"
    ahead = {"source": "heartbeat", "time": 99_000}  # of a clock that was ahead once, and not of a live job
    assert resolve("r", "7", [*records, ahead], "", now=2000).state == "LOST"


def test_the_order_of_the_ledger_counts_where_the_clock_of_one_host_was_ahead():
    pending, running = said("PENDING", t=9000), said("RUNNING", t=1500)
    assert resolve("r", "7", [pending, running], "", now=2000).state == "RUNNING"
    gone = GONE | {"time": 9000}
    assert resolve("r", "7", [pending, gone, running], "", now=2000).state == "RUNNING"
    assert resolve("r", "7", [running, gone], "", now=9900).state == "LOST"


def test_what_concerned_a_job_before_it_was_requeued_does_not_count():
    cancelled = [
        {"source": "submit", "time": 0}, start(), {"source": "cancel", "time": 40}, left(143, signal="TERM"),
        said("CANCELLED", restart=0),
    ]  # fmt: skip
    requeued = [*cancelled, {"source": "requeue", "restart": 1, "time": 70}]
    assert resolve("r", "7", requeued, "", now=2000).state == "PENDING"
    again = [*requeued, start(90) | {"restart": 1}, left(3, t=95) | {"restart": 1}, GONE]
    assert (found := resolve("r", "7", again, "", now=2000)).state == "FAILED" and found.exit_code == 3


def test_a_disagreement_is_shown():
    found = resolve("r", "7", [start(), left(0), said("TIMEOUT", exit_code=0)], "", now=2000)
    assert found.state == "TIMEOUT"
    assert found.conflicts == ["the script left exit code 0, but Slurm says TIMEOUT"]


def test_a_run_that_was_never_submitted_is_not_submitted():
    assert resolve("r", None, [], "", 0).state == "NOT SUBMITTED"


def test_the_root_cause_is_named_and_not_a_rank_that_torchrun_had_to_kill():
    log = AGENT.format(code=1).replace("exitcode  : -15", "exitcode  : -9")
    assert find_dead_rank(log) == (0, 1)
    assert find_cause(log) == "rank 0 exited with code 1"


def test_the_first_dead_rank_is_named_and_not_the_one_that_was_ended_with_it():
    assert find_dead_rank(AGENT.format(code=3)) == (0, 3)
    assert find_cause(AGENT.format(code=3)) == "rank 0 exited with code 3"
    assert find_cause(AGENT.format(code=-9)) == "rank 0 killed by signal 9"


def test_the_message_of_the_failed_rank_is_the_cause():
    log = "[rank 1 on node2] RuntimeError: peer closed\n[rank 0 on node1] ValueError: bad lr\n" + AGENT.format(code=1)
    assert find_cause(log) == "[rank 0 on node1] ValueError: bad lr"


def test_slurms_message_takes_precedence_over_other_causes():
    assert find_cause(LIMIT + AGENT.format(code=-15)) == "Slurm ended it on node1: CANCELLED DUE TO TIME LIMIT"


def test_preemption_is_final_only_if_slurm_does_not_restart_the_job():
    again = said("PREEMPTED", requeue=True)
    first, settled = (resolve("r", "7", [start(), r], "", now=2000) for r in (again, again | {"again": True}))
    assert (first.state, first.ended, settled.ended) == ("PREEMPTED", False, True)
    assert resolve("r", "7", [start(), said("PREEMPTED", requeue=False)], "", now=2000).ended
    assert resolve("r", "7", [start(), again, GONE], "", now=2000).ended


def test_a_traceback_at_the_end_of_the_log_is_a_failure_and_an_earlier_one_a_conflict():
    ended, outlived, ignored = (
        resolve("r", "7", [start(), left(0), said("COMPLETED", exit_code=0)], log, now=2000)
        for log in (TRACE, TRACE + "evaluation done\n", "Exception ignored in: <function f>\n" + TRACE)
    )
    assert (ended.state, ended.cause, len(ended.conflicts)) == ("FAILED", "ValueError: bad lr", 1)
    assert (outlived.state, outlived.confidence, len(outlived.conflicts)) == ("COMPLETED", "medium", 1)
    assert (ignored.state, ignored.confidence, ignored.conflicts) == ("COMPLETED", "high", [])


def test_a_step_that_failed_inside_a_job_that_completed_is_shown():
    record = "JobId=7 JobState=COMPLETED ExitCode=0:0 DerivedExitCode=3:0"
    log = "srun: error: node2: task 5: Exited with exit code 3\n"
    found = resolve("r", "7", [start(), left(0), said("COMPLETED", exit_code=0, verbatim=record)], log, now=2000)
    assert (found.state, found.cause) == ("COMPLETED", "task 5 on node2: Exited with exit code 3")
    assert "a step ended with exit code 3" in found.conflicts[0]
    again = {"restart": 1}  # Slurm keeps DerivedExitCode of the start before
    records = [start() | again, left(0) | again, said("COMPLETED", exit_code=0, verbatim=record, restart=1)]
    assert resolve("r", "7", records, "", now=2000).conflicts == []


@pytest.mark.parametrize(
    ("found", "log", "cause"),
    [
        ([said("FAILED", exit_code=0, signal="53", nodes="node1")], "", "It never started on node1: the folder"),
        ([said("CANCELLED", reason="DependencyNeverSatisfied")], "", "The run that it was to follow did not end well."),
        ([said("NODE_FAIL", nodes="node[1-2]")], "", "A node failed on node[1-2]."),
        ([start(), left(137), GONE], "", "The script was killed by signal 9."),
        ([start(), said("FAILED", exit_code=0, signal="9", nodes="node1")], "srun: error: node1: task 0: Killed\n",
         "The script was killed by signal 9 on node1. task 0 on node1: Killed"),
        ([start(), left(2), GONE], OOM + AGENT.format(code=-9), "rank 0 killed by signal 9 (out of memory)"),
        ([start(), left(1), GONE], "[rank1]: " + TRACE.replace("\n", "\n[rank1]: "), "ValueError: bad lr"),
        ([start(), left(75) | {"reason": "preempted, saved checkpoint-8"}, GONE], "", "preempted, saved checkpoint-8"),
        ([start(5), GONE], "", "Nothing recorded how it ended; the last sign is start: "),
    ],
)  # fmt: skip
def test_a_failure_has_a_cause_of_one_line(found, log, cause):
    assert resolve("r", "7", found, log, now=2000).cause.startswith(cause)


def test_an_exit_record_of_a_job_that_slurm_forgot_is_final():
    """As reported of NVIDIA/Model-Optimizer, pull request 1900."""
    found = resolve("r", "7", [start(), left(0), GONE, BEAT], "", now=2000)
    assert found.ended and found.state == "COMPLETED"


def test_records_of_an_earlier_job_with_the_same_id_and_torn_lines_are_ignored(tmp_path):
    run = Run(tmp_path)
    (tmp_path / "state").mkdir()
    run.note(job_id="7", submitted=1_000_000.0)
    add_record(run, SlurmRecord, state=JobState.FAILED, time=500.0)  # the same id, long ago
    add_record(run, SlurmRecord, state=JobState.RUNNING, time=1_000_010.0)
    with (tmp_path / "state" / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"time": 1000020, "source": "slurm", "job')
    (tmp_path / "state" / "exit.0.json").write_text("{")
    (tmp_path / "state" / ".exit.1.json").write_text("{}")
    assert [record.state for record in read_records(run)] == ["RUNNING"]


def test_a_run_whose_state_folder_is_gone_can_still_be_judged_and_written(tmp_path):
    run = Run(tmp_path)
    run.note(job_id="7")
    assert read_records(run) == []
    add_record(run, GoneRecord)
    assert [record.witness for record in read_records(run)] == ["gone"]


def test_an_array_has_the_state_of_its_worst_task_after_all_tasks_ended():
    ok = RunState("r", "7", JobState.COMPLETED, 0)
    bad = RunState("r", "7", JobState.FAILED, 3, cause="x")
    runs = RunState("r", "7", JobState.RUNNING)
    over, live = combine_tasks("r", "7", {0: ok, 1: bad, 2: ok}), combine_tasks("r", "7", {0: bad, 1: runs})
    assert (over.state, over.exit_code, over.ended) == ("FAILED", 3, True)
    assert over.cause == "3 tasks: 2 COMPLETED, 1 FAILED; x"
    assert (live.state, live.ended, live.tasks) == ("RUNNING", False, {0: "FAILED", 1: "RUNNING"})
    assert combine_tasks("r", "7", {0: ok}).state == "COMPLETED"
