import json
import os
import socket
import subprocess
import sys

import pytest

from kit.check import probe
from kit.config.cluster import Cluster, Link, Links, Nodes, Paths
from kit.errors import InputError
from kit.files import REPOSITORY

TRUTH = REPOSITORY / "tests" / "truth" / "probe_h100x4.json"
H100 = Cluster(
    "h100", Nodes(gpus=4, gpu="H100", gpu_memory_gib=79.2, gpu_bf16_tflops=989.0), Links(Link("nvlink4", 450.0))
)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_rates_of_four_h100s_become_part_of_the_profile(tmp_path):
    """The file: matmul 716 to 755 of 989 TFLOP/s, slowest link 304.5 of 450 GB/s, 11.6 microseconds a launch."""
    found = probe.apply(json.loads(TRUTH.read_text()), H100)
    assert found.nodes.gpu_efficiency == pytest.approx((718.2 + 743.0) / 2 / 989, abs=0.001)
    assert found.nodes.launch_us == pytest.approx(11.6, abs=0.01)
    assert found.links.intra.efficiency == pytest.approx(304.5 / 450, abs=0.001)
    assert (found.links.intra.gb_s, found.links.inter) == (450.0, H100.links.inter)
    path = tmp_path / "h100.toml"
    path.write_text(found.toml())
    assert Cluster.load(path) == found


def test_a_link_above_its_profile_corrects_it():
    slow = Cluster("h100", H100.nodes, Links(Link("pcie5", 50.0)))
    found = probe.apply(json.loads(TRUTH.read_text()), slow).links.intra
    assert (found.kind, found.efficiency) == ("pcie5", 1.0)
    assert found.gb_s == pytest.approx(304.5, abs=0.1)


def test_a_link_far_below_its_profile_corrects_it():
    """305 GB/s of 100,000 is an efficiency of 0.003, less than a profile can state."""
    fast = Cluster("h100", H100.nodes, Links(Link("wrong", 100_000.0)))
    found = probe.apply(json.loads(TRUTH.read_text()), fast).links.intra
    assert found.gb_s * found.efficiency == pytest.approx(304.5, abs=0.1)


def test_a_probe_of_another_machine_is_an_error(local):
    with pytest.raises(InputError, match="ran on NVIDIA H100 80GB HBM3, and local has nodes"):
        probe.apply(json.loads(TRUTH.read_text()), local)


def test_two_local_ranks_measure_their_rates(tmp_path, local):
    out = tmp_path / "found.json"
    env = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    command = [sys.executable, "-m", "kit.check.probe", str(out)]
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    assert [one.wait(120) for one in ranks] == [0, 0]
    found = json.loads(out.read_text())
    assert len(found["ranks"]) == 2
    assert all(r["matmul_tflops"] > 0 and r["launch_us"] > 0 and r["intra_gb_s"] > 0 for r in found["ranks"])
    assert "inter_gb_s" not in found["ranks"][0]  # one node
    measured = probe.apply(found, local)
    moved = measured.links.intra.gb_s * measured.links.intra.efficiency
    assert moved == pytest.approx(min(r["intra_gb_s"] for r in found["ranks"]), rel=0.01)
    assert measured.nodes == local.nodes


@pytest.mark.slow
def test_a_job_probes_both_nodes_of_a_live_slurm_and_writes_the_profile(live_slurm, tmp_path):
    two = Cluster(
        "two", Nodes(count=2, cpus=2, ram_gib=10.0), environment={"GLOO_SOCKET_IFNAME": "lo"},
        paths=Paths(runs=str(tmp_path / "runs")),
    )  # fmt: skip
    told = []
    path = probe.measure(two, tmp_path / "measured.toml", told.append)
    assert Cluster.load(path).links.inter != two.links.inter
    (found,) = (tmp_path / "runs").glob("probe-*/found.json")
    ranks = json.loads(found.read_text())["ranks"]
    assert len(ranks) == 2 * probe.CPU_RANKS
    assert all(rank["intra_gb_s"] > 0 and rank["inter_gb_s"] > 0 for rank in ranks)
    with pytest.raises(InputError, match="exists"):
        probe.measure(two, path, told.append)


def test_a_gpu_job_asks_for_every_gpu_of_every_node(tmp_path):
    text = probe.render_script(Cluster.load("h100-8x8"), tmp_path / "found.json")
    for line in ("--nodes=8", "--ntasks-per-node=8", "--gres=gpu:h100:8", "--partition=gpu", "--cpus-per-task=28"):
        assert f"#SBATCH {line}\n" in text
    assert "LOCAL_WORLD_SIZE=8" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
