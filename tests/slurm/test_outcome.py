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
def test_the_end_is_judged_from_what_is_recorded_and_never_guessed(found, log, state, exit_code):
    found = resolve("r", "7", found, log, now=2000)
    assert (found.state, found.exit_code) == (state, exit_code)


def test_every_row_of_the_table_decides_a_case():
    def deciding(found, log):
        signs = Evidence.of([parse_record(record) for record in found], log, now=2000).signs
        return next(rule for rule in RULES if rule.matches(signs))

    assert {deciding(found, log) for found, log, *_ in CASES} == set(RULES)


def test_a_disagreement_is_shown():
    found = resolve("r", "7", [start(), left(0), said("TIMEOUT", exit_code=0)], "", now=2000)
    assert found.state == "TIMEOUT"
    assert found.conflicts == ["the script left exit code 0, but Slurm says TIMEOUT"]


def test_a_run_that_was_never_submitted_says_so():
    assert resolve("r", None, [], "", 0).state == "NOT SUBMITTED"


def test_the_root_cause_is_named_and_not_a_rank_that_torchrun_had_to_kill():
    log = AGENT.format(code=1).replace("exitcode  : -15", "exitcode  : -9")
    assert find_dead_rank(log) == (0, 1)
    assert find_cause(log).text == "rank 0 exited with code 1"


def test_the_first_dead_rank_is_named_and_not_the_one_that_was_ended_with_it():
    assert find_dead_rank(AGENT.format(code=3)) == (0, 3)
    assert find_cause(AGENT.format(code=3)).text == "rank 0 exited with code 3"
    assert find_cause(AGENT.format(code=-9)).text == "rank 0 killed by signal 9"


def test_what_the_dead_rank_said_is_the_cause():
    log = "[rank 1 on node2] RuntimeError: peer closed\n[rank 0 on node1] ValueError: bad lr\n" + AGENT.format(code=1)
    assert find_cause(log).text == "[rank 0 on node1] ValueError: bad lr"


def test_slurms_own_word_comes_first():
    assert find_cause(LIMIT + AGENT.format(code=-15)).text == "Slurm ended it on node1: CANCELLED DUE TO TIME LIMIT"


def test_preemption_is_an_end_only_when_slurm_does_not_start_the_job_again():
    again = said("PREEMPTED", requeue=True)
    first, settled = (resolve("r", "7", [start(), r], "", now=2000) for r in (again, again | {"again": True}))
    assert (first.state, first.ended, settled.ended) == ("PREEMPTED", False, True)
    assert resolve("r", "7", [start(), said("PREEMPTED", requeue=False)], "", now=2000).ended
    assert resolve("r", "7", [start(), again, GONE], "", now=2000).ended


def test_a_traceback_behind_a_pipe_is_a_failure_and_one_that_the_script_outlived_a_doubt():
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


@pytest.mark.parametrize(
    ("found", "log", "cause"),
    [
        ([said("FAILED", exit_code=0, signal="53", nodes="node1")], "", "It never started on node1: the folder"),
        ([said("CANCELLED", reason="DependencyNeverSatisfied")], "", "The run that it was to follow did not end well."),
        ([said("NODE_FAIL", nodes="node[1-2]")], "", "A node failed on node[1-2]."),
        ([start(), left(137), GONE], "", "The script was killed by signal 9."),
        ([start(), left(2), GONE], OOM + AGENT.format(code=-9), "rank 0 killed by signal 9 (out of memory)"),
        ([start(), left(1), GONE], "[rank1]: " + TRACE.replace("\n", "\n[rank1]: "), "ValueError: bad lr"),
        ([start(), left(75) | {"reason": "preempted, saved checkpoint-8"}, GONE], "", "preempted, saved checkpoint-8"),
        ([start(5), GONE], "", "Nothing recorded how it ended; the last sign is start: "),
    ],
)  # fmt: skip
def test_a_bad_end_has_one_line_of_cause(found, log, cause):
    assert resolve("r", "7", found, log, now=2000).cause.startswith(cause)


def test_a_record_that_was_purged_beside_a_done_marker_is_an_end_and_not_a_job_that_runs_for_ever():
    """As reported of NVIDIA/Model-Optimizer, pull request 1900."""
    found = resolve("r", "7", [start(), left(0), GONE, BEAT], "", now=2000)
    assert found.ended and found.state == "COMPLETED"


def test_job_ids_are_given_again_and_torn_lines_are_no_records(tmp_path):
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


def test_an_array_is_as_bad_as_its_worst_task_and_not_over_before_the_last():
    ok = RunState("r", "7", JobState.COMPLETED, 0)
    bad = RunState("r", "7", JobState.FAILED, 3, cause="x")
    runs = RunState("r", "7", JobState.RUNNING)
    over, live = combine_tasks("r", "7", {0: ok, 1: bad, 2: ok}), combine_tasks("r", "7", {0: bad, 1: runs})
    assert (over.state, over.exit_code, over.ended) == ("FAILED", 3, True)
    assert over.cause == "3 tasks: 2 COMPLETED, 1 FAILED; x"
    assert (live.state, live.ended, live.tasks) == ("RUNNING", False, {0: "FAILED", 1: "RUNNING"})
    assert combine_tasks("r", "7", {0: ok}).state == "COMPLETED"
