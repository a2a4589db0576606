"""Cluster: the machines. Nodes, GPUs, links, storage, Slurm settings and environment, from one TOML file."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from kit.config import schema
from kit.config.schema import at_least


@dataclass(frozen=True)
class Nodes:
    """What each node has. gpus = 0 is a CPU cluster; its memory is then shared by the processes.

    kit.check.probe measures three of them: gpu_efficiency, the part of gpu_bf16_tflops that a large matmul reaches;
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
    the one that launches. "python" is the one of the conda environment or venv that the setup lines activate. env_file
    names a file of NAME=VALUE lines with mode 600, such as tokens, that only the job reads.
    """

    partition: str = ""
    gres: str = ""
    time: str = ""
    account: str = ""
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    python: str = ""
    env_file: str = ""
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
    """One fact about a machine or the cluster, with how it was found; problem says what to do about it.

    facts: the same for programs. A name with a dot is a key of the profile, such as nodes.gpus.
    """

    name: str
    value: str
    how: str
    problem: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def records(text: str) -> list[dict[str, str]]:
    """Records of `scontrol show -o`, one a line; a node's Reason comes last and may hold anything."""
    found = []
    for line in text.splitlines():
        head, _, reason = line.partition(" Reason=")
        pairs = re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", head)
        found.append(dict(pairs) | {"Reason": reason.strip()})
    return [record for record in found if len(record) > 1]


def gpus_of(gres: str, kind: str = "") -> int:
    """GPUs, of one kind if it is named, in Slurm's words for a node, such as gpu:h100:8(S:0-1),nvme:1."""
    return sum(int(n) for k, n in re.findall(r"\bgpu(?::([^:,(]+))??:(\d+)", gres) if kind in ("", k))


def detect(cluster: Cluster) -> list[Finding]:
    """What Slurm says of itself, its partitions and nodes, and where the profile disagrees; or that it is silent.

    Formats: scontrol(1) of Slurm 20.11 to 25.05.
    """
    from kit.slurm.client import command  # which imports this module

    asked = "scontrol show config"
    answer = command(*asked.split(), timeout=8)  # a controller that hangs costs clients 10 s a question
    if answer.returncode:
        # The second is said where Slurm's clients are installed and no cluster is.
        absent = "not installed" in answer.stderr or "configuration source" in answer.stderr
        todo = "" if absent and not cluster.slurm.partition else "look again when `scontrol ping` says UP"
        return [Finding("Slurm", f"does not answer: {answer.stderr.strip().splitlines()[-1]}", asked, todo)]
    config = dict(re.findall(r"^(\w+)\s*= (.*)$", answer.stdout, re.MULTILINE))
    partitions, nodes = (records(command("scontrol", "show", kind, "-o").stdout) for kind in ("partition", "node"))
    return [
        *_controller(config, cluster),
        *_partitions(partitions, nodes, cluster),
        *_nodes(partitions, nodes, cluster),
    ]


def _controller(config: dict[str, str], cluster: Cluster) -> list[Finding]:
    how, version = "scontrol show config", config["SLURM_VERSION"]
    release = tuple(int(part) for part in version.split(".")[:2])
    # Sources: src/srun/opt.c of 22.05, 23.02 and 23.11; CHANGELOG of 24.05.
    quirks = ["srun does not take over --cpus-per-task by itself"] if release in ((22, 5), (23, 2)) else []
    quirks += ["squeue --json ignores filters"] if release < (24, 5) else []
    age = config["MinJobAge"]
    accounting = (
        "off" if config["AccountingStorageType"].endswith("none") or not config["AccountingStorageType"] else "on"
    )
    limits = "enforced by cgroup" if "cgroup" in config["TaskPlugin"] else "not enforced"
    memory = f"counted, {limits}" if "MEMORY" in config["SelectTypeParameters"].upper() else "not counted"
    gres = "gpu" in config["GresTypes"]
    lacks = "GresTypes has no gpu: GPUs cannot be asked for; set slurm.gres to nothing" if cluster.slurm.gres else ""
    return [
        Finding("Slurm", "; ".join([version, *quirks]), how),
        Finding("accounting", f"{accounting}; an ended job is remembered for {age}", how),
        Finding(
            "scheduling", f"GPUs {'counted' if gres else 'not counted'}; memory {memory}; preemption "
            f"{config['PreemptMode']}; requeue {'allowed' if config['JobRequeue'] == '1' else 'only with --requeue'}",
            how, "" if gres else lacks,
        ),
    ]  # fmt: skip


UNFIT = {"DOWN", "DRAIN", "FAIL", "FAILING", "ERROR", "UNKNOWN", "NOT_RESPONDING", "MAINT", "INVAL", "INVALID_REG"}


