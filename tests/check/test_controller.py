import os

import pytest

from kit.check.controller import detect, parse_records
from kit.config.cluster import Cluster, Nodes, Slurm

# scontrol's own form in 22.05, with the parts of a busy GPU cluster: a type in gres, its sockets, a drained and a lost
# node, a reason with an equals sign, a node of another partition.
NODES = """\
NodeName=g1 Arch=x86_64 CoresPerSocket=56  CPUAlloc=0 CPUEfctv=220 CPUTot=224 CPULoad=0.10 Gres=gpu:h100:8(S:0-1) \
NodeAddr=g1 NodeHostName=g1 Version=22.05.8 OS=Linux 5.14.0 #1 SMP Thu Apr 6  RealMemory=2000000 State=IDLE \
Partitions=gpu,all  BootTime=2026-11-01T00:00:00 CfgTRES=cpu=224,mem=2000000M,billing=224,gres/gpu=8 AllocTRES=
NodeName=g2 Gres=gpu:h100:8(S:0-1) CPUEfctv=220 CPUTot=224 RealMemory=2000000 State=MIXED+PLANNED Partitions=gpu,all
NodeName=g3 Gres=gpu:h100:8(S:0-1) CPUEfctv=220 CPUTot=224 RealMemory=2000000 State=IDLE+DRAIN Partitions=gpu,all \
AllocTRES= Reason=bad DIMM, slot=12 [root@2026-11-28T08:13:55]
NodeName=g4 Gres=gpu:h100:8(S:0-1) CPUEfctv=220 CPUTot=224 RealMemory=2000000 State=DOWN* Partitions=gpu,all \
Reason=Not responding [slurm@2026-11-28T08:13:55]
NodeName=c1 Gres=(null) CPUTot=64 RealMemory=256000 State=IDLE+CLOUD+POWERED_DOWN Partitions=cpu,all
"""
PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL Default=YES QoS=N/A DefaultTime=01:00:00 MaxNodes=4 MaxTime=1-00:00:00 \
Nodes=g[1-4] State=UP TotalCPUs=896 TotalNodes=4 JobDefaults=(null)
PartitionName=cpu Default=NO DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=c1 State=UP TotalNodes=1
"""
CONFIG = """\
Configuration data as of 2026-11-28T08:12:50
AccountingStorageType   = accounting_storage/slurmdbd
GresTypes               = gpu
JobRequeue              = 1
MinJobAge               = 300 sec
PreemptMode             = OFF
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 24.05.3
TaskPlugin              = task/cgroup,task/affinity

Slurmctld(primary) at head is UP
"""


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A Slurm of recorded answers."""
    for name, text in (("config", CONFIG), ("partition", PARTITIONS), ("node", NODES)):
        (tmp_path / f"{name}.said").write_text(text)
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ncat {tmp_path}/"$2".said\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")


def named(found, name):
    (one,) = [f for f in found if f.name == name]
    return one


def test_reasons_have_any_text_and_values_have_spaces():
    by_name = {record["NodeName"]: record for record in parse_records(NODES)}
    assert by_name["g3"]["Reason"] == "bad DIMM, slot=12 [root@2026-11-28T08:13:55]"
    assert (by_name["g1"]["OS"], by_name["g1"]["Gres"]) == ("Linux 5.14.0 #1 SMP Thu Apr 6", "gpu:h100:8(S:0-1)")
    assert parse_records("No nodes in the system\n") == []


