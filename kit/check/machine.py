"""What this machine has: software, GPUs, CPUs and memory, network, file systems, and the hosts that it reaches."""

import os
import sys
from pathlib import Path

import psutil

from kit.check.facts import Finding
from kit.check.gpus import find_gpus
from kit.check.mounts import find_mounts
from kit.check.network import find_hosts, find_networks
from kit.config.cluster import NO_COMPILER, Cluster
from kit.forecast.limits import find_compiler
from kit.slurm.rendezvous import Software


def inspect_machine(cluster: Cluster) -> list[Finding]:
    """All findings about this machine; takes some ten seconds."""
    versions = dict(Software.here().versions)
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    cpus, usable = psutil.cpu_count() or 1, len(os.sched_getaffinity(0))
    gib = psutil.virtual_memory().total / 2**30
    host = f"{cpus} CPUs, {usable} of them for this process; {gib:.1f} GiB"
    return [
        Finding("software", software, sys.executable, facts=versions),
        *find_gpus(),
        Finding("host", host, "psutil", facts={"nodes.cpus": cpus, "nodes.ram_gib": round(gib, 1)}),
        _compiler(),
        *find_networks(cluster),
        *find_mounts(cluster),
        *find_hosts(),
    ]


def _compiler() -> Finding:
    """The C compiler that torch.compile needs. Jobs train without compiled layers, too, so this is never a problem."""
    found = find_compiler()
    value = found or "none with Python's headers: layers are not compiled"
    facts = {"nodes.compiler": Path(found).name if found else NO_COMPILER}
    return Finding("C compiler", value, "CC, gcc, cc, clang; Python.h", facts=facts)
