"""The job scripts are bash, so nothing but these tests ties their names to those of the Python modules."""

import re
from dataclasses import fields

from kit.slurm.folder import StateFolder
from kit.slurm.states import ExitRecord, ScriptEnd, StartRecord
from kit.slurm.variables import Variable
from tests.conftest import REPOSITORY

ROOM = REPOSITORY / "kit" / "slurm"
SCRIPTS = {path.name: path.read_text() for path in ROOM.iterdir() if path.suffix in (".sh", ".sbatch")}


def test_the_job_scripts_use_listed_variables_only():
    used = {name for text in SCRIPTS.values() for name in re.findall(r"KIT_[A-Z_]+", text)}
    assert used <= set(Variable) and {Variable.RUN, Variable.JOB_ID} <= used


def test_python_names_a_variable_in_one_place_only():
    named = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "kit").rglob("*.py")
        if re.search(r"""["']KIT_[A-Z_]+["']""", path.read_text())
    }
    assert named == {"kit/slurm/variables.py"}


def test_the_job_script_writes_known_ends_and_keys():
    text = SCRIPTS["job.sbatch"]
    assert set(re.findall(r"(?<![\w$])end=(\w+)", text)) == set(ScriptEnd)
    keys = {field.name for kind in (ExitRecord, StartRecord) for field in fields(kind)} | {"version"}
    for name in ("job.sbatch", "witness.sh"):
        written = set(re.findall(r'\\?"(\w+)\\?": ', SCRIPTS[name]))
        assert {"job_id", "time", "exit_code", "nodes"} <= written <= keys


def test_the_job_script_and_python_give_the_state_files_the_same_names(tmp_path):
    folder = StateFolder(tmp_path)
    text = SCRIPTS["job.sbatch"]
    for path in (folder.stop, folder.saved, folder.result, folder.path / "heartbeat"):
        assert f'"$KIT_RUN/state/{path.name}"' in text
    assert "state/$1.$restart.json" in text
