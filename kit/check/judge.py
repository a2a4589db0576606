"""Where a node has less than its profile says (memory, GPUs, CPUs) or other software, and what to set."""

from collections.abc import Mapping
from dataclasses import replace

from kit.check.facts import Finding
from kit.config import schema
from kit.config.cluster import Cluster

AT_LEAST = ("nodes.count", "nodes.gpus", "nodes.gpu_memory_gib", "nodes.cpus", "nodes.ram_gib")
TOLERANCE = 0.97  # a node may have 3 % less than its profile says: firmware and the kernel take some memory


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
