"""Machine: what this one has and sees. Software, GPUs and their links, memory, network, mounts, the hub and W&B."""

import collections
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from kit.check.facts import Finding
from kit.checkpoints import pagecache
from kit.config.cluster import Cluster
from kit.errors import KitError

SIZE, BLOCK, LIMIT = 256 << 20, 8 << 20, 2.0  # bytes of a trial file, bytes a call, seconds to write it and to read it
NETWORKED = ("nfs", "lustre", "beegfs", "mergerfs", "gpfs", "ceph", "wekafs", "cifs", "glusterfs", "sshfs", "juicefs")
HOSTS = {
    "hub": ("HF_ENDPOINT", "https://huggingface.co", "fetch on the login node; jobs get HF_HUB_OFFLINE=1 from the kit"),
    "W&B": ("WANDB_BASE_URL", "https://api.wandb.ai", "jobs get WANDB_MODE=offline from the kit; sync them later"),
}
WAYS = {
    "PIX": "under one PCIe switch", "PXB": "over several PCIe switches", "PHB": "over a PCIe host bridge",
    "NODE": "over host bridges of one NUMA node", "SYS": "from socket to socket",
}  # fmt: skip


def look(cluster: Cluster) -> list[Finding]:
    """Software, GPUs, memory, network, mounts and hosts, as this machine sees them; some ten seconds."""
    from kit.slurm.rendezvous import Software

    versions = Software.here().versions()
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    cpus, own, gib = psutil.cpu_count() or 1, len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    host = f"{cpus} CPUs, {own} of them for this process; {gib:.1f} GiB"
    return [
        Finding("software", words, sys.executable, facts=versions),
        *gpus(),
        Finding("host", host, "psutil", facts={"nodes.cpus": cpus, "nodes.ram_gib": round(gib, 1)}),
        *network(cluster),
        *mounts(cluster),
        *reach(),
    ]


def _say(*words: str) -> str:
    """The command's output; empty where it is absent, fails or takes longer than 15 s."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=15, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def within(seconds: float, work: Callable[..., Any], *given: Any) -> Any:
    """What the work gives; raises TimeoutError where a name server or a file system takes longer, and leaves it."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*given))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout=seconds)


