"""Network interfaces, RDMA ports, what NCCL should use of them, and whether the hub and W&B are reached."""

import contextlib
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kit.check.facts import Finding, within
from kit.config.cluster import Cluster

HOSTS = {  # name -> variable with the address, default address, what to do offline
    "hub": ("HF_ENDPOINT", "https://huggingface.co", "fetch on the login node; the kit sets HF_HUB_OFFLINE=1 in jobs"),
    "W&B": ("WANDB_BASE_URL", "https://api.wandb.ai", "the kit sets WANDB_MODE=offline in jobs; sync them later"),
}
VIRTUAL = re.compile("docker|virbr|veth|cni|br-")  # interfaces that lead to no other node


@dataclass(frozen=True)
class Interfaces:
    """Speeds of interfaces that are up and of active RDMA ports, in Gb/s; 0 where unknown. Addresses are IPv4."""

    speeds: Mapping[str, float]
    rdma: Mapping[str, float]
    addresses: Mapping[str, list[str]]

    @classmethod
    def read(cls, root: Path, addresses: Mapping[str, Any]) -> "Interfaces":
        """From /sys/class and from what psutil.net_if_addrs() returns."""
        ports = [p for p in sorted(root.glob("infiniband/*/ports/*")) if "ACTIVE" in _read(p / "state")]
        states = {p: _read(p / "operstate") for p in sorted(root.glob("net/*"))}
        up = [path for path, state in states.items() if state in ("up", "unknown") and path.name != "lo"]
        return cls(
            {path.name: max(0, int(_read(path / "speed"))) / 1000 for path in up},
            # A rate is written as in "400 Gb/sec (4X NDR)".
            {f"{port.parts[-3]}:{port.name}": float(_read(port / "rate").split()[0]) for port in ports},
            {name: [a.address for a in found if a.family == socket.AF_INET] for name, found in addresses.items()},
        )

    @property
    def fastest(self) -> str:
        """The fastest interface with an address that leads to other nodes, or an empty string."""
        return max(self.usable, key=lambda name: self.usable[name], default="")

    @property
    def usable(self) -> dict[str, float]:
        """Interfaces with an address that lead to other nodes."""
        return {n: speed for n, speed in self.speeds.items() if self.addresses.get(n) and not VIRTUAL.match(n)}

    def __str__(self) -> str:
        words = [
            f"{name} {' '.join(self.addresses.get(name, []))} {f'{speed:g} Gb/s' if speed else 'speed unknown'}"
            for name, speed in self.speeds.items()
        ]
        return "; ".join(words + [f"{name} RDMA {speed:g} Gb/s" for name, speed in self.rdma.items()])


def find_networks(cluster: Cluster, root: Path = Path("/sys/class"), addresses: Any = None) -> list[Finding]:
    """Interfaces that are up, active RDMA ports, and what NCCL should use. `addresses` as psutil.net_if_addrs().

    NCCL uses every active RDMA port unless NCCL_IB_DISABLE=1; for sockets, and to start, all interfaces but lo and
    docker*, those that begin with ib first (NVIDIA's NCCL user guide, environment variables).
    """
    found = Interfaces.read(root, psutil.net_if_addrs() if addresses is None else addresses)
    use = f"sockets over {found.fastest or 'nothing'}"
    facts = _link_facts(found)
    if found.rdma:
        use = f"RDMA over {', '.join(found.rdma)}; to start, {use}"
    wanted = cluster.environment.get("NCCL_SOCKET_IFNAME", "")
    problem = _rdma_problem(found, cluster) or _interface_problem(found, wanted)
    if len(found.usable) > 1 and (not wanted or wanted.startswith("^")):
        use += f", the fastest with an address: without NCCL_SOCKET_IFNAME={found.fastest} NCCL also uses others"
        facts["environment.NCCL_SOCKET_IFNAME"] = found.fastest
    return [
        Finding("network", str(found), f"{root}/net, {root}/infiniband"),
        Finding("NCCL", use, "the speeds above", problem, facts),
    ]


def _link_facts(found: Interfaces) -> dict[str, Any]:
    """The profile's links.inter: all RDMA ports together, else the fastest interface; a byte has 8 bits."""
    if found.rdma:
        kind = f"RDMA {len(found.rdma)}x{max(found.rdma.values()):g}G"
        return {"links.inter": {"kind": kind, "gb_s": sum(found.rdma.values()) / 8}}
    speed = found.usable.get(found.fastest)
    return {"links.inter": {"kind": f"{speed:g}GbE", "gb_s": speed / 8}} if speed else {}


def _rdma_problem(found: Interfaces, cluster: Cluster) -> str:
    if found.rdma and cluster.environment.get("NCCL_IB_DISABLE") == "1":
        return f"NCCL_IB_DISABLE=1 in the profile leaves {len(found.rdma)} RDMA ports unused: remove it"
    return ""


def _interface_problem(found: Interfaces, wanted: str) -> str:
    """What is wrong with the profile's NCCL_SOCKET_IFNAME: NCCL takes a prefix, =exact or ^not."""
    if not wanted or wanted.startswith("^"):
        return ""
    matching = [speed for name, speed in found.speeds.items() if name.startswith(wanted.lstrip("="))]
    if not matching:
        return f"NCCL_SOCKET_IFNAME={wanted} of the profile is not up here: set it to {found.fastest}"
    if not found.rdma and max(matching) < found.usable.get(found.fastest, 0):
        slower = f"slower than {found.fastest} here"
        return f"NCCL_SOCKET_IFNAME={wanted} of the profile is {slower}: set it to {found.fastest}"
    return ""


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):  # EINVAL: a virtual interface has no speed
        return path.read_text().strip()
    return "0"


def find_hosts() -> list[Finding]:
    """Whether the hub and W&B, or the proxy to them, accept a connection within 3 s; what to do offline where not."""
    found = []
    for name, (variable, default, offline) in HOSTS.items():
        url = urllib.parse.urlsplit(os.environ.get(variable, default))
        proxy = urllib.request.getproxies().get(url.scheme, "")
        via_proxy = bool(proxy) and not urllib.request.proxy_bypass(url.netloc)
        target = urllib.parse.urlsplit(proxy) if via_proxy else url
        port = target.port or {"http": 80}.get(target.scheme, 443)
        try:
            within(3, socket.create_connection, (target.hostname, port), 3).close()
            value = f"{url.hostname} answers" + (f" through {target.hostname}" if via_proxy else "")
        except OSError as error:
            value = f"{url.hostname} is not reached ({error.strerror or 'timed out'}): {offline}"
        found.append(Finding(name, value, f"a connection to {target.hostname}:{port}"))
    return found
