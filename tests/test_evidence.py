import pytest

from kit.evidence import resolve
from kit.joblog import cause_in, dead_rank

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


def start(t=0):
    return {"source": "start", "restart": 0, "time": t}


def left(code, t=50, signal=""):
    return {"source": "exit", "restart": 0, "exit_code": code, "signal": signal, "time": t}


def said(state, t=60, **more):
    return {"source": "slurm", "state": state, "time": t, **more}


GONE = {"source": "gone", "time": 1000}
BEAT = {"source": "heartbeat", "time": 45}


@pytest.mark.parametrize(
    ("records", "log", "state", "exit_code"),
    [
        ([], "", "LOST", None),
        ([said("PENDING")], "", "PENDING", None),
        ([said("RUNNING"), start()], "", "RUNNING", None),
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
    ],
)  # fmt: skip
def test_the_end_is_judged_from_what_is_recorded_and_never_guessed(records, log, state, exit_code):
    found = resolve("r", "7", records, log, now=2000)
    assert (found.state, found.exit_code) == (state, exit_code)


def test_a_disagreement_is_shown():
    found = resolve("r", "7", [start(), left(0), said("TIMEOUT", exit_code=0)], "", now=2000)
    assert found.state == "TIMEOUT"
    assert found.conflicts == ["the script left exit code 0, but Slurm says TIMEOUT"]


def test_a_run_that_was_never_submitted_says_so():
    assert resolve("r", None, [], "", 0).state == "NOT SUBMITTED"


def test_the_first_dead_rank_is_named_and_not_the_one_that_was_ended_with_it():
    assert dead_rank(AGENT.format(code=3)) == (0, 3)
    assert cause_in(AGENT.format(code=3)) == "rank 0 exited with code 3"
    assert cause_in(AGENT.format(code=-9)) == "rank 0 killed by signal 9"


def test_what_the_dead_rank_said_is_the_cause():
    log = "[rank 1 on node2] RuntimeError: peer closed\n[rank 0 on node1] ValueError: bad lr\n" + AGENT.format(code=1)
    assert cause_in(log) == "[rank 0 on node1] ValueError: bad lr"


def test_slurms_own_word_comes_first():
    assert cause_in(LIMIT + AGENT.format(code=-15)) == "Slurm ended it on node1: CANCELLED DUE TO TIME LIMIT"
