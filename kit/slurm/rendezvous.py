"""The start of a job on each node: the nodes meet at the head node, compare their software, and start their ranks.

`python -m kit.slurm.rendezvous RUN LAUNCHER...` runs as one srun task on each node. The head node listens on a port
that depends on the job id. Each other node connects, reads a line that identifies this start of the job, and sends its
number and its software as a line of JSON. The head node answers with the port for torch's rendezvous, or with the exit
code that all nodes end with. A job whose nodes cannot meet so ends in seconds, with one line that says why.
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

import psutil
import pynvml

from kit.slurm.variables import Variable
from kit.trainers import trl
from kit.trainers.base import HEAD_ADDRESS, HEAD_PORT, NODE_RANK

TIMEOUT_S = 20.0  # srun starts all tasks together, and imports from a busy file system take seconds
# Other nodes give up first, so that the head node's message names them.
HEAD_EXTRA_S = 5.0
# 16 ports to try, others for each job, all below the range of outgoing connections (from 32768 on Linux).
FIRST_PORT, PORT_RANGE, PORT_COUNT = 20000, 12000, 16


class ExitCode(IntEnum):
    """Exit codes of a node that does not start its ranks. node.sh also ends with NODE_MISSING."""

    NODE_MISSING = 41
    SOFTWARE_DIFFERS = 42


class RendezvousError(SystemExit):
    """The nodes did not meet. `reason` is a line for the job's log; empty on nodes where the head node logs it."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(code)
        self.reason = reason


@dataclass(frozen=True)
class Software:
    """What all nodes of a job must have in common, and what this node lacks.

    kit: digest of the kit's source. driver: NVIDIA's, or "none". missing_interface: the variable and the network
    interfaces that it names, where this node has none of them.
    """

    python: str
    torch: str
    kit: str
    driver: str
    missing_interface: str = ""

    @classmethod
    def here(cls) -> "Software":
        """Of this node."""
        versions = software()
        return cls(versions["Python"], versions["torch"], _source_digest(), _driver(), _missing_interface())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Software":
        """Raises KeyError or TypeError for anything else."""
        return cls(**{field.name: str(value[field.name]) for field in fields(cls)})

    def versions(self) -> dict[str, str]:
        """What must be equal, by the name for messages."""
        return {"Python": self.python, "torch": self.torch, "kit": self.kit, "driver": self.driver}


@dataclass(frozen=True)
class Node:
    """This node's part in the job. hosts: all nodes in the order of their numbers; the head node is number 0.

    start_id: a line that identifies this start of this job. launched_with: versions at the launch, by name; empty where
    the ranks run another interpreter.
    """

    hosts: tuple[str, ...]
    number: int
    head_address: str
    start_id: str
    ports: tuple[int, ...]
    launched_with: Mapping[str, str]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Node":
        """By the variables of Slurm and of the job script."""
        job, restart = environment["SLURM_JOB_ID"], environment.get("SLURM_RESTART_COUNT", "0")
        return cls(
            hosts=tuple(environment[Variable.HOSTS].split()),
            number=int(environment["SLURM_NODEID"]),
            head_address=environment[Variable.ADDRESS],
            start_id=f"kit {job}.{restart}\n",
            ports=tuple(FIRST_PORT + (int(job) + offset) % PORT_RANGE for offset in range(PORT_COUNT)),
            launched_with=json.loads(environment.get(Variable.SOFTWARE, "{}")),
        )

    @property
    def name(self) -> str:
        """As Slurm has it."""
        return self.hosts[self.number]

    @property
    def head(self) -> str:
        """The head node's name."""
        return self.hosts[0]


class Head:
    """The head node's side. It holds its port until the process ends, so that no other job can take it."""

    def __init__(self, node: Node, timeout_s: float = TIMEOUT_S) -> None:
        self.node = node
        self.timeout_s = timeout_s
        self.server = _listen(node.ports, len(node.hosts))
        self.port = int(self.server.getsockname()[1])

    def meet(self, own: Software) -> int:
        """Wait for all nodes, compare their software with this node's, and return the port for torch's rendezvous.

        Raises RendezvousError where a node does not come or differs; all nodes that came get its exit code.
        """
        found = {self.node.head: own}
        with contextlib.ExitStack() as connections:
            guests = self._accept_all(found, connections)
            failure = self._compare(found)
            answer = failure.code if failure else self.port
            for guest in guests:
                with contextlib.suppress(OSError):  # that node has ended
                    guest.sendall(f"{answer}\n".encode())
        self.server.shutdown(socket.SHUT_RDWR)  # no more connections; the port stays taken
        if failure:
            raise failure
        return self.port

    def _accept_all(self, found: dict[str, Software], connections: contextlib.ExitStack) -> list[socket.socket]:
        guests: list[socket.socket] = []
        deadline = time.monotonic() + self.timeout_s + HEAD_EXTRA_S
        while len(found) < len(self.node.hosts) and (left := deadline - time.monotonic()) > 0:
            self.server.settimeout(left)
            # Nobody connected in time, or something else than a node of this job did.
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
                guest = connections.enter_context(self.server.accept()[0])
                number, software_there = self._greet(guest)
                found[self.node.hosts[number]] = software_there
                guests.append(guest)
        return guests

    def _greet(self, guest: socket.socket) -> tuple[int, Software]:
        guest.settimeout(2)
        guest.sendall(self.node.start_id.encode())
        with guest.makefile() as stream:
            number, facts = json.loads(stream.readline())
        return int(number), Software.from_json(facts)

    def _compare(self, found: Mapping[str, Software]) -> RendezvousError | None:
        """Why this job cannot start; None if it can."""
        head = self.node.head
        if missing := [name for name in self.node.hosts if name not in found]:
            return RendezvousError(
                ExitCode.NODE_MISSING,
                f"{', '.join(missing)} did not connect to {head} ({self.node.head_address}) in {self.timeout_s:.0f} s.",
            )
        wanted = {name: (version, f"on {head}") for name, version in found[head].versions().items()}
        wanted |= {name: (version, "where it was launched") for name, version in self.node.launched_with.items()}
        for node_name, node_software in found.items():
            if problem := _problem(node_name, node_software, wanted):
                return RendezvousError(ExitCode.SOFTWARE_DIFFERS, problem)
        return None


