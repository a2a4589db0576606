"""The start of a job on each node: the nodes meet at the head node, compare their software, and start their ranks.

`python -m kit.slurm.rendezvous RUN LAUNCHER...` runs as one srun task on each node. The head node listens on a port
that depends on the job id. Each other node connects and sends its number and its software as a line of JSON. The head
node answers with the port for torch's rendezvous, or with the exit code that all nodes end with. A job whose nodes
cannot meet so ends in seconds, with one line that says why.

All messages are authenticated (kit.slurm.handshake) by a random key, which the job script makes at each start and hands
only to these tasks. Other connections are closed and counted.
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
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

import psutil
import pynvml
from pydantic import TypeAdapter

from kit.slurm.handshake import Peer, StrangerError
from kit.slurm.variables import Variable
from kit.trainers import trl
from kit.trainers.base import HEAD_ADDRESS, HEAD_PORT, NODE_RANK

TIMEOUT_S = 20.0  # srun starts all tasks together, and imports from a busy file system take seconds
# Other nodes give up first, so that the head node's message names them.
HEAD_EXTRA_S = 5.0
GREETING_S = 3.0  # for the proofs and the facts of one connection
ACCEPT_S = 0.1  # between two looks at what the connections have sent
MOST_CONNECTIONS = 256  # at once, beyond the job's own; more are closed
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

    versions: of "Python", "torch", "kit" (a digest of its source) and "driver" (NVIDIA's, or "none").
    missing_interface: the variable and the network interfaces that it names, where this node has none of them.
    """

    versions: Mapping[str, str]
    missing_interface: str = ""

    @classmethod
    def here(cls) -> "Software":
        """Of this node."""
        return cls(software() | {"kit": _source_digest(), "driver": _driver()}, _missing_interface())


GREETING = TypeAdapter(tuple[int, Software])  # what a node sends to the head node: its number and its software


