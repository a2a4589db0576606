"""`kit.check`: what this cluster is, by Slurm, by this machine and by a small job on every node."""

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from kit import figures
from kit.check.controller import detect
from kit.check.facts import Finding
from kit.check.gpus import Matrix, read_topology
from kit.check.machine import inspect_machine
from kit.check.node_job import inspect_nodes
from kit.check.profile import filled_profile
from kit.config import schema
from kit.config.cluster import NO_COMPILER, Cluster
from kit.show import Answer, Part, Result, Table, progress_bar

SLURM = "Slurm"
AT_LEAST = ("nodes.count", "nodes.gpus", "nodes.gpu_memory_gib", "nodes.cpus", "nodes.ram_gib")
TOLERANCE = 0.97  # a node may have 3 % less than its profile says: firmware and the kernel take some memory


@dataclass(frozen=True)
class Survey(Result):
    """Findings by place: Slurm, this machine, the nodes. `nodes` names the places that are compute nodes."""

    cluster: Cluster
    places: dict[str, list[Finding]]
    nodes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Every finding with its place, problems first."""
        rows = [{"place": place} | asdict(finding) for place, found in self.places.items() for finding in found]
        return {"findings": sorted(rows, key=lambda row: not row["problem"])}

    def parts(self) -> Iterator[Part]:
        """A table of problems, then everything that was found."""
        yield self.problems
        yield self.slurm
        yield self.machines

    @cached_property
    def problems(self) -> Table:
        """Every problem with what to do about it."""
        rows = [(place, f.name, f.value, f.problem) for place, found in self.places.items() for f in found if f.problem]
        marks = dict.fromkeys(range(len(rows)), "bad")
        title = "Problems" if rows else "No problem was found."
        if not rows and not any("usable" in finding.facts for finding in self.places[SLURM]):
            title += " Slurm does not answer here: runs start on this machine."
        return Table(("place", "what", "value", "what to do"), rows, title, marks)  # type: ignore[arg-type]

    @property
    def slurm(self) -> Table:
        """What Slurm says about itself, its partitions and its nodes."""
        rows = [(finding.name, finding.value, finding.how) for finding in self.places[SLURM]]
        return Table(("what", "value", "how it was found"), rows, SLURM)

    @property
    def machines(self) -> Table:
        """What each machine found; one column for machines that agree in everything."""
        values: dict[str, dict[str, str]] = {}
        how: dict[str, str] = {}
        places = [place for place in self.places if place != SLURM]
        for place in places:
            for finding in self.places[place]:
                values.setdefault(finding.name, {})[place] = finding.value
                how[finding.name] = finding.how
        columns = {place: tuple(row.get(place, "") for row in values.values()) for place in places}
        groups: dict[tuple[str, ...], list[str]] = {}
        for place, column in columns.items():
            groups.setdefault(column, []).append(place)
        names = [", ".join(group) for group in groups.values()]
        rows = [(name, *(column[index] for column in groups), how[name]) for index, name in enumerate(values)]
        return Table(("what", *names, "how it was found"), rows, "Machines")

    @property
    def facts(self) -> dict[str, Any]:
        """Values for keys of a profile: the least of the nodes; where Slurm knows, Slurm's value."""
        merged: dict[str, Any] = {}
        for place in (*self.nodes, SLURM):
            for finding in self.places[place]:
                for key, value in finding.facts.items():
                    if "." not in key or merged.get(key) == NO_COMPILER:
                        continue
                    take_least = place != SLURM and isinstance(value, int | float)
                    merged[key] = min(merged.get(key, value), value) if take_least else value
        return merged

    @property
    def profile(self) -> Answer:
        """The cluster's profile with the facts that it lacks."""
        return filled_profile(self.cluster, self.facts)

    @property
    def rates(self) -> Any:
        """What one process wrote and read on each file system, as a figure."""
        rows: dict[str, dict[str, float]] = {}
        for place, found in self.places.items():
            for facts in (finding.facts for finding in found if "mount" in finding.facts):
                rows[f"{place} {facts['mount']}, write"] = {"write": facts["write_gb_s"]}
                rows[f"{place} {facts['mount']}, read"] = {"read": facts["read_gb_s"]}
        return figures.bars("One process, one file", "GB/s", rows)

    @property
    def topology(self) -> Table:
        """How the GPUs of the first machine that has any are connected; empty where no machine has."""
        texts = [f.facts["topology"] for found in self.places.values() for f in found if "topology" in f.facts]
        matrix: Matrix = read_topology(texts[0]) if texts else {}
        if not matrix:
            return Table(("GPU",), [], "No GPUs were seen.")
        columns = ["GPU", *next(iter(matrix.values()))]
        return Table(columns, [(gpu, *row.values()) for gpu, row in matrix.items()], "GPU topology")


def survey(cluster: Cluster, nodes: int | None = None, say: Callable[[str], None] = print) -> Survey:
    """Survey Slurm, this machine and the nodes, and compare them with the profile.

    A job inspects the nodes where Slurm answers and this machine has no GPUs, or where `nodes` is given: the number of
    nodes to inspect, by default the profile's count; 0 submits no job.
    """
    here = socket.gethostname()
    with progress_bar(2, "survey", "place") as bar:
        places = {SLURM: detect(cluster)}
        bar.update(1)
        places[here] = inspect_machine(cluster)
        bar.update(1)
    known = {key: value for found in (places[here], places[SLURM]) for f in found for key, value in f.facts.items()}
    local_gpus = next(f.facts["nodes.gpus"] for f in places[here] if "nodes.gpus" in f.facts)
    count = min(known.get("usable", 0), cluster.nodes.count if nodes is None else nodes)
    if count and (nodes or not local_gpus):
        answers = inspect_nodes(cluster, count, known.get("slurm.gres", ""), say)
        places[SLURM] += answers.pop(SLURM)
        places |= answers
    compute: tuple[str, ...] = (here,)
    if "usable" in known:  # Slurm answers, so that this is a login node
        compute = tuple(place for place in places if place not in (SLURM, here))
    login = places[here][0].facts
    judged = {place: [judge_node(finding, cluster, login) for finding in places[place]] for place in compute}
    return Survey(cluster, places | judged, compute)


def judge_node(finding: Finding, cluster: Cluster, login: Mapping[str, str]) -> Finding:
    """The finding with a problem where a node has less than the profile says, or other software than the login node."""
    problem, profile = finding.problem, schema.as_dict(cluster)
    for key in (key for key in AT_LEAST if key in finding.facts):
        table, name = key.split(".")
        if finding.facts[key] < TOLERANCE * profile[table][name]:
            problem = problem or f"the profile says {key} = {profile[table][name]}: set it to {finding.facts[key]}"
    own_python = cluster.slurm.container.kind != "none" or cluster.slurm.python
    if finding.name == "software" and not own_python:
        unlike = [
            f"{name} {version} on the login node"
            for name, version in login.items()
            if name != "driver" and finding.facts[name] != version
        ]
        if unlike:
            problem = f"{', '.join(unlike)}: give all nodes one environment by slurm.setup"
    return replace(finding, problem=problem)