def _problem(node_name: str, found: Software, wanted: Mapping[str, tuple[str, str]]) -> str:
    """What a node lacks or has in another version, and how to fix it; empty where nothing is wrong."""
    if found.missing_interface:
        return f"{node_name} lacks {found.missing_interface}: set it in [environment] of the cluster profile."
    own = found.versions()
    other = [
        f"{name} {own[name]} ({version} {where})" for name, (version, where) in wanted.items() if own[name] != version
    ]
    if not other:
        return ""
    return f"{node_name} has {', '.join(other)}: give all nodes one environment by slurm.setup of the cluster profile."


def _listen(ports: Sequence[int], backlog: int) -> socket.socket:
    """A socket on the first port that is free on all interfaces. Raises RendezvousError where none is."""
    for port in ports:
        server = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        try:
            if server.family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind(("", port))
            # Set after bind: this process gets a free port, and torch's store, which sets it before, can
            # then bind to it as well.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.listen(backlog)
            return server
        except OSError:
            server.close()
    raise RendezvousError(
        ExitCode.NODE_MISSING, f"Ports {ports[0]} to {ports[-1]} are all in use: submit the run again."
    )


def join(node: Node, own: Software, timeout_s: float = TIMEOUT_S) -> int:
    """The other nodes' side: find the head node, send this node's software, and return the port that it answers.

    Raises RendezvousError where the head node cannot be reached, or answers that the job ends.
    """
    deadline, first_error = time.monotonic() + timeout_s, ""
    for port in itertools.cycle(node.ports):
        if time.monotonic() > deadline:
            break
        try:
            answer = _ask_head(node, own, port, timeout_s)
        except (OSError, ValueError) as error:
            first_error = str(error) if port == node.ports[0] else first_error
            time.sleep(0.02)
            continue
        if answer in node.ports:
            return answer
        if answer is not None:
            raise RendezvousError(answer)  # the head node logs the reason
    raise RendezvousError(
        ExitCode.NODE_MISSING,
        f"{node.head} does not answer at {node.head_address}:{node.ports[0]} ({first_error}). This node has "
        f"{_interfaces()}. That address is Slurm's NodeAddr; where another network is meant for this, name it "
        "in [environment] of the cluster profile: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME.",
    )


def _ask_head(node: Node, own: Software, port: int, timeout_s: float) -> int | None:
    """The head node's answer; None where this port belongs to another job. Raises OSError or ValueError."""
    address = (node.head_address, port)
    with socket.create_connection(address, timeout=2) as connection, connection.makefile("rw") as stream:
        if stream.readline() != node.start_id:
            return None
        print(json.dumps([node.number, asdict(own)]), file=stream, flush=True)
        connection.settimeout(timeout_s + 2 * HEAD_EXTRA_S)  # the head node waits for the others
        return int(stream.readline())


def software() -> dict[str, str]:
    """Versions of Python and torch by name. torch is not imported."""
    return {"Python": platform.python_version(), "torch": importlib.metadata.version("torch")}


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _driver() -> str:
    if not Path("/proc/driver/nvidia").exists():
        return "none"
    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def _missing_interface() -> str:
    """The first variable that names only network interfaces that this node does not have.

    NCCL takes prefixes, "=" before exact names, and "^" before names to leave out.
    """
    own = list(psutil.net_if_addrs())
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "").lstrip("=").split(",")
        if not any(name.startswith("^") or there.startswith(name) for name in wanted for there in own):
            return f"{variable}={','.join(wanted)} (it has {_interfaces()})"
    return ""


def _interfaces() -> str:
    """This node's interfaces with their IPv4 addresses."""
    return ", ".join(
        f"{name} {address.address}"
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    )


def start_ranks(launcher: Sequence[str], node: Node, port: int) -> None:
    """Become the launcher of this node's ranks: a Python module and its arguments, in this process.

    It stays this process so that the head node's port stays taken until the launcher binds to it.
    """
    known = {NODE_RANK: str(node.number), HEAD_ADDRESS: node.head_address, HEAD_PORT: str(port)}
    module, *arguments = (known.get(word, word) for word in launcher)
    # A SIGTERM to the step reaches the ranks, which save. The launcher only has to wait: torch's agent would kill them
    # after 30 s. A handler, unlike SIG_IGN, is not inherited by the ranks.
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(arguments: Sequence[str]) -> None:
    """Meet the other nodes, then start this node's ranks."""
    run, *launcher = arguments
    node = Node.from_environment(os.environ)
    try:
        own = Software.here()
        if node.number:
            port = join(node, own)
        else:
            head = Head(node)  # a name that lives as long as the launcher, and with it the socket that holds the port
            port = head.meet(own)
    except RendezvousError as error:
        if error.reason:
            print(f"[rendezvous on {node.name}] {error.reason}", flush=True)
        raise
    # Job scripts from before the launcher was an argument name only the run.
    start_ranks(launcher or trl.launcher(Path(run)), node, port)


if __name__ == "__main__":
    main(sys.argv[1:])
