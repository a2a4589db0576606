import pytest

from kit.errors import InputError
from kit.slurm.logs import LogTail, SlurmKill, find_cause, find_slurm_kill, follow, last_lines

KILLED_STEP = "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-28T00:10:00{} ***\n"


def over():
    return True


@pytest.mark.parametrize(("lines", "shown"), [(0, ""), (1, "c"), (2, "b\nc"), (9, "a\nb\nc")])
def test_as_many_last_lines_are_shown_as_are_asked_for(tmp_path, lines, shown):
    (tmp_path / "log").write_text("a\nb\nc\n")
    assert last_lines(tmp_path / "log", lines) == shown


def test_a_negative_number_of_lines_is_refused(tmp_path):
    (tmp_path / "log").write_text("a\n")
    with pytest.raises(InputError, match="-5 lines were asked for"):
        last_lines(tmp_path / "log", -5)
    with pytest.raises(InputError, match="-5 lines were asked for"):
        list(follow(lambda: [tmp_path / "log"], over, lines=-5))


def test_at_most_a_mebibyte_of_a_log_is_read(tmp_path):
    (tmp_path / "log").write_bytes(b"first\n" + b"x" * 2**20)
    assert last_lines(tmp_path / "log", 10) == "x" * 2**20


@pytest.mark.parametrize(("lines", "shown"), [(0, []), (1, ["[rank-000] b"]), (9, ["[rank-000] a", "[rank-000] b"])])
def test_a_followed_log_begins_with_its_last_lines(tmp_path, lines, shown):
    (tmp_path / "rank-000.log").write_text("a\nb\n")
    assert list(follow(lambda: [tmp_path / "rank-000.log"], over, lines)) == shown


def test_a_last_line_without_a_line_break_is_followed_too(tmp_path):
    """A rank that was killed leaves one."""
    log = tmp_path / "rank-001.log"
    log.write_text("step 1\nstep 2 lo")
    assert list(follow(lambda: [log], over)) == ["[rank-001] step 1", "[rank-001] step 2 lo"]


def test_a_line_is_shown_once_and_complete_while_it_is_written(tmp_path, monkeypatch):
    log, written = tmp_path / "out", iter(["b", "c\nd"])
    log.write_text("a\n")

    def write_more(_):
        with log.open("a") as stream:
            stream.write(next(written))

    monkeypatch.setattr("kit.slurm.logs.time.sleep", write_more)
    rounds = iter([False, False, True])
    assert list(follow(lambda: [log], lambda: next(rounds))) == ["[out] a", "[out] bc", "[out] d"]


def test_a_log_that_appears_later_is_shown_from_its_beginning(tmp_path, monkeypatch):
    log = tmp_path / "out"
    monkeypatch.setattr("kit.slurm.logs.time.sleep", lambda _: log.write_text("a\nb\n"))
    rounds = iter([False, True])
    found = follow(lambda: [log] if log.exists() else [], lambda: next(rounds), lines=1)
    assert list(found) == ["[out] a", "[out] b"]


def test_the_ends_of_logs_are_shown_by_name():
    tail = LogTail("r", {"slurm-7.out": "a\nb", "rank-000.log": "c"})
    assert str(tail) == "== slurm-7.out\na\nb\n== rank-000.log\nc"
    assert tail.as_dict() == {"run": "r", "logs": {"slurm-7.out": ["a", "b"], "rank-000.log": ["c"]}}
    assert str(LogTail("r", {})) == "r has no such log yet."


def test_a_cancelled_step_is_an_end_of_the_job_only_with_a_reason():
    assert find_slurm_kill(KILLED_STEP.format("")) is None
    assert find_slurm_kill(KILLED_STEP.format(" DUE TO TIME LIMIT")) == SlurmKill("node1", "TIMEOUT", "TIME LIMIT")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            KILLED_STEP.format(" DUE TO TIME LIMIT") + "[rank 0 on node1] ValueError: bad lr\n",
            "Slurm ended it on node1: CANCELLED DUE TO TIME LIMIT",
        ),
        (
            "[start on node2] /runs/x is not here: every node must see paths.runs\n",
            "[start on node2] /runs/x is not here: every node must see paths.runs",
        ),
        ("rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 5)\n", "rank 1 killed by signal 9"),
        ("srun: error: node2: task 5: Exited with exit code 3\n", "task 5 on node2: Exited with exit code 3"),
        ("torch.OutOfMemoryError: CUDA out of memory\n", "out of memory"),
    ],
)
def test_the_cause_is_taken_from_the_log(log, cause):
    assert find_cause(log) == cause


def test_the_cause_has_the_exception_of_the_rank_that_ended_the_job():
    """As when the disk is full at a save: the job's log has the end of that rank's log."""
    failed = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 9)\n"
    end = "    stream.write(data)\nOSError: [Errno 28] No space left on device\n"
    log = f"ChildFailedError: \n{failed}Last lines of logs/rank-001.log:\n{end}"
    assert find_cause(log) == "rank 1 exited with code 1: OSError: [Errno 28] No space left on device"
    assert find_cause(log.replace("001.log", "000.log")) == "rank 1 exited with code 1"


def test_a_log_without_a_sign_of_failure_has_no_cause():
    assert find_cause("step 40/40  saved checkpoint-40\n") == ""


def test_the_lines_of_an_earlier_start_are_left_out(tmp_path):
    log = tmp_path / "log"
    log.write_text("first start\nTraceback\nsecond start\n")
    assert last_lines(log, 10, len("first start\nTraceback\n")) == "second start"
    assert last_lines(log, 10, 10_000).count("\n") == 2  # the log was replaced by a shorter one
