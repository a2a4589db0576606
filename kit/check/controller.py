"""What Slurm's controller says about itself, its partitions and its nodes, and where a profile disagrees.

Formats: scontrol(1) of Slurm 20.11 to 25.05.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kit.check.facts import Finding
from kit.config.cluster import Cluster, gpus_of, parse_gres, parse_time_limit
from kit.slurm.client import NOT_INSTALLED, command

Record = dict[str, str]
UNFIT = {"DOWN", "DRAIN", "FAIL", "FAILING", "ERROR", "UNKNOWN", "NOT_RESPONDING", "MAINT", "INVAL", "INVALID_REG"}
NAMED = 8  # nodes of one kind that are named


def parse_records(text: str) -> list[Record]:
    """Records of `scontrol show -o`, one per line; a node's Reason comes last and may hold anything."""
    found = []
    for line in text.splitlines():
        head, _, reason = line.partition(" Reason=")
        pairs = re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", head)
        found.append(dict(pairs) | {"Reason": reason.strip()})
    return [record for record in found if len(record) > 1]


def detect(cluster: Cluster) -> list[Finding]:
    """Findings about the controller, its partitions and its nodes; one finding if Slurm does not answer."""
    asked = "scontrol show config"
    answer = command(*asked.split(), timeout=8)  # a controller that hangs costs clients 10 s a question
    if answer.returncode:
        # Slurm's clients say "configuration source" where they are installed without a cluster.
        absent = answer.returncode == NOT_INSTALLED or "configuration source" in answer.stderr
        todo = "" if absent and not cluster.slurm.partition else "try again when `scontrol ping` says UP"
        return [Finding("Slurm", f"does not answer: {answer.stderr.strip().splitlines()[-1]}", asked, todo)]
    config = dict(re.findall(r"^(\w+)\s*= (.*)$", answer.stdout, re.MULTILINE))
    partitions = parse_records(command("scontrol", "show", "partition", "-o").stdout)
    nodes = parse_records(command("scontrol", "show", "node", "-o").stdout)
    return [
        *_controller(config, cluster),
        *_partitions(partitions, nodes, cluster),
        *_nodes(partitions, nodes, cluster),
    ]


def can_run_jobs(node: Record) -> bool:
    """Whether jobs can start on a node, now or when it is free; a star in the state marks one that does not respond."""
    return "*" not in node["State"] and not UNFIT & set(node["State"].split("+"))


def _controller(config: dict[str, str], cluster: Cluster) -> list[Finding]:
    how, version = "scontrol show config", config["SLURM_VERSION"]
    release = tuple(int(part) for part in version.split(".")[:2])
    # Sources: src/srun/opt.c of 22.05, 23.02 and 23.11; CHANGELOG of 24.05.
    quirks = ["srun does not inherit --cpus-per-task"] if release in ((22, 5), (23, 2)) else []
    quirks += ["squeue --json ignores filters"] if release < (24, 5) else []
    storage = config["AccountingStorageType"]
    accounting = "off" if storage.endswith("none") or not storage else "on"
    limits = "enforced by cgroup" if "cgroup" in config["TaskPlugin"] else "not enforced"
    memory = f"counted, {limits}" if "MEMORY" in config["SelectTypeParameters"].upper() else "not counted"
    counts_gpus = "gpu" in config["GresTypes"]
    problem = ""
    if cluster.slurm.gres and not counts_gpus:
        problem = "GresTypes has no gpu, so jobs cannot ask for GPUs: set slurm.gres to nothing"
    scheduling = [
        f"GPUs {'counted' if counts_gpus else 'not counted'}",
        f"memory {memory}",
        f"preemption {config['PreemptMode']}",
        f"requeue {'allowed' if config['JobRequeue'] == '1' else 'only with --requeue'}",
    ]
    return [
        Finding("Slurm", "; ".join([version, *quirks]), how),
        Finding("accounting", f"{accounting}; an ended job is remembered for {config['MinJobAge']}", how),
        Finding("scheduling", "; ".join(scheduling), how, problem),
    ]


def _wanted(partitions: list[Record], cluster: Cluster) -> str:
    """The profile's partition, else the default one."""
    default = [p["PartitionName"] for p in partitions if p["Default"] == "YES"]
    return cluster.slurm.partition or next(iter(default), "")


def _in_partition(nodes: list[Record], partition: str) -> list[Record]:
    """Slurm prints a node's partitions only if it has any (api/node_info.c)."""
    return [node for node in nodes if partition in node.get("Partitions", "").split(",")]


def _partitions(partitions: list[Record], nodes: list[Record], cluster: Cluster) -> list[Finding]:
    wanted = _wanted(partitions, cluster)
    found = [_partition(one, nodes, cluster, one["PartitionName"] == wanted) for one in partitions]
    names = [one["PartitionName"] for one in partitions]
    if wanted not in names:
        problem = f"Slurm has no partition {wanted!r}: set slurm.partition to one of {', '.join(names)}"
        found.append(Finding("partition", wanted or "there is no default", "profile", problem))
    return found


