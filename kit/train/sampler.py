"""Node sampler: writes one JSON line a second to nodes/<host>.jsonl. kit.watch.samples reads them.

Runs next to the training: `python -m kit.train.sampler RUN`.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml

from kit.watch.samples import GB, GIB


def own_gpus(environment: dict[str, str]) -> list[Any]:
    """NVML handles of this job's GPUs: those that CUDA_VISIBLE_DEVICES lists, else SLURM_JOB_GPUS, else all.

    Where Slurm hides the GPUs of other jobs, NVML counts from 0 while SLURM_JOB_GPUS has the numbers of the node. Then
    as many GPUs are visible as are listed, and all of them belong to this job.
    """
    everything = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    listed = environment.get("CUDA_VISIBLE_DEVICES", environment.get("SLURM_JOB_GPUS"))
    if listed is None:
        return everything
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if all(name.isdigit() for name in names):
        own = [everything[int(name)] for name in names if int(name) < len(everything)]
        return everything if len(names) == len(everything) else own
    uuids = {pynvml.nvmlDeviceGetUUID(gpu): gpu for gpu in everything}  # CUDA takes the beginning of a UUID, too
    own = [gpu for name in names for uuid, gpu in uuids.items() if uuid.startswith(name)]
    return own + [pynvml.nvmlDeviceGetHandleByUUID(name) for name in names if name.startswith("MIG-")]


def _reading(read: Callable[[], Any]) -> Any:
    """The result, or None where reading fails: MIG instances have no utilisation, containers no disks, drivers fail."""
    try:
        return read()
    except Exception:
        return None


def gpu_sample(gpu: Any) -> dict[str, Any]:
    """Utilisation in %, memory in GiB, power in W, temperature in degrees C; None where it is unknown."""
    memory = _reading(lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu))
    milliwatts = _reading(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu))
    return {
        "index": _reading(lambda: pynvml.nvmlDeviceGetIndex(gpu)),
        "uuid": _reading(lambda: pynvml.nvmlDeviceGetUUID(gpu)),
        "util": _reading(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        "mem_gib": memory and round(memory.used / GIB, 3),
        "mem_total_gib": memory and round(memory.total / GIB, 3),
        "power_w": milliwatts and round(milliwatts / 1000, 1),
        "temp_c": _reading(lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    }


def _traffic() -> dict[str, int]:
    """Bytes since boot, without loopback, and without bonds and bridges, which count twice. RDMA is not counted."""
    nics = psutil.net_io_counters(pernic=True)
    own = [nics[name] for name in nics if name != "lo" and not any(Path("/sys/class/net", name).glob("lower_*"))]
    return {"in": sum(nic.bytes_recv for nic in own), "out": sum(nic.bytes_sent for nic in own)}


def _disk() -> dict[str, int]:
    counters = psutil.disk_io_counters()
    return {"read": counters.read_bytes, "write": counters.write_bytes}


class Counters(NamedTuple):
    """Bytes since boot at one time; None for what could not be read."""

    time: float
    network: dict[str, int] | None
    disk: dict[str, int] | None

    @classmethod
    def now(cls) -> "Counters":
        """Read them."""
        return cls(time.monotonic(), _reading(_traffic), _reading(_disk))


class Sampler:
    """Readings of one node. CPU load and rates are means since the previous sample."""

    def __init__(self, host: str, environment: dict[str, str]) -> None:
        self.host = host
        _reading(pynvml.nvmlInit)
        self.gpus = _reading(lambda: own_gpus(environment)) or []
        self.before = Counters.now()
        psutil.cpu_percent()

    def sample(self) -> dict[str, Any]:
        """CPU in %, RAM in GiB, network and disk in GB/s, and a `gpu_sample` each; None for what could not be read."""
        before, now = self.before, Counters.now()
        self.before = now
        seconds = now.time - before.time
        return {
            "t": round(time.time(), 3),
            "host": self.host,
            "cpu": _reading(psutil.cpu_percent),
            "ram_gib": _reading(lambda: round(psutil.virtual_memory().used / GIB, 3)),
            "net_gb_s": _rates(before.network, now.network, seconds),
            "disk_gb_s": _rates(before.disk, now.disk, seconds),
            "gpus": [gpu_sample(gpu) for gpu in self.gpus],
        }


def _rates(before: dict[str, int] | None, now: dict[str, int] | None, seconds: float) -> dict[str, float] | None:
    """GB/s."""
    return {key: round((now[key] - before[key]) / GB / seconds, 6) for key in now} if now and before else None


def main(argv: list[str] | None = None) -> None:
    """Sample until the parent process has ended, or SIGTERM or SIGINT arrives."""
    parser = argparse.ArgumentParser(prog="python -m kit.train.sampler")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between samples (default 1)")
    parser.add_argument(
        "--parent", type=int, default=os.getppid(), help="process with which to end (default: the parent)"
    )
    asked = parser.parse_args(argv)
    if not asked.run.is_dir():
        parser.error(f"{asked.run} is not a folder")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    path = asked.run / "nodes" / f"{host}.jsonl"
    path.parent.mkdir(exist_ok=True)
    sampler = Sampler(host, dict(os.environ))
    while not stop.wait(asked.every) and os.getppid() == asked.parent:
        try:
            # Opened for each line: NFS sends a writer's pages to the server when the file is closed, not before.
            with path.open("a") as stream:
                stream.write(json.dumps(sampler.sample()) + "\n")
        except OSError as error:
            print(f"kit.train.sampler: {path} was not written ({error}).", file=sys.stderr)


if __name__ == "__main__":
    main()