def gpus() -> list[Finding]:
    """GPUs, with the memory that is left for programs, and how they are linked."""
    keys = "name,memory.total,memory.reserved,pcie.link.gen.max,pcie.link.width.max"
    said = _say("nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in said.splitlines()]
    given = int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
    lost = f"Slurm gave this job {given} GPUs: have the driver, or Slurm's gres, mended" if given > len(rows) else ""
    if not rows:
        return [Finding("GPUs", "none seen", "nvidia-smi", lost, {"nodes.gpus": 0})]
    name, total, reserved, generation, lanes = ("0" if cell.startswith("[") else cell for cell in rows[0])  # [N/A]
    gib = (float(total) - float(reserved)) / 1024
    facts = {"nodes.gpus": len(rows), "nodes.gpu": name, "nodes.gpu_memory_gib": round(gib, 1)}
    kinds = ", ".join(f"{count} x {kind}" for kind, count in collections.Counter(row[0] for row in rows).items())
    near = topology(text := _say("nvidia-smi", "topo", "-m"))
    link = {"links.intra": intra(near, int(generation), int(lanes))} if len(near) > 1 else {}
    return [
        Finding("GPUs", f"{kinds}, {gib:.1f} GiB each", "nvidia-smi --query-gpu", lost, facts),
        Finding("topology", in_words(near), "nvidia-smi topo -m", facts=link | {"topology": text}),
    ]


def topology(text: str) -> dict[str, dict[str, str]]:
    """A row for each GPU of `nvidia-smi topo -m`: its way to every device, and its "CPUs" and "NUMA node".

    A way is NV<number of NVLinks> or a key of WAYS. Cells are between tabs, the header may be underlined, and NICs get
    their own names from the legend.
    """
    lines = [line.split("\t") for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    header = next((cells for cells in lines if "CPU Affinity" in cells), ["CPU Affinity"])
    names = [cell for cell in header[: header.index("CPU Affinity")] if cell]
    nics = dict(re.findall(r"^\s*(NIC\d+): (\S+)", text, re.MULTILINE))
    columns = [*(nics.get(name, name) for name in names), "CPUs", "NUMA node"]
    rows = [cells for cells in lines if re.fullmatch(r"GPU\d+", cells[0]) and cells != header]
    return {name: dict(zip(columns, map(str.strip, cells), strict=False)) for name, *cells in rows}


def ways(near: Mapping[str, Mapping[str, str]]) -> "collections.Counter[str]":
    """How many pairs of GPUs are linked in each way."""
    names = list(near)
    return collections.Counter(near[a][b] for i, a in enumerate(names) for b in names[i + 1 :])


def intra(near: Mapping[str, Mapping[str, str]], generation: int, lanes: int) -> dict[str, Any]:
    """The profile's links.intra, by the slowest pair: GB/s of one direction.

    An NVLink of the 2nd to 4th generation moves 25 GB/s (NVIDIA's H100 white paper: 18 make 450), a PCIe lane 0.985 in
    the 3rd and twice that in each later one. `kit check --probe` measures what collectives get of it.
    """
    links = [int(way[2:]) for way in ways(near) if way.startswith("NV")]
    if len(links) == len(ways(near)):
        return {"kind": f"nvlink x{min(links)}", "gb_s": 25.0 * min(links)}
    return {"kind": f"pcie{generation}", "gb_s": round(0.985 * 2 ** (generation - 3) * lanes, 1)}


def in_words(near: Mapping[str, Mapping[str, str]]) -> str:
    """How the pairs are linked, and which GPUs and CPUs are together."""
    names = {way: f"by {way[2:]} NVLinks" if way.startswith("NV") else WAYS.get(way, way) for way in ways(near)}
    places = collections.defaultdict[str, list[str]](list)
    for gpu, row in near.items():
        places[f"NUMA node {row['NUMA node'] or '?'}, CPUs {row['CPUs'] or '?'}"].append(gpu)
    pairs = [f"{count} pairs {names[way]}" for way, count in ways(near).most_common()]
    return "; ".join(pairs + [f"{', '.join(own)}: {place}" for place, own in places.items()])


def paint(way: str) -> str:
    """CSS of a way: NVLink is blue, PCIe switches alone are green, through a CPU is orange, between sockets red."""
    colours = {"NV": "#2563eb", "PI": "#059669", "PX": "#059669", "PH": "#d97706", "NO": "#d97706", "SY": "#dc2626"}
    colour = colours.get(way[:2], "#334155")
    return f"color: {colour}; background: {colour}1a; text-align: center; padding: 3px 5px; white-space: nowrap"


def network(cluster: Cluster, root: Path = Path("/sys/class"), own: Any = None) -> list[Finding]:
    """Interfaces that are up, RDMA ports that are active, and what NCCL should use of them.

    NCCL takes every active RDMA port unless NCCL_IB_DISABLE=1; for sockets, and to start, all interfaces but lo and
    docker*, those that begin with ib first (NVIDIA's NCCL user guide, environment variables). own: psutil's addresses.
    """

    def read(path: Path) -> str:
        with contextlib.suppress(OSError):  # EINVAL: a virtual interface has no speed
            return path.read_text().strip()
        return "0"

    own = psutil.net_if_addrs() if own is None else own
    addresses = {n: [a.address for a in ads if a.family == socket.AF_INET] for n, ads in own.items()}
    ports = [p for p in sorted(root.glob("infiniband/*/ports/*")) if "ACTIVE" in read(p / "state")]
    rdma = {f"{p.parts[-3]}:{p.name}": float(read(p / "rate").split()[0]) for p in ports}  # such as 400 Gb/sec (4X NDR)
    up = [p for p in sorted(root.glob("net/*")) if read(p / "operstate") in ("up", "unknown") and p.name != "lo"]
    speeds = {p.name: max(0, int(read(p / "speed"))) / 1000 for p in up}
    usable = {n: s for n, s in speeds.items() if addresses.get(n) and not re.match("docker|virbr|veth|cni|br-", n)}
    best, wanted = max(usable, key=lambda n: usable[n], default=""), cluster.environment.get("NCCL_SOCKET_IFNAME", "")
    words = [
        f"{n} {' '.join(addresses.get(n, []))} {f'{s:g} Gb/s' if s else 'speed unknown'}" for n, s in speeds.items()
    ]
    words += [f"{n} RDMA {s:g} Gb/s" for n, s in rdma.items()]
    use, problem = f"sockets over {best or 'nothing'}", ""
    facts: dict[str, Any] = {}
    if rdma:
        use = f"RDMA over {', '.join(rdma)}; to start, {use}"
        facts = {"links.inter": {"kind": f"RDMA {len(rdma)}x{max(rdma.values()):g}G", "gb_s": sum(rdma.values()) / 8}}
        if cluster.environment.get("NCCL_IB_DISABLE") == "1":
            problem = f"NCCL_IB_DISABLE=1 in the profile leaves {len(rdma)} RDMA ports unused: take it out"
    elif usable.get(best):
        facts = {"links.inter": {"kind": f"{usable[best]:g}GbE", "gb_s": usable[best] / 8}}
    if wanted and not wanted.startswith("^"):
        fastest = max((s for n, s in speeds.items() if n.startswith(wanted.lstrip("="))), default=-1.0)
        if fastest < (0 if rdma else usable.get(best, 0)):
            how = "not up" if fastest < 0 else f"slower than {best}"
            problem = f"NCCL_SOCKET_IFNAME={wanted} of the profile is {how} here: set it to {best}"
    elif len(usable) > 1:
        use += f", the fastest with an address: without NCCL_SOCKET_IFNAME={best} it takes others too"
        facts["environment.NCCL_SOCKET_IFNAME"] = best
    return [
        Finding("network", "; ".join(words), f"{root}/net, {root}/infiniband"),
        Finding("NCCL", use, "the speeds above", problem, facts),
    ]


def mounts(cluster: Cluster, table: str = "") -> list[Finding]:
    """File systems of the profile's paths and of scratch, with a trial of each; and every other one of a network."""
    lines = [line.split() for line in (table or Path("/proc/mounts").read_text()).splitlines()]
    known = {target.replace("\\040", " "): (source, kind) for source, target, kind, *_ in lines}
    paths = {"runs": cluster.paths.runs, "hf_home": cluster.paths.hf_home, "scratch": tempfile.gettempdir()}
    uses, gone = collections.defaultdict[str, dict[str, Path]](dict), []
    for use, path in (paths | {name: s.path for name, s in cluster.storage.items()}).items():
        if path:
            folder, there = Path(path).absolute(), True
            with contextlib.suppress(TimeoutError):  # which is said below
                folder, there = within(5, _existing, folder)
            if use in cluster.storage and not there:
                todo = "mount it, or correct [storage] of the profile"
                gone.append(Finding(f"storage {use}", f"{path} is not there", "profile", todo))
                continue
            uses[max((m for m in known if folder.is_relative_to(m)), key=len)][use] = folder
    kinds = {m: re.sub(r"^fuse\.|_nodev$|(?<=nfs)\d", "", kind) for m, (_, kind) in known.items()}
    others: dict[str, dict[str, Path]] = {m: {} for m, kind in kinds.items() if kind in NETWORKED and m not in uses}
    return [*(_mount(m, known[m][0], kinds[m], use) for m, use in (uses | others).items()), *gone]


def _existing(path: Path) -> tuple[Path, bool]:
    """The path, or its nearest parent that is there, with links followed; and whether it is the path itself."""
    whole = path.resolve()
    found = next(p for p in (whole, *whole.parents) if p.exists())
    return found, found == whole


def _mount(mount: str, source: str, kind: str, uses: Mapping[str, Path]) -> Finding:
    value, problem = f"{kind} from {source}" + (f" ({', '.join(uses)})" if uses else ""), ""
    facts: dict[str, Any] = {}
    try:
        space = within(5, shutil.disk_usage, mount)
        value += f", {space.free / 1e9:,.0f} of {space.total / 1e9:,.0f} GB free"
        full = space.free < 4 * SIZE
        problem = "nearly full: free space, or set another path" if full and set(uses) - {"scratch"} else ""
        for folder in list(uses.values())[: 0 if full else 1]:
            wrote, read, cold = within(60, trial, folder)
            value += f"; writes {wrote:.2g}, reads {read:.2g} GB/s{'' if cold else ' from memory'}"
            facts = {"mount": mount, "write_gb_s": wrote, "read_gb_s": read}
            if set(uses) - {"scratch"} and not set(uses) - {
                "runs",
                "hf_home",
                "scratch",
            }:  # the profile has no storage there
                name = re.sub(r"\W+", "_", mount.strip("/")) or "root"
                facts[f"storage.{name}"] = {"path": mount, "kind": kind, "gb_s": round(min(wrote, read), 2)}
    except TimeoutError:
        problem = "it does not answer: its server may be gone"
    except OSError as error:
        problem = f"{', '.join(map(str, uses.values()))}: {error.strerror}; set another path"
    return Finding(f"mount {mount}", value, f"/proc/mounts, a file of {SIZE >> 20} MiB", problem, facts)


def trial(folder: Path) -> tuple[float, float, bool]:
    """GB/s that one process writes, on disk, and reads back, and whether what it read had been evicted from memory."""
    block = os.urandom(BLOCK)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".trial-", buffering=0) as stream:
        start, path = time.perf_counter(), Path(stream.name)
        while stream.tell() < SIZE and time.perf_counter() < start + LIMIT:
            stream.write(block)
            if stream.tell() % (4 * BLOCK) == 0:
                os.fsync(stream.fileno())  # now and then, so that a slow disk ends in time
        os.fsync(stream.fileno())
        wrote = stream.tell() / (time.perf_counter() - start) / 1e9
        pagecache.evict([path])
        cold = False
        with contextlib.suppress(KitError):  # a file system that maps no files
            cold = pagecache.residency([path]) < 0.05
        stream.seek(0)
        start = time.perf_counter()
        while time.perf_counter() < start + LIMIT and stream.read(BLOCK):
            pass
        return wrote, stream.tell() / (time.perf_counter() - start) / 1e9, cold


def reach() -> list[Finding]:
    """Whether the hub and W&B, or the proxy on the way, take a connection within 3 s; offline settings where not."""
    found = []
    for name, (variable, usual, offline) in HOSTS.items():
        url = urllib.parse.urlsplit(os.environ.get(variable, usual))
        proxy = urllib.request.getproxies().get(url.scheme, "")
        to = urllib.parse.urlsplit(proxy) if proxy and not urllib.request.proxy_bypass(url.netloc) else url
        port = to.port or {"http": 80}.get(to.scheme, 443)
        try:
            within(3, socket.create_connection, (to.hostname, port), 3).close()
            value = f"{url.hostname} answers" + (f" through {to.hostname}" if to != url else "")
        except OSError as error:
            value = f"{url.hostname} is not reached ({error.strerror or 'timed out'}): {offline}"
        found.append(Finding(name, value, f"a connection to {to.hostname}:{port}"))
    return found
