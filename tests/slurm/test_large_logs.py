"""A job's log of 5 GB, without blocks on the disk but for its end: commands read only the end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.slurm import logs
from kit.slurm.run import Run
from kit.slurm.states import JobState, SlurmRecord
from tests.conftest import add_record

ROOT = Path(__file__).resolve().parents[2]
GB, MB = 10**9, 1 << 20
END = '\nTraceback (most recent call last):\n  File "x.py", line 1\nValueError: too many nodes\n'


# The most memory that the process itself has had; getrusage has that of the process which started it, too.
MEASURED = """
import atexit, re, runpy, sys
status = "/proc/self/status"
atexit.register(lambda: print("\\n" + re.search(r"VmHWM:\\s+(\\d+)", open(status).read())[1]))
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def failed(local):
    """A run of a script that failed, with a log of 5 GB and one of a rank that is as long."""
    run = Run.create_for_script("#!/bin/bash\n", local, "own")
    run.note(job_id="7", submitted=time.time() - 100)
    add_record(run, SlurmRecord, state=JobState.FAILED, exit_code=1)
    for path in (run.log, run.path / "logs" / "rank-000.log"):
        path.touch()
        os.truncate(path, 5 * GB)
        with path.open("a") as stream:
            stream.write(END)
    return run


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["kit.cli", "state", "RUN"], "ValueError: too many nodes"),
        (["kit.cli", "tail", "RUN"], "ValueError: too many nodes"),
        (["kit.cli", "tail", "RUN", "--follow"], "ValueError: too many nodes"),
        (["kit.cli", "runs"], "FAILED"),
        (["kit.cli", "watch", "RUN", "--once"], "failed (ValueError: too many nodes)"),
        (["kit.slurm.failure", "RUN", "1"], ""),
    ],
)
def test_a_command_on_a_log_of_5_gb_takes_at_most_100_mb(failed, command, said):
    words = [str(failed.path) if word == "RUN" else word for word in command]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert said in done.stdout
    assert int(done.stdout.split()[-1]) * 1024 <= 100 * MB


def test_what_a_log_gained_since_the_last_look_is_read_in_parts(tmp_path):
    import tracemalloc

    path = tmp_path / "slurm-1.out"
    path.write_text("first\n")
    ended = iter([False, True, True])

    def finished() -> bool:
        over = next(ended)
        if over:  # 1 GB without an end of a line, and a line
            os.truncate(path, GB)
            with path.open("a") as stream:
                stream.write("\nlast\n")
        return over

    tracemalloc.start()
    lines = logs.follow(lambda: [path], finished)
    found = [line[-20:] for line in lines]
    highest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found[0], found[-1]) == ("[slurm-1] first", "[slurm-1] last")
    assert highest < 50 * MB
