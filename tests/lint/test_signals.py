"""Which warning signals reach a program, tried with a live Slurm: what rule KS506 goes by.

Slurm looks each half minute whether a time limit is near, so it sends the signal up to half a minute early. The jobs
run side by side, on a Slurm that no other test uses: they fill its nodes, and wait.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.lint.lint import lint

# Notes each signal that it gets, and again when it has "saved" for three seconds.
PROGRAM = """\
import os, signal, time
def note(text):
    with open(os.environ["NOTES"], "a") as file:
        file.write(text + "\\n")
def save(number, frame):
    name = signal.Signals(number).name.removeprefix("SIG")
    note("got " + name)
    time.sleep(3)
    note("saved " + name)
    os._exit(0)
for name in ("USR1", "USR2", "TERM", "INT", "HUP"):
    signal.signal(getattr(signal, "SIG" + name), save)
note("ready")
while True:
    time.sleep(0.1)
"""
LIMIT, EARLY = "--time=1", 15  # minutes, seconds: the programs have started before the first possible signal
WAIT = "p=$!\nwait $p\nwait $p"
# The value of --signal, the body of the script, and whether the program saves because of that signal.
TRIALS = [
    ("USR2", "PYTHON", False),
    ("USR2", "exec PYTHON", False),
    ("USR2", "srun PYTHON", True),
    ("USR2", "exec srun PYTHON", True),
    ("USR2", "srun bash -c 'exec PYTHON'", True),
    ("USR2", f"trap 'kill -USR2 $p' USR2\nPYTHON &\n{WAIT}", False),
    ("B:USR2", "PYTHON", False),
    ("B:USR2", "exec PYTHON", True),
    ("B:USR2", "srun PYTHON", False),
    ("B:USR2", "exec srun PYTHON", True),
    ("B:TERM", "exec srun PYTHON", False),
    ("B:USR2", f"trap 'kill -USR2 $p' USR2\nsrun PYTHON &\n{WAIT}", True),
    ("B:TERM", f"trap 'kill -TERM $p' TERM\nsrun PYTHON &\n{WAIT}", False),
    ("B:USR2", f"trap 'kill -INT $p' USR2\nsrun PYTHON &\n{WAIT}", False),
    ("B:USR2", f"trap 'kill -USR2 $p' USR2\nPYTHON &\n{WAIT}", True),
    ("B:USR2", "trap true USR2\nsrun PYTHON", False),
]


def submit(folder: Path, signal: str, body: str) -> str:
    """Submit a job whose program writes folder/notes. Returns its id."""
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    head = f"#SBATCH {LIMIT} --signal={signal}@{EARLY} --ntasks=1 --overcommit --mem=10 --output={folder}/log\n"
    program = f"{sys.executable} {folder}/program.py"
    script = f"#!/bin/bash\n{head}export NOTES={folder}/notes\n{body.replace('PYTHON', program)}\n"
    (folder / "job.sh").write_text(script)
    command = ["sbatch", "--parsable", f"--chdir={folder}", f"{folder}/job.sh"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def wait_until_ended(jobs: list[str]) -> None:
    while subprocess.run(["squeue", "-h", "-j", ",".join(jobs)], capture_output=True, text=True).stdout.strip():
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.slurm
def test_the_rule_says_of_each_signal_what_slurm_does(live_slurm: Path, tmp_path: Path) -> None:
    jobs = [submit(tmp_path / str(number), signal, body) for number, (signal, body, _) in enumerate(TRIALS)]
    wait_until_ended(jobs)
    for number, (signal, body, expected) in enumerate(TRIALS):
        notes = (tmp_path / str(number) / "notes").read_text()
        name = signal.removeprefix("B:")
        early = "saved" in notes and not is_at_time_limit(tmp_path / str(number) / "log")
        assert notes.startswith("ready\n"), (signal, body)
        assert (f"saved {name}\n" in notes and early) is expected, (signal, body, notes)
        head = f"#SBATCH {LIMIT} --nodes=1 --signal={signal}@{EARLY}\n"
        script = f"#!/bin/bash\n{head}{body.replace('PYTHON', 'python t.py')}\n"
        assert ("KS506" in {finding.rule for finding in lint(script)}) is not expected, (signal, body)


def is_at_time_limit(log: Path) -> bool:
    return bool(re.search("DUE TO TIME LIMIT", log.read_text()))