def _partition(one: Record, nodes: list[Record], cluster: Cluster, wanted: bool) -> Finding:
    name, limit = one["PartitionName"], one["MaxTime"]
    gres = Counter(node["Gres"] for node in _in_partition(nodes, name))
    facts, problem = {}, ""
    if wanted:
        facts = {"slurm.partition": name} | ({"slurm.time": limit} if limit != "UNLIMITED" else {})
        if cluster.slurm.time and cluster.slurm.limit_s > parse_time_limit(limit):
            problem = f"slurm.time {cluster.slurm.time} is over its limit: set it to at most {limit}"
    value = (
        f"{one['State']}; {one['TotalNodes']} nodes: {one['Nodes']}; at most {one['MaxNodes']} a job; "
        f"time limit {limit}, default {one['DefaultTime']}; "
        f"gres {', '.join(f'{gres_text} on {count}' for gres_text, count in gres.items()) or 'none'}"
    )
    label = f"partition {name}" + (" (default)" if one["Default"] == "YES" else "")
    return Finding(label, value.replace("(null)", "none"), "scontrol show partition", problem, facts)


@dataclass(frozen=True)
class NodeKind:
    """What nodes have that a job can ask for. The gres text has no sockets and no indexes."""

    cpus: int
    ram_gib: float
    gres: str

    @classmethod
    def of(cls, node: Record) -> "NodeKind":
        """The kind of a node of `scontrol show node`; CPUEfctv, what jobs get of CPUTot, exists since 22.05."""
        return cls(
            int(node.get("CPUEfctv", node["CPUTot"])),
            round(int(node["RealMemory"]) / 1024, 1),
            ",".join(map(str, parse_gres(node["Gres"]))),
        )


def _nodes(partitions: list[Record], nodes: list[Record], cluster: Cluster) -> list[Finding]:
    """Nodes of the wanted partition: those that can run jobs, by kind, and each that cannot, with the reason."""
    how = "scontrol show node"
    own = _in_partition(nodes, _wanted(partitions, cluster))
    kinds: dict[NodeKind, list[Record]] = {}
    for node in filter(can_run_jobs, own):
        kinds.setdefault(NodeKind.of(node), []).append(node)
    found = [Finding("nodes", _kind_text(kind, some), how) for kind, some in kinds.items()]
    found += [
        Finding(f"node {node['NodeName']}", f"{node['State']}: {node['Reason']}", how)
        for node in own
        if not can_run_jobs(node)
    ]
    usable = sum(map(len, kinds.values()))
    facts: dict[str, Any] = {"nodes.count": len(own), "usable": usable}
    problem = ""
    if usable < cluster.nodes.count:
        problem = f"the profile says {cluster.nodes.count}: lower nodes.count, or ask why nodes are out"
    if kinds:
        least = min((kind.gres for kind in kinds), key=gpus_of)
        enough = any(_has(kind.gres, cluster.slurm.gres) for kind in kinds)
        if not enough:
            problem = f"no node has {cluster.slurm.gres}: set slurm.gres to {least or 'nothing'}"
        facts |= {
            "nodes.cpus": min(kind.cpus for kind in kinds),
            "nodes.ram_gib": min(kind.ram_gib for kind in kinds),
            "nodes.gpus": gpus_of(least),
        }
        gres = cluster.slurm.gres if cluster.slurm.gres and enough else _gpus_alone(least)
        facts |= {"slurm.gres": gres} if gpus_of(gres) else {}
    found.append(Finding("node count", f"{usable} of {len(own)} can run jobs", how, problem, facts))
    return found


def _has(gres: str, wanted: str) -> bool:
    """Whether a node's gres has every resource of the profile's, of its type where it names one."""
    there = parse_gres(gres)
    return all(
        sum(entry.count for entry in there if entry.name == ask.name and ask.type in ("", entry.type)) >= ask.count
        for ask in parse_gres(wanted)
    )


def _gpus_alone(gres: str) -> str:
    """The GPUs of a node's gres: what a job should ask for, where the node has disks or licences as well."""
    return ",".join(str(entry) for entry in parse_gres(gres) if entry.name == "gpu")


def _kind_text(kind: NodeKind, nodes: list[Record]) -> str:
    states = Counter(node["State"].lower() for node in nodes)
    names = [node["NodeName"] for node in nodes[:NAMED]]
    names += [f"{len(nodes) - NAMED} more"] if len(nodes) > NAMED else []
    return (
        f"{', '.join(names)}: {', '.join(f'{count} {state}' for state, count in states.items())}; "
        f"{kind.cpus} CPUs, {kind.ram_gib:.0f} GiB, gres {kind.gres or 'none'} each"
    )
