"""Checkpoints of Orbax, as JAX writes them: their headers, their damage, and loads by Orbax itself."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from kit.checkpoints.formats.base import ProblemKind
from kit.checkpoints.inspect import inspect
from kit.checkpoints.timing import time_load
from kit.checkpoints.weights import read_headers
from tests.conftest import oracle

PACKAGE = "orbax-checkpoint-0.12.8"
SAVE = """
import sys
import jax.numpy as jnp
import orbax.checkpoint as ocp
layers = [{"kernel": jnp.ones((256, 1024)), "bias": jnp.zeros(16, jnp.bfloat16)}]
layers.append({"kernel": jnp.ones((3, 5), jnp.int8)})
with ocp.CheckpointManager(sys.argv[1]) as manager:
    manager.save(5, args=ocp.args.StandardSave({"layers": layers, "step": jnp.int32(7)}))
"""


@pytest.fixture
def step(tmp_path):
    """The folder of step 5 that Orbax's manager has saved."""
    variables = os.environ | {"PYTHONPATH": str(oracle(PACKAGE)), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SAVE, str(tmp_path / "run")], env=variables, check=True, capture_output=True)
    return tmp_path / "run" / "5"


@pytest.fixture
def packages(monkeypatch):
    """Orbax and tensorstore for this process and those that it starts."""
    monkeypatch.syspath_prepend(oracle(PACKAGE))
    monkeypatch.setenv("PYTHONPATH", str(oracle(PACKAGE)))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.mark.slow
def test_the_arrays_of_an_orbax_checkpoint_are_listed_and_loaded_by_orbax(step, packages):
    found = inspect(step, values=True)
    assert (found.format, found.tensors, found.bytes) == ("orbax", 4, 256 * 1024 * 4 + 16 * 2 + 15 + 4)
    assert found.kinds == {ProblemKind.NOT_SUPPORTED} and not found.values_read  # of the values, which are compressed
    tensors = read_headers(step).tensors
    assert [(name, each.dtype, each.shape) for name, each in tensors.items()] == [
        ("layers.0.bias", "bfloat16", (16,)), ("layers.0.kernel", "float32", (256, 1024)),
        ("layers.1.kernel", "int8", (3, 5)), ("step", "int32", ()),
    ]  # fmt: skip
    (timed,) = time_load(step, repeats=1).as_dict()["methods"]
    assert timed["method"] == "orbax" and timed["wanted_gb"] == pytest.approx(found.bytes / 1e9)


@pytest.mark.slow
def test_a_damaged_orbax_checkpoint_is_named(step, packages):
    metadata = step / "default" / "_METADATA"
    content = json.loads(metadata.read_text())
    content["tree_metadata"]["('lost',)"] = {"key_metadata": [{"key": "lost", "key_type": 2}]}
    metadata.write_text(json.dumps(content))
    (problem,) = inspect(step).problems
    assert problem.kind is ProblemKind.MISSING_TENSOR and problem.message.startswith("The array lost, which ")
    (step / "default" / "manifest.ocdbt").write_bytes(b"no manifest")
    assert ProblemKind.DAMAGED_FILE in inspect(step).kinds


@pytest.mark.slow
def test_without_tensorstore_an_orbax_checkpoint_says_what_to_install(step):
    for command in ("inspect", "time"):
        words = [sys.executable, "-m", "kit.cli", "checkpoint", command, str(step)]
        found = subprocess.run(words, check=False, capture_output=True, text=True)
        assert found.returncode == 1
        assert "Reading it takes tensorstore: run `pip install tensorstore`" in found.stdout + found.stderr


@pytest.mark.slow
def test_all_items_of_a_step_are_read_and_an_unfinished_save_is_named(step, packages):
    shutil.copytree(step / "default", step / "ema")
    found = read_headers(step)
    assert len(found.tensors) == 8 and {"default.step", "ema.step"} <= found.tensors.keys()
    (timed,) = time_load(step, repeats=1).as_dict()["methods"]
    assert timed["wanted_gb"] == pytest.approx(found.bytes / 1e9)
    unfinished = step.rename(step.with_name("5.orbax-checkpoint-tmp-1"))
    assert inspect(unfinished).kinds == {ProblemKind.UNFINISHED_SAVE}
