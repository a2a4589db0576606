"""The node sampler, as a process beside the training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from kit.train import sampler

REPOSITORY = Path(__file__).resolve().parents[2]


def start(run, stderr=None, **environment):
    command = [sys.executable, "-m", "kit.train.sampler", str(run), "--every", "0.1"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "SLURMD_NODENAME": "node7", **environment}
    return subprocess.Popen(command, env=env, stderr=stderr, text=True)


def lines(run, count):
    """The first `count` lines, once they are there."""
    path = run / "nodes" / "node7.jsonl"
    deadline = time.monotonic() + 30
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_node_is_sampled_until_the_job_ends_it(tmp_path):
    process = start(tmp_path)
    first, second, third = lines(tmp_path, 3)[:3]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0
    assert first["host"] == "node7"
    assert 0.05 < second["t"] - first["t"] < 5
    assert 0 <= third["cpu"] <= 100
    assert 0 < third["ram_gib"] < 10_000
    assert third["net_gb_s"].keys() == {"in", "out"}
    assert {"gpus", "disk_gb_s"} <= third.keys()


def test_it_ends_at_once_where_its_parent_ended_while_it_started(tmp_path):
    (gone := subprocess.Popen([sys.executable, "-c", ""])).wait()
    command = [sys.executable, "-m", "kit.train.sampler", str(tmp_path), "--every", "0.1", "--parent", str(gone.pid)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run(command, env=env, timeout=60, check=False).returncode == 0
    assert list((tmp_path / "nodes").iterdir()) == []


def test_it_ends_with_its_parent(tmp_path):
    script = f"{sys.executable} -m kit.train.sampler {tmp_path} --every 0.1 & echo $!; wait"
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "SLURMD_NODENAME": "node7"}
    parent = subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    lines(tmp_path, 1)
    parent.kill()
    parent.communicate()  # returns when the child, too, has closed the pipe
    assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes()


def test_it_goes_on_when_a_line_cannot_be_written(tmp_path):
    (tmp_path / "nodes").mkdir()
    target = tmp_path / "nodes" / "node7.jsonl"
    target.mkdir()  # opening it fails
    process = start(tmp_path, stderr=subprocess.PIPE)
    assert "was not written" in process.stderr.readline()
    target.rmdir()
    assert lines(tmp_path, 1)
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 0


def test_a_wrong_folder_is_a_wrong_call(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        sampler.main([str(tmp_path / "nothing")])
    assert stop.value.code == 2
    assert "nothing is not a folder" in capsys.readouterr().err


class Driver:
    """A stand-in for NVML with four GPUs of which the last is cut into MIG instances: no machine of ours has one."""

    def __init__(self, monkeypatch):
        for name in [n for n in vars(type(self)) if n.startswith("nvml")]:
            monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 4

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return {"MIG-aa": "instance"}[uuid]

    def nvmlDeviceGetUUID(self, gpu):  # noqa: N802
        return "MIG-aa" if gpu == "instance" else f"GPU-{gpu}{gpu}-long"

    def nvmlDeviceGetMemoryInfo(self, gpu):  # noqa: N802
        return SimpleNamespace(used=10 << 30, total=80 << 30)

    def nvmlDeviceGetUtilizationRates(self, gpu):  # noqa: N802
        if gpu == "instance":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=97)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-11,GPU-33-long"}, [1, 3]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-aa"}, ["instance"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"SLURM_JOB_GPUS": "1,3"}, [1, 3]),
        ({"SLURM_JOB_GPUS": "4,5,6,7"}, [0, 1, 2, 3]),  # Slurm hides the other GPUs: NVML counts ours from 0
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_GPUS": "0,1"}, [1]),
    ],
)
def test_only_gpus_of_this_job_are_sampled(monkeypatch, environment, expected):
    Driver(monkeypatch)
    assert sampler.own_gpus(environment) == expected


def test_readings_that_a_mig_instance_lacks_are_null(monkeypatch):
    Driver(monkeypatch)
    whole, instance = sampler.gpu_sample(0), sampler.gpu_sample("instance")
    assert (whole["util"], whole["mem_gib"], whole["mem_total_gib"]) == (97, 10.0, 80.0)
    assert (instance["util"], instance["power_w"], instance["mem_gib"]) == (None, None, 10.0)
    assert json.loads(json.dumps(instance))["uuid"] == "MIG-aa"
