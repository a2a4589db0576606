"""Cluster: the machines. Nodes, GPUs, links, storage, Slurm settings and environment, from one TOML file."""

import importlib.metadata
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import tomli_w

from kit import schema
from kit.schema import at_least


@dataclass(frozen=True)
class Nodes:
    """What each node has. gpus = 0 is a CPU cluster; its memory is then shared by the processes.

    kit.probe measures three of them: gpu_efficiency, the part of gpu_bf16_tflops that a large matmul reaches;
    gpu_memory_gb_s, what the GPU's memory moves; launch_us, in which the host issues one small operation. 0: not known.
    """

    count: int = at_least(1, 1)
    gpus: int = at_least(0, 0)
    gpu: str = ""
    gpu_memory_gib: float = at_least(0, 0.0)
    gpu_bf16_tflops: float = at_least(0, 0.0)
    gpu_efficiency: float = at_least(0, 0.0, most=1)
    gpu_memory_gb_s: float = at_least(0, 0.0)
    launch_us: float = at_least(0, 0.0)
    cpus: int = at_least(1, 2)
    ram_gib: float = at_least(0.5, 16.0)


@dataclass(frozen=True)
class Link:
    """Bandwidth in GB/s (1e9 bytes) of one direction; efficiency is the part that collectives get of it."""

    kind: str
    gb_s: float = at_least(0, 10.0)
    efficiency: float = at_least(0.01, 0.8, most=1)


@dataclass(frozen=True)
class Links:
    """intra: per GPU, inside a node. inter: per node."""

    intra: Link = field(default_factory=lambda: Link("memory"))
    inter: Link = field(default_factory=lambda: Link("none"))


@dataclass(frozen=True)
class Container:
    """The image in which the ranks run: what enroot takes (pyxis), or a .sif file; mounts are further host[:inside]."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    image: str = ""
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slurm:
    """What the job script asks for. gres is per node, as Slurm spells it.

    python is the interpreter on the nodes, in the image where there is one; else python3 there, and outside of an image
    the one that launches.
    """

    partition: str = ""
    gres: str = ""
    time: str = ""
    account: str = ""
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    python: str = ""
    container: Container = field(default_factory=Container)

    @property
    def limit_s(self) -> float:
        """Seconds of a time limit MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; infinite where there is none."""
        days, dash, clock = self.time.rpartition("-")
        try:
            parts = [int(part) for part in clock.split(":")]
        except ValueError:
            return math.inf
        units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
        return float(86_400 * int(days or 0) + sum(n * unit for n, unit in zip(parts, units, strict=False)))


@dataclass(frozen=True)
class Paths:
    """Folders that every node sees."""

    runs: str = "runs"
    hf_home: str = ""


@dataclass(frozen=True)
class Storage:
    """A mounted file system and what it moves, in GB/s."""

    path: str
    kind: str = "local"
    gb_s: float = at_least(0, 1.0)


@dataclass(frozen=True)
class Cluster:
    """The machines. Raises InputError for an unknown key or a bad value, naming it and the valid ones."""

    name: str
    nodes: Nodes = field(default_factory=Nodes)
    links: Links = field(default_factory=Links)
    slurm: Slurm = field(default_factory=Slurm)
    environment: dict[str, str] = field(default_factory=dict)
    paths: Paths = field(default_factory=Paths)
    storage: dict[str, Storage] = field(default_factory=dict)

    @classmethod
    def load(cls, name: "str | Path | Cluster") -> "Cluster":
        """From a file or the name of a shipped profile."""
        if isinstance(name, Cluster):
            return name
        path = schema.find(name, "clusters")
        return schema.build(cls, schema.read_toml(path), str(path))

    def toml(self) -> str:
        """The profile as a file that loads to an equal cluster."""
        return tomli_w.dumps(schema.as_dict(self))


@dataclass(frozen=True)
class Finding:
    """One fact about this machine or cluster, with how it was found; problem says what to do about it."""

    name: str
    value: str
    how: str
    problem: str = ""


def detect(cluster: Cluster) -> list[Finding]:
    """What is here now, each finding with how it was found, and where it disagrees with the profile."""
    return [
        _python(),
        *_slurm(cluster),
        _gpus(cluster),
        *_memory_and_cpus(cluster),
        *_storage(cluster),
        _network(cluster),
    ]


def _say(*words: str) -> str:
    """The command's output; empty where it is absent, fails or takes longer than 15 s."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=15, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _python() -> Finding:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    return Finding("python", f"{sys.version.split()[0]} with {versions}", sys.executable)


