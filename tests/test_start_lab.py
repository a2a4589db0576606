"""JupyterLab on a compute node of the live Slurm: the log alone is enough to reach it, and only its owner can."""

import json
import os
import re
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import psutil
import pytest

from kit.lint.lint import lint_file
from tests import conftest
from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "env" / "start_lab.sbatch"
until = partial(conftest.until, seconds=120)
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def test_the_linter_has_nothing_to_say_of_it():
    assert lint_file(SCRIPT) == []


def fetch(port, path, token=""):
    request = urllib.request.Request(f"http://localhost:{port}{path}", headers={"Authorization": f"token {token}"})
    try:
        with DIRECT.open(request, timeout=20) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:  # it is not up yet
        return None


def submit(*options, expect=0):
    arguments = ["--allow-root"] if os.geteuid() == 0 else []
    done = subprocess.run(["sbatch", "--parsable", *options, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == expect, done.stderr
    return done.stdout.strip()


@pytest.fixture
def lab(live_slurm, tmp_path, monkeypatch):
    """A submitted Lab: its job, its log, the port of the tunnel line, the file that holds its token."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LAB_PYTHON", sys.executable)
    monkeypatch.setenv("LAB_LOGIN", "me@login")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_TOKEN", "taken-from-elsewhere")
    job = submit("--time=10")
    log = folder / f"lab-{job}.log"
    text = lambda: log.read_text() if log.exists() else ""  # noqa: E731
    line = until(lambda: re.search(r"^  ssh -N -L (\d+):127\.0\.0\.1:\1 me@login$", text(), re.MULTILINE))
    yield job, text, line[1], Path(re.search(r"^  cat (.+)$", text(), re.MULTILINE)[1])
    subprocess.run(["scancel", job], check=True)


@pytest.mark.slow
@pytest.mark.slurm
def test_the_log_gives_the_tunnel_line_and_the_token_stays_in_a_file_of_its_owner(lab, tmp_path):
    job, text, port, token_file = lab
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    token = token_file.read_text()
    assert until(lambda: fetch(port, "/api"))["version"]
    assert fetch(port, "/api/contents", token)["content"][0]["name"] == f"lab-{job}.log", "opens where it was submitted"
    assert fetch(port, "/api/contents", "taken-from-elsewhere") == fetch(port, "/api/contents") == 403
    own = [p for p in psutil.process_iter(["cmdline"]) if f"--port={port}" in (p.info["cmdline"] or [])]
    assert own and not [p for p in psutil.process_iter(["cmdline"]) if token in " ".join(p.info["cmdline"] or [])]
    assert token not in "".join(own[0].environ().values())
    written = [p for p in tmp_path.rglob("*") if p.is_file() and token.encode() in p.read_bytes()]
    assert token_file in written
    assert [p for p in written if p.stat().st_mode & 0o077 and p.parent.stat().st_mode & 0o077] == []

    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)  # as Slurm does before the time limit
    assert until(lambda: re.search(r"^JupyterLab ends at the time limit, 20\d\d-.*Save now", text(), re.MULTILINE))
    assert fetch(port, "/api")["version"], "a warning ends nothing"
    subprocess.run(["scancel", job], check=True)
    until(lambda: not own[0].is_running() or own[0].status() == psutil.STATUS_ZOMBIE)
    until(lambda: not token_file.exists())


@pytest.mark.slurm
def test_a_python_without_jupyterlab_is_named(live_slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_PYTHON", str(tmp_path / "nowhere" / "python"))
    job = submit("--wait", expect=2)
    said = (tmp_path / f"lab-{job}.log").read_text()
    assert f"{tmp_path}/nowhere/python does not run JupyterLab: bash env/setup, or set LAB_PYTHON." in said
