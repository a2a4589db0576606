"""papermill's own tests, with the kit's engine in the place of papermill's, except for what differs by design."""

import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("test_execute", "test_cli", "test_parameterize", "test_inspect", "test_autosave")
# README.md lists the first three for users.
BY_DESIGN = {
    "test_backslash_params": "a name that the parameters cell does not have is refused",
    "test_backslash_quote_params": "a name that the parameters cell does not have is refused",
    "test_double_backslash_quote_params": "a name that the parameters cell does not have is refused",
    "test_from_version_4_4_upgrades": "text for a parameter whose default is a whole number is refused",
    "test_start_timeout": "asks a mock of papermill's own client for the time-out",
    "test_default_start_timeout": "asks a mock of papermill's own client for the time-out",
    "test_end2end_autosave_slow_notebook": "counts calls of papermill's own function that saves",
}
NOT_OURS = {"TestBrokenNotebook2::test"}  # fails with papermill's own engine, too, on IPython 9
REGISTER = """
from kit.notebook.execute import KitEngine

for _name in (None, "nbclient", "kit"):
    papermill_engines.register(_name, KitEngine)
"""


@pytest.fixture(scope="module")
def papermill_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """papermill as its release has it, with its tests; every engine in it is the kit's."""
    folder = tmp_path_factory.mktemp("papermill")
    name = f"papermill=={version('papermill')}"
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archive = next(folder.glob("papermill-*.tar.gz"), None)
    if done.returncode or archive is None:
        pytest.skip(f"the source release of {name} cannot be downloaded: {done.stderr.strip()[-200:]}")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    missing = [suite for suite in SUITES if not (source / "papermill" / "tests" / f"{suite}.py").exists()]
    if missing:
        pytest.skip(f"the source release of {name} does not hold {', '.join(missing)}")
    with (source / "papermill" / "engines.py").open("a") as engines:
        engines.write(REGISTER)
    return source


@pytest.mark.slow
def test_papermill_passes_its_own_tests_with_the_engine(papermill_source: Path) -> None:
    suites = [f"papermill/tests/{suite}.py" for suite in SUITES]
    options = ["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "default"]
    command = [sys.executable, "-m", "pytest", *options, *suites]
    env = {"PYTHONPATH": f"{papermill_source}:{ROOT}", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=papermill_source, env=env, capture_output=True, text=True, check=False)
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+?\.py::(\S+)", done.stdout, re.MULTILINE)) - NOT_OURS
    assert {name.rpartition("::")[2] for name in failed} == set(BY_DESIGN), done.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 120