def test_findings_list_unavailable_nodes_with_reasons(recorded):
    found = detect(Cluster("x", Nodes(count=2, gpus=8), slurm=Slurm("gpu", "gpu:h100:8", "24:00:00")))
    assert [f for f in found if f.problem] == []
    assert named(found, "Slurm").value == "24.05.3"
    assert named(found, "accounting").value == "on; an ended job is remembered for 300 sec"
    assert "memory counted, enforced by cgroup" in named(found, "scheduling").value
    limits = named(found, "partition gpu (default)").value
    assert "time limit 1-00:00:00, default 01:00:00" in limits and "gpu:h100:8(S:0-1) on 4" in limits
    assert named(found, "nodes").value.startswith(
        "g1, g2: 1 idle, 1 mixed+planned; 220 CPUs, 1953 GiB, gres gpu:h100:8"
    )
    assert named(found, "node g3").value == "IDLE+DRAIN: bad DIMM, slot=12 [root@2026-11-28T08:13:55]"
    assert named(found, "node g4").value.startswith("DOWN*: Not responding")
    assert named(found, "node count").facts == {
        "nodes.count": 4, "usable": 2, "nodes.cpus": 220, "nodes.ram_gib": 1953.1, "nodes.gpus": 8,
        "slurm.gres": "gpu:h100:8",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("slurm", "count", "words"),
    [
        (Slurm("gpux"), 1, "Slurm has no partition 'gpux': set slurm.partition to one of gpu, cpu"),
        (Slurm("gpu", time="2-00:00:00"), 1, "slurm.time 2-00:00:00 is over its limit: set it to at most 1-00:00:00"),
        (Slurm("gpu", "gpu:a100:8"), 1, "no node has gpu:a100:8: set slurm.gres to gpu:h100:8"),
        (Slurm("gpu"), 3, "the profile says 3: lower nodes.count, or ask why nodes are out"),
    ],
)
def test_a_profile_that_slurm_would_reject_is_a_problem(recorded, slurm, count, words):
    assert words in [f.problem for f in detect(Cluster("x", Nodes(count=count), slurm=slurm))]


def test_a_missing_slurm_is_a_problem_only_with_a_partition(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = detect(Cluster("x"))
    assert found.value == "does not answer: scontrol is not installed here" and not found.problem
    assert detect(Cluster("x", slurm=Slurm("gpu")))[0].problem


def test_nodes_outside_of_partitions_are_ignored(recorded, tmp_path):
    """Slurm 22.05 and later print Partitions only for nodes that are in one: api/node_info.c."""
    outside = "NodeName=x1 Gres=(null) CPUTot=8 RealMemory=16000 State=IDLE\n"
    (tmp_path / "node.said").write_text(NODES + outside)
    found = detect(Cluster("x", slurm=Slurm("gpu")))
    assert named(found, "node count").value == "2 of 4 can run jobs"
    assert not [f for f in found if "x1" in f.value]


def node(name, gres):
    return f"NodeName={name} Gres={gres} CPUTot=64 RealMemory=256000 State=IDLE Partitions=gpu\n"


def test_the_smallest_node_has_the_fewest_gpus(recorded, tmp_path):
    (tmp_path / "node.said").write_text(node("big", "gpu:a100:16") + node("small", "gpu:a100:8"))
    facts = named(detect(Cluster("x", slurm=Slurm("gpu"))), "node count").facts
    assert (facts["nodes.gpus"], facts["slurm.gres"]) == (8, "gpu:a100:8")


def test_the_proposed_gres_of_a_node_with_other_resources_is_its_gpus(recorded, tmp_path):
    (tmp_path / "node.said").write_text(node("g1", "gpu:a100:8(S:0-1),nvme:1"))
    facts = named(detect(Cluster("x", slurm=Slurm("gpu"))), "node count").facts
    assert (facts["nodes.gpus"], facts["slurm.gres"]) == (8, "gpu:a100:8")


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:a100:8,nvme:1", True), ("gpu:8,nvme", True), ("gpu:a100:4", True),
        ("gpu:a100:8,nvme:2", False), ("gpu:v100:8", False), ("gpu:9", False),
    ],
)  # fmt: skip
def test_every_resource_of_the_profile_is_compared_with_the_nodes(recorded, tmp_path, gres, found):
    (tmp_path / "node.said").write_text(node("g1", "gpu:a100:8(S:0-1),nvme:1"))
    count = named(detect(Cluster("x", slurm=Slurm("gpu", gres))), "node count")
    assert count.problem == ("" if found else f"no node has {gres}: set slurm.gres to gpu:a100:8,nvme:1")
    assert count.facts["slurm.gres"] == (gres if found else "gpu:a100:8")
