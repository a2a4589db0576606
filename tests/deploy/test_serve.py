"""Real servers: transformers' own, and vLLM where VLLM_PYTHON names the interpreter of an environment that has it."""

import dataclasses
import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import psutil
import pytest

from kit.deploy import serve
from kit.deploy.proof import Outcome
from kit.deploy.servers import Engine
from kit.errors import InputError, KitError
from tests.conftest import REPOSITORY, make_tiny

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("uvicorn"), reason="no server is installed: pip install 'finetune-kit[serve]'"
)


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory) -> Path:
    """An adapter, random and strong, on the tiny model."""
    return make_adapter(tiny, tmp_path_factory.mktemp("adapter"))


def make_adapter(base, folder):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=8, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT 0.20 still reads it
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


@pytest.fixture
def here(local, tmp_path, monkeypatch):
    """The local cluster, with its runs in this test's folder."""
    monkeypatch.chdir(tmp_path)
    return local


@pytest.mark.slow
def test_the_served_adapter_is_the_one_that_was_trained(adapter, here, tmp_path):
    run = serve.launch(str(adapter), tmp_path / "out", here, engine=Engine.TRANSFORMERS)
    try:
        served = serve.wait(run, tmp_path / "out")
        assert {check.name: check.outcome for check in served.checks} == {
            "chat template": Outcome.PASSED, "answers": Outcome.PASSED,
        }  # fmt: skip
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/health") as response:
            assert response.status == 200
        listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [address.ip for address in listening if address.port == served.port] == ["127.0.0.1"]
        assert not served.key_file
    finally:
        run.cancel()
        assert run.wait(timeout=60).state == "CANCELLED"


@pytest.mark.slow
def test_a_server_with_another_template_and_without_the_adapter_is_stopped(adapter, here, tmp_path, monkeypatch):
    """Damage what the job serves after its request is written, as a wrong file on the storage would."""
    script = serve._script

    def damaged(cluster, out, gpus):
        (out / "model" / "adapter_config.json").unlink()
        template = out / "model" / "chat_template.jinja"
        text = template.read_text()
        template.unlink()
        template.write_text("Another prompt: " + text)
        return script(cluster, out, gpus)

    monkeypatch.setattr(serve, "_script", damaged)
    run = serve.launch(str(adapter), tmp_path / "out", here, engine=Engine.TRANSFORMERS)
    with pytest.raises(KitError, match=r"(?s)chat template: 0 of 20.*answers: of 20 answers, 0 are"):
        serve.wait(run, tmp_path / "out")
    end = run.wait(timeout=60)
    assert (end.state, end.exit_code) == ("FAILED", 1)


def test_an_adapter_whose_names_match_no_module_is_refused_before_a_job(adapter, here, tmp_path):
    from safetensors.numpy import load_file, save_file

    wrong = Path(shutil.copytree(adapter, tmp_path / "wrong"))
    tensors = load_file(wrong / "adapter_model.safetensors")
    renamed = {name.replace("model.layers", "model.language_model.layers"): value for name, value in tensors.items()}
    save_file(renamed, wrong / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"14 of 14 modules are not in .* such as model\.language_model\.layers\.0"):
        serve.launch(str(wrong), tmp_path / "out", here, engine=Engine.TRANSFORMERS)
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs").exists()


def test_vllm_is_refused_where_it_is_not_installed_or_cannot_serve_the_adapter(adapter, here, tmp_path):
    with pytest.raises(InputError, match=r"vllm is not installed for .*--python"):
        serve.launch(str(adapter), tmp_path / "out", here, engine=Engine.VLLM)
    with pytest.raises(InputError, match="cannot be started"):
        serve.launch(str(adapter), tmp_path / "out", here, python=str(tmp_path / "none" / "python"))


def test_a_model_that_does_not_fit_is_refused(adapter, here, tmp_path):
    small = dataclasses.replace(here, nodes=dataclasses.replace(here.nodes, gpus=1, gpu_memory_gib=1e-4))
    with pytest.raises(InputError, match=r"GiB of weights, which do not fit 1 GPU"):
        serve.launch(str(adapter), tmp_path / "out", small, engine=Engine.TRANSFORMERS)
    with pytest.raises(InputError, match="has 1 GPUs per node, not 2"):
        serve.launch(str(adapter), tmp_path / "out", small, engine=Engine.TRANSFORMERS, gpus=2)


@pytest.mark.slow
def test_a_port_in_use_ends_the_job_with_the_reason(adapter, here, tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        run = serve.launch(str(adapter), tmp_path / "out", here, engine=Engine.TRANSFORMERS, port=port)
        with pytest.raises(KitError, match=f"Port {port} is in use"):
            serve.wait(run, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(not VLLM_PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")
def test_vllm_serves_the_adapter_with_the_log_probabilities_of_transformers(smollm2, here, tmp_path):
    make_tiny(tmp_path / "base", smollm2, head_dim=64)  # vLLM has no attention for heads of 16 on CPUs
    adapter = make_adapter(tmp_path / "base", tmp_path / "adapter")
    memory = ["--gpu-memory-utilization=0.2"]  # of this machine's memory, where vLLM runs on CPUs
    run = serve.launch(str(adapter), tmp_path / "out", here, python=VLLM_PYTHON, options=memory)
    try:
        served = serve.wait(run, tmp_path / "out")
        assert stat.S_IMODE(Path(served.key_file).stat().st_mode) == 0o600
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{served.port}/v1/models")
    finally:
        run.cancel()
        run.wait(timeout=60)
    assert {check.name: check.outcome for check in served.checks} == dict.fromkeys(
        ("chat template", "answers", "log-probabilities"), Outcome.PASSED
    )


def test_the_command_names_the_servers_that_it_knows(tmp_path):
    command = [sys.executable, "-m", "kit.cli", "serve", "model", "--engine", "tgi"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True)
    assert done.returncode == 2
    assert "No server 'tgi': it is one of vllm, transformers." in done.stderr.decode()