def fit(node: dict[str, str]) -> bool:
    """Whether jobs can start on a node, now or when it is free; a star marks one that does not respond."""
    return "*" not in node["State"] and not UNFIT & set(node["State"].split("+"))


def _wanted(partitions: list[dict[str, str]], cluster: Cluster) -> str:
    """The profile's partition, else the default one."""
    default = [p["PartitionName"] for p in partitions if p["Default"] == "YES"]
    return cluster.slurm.partition or next(iter(default), "")


def _partitions(partitions: list[dict[str, str]], nodes: list[dict[str, str]], cluster: Cluster) -> list[Finding]:
    how, found, wanted = "scontrol show partition", [], _wanted(partitions, cluster)
    for one in partitions:
        name, limit, most = one["PartitionName"], one["MaxTime"], one["MaxNodes"]
        gres = Counter(n["Gres"] for n in nodes if name in n["Partitions"].split(","))
        facts, problem = {}, ""
        if name == wanted:
            facts = {"slurm.partition": name} | ({"slurm.time": limit} if limit != "UNLIMITED" else {})
            asked, allowed = cluster.slurm.limit_s, Slurm(time=limit).limit_s
            if cluster.slurm.time and asked > allowed:
                problem = f"slurm.time {cluster.slurm.time} is over its limit: set it to at most {limit}"
        value = f"{one['State']}; {one['TotalNodes']} nodes: {one['Nodes']}; at most {most} a job; time limit {limit}, "
        value += f"default {one['DefaultTime']}; gres {', '.join(f'{g} on {n}' for g, n in gres.items()) or 'none'}"
        label = f"partition {name}" + (" (default)" if one["Default"] == "YES" else "")
        found.append(Finding(label, value.replace("(null)", "none"), how, problem, facts))
    if wanted not in (names := [one["PartitionName"] for one in partitions]):
        problem = f"Slurm has no partition {wanted!r}: set slurm.partition to one of {', '.join(names)}"
        found.append(Finding("partition", wanted or "none is the default", "profile", problem))
    return found


def _nodes(partitions: list[dict[str, str]], nodes: list[dict[str, str]], cluster: Cluster) -> list[Finding]:
    """Nodes of the wanted partition: those that can run jobs, by what they have, and each that cannot, with why."""
    how, wanted = "scontrol show node", _wanted(partitions, cluster)
    own = [n for n in nodes if wanted in n["Partitions"].split(",")]
    kinds: dict[tuple[int, float, str], list[dict[str, str]]] = {}
    for node in filter(fit, own):  # CPUEfctv, what jobs get of CPUTot, is there since 22.05
        cpus, gib = int(node.get("CPUEfctv", node["CPUTot"])), round(int(node["RealMemory"]) / 1024, 1)
        kinds.setdefault((cpus, gib, re.sub(r"\([^)]*\)", "", node["Gres"])), []).append(node)
    found = []
    for (cpus, gib, gres), some in kinds.items():
        states = ", ".join(f"{n} {s}" for s, n in Counter(n["State"].lower() for n in some).items())
        names = [n["NodeName"] for n in some[:8]] + ([f"{len(some) - 8} more"] if len(some) > 8 else [])
        has = f"{cpus} CPUs, {gib:.0f} GiB, gres {gres or 'none'}"
        found.append(Finding("nodes", f"{', '.join(names)}: {states}; {has} each", how))
    found += [Finding(f"node {n['NodeName']}", f"{n['State']}: {n['Reason']}", how) for n in own if not fit(n)]
    usable = sum(map(len, kinds.values()))
    facts: dict[str, Any] = {"nodes.count": len(own), "usable": usable}
    problem = f"the profile says {cluster.nodes.count}: lower nodes.count, or ask why nodes are out"
    problem = problem if usable < cluster.nodes.count else ""
    if kinds:
        cpus, gib, gres = (min(column) for column in zip(*kinds, strict=True))
        facts |= {"nodes.cpus": cpus, "nodes.ram_gib": gib, "nodes.gpus": gpus_of(gres)}
        asked = re.fullmatch(r"gpu(?::([^:]+))??:(\d+)", cluster.slurm.gres)
        if asked and max(gpus_of(g, asked[1] or "") for *_, g in kinds) < int(asked[2]):
            problem = f"no node has {cluster.slurm.gres}: set slurm.gres to {gres or 'nothing'}"
        elif asked:
            gres = cluster.slurm.gres
        facts |= {"slurm.gres": gres} if gpus_of(gres) else {}
    found.append(Finding("node count", f"{usable} of {len(own)} can run jobs", how, problem, facts))
    return found
