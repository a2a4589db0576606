"""Interfaces, RDMA ports and hosts, from folders like /sys/class and sockets of this machine."""

import socket

import pytest

from kit.check import network
from kit.config.cluster import Cluster


@pytest.fixture
def closed(monkeypatch):
    """Hosts that refuse at once: nothing listens on port 9 of this machine."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def interface(root, name, speed=None, state="up"):
    folder = root / "net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(f"{state}\n")
    if speed is not None:
        (folder / "speed").write_text(f"{speed}\n")


def addresses(**own):
    class Address:
        family = socket.AF_INET

        def __init__(self, address):
            self.address = address

    return {name: [Address(a)] for name, a in own.items()}


@pytest.fixture
def ethernet(tmp_path):
    """The two-node PCIe machine: two 100 Gb/s ports bonded, a 1 Gb/s port, docker."""
    for name, speed in (("lo", None), ("bond0", 200_000), ("eno1", 1000), ("enp1s0", 100_000), ("docker0", -1)):
        interface(tmp_path, name, speed, "unknown" if name == "lo" else "up")
    interface(tmp_path, "eno2", -1, "down")
    own = addresses(lo="127.0.0.1", bond0="10.0.0.1", eno1="192.168.0.1", docker0="172.17.0.1")
    return lambda **settings: network.find_networks(Cluster("x", environment=settings), tmp_path, own)


def test_nccl_should_use_the_fastest_interface_with_an_address(ethernet):
    found, nccl = ethernet()
    assert "eno2" not in found.value and "bond0 10.0.0.1 200 Gb/s" in found.value
    assert nccl.facts == {
        "links.inter": {"kind": "200GbE", "gb_s": 25.0}, "environment.NCCL_SOCKET_IFNAME": "bond0"
    }  # fmt: skip
    assert "without NCCL_SOCKET_IFNAME=bond0 NCCL also uses others" in nccl.value and not nccl.problem


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("bond0", ""), ("=bond0", ""), ("bond", ""), ("^docker,lo", ""),
        ("eno1", "NCCL_SOCKET_IFNAME=eno1 of the profile is slower than bond0 here: set it to bond0"),
        ("ib0", "NCCL_SOCKET_IFNAME=ib0 of the profile is not up here: set it to bond0"),
    ],
)  # fmt: skip
def test_the_profiles_interface_is_compared_with_what_is_up(ethernet, wanted, problem):
    assert ethernet(NCCL_SOCKET_IFNAME=wanted)[1].problem == problem


def test_nccl_uses_active_rdma_ports(tmp_path):
    interface(tmp_path, "eth0", 25_000)
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    own = addresses(eth0="10.0.0.1")
    _, nccl = network.find_networks(Cluster("x"), tmp_path, own)
    assert nccl.value == "RDMA over mlx5_0:1, mlx5_1:1; to start, sockets over eth0"
    assert nccl.facts == {"links.inter": {"kind": "RDMA 2x400G", "gb_s": 100.0}}
    off = network.find_networks(Cluster("x", environment={"NCCL_IB_DISABLE": "1"}), tmp_path, own)[1]
    assert "leaves 2 RDMA ports unused" in off.problem


def test_unreachable_hosts_name_the_offline_settings_and_are_not_a_problem(closed, monkeypatch):
    hub, wandb = network.find_hosts()
    assert hub.value == (
        "127.0.0.1 is not reached (Connection refused): fetch on the login node; the kit sets HF_HUB_OFFLINE=1 in jobs"
    )
    assert "WANDB_MODE=offline" in wandb.value and not hub.problem and not wandb.problem
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert network.find_hosts()[0].value == "127.0.0.1 answers"
        monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert network.find_hosts()[0].value == "hub.invalid answers through 127.0.0.1"
