"""The start of a job on each node: they meet at the head, compare what they run, and then launch their ranks."""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pynvml

PATIENCE = 20.0  # seconds; srun starts all nodes together, and a busy file system takes a few to import
MISSING, UNLIKE = 41, 42  # exit codes


class Failed(SystemExit):
    """The nodes did not meet; the reason is a line for the job's log, except where the head says it."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(code)
        self.reason = reason


class Meeting:
    """What a node knows of its job: hosts in Slurm's order, its own number, the head's address, a key of this start."""

    def __init__(self, environment: Mapping[str, str], patience: float = PATIENCE) -> None:
        job, restart = environment["SLURM_JOB_ID"], environment.get("SLURM_RESTART_COUNT", "0")
        self.hosts, self.node = environment["KIT_HOSTS"].split(), int(environment["SLURM_NODEID"])
        self.address, self.key, self.patience = environment["KIT_ADDRESS"], f"kit {job}.{restart}\n", patience
        self.launched = json.loads(environment.get("KIT_SOFTWARE", "{}"))  # there may be none in an image
        # 16 to try, others for each job, below the range of outgoing connections (32768 on Linux)
        self.ports = [20000 + (int(job) + n) % 12000 for n in range(16)]

    def host(self, mine: dict[str, str]) -> int:
        """The head's part: wait for all, compare, and tell all the port. Raises Failed."""
        guests, found = [], {self.hosts[0]: mine}
        with contextlib.ExitStack() as open_:
            self.server = server = self._listen()
            port, end = int(server.getsockname()[1]), time.monotonic() + self.patience + 5  # guests complain first
            while len(found) < len(self.hosts) and (left := end - time.monotonic()) > 0:
                server.settimeout(left)
                with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # nobody, or a stranger
                    guest = open_.enter_context(server.accept()[0])
                    guest.settimeout(2)
                    guest.sendall(self.key.encode())
                    with guest.makefile() as said:
                        node, facts = json.loads(said.readline())
                    found[self.hosts[node]] = facts
                    guests.append(guest)
            code, reason = self._judge(found)
            for guest in guests:
                with contextlib.suppress(OSError):  # it has gone
                    guest.sendall(f"{code or port}\n".encode())
        server.shutdown(socket.SHUT_RDWR)  # the port stays taken: no other job gets it before the launcher
        if code:
            raise Failed(code, reason)
        return port

    def _listen(self) -> socket.socket:
        for port in self.ports:
            server = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
            try:
                if server.family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                server.bind(("", port))
                # After bind, so that it goes to a port that is wholly free, and the launcher, which sets it, is let in.
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.listen(len(self.hosts))
                return server
            except OSError:
                server.close()
        raise Failed(MISSING, f"Ports {self.ports[0]} to {self.ports[-1]} are all in use: submit the run again.")

    def _judge(self, found: dict[str, dict[str, str]]) -> tuple[int, str]:
        head, wanted = self.hosts[0], {k: (v, "where it was launched") for k, v in self.launched.items()}
        if missing := [name for name in self.hosts if name not in found]:
            return (
                MISSING,
                f"{', '.join(missing)} did not come to {head} ({self.address}) in {self.patience:.0f} s.",
            )
        wanted = {k: (v, f"on {head}") for k, v in found[head].items()} | wanted
        for name, own in found.items():
            unlike = [f"{k} {own[k]} ({v} {where})" for k, (v, where) in wanted.items() if own[k] != v]
            if own["lacks"] or unlike:
                fix = "set it in [environment]" if own["lacks"] else "give all nodes one environment by slurm.setup"
                has = f"lacks {own['lacks']}" if own["lacks"] else f"has {', '.join(unlike)}"
                return UNLIKE, f"{name} {has}: {fix} of the cluster profile."
        return 0, ""

    def join(self, mine: dict[str, str]) -> int:
        """A guest's part: find the head, tell it what runs here, and hear the port. Raises Failed."""
        end, why = time.monotonic() + self.patience, ""
        for port in itertools.takewhile(lambda _: time.monotonic() < end, itertools.cycle(self.ports)):
            try:
                with socket.create_connection((self.address, port), timeout=2) as link, link.makefile("rw") as talk:
                    if talk.readline() == self.key:
                        print(json.dumps([self.node, mine]), file=talk, flush=True)
                        link.settimeout(self.patience + 10)
                        answer = int(talk.readline())
                        break
            except (OSError, ValueError) as error:
                why = str(error) if port == self.ports[0] else why
                time.sleep(0.02)
        else:
            raise Failed(
                MISSING, f"{self.hosts[0]} does not answer at {self.address}:{self.ports[0]} ({why}). This node has "
                f"{_interfaces()}. That address is Slurm's NodeAddr; where another network is meant for this, name it "
                "in [environment] of the cluster profile: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME."
            )  # fmt: skip
        if answer not in self.ports:
            raise Failed(answer)
        return answer


def software() -> dict[str, str]:
    """Versions of Python and torch; the latter is not imported."""
    return {"Python": platform.python_version(), "torch": importlib.metadata.version("torch")}


def facts() -> dict[str, str]:
    """What must be the same on all nodes; "lacks" names an interface that the profile wants and this node has not."""
    code, driver = hashlib.sha256(), "none"
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    if Path("/proc/driver/nvidia").exists():
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    own, lacks = list(psutil.net_if_addrs()), ""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # NCCL takes a prefix, =exact or ^not
        wanted = os.environ.get(variable, "").lstrip("=").split(",")
        if not any(w.startswith("^") or name.startswith(w) for w in wanted for name in own):
            lacks = f"{variable}={','.join(wanted)} (it has {_interfaces()})"
    return software() | {"kit": code.hexdigest()[:8], "driver": driver, "lacks": lacks}


def _interfaces() -> str:
    every = psutil.net_if_addrs().items()
    return ", ".join(f"{name} {a.address}" for name, ads in every for a in ads if a.family == socket.AF_INET)


def main() -> None:
    """Meet, then become this node's launcher. Ranks see a SIGTERM to the step themselves, and save: it only waits."""
    meeting, run = Meeting(os.environ), sys.argv[1]
    try:
        port = meeting.join(facts()) if meeting.node else meeting.host(facts())
    except Failed as failed:
        if failed.reason:
            print(f"[rendezvous on {meeting.hosts[meeting.node]}] {failed.reason}", flush=True)
        raise
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"  # torch's agent would kill them after 30 s
    signal.signal(signal.SIGTERM, lambda *_: None)  # unlike SIG_IGN it is not handed on to the ranks
    sys.argv = ["accelerate", "--config_file", f"{run}/accelerate.yaml", "--machine_rank", str(meeting.node)]
    sys.argv += ["--main_process_ip", meeting.address, "--main_process_port", str(port), "-m", "kit.train", run]
    from accelerate.commands import launch

    launch.main()


if __name__ == "__main__":
    main()
