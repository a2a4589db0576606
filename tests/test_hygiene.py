"""What is committed: no outputs, no secrets, no machine and no person. The pre-commit hooks run here as they are."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_output

from tests.conftest import REPOSITORY

GIT = ["git", "-C", str(REPOSITORY)]
LIST = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]  # also what is not committed yet
NAMES = subprocess.run([*GIT, *LIST], capture_output=True, text=True).stdout.split("\0")
FILES = [Path(name) for name in NAMES if name and (REPOSITORY / name).is_file()]
pytestmark = pytest.mark.skipif(not FILES, reason="not a git checkout, so nobody knows what would be committed")
HOOKS = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
BY_ID = {hook["id"]: hook for group in HOOKS for hook in group["hooks"]}
ENDINGS = {"python": ".py", "jupyter": ".ipynb"}  # pre-commit's own names


def text_of(path):
    return (REPOSITORY / path).read_bytes().decode(errors="replace")


# Hooks


@pytest.fixture
def checkout(tmp_path):
    """A repository of its own with the files as they are now."""
    for path in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def run_hook(name, checkout):
    """As pre-commit does: the hook's command on the files that it is for. Its exit code, words, and changed files."""
    hook = BY_ID[name]
    subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)
    staged = subprocess.check_output(["git", "ls-files"], cwd=checkout, text=True).split("\n")[:-1]
    endings = tuple(ENDINGS[t] for t in hook.get("types_or", []))
    wanted, unwanted = re.compile(hook.get("files", "")), re.compile(hook.get("exclude", "^$"))
    given = [f for f in staged if wanted.search(f) and not unwanted.search(f) and (not endings or f.endswith(endings))]
    assert given
    program, *words = shlex.split(hook["entry"])
    command = [Path(sys.executable).with_name(program), *words, *given]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    changed = subprocess.check_output(["git", "diff", "--name-only"], cwd=checkout, text=True).split()
    return done.returncode, done.stdout + done.stderr, changed


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_ID)
def test_the_files_pass_the_hook_and_are_not_changed_by_it(name, checkout):
    code, said, changed = run_hook(name, checkout)
    assert (code, changed) == (0, []), said


def test_an_executed_notebook_is_stripped_to_what_was_committed(checkout):
    path = checkout / "notebooks" / "00_check_cluster.ipynb"
    clean = path.read_text()
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].update(execution_count=7, outputs=[new_output("stream", text="left behind")])
    for metadata in (notebook.metadata, notebook.cells[0].metadata, notebook.cells[1].metadata):
        metadata.update(papermill={"status": "completed"})
    notebook.metadata.update(kit={"host": "h"}, widgets={"application/vnd.jupyter.widget-state+json": {}})
    notebook.cells[1].metadata["execution"] = {"iopub.execute_input": "2020-01-01"}
    path.write_text(nbformat.writes(notebook) + "\n")
    code, said, _ = run_hook("nbstripout", checkout)
    assert code == 0, said
    assert path.read_text() == clean


@pytest.mark.parametrize("where", ["kit/planted.py", "notebooks/planted.ipynb", "env/planted.toml"])
def test_a_planted_secret_is_caught(where, checkout):
    value = "hf_" + "".join(chr(97 + i * 7 % 26) + str(i * 3 % 10) for i in range(17))
    line = f'api_token = "{value}"'
    cell = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": [], "source": [line]}
    notebook = json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    for path in FILES:  # only the plant is looked at, to be quick
        if path.name != ".secrets.baseline":
            (checkout / path).unlink()
    (checkout / where).write_text(notebook if where.endswith("ipynb") else line)
    code, said, _ = run_hook("detect-secrets", checkout)
    assert code == 1 and where in said, said
    assert value not in said


def test_hooks_need_no_host_but_pypi_and_have_the_versions_of_the_constraints():
    assert {group["repo"] for group in HOOKS} == {"local"}
    pins = set((REPOSITORY / "env" / "constraints.txt").read_text().split())
    for hook in BY_ID.values():
        assert hook["language"] == "python" and set(hook["additional_dependencies"]) <= pins, hook["id"]


# Words


def addresses(text):
    """E-mail addresses, but for those of the domains that RFC 2606 keeps for examples."""
    found = re.findall(r"[\w.+-]+@(?:[\w-]+\.)+[a-z]{2,}", text)
    return [a for a in found if not re.search(r"[@.](example(\.(com|net|org))?|test|invalid)$", a)]


def homes(text):
    return [home for home in re.findall(r"/(?:home|Users)/\w+", text) if home not in ("/home/me", "/home/you")]


def test_no_file_names_a_person():
    assert addresses("write to ann" + "@site.org, not to me@login.example") == ["ann" + "@site.org"]
    assert homes("/home" + "/ann/kit and /home/me/kit") == ["/home" + "/ann"]
    assert [(str(p), found) for p in FILES for found in addresses(text_of(p)) + homes(text_of(p))] == []


def test_no_file_names_this_machine():
    here = {str(REPOSITORY.parent), str(Path.home()), sys.prefix, socket.gethostname(), os.environ.get("USER", "")}
    names = [re.escape(name) for name in here if len(name) > 4 and name not in ("/home", "localhost")]
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(names)})(?!\w)")
    assert [(str(p), found) for p in FILES for found in pattern.findall(text_of(p))] == []


def test_no_file_is_large_and_none_is_left_by_a_run():
    assert [str(p) for p in FILES if (REPOSITORY / p).stat().st_size > 300_000] == []
    left = re.compile(
        r"(^|/)(wandb|runs|prepared|\.ipynb_checkpoints|__pycache__)/|\.(wandb|safetensors|distcp|log|pyc)$"
    )
    assert [str(p) for p in FILES if left.search(str(p))] == []