@dataclass(frozen=True)
class Node:
    """This node's part in the job. hosts: all nodes in the order of their numbers; the head node is number 0.

    key: the secret of this start of the job. launched_with: versions at the launch, by name; empty where the ranks run
    another interpreter.
    """

    hosts: tuple[str, ...]
    number: int
    head_address: str
    key: bytes
    ports: tuple[int, ...]
    launched_with: Mapping[str, str]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Node":
        """By the variables of Slurm and of the job script.

        Raises RendezvousError where several nodes have no key to authenticate each other with.
        """
        job = environment["SLURM_JOB_ID"]
        hosts, key = tuple(environment[Variable.HOSTS].split()), environment.get(Variable.KEY, "")
        if len(hosts) > 1 and not key:
            raise RendezvousError(
                ExitCode.NODE_MISSING,
                f"The job script sets no {Variable.KEY}, so it is of an earlier version of the kit: cancel the job and "
                "submit the run again.",
            )
        return cls(
            hosts=hosts,
            number=int(environment["SLURM_NODEID"]),
            head_address=environment[Variable.ADDRESS],
            key=bytes.fromhex(key),
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
    """The head node's side. It holds its port until the process ends, so that no other job can take it.

    strangers: connections that were not of this start of the job.
    """

    def __init__(self, node: Node, timeout_s: float = TIMEOUT_S) -> None:
        self.node = node
        self.timeout_s = timeout_s
        self.strangers = 0
        self._guests: dict[int, tuple[Software, Peer]] = {}  # by the number of the node
        self._lock = threading.Lock()
        self._reserved, self._server = _listen(node)
        self.port = int(self._server.getsockname()[1])

    def meet(self, own: Software) -> int:
        """Wait for all nodes, compare their software with this node's, and return the port for torch's rendezvous.

        Raises RendezvousError where a node does not come or differs; all nodes that came get its exit code.
        """
        self._accept_all()
        self._server.close()  # no more connections; the port stays reserved
        with self._lock:
            guests = dict(self._guests)
        found = {self.node.head: own} | {self.node.hosts[number]: there for number, (there, _) in guests.items()}
        failure = self._compare(found)
        answer = failure.code if failure else self.port
        for _, guest in guests.values():
            with contextlib.suppress(StrangerError):  # that node has ended
                guest.send(str(answer), GREETING_S)
            guest.connection.close()
        if failure:
            raise failure
        return self.port

    def close(self) -> None:
        """Give the port back."""
        self._server.close()
        self._reserved.close()

    def _accept_all(self) -> None:
        """Accept connections until all nodes have come, or the time is over; each is served by its own thread."""
        deadline = time.monotonic() + self.timeout_s + HEAD_EXTRA_S
        places = threading.BoundedSemaphore(MOST_CONNECTIONS + len(self.node.hosts))
        self._server.settimeout(ACCEPT_S)
        while len(self._guests) < len(self.node.hosts) - 1 and time.monotonic() < deadline:
            try:
                connection = self._server.accept()[0]
            except OSError:  # no connection in this time, or it was closed again
                continue
            if places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection, places), daemon=True).start()
            else:
                self._reject(connection)

    def _serve(self, connection: socket.socket, places: threading.BoundedSemaphore) -> None:
        guest = Peer(connection, self.node.key, is_head=True)
        try:
            guest.greet(GREETING_S)
            number, facts = GREETING.validate_json(guest.receive(GREETING_S))
            if not 0 < number < len(self.node.hosts):
                raise StrangerError(f"node {number}")
            with self._lock:
                self._guests[number] = (facts, guest)
        except (StrangerError, ValueError):  # ValueError: a message of another shape
            self._reject(connection)
        finally:
            places.release()

    def _reject(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # reset it: the port is then not kept for another minute (TIME_WAIT)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        with self._lock:
            self.strangers += 1

    def _compare(self, found: Mapping[str, Software]) -> RendezvousError | None:
        """Why this job cannot start; None if it can."""
        head = self.node.head
        if missing := [name for name in self.node.hosts if name not in found]:
            return RendezvousError(
                ExitCode.NODE_MISSING,
                f"{', '.join(missing)} did not connect to {head} ({self.node.head_address}) in {self.timeout_s:.0f} s.",
            )
        wanted = {name: (version, f"on {head}") for name, version in found[head].versions.items()}
        wanted |= {name: (version, "where it was launched") for name, version in self.node.launched_with.items()}
        for node_name, node_software in found.items():
            if problem := _problem(node_name, node_software, wanted):
                return RendezvousError(ExitCode.SOFTWARE_DIFFERS, problem)
        return None


def _problem(node_name: str, found: Software, wanted: Mapping[str, tuple[str, str]]) -> str:
    """What a node lacks or has in another version, and how to fix it; empty where nothing is wrong."""
    if found.missing_interface:
        return f"{node_name} lacks {found.missing_interface}: set it in [environment] of the cluster profile."
    own = {name: found.versions.get(name, "none") for name in wanted}
    other = [
        f"{name} {own[name]} ({version} {where})" for name, (version, where) in wanted.items() if own[name] != version
    ]
    if not other:
        return ""
    return f"{node_name} has {', '.join(other)}: give all nodes one environment by slurm.setup of the cluster profile."


def _listen(node: Node) -> tuple[socket.socket, socket.socket]:
    """Two sockets on the first of the node's ports that is free: one reserves it, the other one listens.

    The reservation is on all interfaces, as torch's store listens on all of them later; this job's nodes are listened
    to only at the head node's address, where it is an address of this machine. Raises RendezvousError where no port is
    free.
    """
    ports = node.ports
    for port in ports:
        reserved = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        try:
            if reserved.family == socket.AF_INET6:
                reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            reserved.bind(("", port))
            # Set after bind: this process gets a free port, and torch's store, which sets it before, can
            # then bind to it as well.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return reserved, _server(node.head_address, port)
        except OSError:
            reserved.close()
    raise RendezvousError(
        ExitCode.NODE_MISSING, f"Ports {ports[0]} to {ports[-1]} are all in use: submit the run again."
    )


def _server(address: str, port: int) -> socket.socket:
    """A listening socket at this address, or on all interfaces where the address is not this machine's (NAT)."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=MOST_CONNECTIONS)
    except OSError:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=MOST_CONNECTIONS, dualstack_ipv6=dual)


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
        except (OSError, StrangerError) as error:  # nothing listens there, or another job or program does
            first_error = str(error) if port == node.ports[0] else first_error
            time.sleep(0.02)
            continue
        if answer not in node.ports:
            raise RendezvousError(answer)  # the head node logs the reason
        return answer
    raise RendezvousError(
        ExitCode.NODE_MISSING,
        f"{node.head} does not answer at {node.head_address}:{node.ports[0]} ({first_error}). This node has "
        f"{_interfaces()}. That address is Slurm's NodeAddr; where another network is meant for this, name it "
        "in [environment] of the cluster profile: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME.",
    )


def _ask_head(node: Node, own: Software, port: int, timeout_s: float) -> int:
    """The head node's answer. Raises OSError or StrangerError."""
    with socket.create_connection((node.head_address, port), timeout=GREETING_S) as connection:
        head = Peer(connection, node.key, is_head=False)
        head.greet(GREETING_S)
        head.send(json.dumps([node.number, asdict(own)]), GREETING_S)
        return int(head.receive(timeout_s + 2 * HEAD_EXTRA_S))  # the head node waits for the others


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
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        node = Node.from_environment(os.environ)
        os.environ.pop(Variable.KEY, None)  # the ranks do not need it
        own = Software.here()
        if node.number:
            port = join(node, own)
        else:
            head = Head(node)  # a name that lives as long as the launcher, and with it the socket that holds the port
            port = head.meet(own)
            if head.strangers:
                print(f"{head.strangers} connections were not of this job, and were ignored.", flush=True)
    except RendezvousError as error:
        if error.reason:
            reason = "".join(character if character.isprintable() else "?" for character in error.reason)
            print(f"[rendezvous on {name}] {reason}", flush=True)
        raise
    # Job scripts from before the launcher was an argument name only the run.
    start_ranks(launcher or trl.launcher(Path(run)), node, port)


if __name__ == "__main__":
    main(sys.argv[1:])