def _slurm(cluster: Cluster) -> list[Finding]:
    if not (version := _say("sinfo", "--version")) or not (lines := _say("sinfo", "-h", "-o", "%P|%D|%G|%l|%T")):
        return [Finding("slurm", "none answers", "sinfo", "" if cluster.nodes.gpus == 0 else "jobs would run here")]
    config = _say("scontrol", "show", "config")
    accounting = "off" if "accounting_storage/none" in config else "on"
    found = [
        Finding("slurm", f"{version.removeprefix('slurm ')}, accounting {accounting}", "sinfo, scontrol show config")
    ]
    for line in lines.splitlines():
        partition, nodes, gres, limit, state = line.split("|")
        value = f"{nodes} nodes {state}, gres {gres}, time limit {limit}"
        found.append(Finding(f"partition {partition.rstrip('*')}", value, "sinfo"))
    wanted = cluster.slurm.partition
    if wanted and wanted not in [f.name.removeprefix("partition ") for f in found]:
        found.append(Finding("partition", wanted, "profile", f"Slurm has no partition {wanted}; set slurm.partition."))
    return found


def _gpus(cluster: Cluster) -> Finding:
    names = _say("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").splitlines()
    if not names:
        return Finding("gpus", "none on this machine", "nvidia-smi")
    wrong = cluster.nodes.gpus not in (0, len(names))
    problem = f"the profile says {cluster.nodes.gpus}; set nodes.gpus" if wrong else ""
    return Finding("gpus", f"{len(names)} x {names[0]}", "nvidia-smi", problem)


def _memory_and_cpus(cluster: Cluster) -> list[Finding]:
    ram, cpus = psutil.virtual_memory().total / 2**30, len(os.sched_getaffinity(0))
    short = cluster.nodes.gpus == 0 and ram < cluster.nodes.ram_gib
    problem = f"less than the profile's {cluster.nodes.ram_gib:g} GiB; set nodes.ram_gib" if short else ""
    return [
        Finding("memory", f"{ram:.1f} GiB", "psutil", problem),
        Finding("cpus", f"{cpus} usable by this process", "sched_getaffinity"),
    ]


def _storage(cluster: Cluster) -> list[Finding]:
    return [_mount("runs", cluster.paths.runs)] + [_mount(f"storage {n}", s.path) for n, s in cluster.storage.items()]


def _mount(name: str, path: str) -> Finding:
    """The file system of a path, or of its nearest existing parent."""
    folder = next(p for p in (Path(path).absolute(), *Path(path).absolute().parents) if p.exists())
    parts = [p for p in psutil.disk_partitions(all=True) if folder.is_relative_to(p.mountpoint)]
    kind = max(parts, key=lambda p: len(p.mountpoint)).fstype if parts else "unknown"
    free = shutil.disk_usage(folder).free / 1e9
    problem = "" if os.access(folder, os.W_OK) else f"{folder} is not writable; set another path"
    return Finding(name, f"{path}: {kind}, {free:,.0f} GB free", f"mount of {folder}", problem)


def _network(cluster: Cluster) -> Finding:
    up = {n: s for n, s in psutil.net_if_stats().items() if s.isup}
    value = ", ".join(f"{n} ({s.speed} Mb/s)" if s.speed else n for n, s in up.items())
    wanted = cluster.environment.get("NCCL_SOCKET_IFNAME") or cluster.environment.get("GLOO_SOCKET_IFNAME") or ""
    here = not wanted or any(n.startswith(wanted.lstrip("=^")) for n in up)
    return Finding("network", value, "psutil", "" if here else f"the profile's {wanted} is not up on this machine")
