import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.check import machine, survey
from kit.check.facts import Finding
from kit.cli import main
from kit.config.cluster import Cluster, Nodes, Paths, Slurm, Storage
from kit.errors import InputError
from kit.lint.lint import lint
from kit.slurm.run import Run
from tests.conftest import REPOSITORY


def matrix(nics, cpus, way):
    """The form of `nvidia-smi topo -m` of driver 580: tabs, padded cells, two of them before the last column."""
    devices = [*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(nics))]
    text = "\t".join(["\t\x1b[4mGPU0", *devices[1:], "CPU Affinity", "NUMA Affinity", "GPU NUMA ID\x1b[0m"]) + "\n"
    for a in devices:
        own = f"\t{cpus[int(a[3]) // 4]}\t{int(a[3]) // 4}\t\tN/A" if a.startswith("GPU") else "\t\t\t\t"
        text += "\t".join([a, *(" X " if a == b else way(a, b) for b in devices)]) + own + "\n"
    legend = "".join(f"  NIC{i}: mlx5_{i}\n" for i in range(nics))
    return f"{text}\nLegend:\n\n  X    = Self\n  NV#  = a bonded set of # NVLinks\n\nNIC Legend:\n\n{legend}"


def dgx_way(a, b):
    if a[:3] == b[:3] == "GPU":
        return "NV18"
    if int(a[3]) // 4 != int(b[3]) // 4:
        return "SYS"
    return "PXB" if a[3] == b[3] else "NODE"


# Eight H100: every pair by 18 NVLinks, one NIC beside each GPU. Built after deepseek-ai/DeepEP issue 145 (18 NICs).
DGX = matrix(8, ("0-55,112-167", "56-111,168-223"), dgx_way)
# Eight RTX 4090 on two sockets, every pair SYS, two ports of one NIC near GPU6: NVIDIA/go-gpuallocator issue 17.
TWO_SOCKETS = matrix(
    2,
    ("0-55,112-167", "56-111,168-223"),
    lambda a, b: (
        "PIX" if a[:3] == b[:3] == "NIC" else "PHB" if {a[:3], b[:3]} > {"NIC"} and "GPU6" in (a, b) else "SYS"
    ),
)


def stand_in(folder, name, script):
    """A client that gives recorded answers."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def small(monkeypatch):
    """Trials of a few MiB, and hosts that answer at once: nobody listens on port 9 of this machine."""
    monkeypatch.setattr(machine, "SIZE", 16 << 20)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def named(found, name):
    (one,) = [f for f in found if f.name == name]
    return one


def test_nvlink_between_every_pair_is_read_off_the_matrix():
    near = machine.topology(DGX)
    assert machine.ways(near) == {"NV18": 28}
    assert near["GPU5"]["mlx5_5"] == "PXB" and near["GPU5"]["mlx5_0"] == "SYS" and near["GPU0"]["GPU0"] == "X"
    assert machine.intra(near, 5, 16) == {"kind": "nvlink x18", "gb_s": 450.0}  # 18 x 25 GB/s, as the profile h100-8x8
    assert machine.in_words(near) == (
        "28 pairs by 18 NVLinks; GPU0, GPU1, GPU2, GPU3: NUMA node 0, CPUs 0-55,112-167; "
        "GPU4, GPU5, GPU6, GPU7: NUMA node 1, CPUs 56-111,168-223"
    )


def test_pcie_over_two_sockets_is_read_off_the_matrix():
    near = machine.topology(TWO_SOCKETS)
    assert machine.ways(near) == {"SYS": 28}
    assert near["GPU6"]["mlx5_1"] == "PHB" and near["GPU7"]["NUMA node"] == "1"
    assert machine.in_words(near).startswith("28 pairs from socket to socket; ")
    # 0.985 GB/s a lane of generation 3 (8 GT/s, 128b/130b), four times that at generation 5.
    assert machine.intra(near, 5, 16) == {"kind": "pcie5", "gb_s": 63.0}


def test_a_matrix_of_one_gpu_or_of_none_has_no_pairs():
    one = machine.topology("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t\t0\t\tN/A\n")
    assert machine.in_words(one) == "GPU0: NUMA node 0, CPUs ?"
    assert machine.topology("") == {}


def test_gpus_are_told_with_the_memory_that_programs_get(tmp_path, monkeypatch):
    (tmp_path / "topo").write_text(DGX)
    rows = "NVIDIA H100 80GB HBM3, 81559, 551, 5, 16\\n" * 8  # so that 79.1 GiB are left, as in probe_h100x4.json
    stand_in(tmp_path / "bin", "nvidia-smi", f"[ $1 = topo ] && exec cat {tmp_path}/topo\nprintf '{rows}'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    found, topology = machine.gpus()
    assert found.value == "8 x NVIDIA H100 80GB HBM3, 79.1 GiB each" and not found.problem
    assert found.facts["nodes.gpu_memory_gib"] == 79.1
    assert topology.facts["links.intra"]["gb_s"] == 450.0
    (tmp_path / "topo").write_text("")  # an old driver, a container
    assert [f.facts.get("links.intra") for f in machine.gpus()] == [None, None]
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "9")
    assert machine.gpus()[0].problem.startswith("Slurm gave this job 9 GPUs")


def interface(root, name, speed=None, state="up"):
    folder = root / "net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(f"{state}\n")
    if speed is not None:
        (folder / "speed").write_text(f"{speed}\n")


def addresses(**own):
    class Address:
        family = socket.AF_INET

        def __init__(self, address):
            self.address = address

    return {name: [Address(a)] for name, a in own.items()}


@pytest.fixture
def ethernet(tmp_path):
    """The two-node PCIe machine: two 100 Gb/s ports bonded, a 1 Gb/s port, docker."""
    for name, speed in (("lo", None), ("bond0", 200_000), ("eno1", 1000), ("enp1s0", 100_000), ("docker0", -1)):
        interface(tmp_path, name, speed, "unknown" if name == "lo" else "up")
    interface(tmp_path, "eno2", -1, "down")
    own = addresses(lo="127.0.0.1", bond0="10.0.0.1", eno1="192.168.0.1", docker0="172.17.0.1")
    return lambda **settings: machine.network(Cluster("x", environment=settings), tmp_path, own)


def test_nccl_should_use_the_fastest_interface_that_has_an_address(ethernet):
    found, nccl = ethernet()
    assert "eno2" not in found.value and "bond0 10.0.0.1 200 Gb/s" in found.value
    assert nccl.facts == {
        "links.inter": {"kind": "200GbE", "gb_s": 25.0}, "environment.NCCL_SOCKET_IFNAME": "bond0"
    }  # fmt: skip
    assert "without NCCL_SOCKET_IFNAME=bond0 it takes others too" in nccl.value and not nccl.problem


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("bond0", ""), ("=bond0", ""), ("bond", ""), ("^docker,lo", ""),
        ("eno1", "NCCL_SOCKET_IFNAME=eno1 of the profile is slower than bond0 here: set it to bond0"),
        ("ib0", "NCCL_SOCKET_IFNAME=ib0 of the profile is not up here: set it to bond0"),
    ],
)  # fmt: skip
def test_the_profiles_interface_is_held_against_what_is_up(ethernet, wanted, problem):
    assert ethernet(NCCL_SOCKET_IFNAME=wanted)[1].problem == problem


def test_active_rdma_ports_are_what_nccl_takes(tmp_path):
    interface(tmp_path, "eth0", 25_000)
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    own = addresses(eth0="10.0.0.1")
    _, nccl = machine.network(Cluster("x"), tmp_path, own)
    assert nccl.value == "RDMA over mlx5_0:1, mlx5_1:1; to start, sockets over eth0"
    assert nccl.facts == {"links.inter": {"kind": "RDMA 2x400G", "gb_s": 100.0}}
    off = machine.network(Cluster("x", environment={"NCCL_IB_DISABLE": "1"}), tmp_path, own)[1]
    assert "leaves 2 RDMA ports unused" in off.problem


def test_mounts_are_named_by_kind_and_the_profiles_are_tried(tmp_path, small):
    table = (
        f"/dev/sda1 / ext4 rw 0 0\nfiler:/vol/a {tmp_path} nfs4 rw,vers=4.2 0 0\n"
        f"/mnt/a:/mnt/b {tmp_path}/absent\\040pool fuse.mergerfs rw 0 0\nbeegfs_nodev {tmp_path}/none beegfs rw 0 0\n"
    )
    found = {f.name: f for f in machine.mounts(Cluster("x", paths=Paths(runs=str(tmp_path / "runs"))), table)}
    runs = found[f"mount {tmp_path}"]
    assert re.match(r"nfs from filer:/vol/a \(runs(, scratch)?\), \d", runs.value) and not runs.problem
    assert runs.facts["write_gb_s"] > 0 and runs.facts["read_gb_s"] > 0
    (key,) = [k for k in runs.facts if "." in k]
    assert runs.facts[key]["kind"] == "nfs" and runs.facts[key]["path"] == str(tmp_path)
    # Other networks' mounts are listed, not tried; these are not there at all.
    assert found[f"mount {tmp_path}/absent pool"].value.startswith("mergerfs from /mnt/a:/mnt/b")
    assert found[f"mount {tmp_path}/none"].value.startswith("beegfs from beegfs_nodev")
    assert list(tmp_path.glob(".trial*")) == []


def test_a_link_leads_to_the_mount_behind_it(tmp_path, small):
    (tmp_path / "pool").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pool")
    table = f"root / ext4 rw 0 0\nfiler:/a {tmp_path / 'pool'} nfs rw 0 0\n"
    found = machine.mounts(Cluster("x", paths=Paths(str(tmp_path / "link" / "runs"))), table)
    assert found[0].name == f"mount {tmp_path / 'pool'}"


def test_a_mount_that_the_profile_names_and_that_is_not_there_is_a_problem(tmp_path, small):
    *_, gone = machine.mounts(Cluster("x", storage={"pool": Storage(str(tmp_path / "pool"))}))
    assert (gone.name, gone.value) == ("storage pool", f"{tmp_path / 'pool'} is not there")
    assert gone.problem == "mount it, or correct [storage] of the profile"


def test_a_full_disk_is_told_and_not_filled_further(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "SIZE", 1 << 60)
    found = machine.mounts(Cluster("x", paths=Paths(str(tmp_path))))
    runs = next(f for f in found if "runs" in f.value)
    assert runs.problem.startswith("nearly full") and "writes" not in runs.value


def test_a_profiles_storage_keeps_its_name(tmp_path, small):
    cluster = Cluster("x", paths=Paths(str(tmp_path / "runs")), storage={"pool": Storage(str(tmp_path))})
    (runs,) = [f for f in machine.mounts(cluster) if "runs" in f.value and "pool" in f.value]
    assert not [key for key in runs.facts if key.startswith("storage.")]


def test_a_folder_that_cannot_be_written_is_a_problem_with_a_way_out(tmp_path, small):
    (tmp_path / "file").write_text("")
    found = machine.mounts(
        Cluster("x", paths=Paths(str(tmp_path / "file" / "runs"))), f"root / ext4 rw 0 0\ndisk {tmp_path} ext4 rw 0 0\n"
    )
    assert found[0].problem == f"{tmp_path / 'file'}: Not a directory; set another path"


def test_a_mount_that_does_not_answer_is_left_alone(monkeypatch):
    with pytest.raises(TimeoutError):
        machine.within(0.05, time.sleep, 0.5)
    assert machine.within(5, sum, [1, 2]) == 3
    monkeypatch.setattr(machine, "within", lambda *_: (_ for _ in ()).throw(TimeoutError))
    found = machine.mounts(Cluster("x"), "filer:/a / nfs rw 0 0\n")
    assert found[0].problem == "it does not answer: its server may be gone"


def test_what_cannot_be_reached_names_the_offline_settings_and_is_no_problem(small, monkeypatch):
    start = time.monotonic()
    hub, wandb = machine.reach()
    assert time.monotonic() - start < 7
    assert hub.value == (
        "127.0.0.1 is not reached (Connection refused): fetch on the login node; jobs get HF_HUB_OFFLINE=1 from the kit"
    )
    assert "WANDB_MODE=offline" in wandb.value and not hub.problem and not wandb.problem
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert machine.reach()[0].value == "127.0.0.1 answers"
        monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert machine.reach()[0].value == "hub.invalid answers through 127.0.0.1"


def test_clocks_are_compared_within_the_round_trip(tmp_path):
    """The node is a process whose clock is 100 s behind."""
    behind = (
        "import time; now = time.time; time.time = lambda: now() - 100\nfrom kit.check import survey; print(survey.skew"
    )
    with survey._clock() as clock:
        ahead, half = survey.skew(clock)
        assert abs(ahead) <= half < 0.5
        command = [sys.executable, "-c", f"{behind}({clock!r})[0])"]
        said = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
        assert float(said.stdout) == pytest.approx(-100, abs=0.5)
    with pytest.raises(OSError, match="login node does not answer"):
        survey.skew("127.0.0.1:9")
    assert abs(survey.file_skew(tmp_path)) < 0.5


@pytest.fixture
def found():
    gpus = Finding("GPUs", "7 x H100", "nvidia-smi", "", {"nodes.gpus": 7, "nodes.gpu": "H100"})
    here = [Finding("software", "torch 2", "python", "", {"torch": "2"})]
    places = {"Slurm": [Finding("n", "v", "h", "", {"nodes.cpus": 220, "slurm.partition": "gpu"})], "login": here}
    node = [*here, gpus, Finding("host", "224 CPUs", "psutil", "", {"nodes.cpus": 224, "nodes.ram_gib": 1000.0})]
    link = {"links.inter": {"kind": "100GbE", "gb_s": 12.5}}
    return survey.Survey(
        places | {"a": node, "b": [Finding("host", "x", "h", "low", {"nodes.ram_gib": 900.0} | link)]}, ("a", "b")
    )


def test_problems_come_first_and_places_that_agree_share_a_line(found):
    lines = found.lines()
    assert lines[0] == "PROBLEM  b, host: x\n         low"
    assert "software       torch 2  [login, a: python]" in lines


def test_a_profile_takes_the_least_of_the_nodes_and_slurms_word_over_it(found):
    assert found.facts() == {
        "nodes.gpus": 7, "nodes.gpu": "H100", "nodes.cpus": 220, "nodes.ram_gib": 900.0,
        "links.inter": {"kind": "100GbE", "gb_s": 12.5}, "slurm.partition": "gpu",
    }  # fmt: skip


def test_what_a_person_wrote_stays_with_its_comments(found):
    written = (
        '# Ours\nname = "ours"\n\n[nodes]  # rack 4\ngpus = 8  # one is away\n[links]\nintra = { kind = "pcie5" }\n'
    )
    text = survey.fill(written, found.facts())
    assert all(line in text.splitlines() for line in written.splitlines())
    (path := Path("ours.toml")).write_text(text)
    filled = Cluster.load(path)
    assert (filled.nodes.gpus, filled.nodes.gpu, filled.nodes.cpus) == (8, "H100", 220)
    assert (filled.links.intra.kind, filled.links.inter.gb_s, filled.slurm.partition) == ("pcie5", 12.5, "gpu")
    assert survey.fill(text, found.facts()) == text
    assert survey.fill('name = "x"\n[nodes]', {"nodes.gpus": 1}) == 'name = "x"\n[nodes]\ngpus = 1\n'
    with pytest.raises(InputError, match="begin each table with its"):
        survey.fill('name = "x"\nnodes = { count = 2 }\n', {"nodes.gpus": 1})


@pytest.mark.parametrize("path", sorted((REPOSITORY / "env/clusters").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_profile_can_be_filled(path, found):
    more = found.facts() | {"storage.scratch": {"path": "/scratch", "kind": "xfs", "gb_s": 1.0}}
    text = survey.fill(path.read_text(), more)
    Path("c.toml").write_text(text)
    assert Cluster.load("c.toml").storage["scratch"].kind == "xfs"
    assert Cluster.load("c.toml").nodes.count == Cluster.load(path).nodes.count


def test_another_file_is_never_overwritten(tmp_path):
    (tmp_path / "a.toml").write_text('name = "a"\n')
    for base in (None, REPOSITORY / "env/clusters/local.toml"):
        with pytest.raises(InputError, match=r"a\.toml exists, and is not the profile that is checked"):
            survey.start_profile(tmp_path / "a.toml", base)
    assert survey.start_profile(tmp_path / "a.toml", tmp_path / "a.toml")[1].name == "a"
    assert survey.start_profile(tmp_path / "new.toml", None)[0] == 'name = "new"\n'


def test_a_node_with_less_than_its_profile_or_other_software_is_told_so():
    machine = Cluster("x", Nodes(gpus=8, cpus=64, ram_gib=1000.0))
    judged = survey._judged(Finding("GPUs", "", "", "", {"nodes.gpus": 7}), machine, {})
    assert judged.problem == "the profile says nodes.gpus = 8: set it to 7"
    assert not survey._judged(
        Finding("host", "", "", "", {"nodes.cpus": 64, "nodes.ram_gib": 990.0}), machine, {}
    ).problem
    login = {"Python": "3.12", "torch": "2.13", "driver": "none"}
    node = Finding("software", "", "", "", login | {"Python": "3.9", "driver": "580"})
    assert survey._judged(node, machine, login).problem == (
        "Python 3.12 on the login node: give all nodes one environment by slurm.setup"
    )


@pytest.mark.parametrize("name", ["two-node-pcie", "h100-8x8", "local"])
def test_the_job_asks_for_little_and_is_clean(tmp_path, name):
    cluster = Cluster.load(name)
    script = survey.render_script(cluster, tmp_path / "a folder", cluster.nodes.count, cluster.slurm.gres)
    assert [f for f in lint(script, cluster=cluster) if f.severity != "info"] == []
    assert f"#SBATCH --nodes={cluster.nodes.count}\n" in script and "#SBATCH --time=00:05:00\n" in script
    assert ("#SBATCH --gres=gpu:" in script) == bool(cluster.nodes.gpus)


def test_without_slurm_this_machine_is_looked_at_in_this_process(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # neither scontrol nor nvidia-smi
    assert main(["check", "--write", "here.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {"place", "name", "value", "how", "problem"} <= set(found[0])
    assert {"software", "GPUs", "host", "network", "NCCL", "hub", "W&B"} <= {f["name"] for f in found}
    assert "none seen" in [f["value"] for f in found]
    here = Cluster.load("here.toml")
    assert here.nodes.cpus == os.cpu_count() and here.nodes.gpus == 0
    assert main(["check", "--write", "here.toml"]) == 2
    assert "exists, and is not the profile" in capsys.readouterr().err
    assert main(["check", "--cluster", "here.toml", "--write", "here.toml"]) == 0
    assert Cluster.load("here.toml") == here
    (tmp_path / "big.toml").write_text('name = "big"\n[nodes]\nram_gib = 1e6\n')
    capsys.readouterr()
    assert main(["check", "--cluster", "big.toml"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("         the profile says nodes.ram_gib = 1000000.0: set it to")


@pytest.mark.slurm
def test_a_job_shows_both_nodes_of_a_live_slurm_side_by_side(live_slurm, small, capsys, tmp_path):
    profile = tmp_path / "two.toml"
    profile.write_text('name = "two"\n[nodes]\ncount = 2\n[slurm]\npartition = "gpu"\n[paths]\nruns = "runs"\n')
    # Plain files stand for its GPUs, so what Slurm promises is not there; and that is what is told.
    assert main(["check", "--cluster", str(profile), "--write", str(profile), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["findings"]
    problems = {(r["place"], r["name"]) for r in rows if r["problem"]}
    assert problems == {("node1", "GPUs"), ("node2", "GPUs")}, [r for r in rows if r["problem"]]
    at = {r["name"]: r for r in rows if r["place"] == "node2"}
    assert at["shared folder"]["value"] == f"{tmp_path / 'runs'}: seen both ways"
    skew = re.match(r"([+-]\S+) s to the login node, give or take (\S+);", at["clock"]["value"])
    assert abs(float(skew[1])) <= float(skew[2]) + 1e-4 < 1
    (login,) = {r["place"] for r in rows} - {"Slurm", "node1", "node2"}
    assert at["software"]["value"] in [r["value"] for r in rows if r["place"] == login]
    filled = Cluster.load(profile)
    assert (filled.nodes.cpus, filled.nodes.gpus, filled.slurm.gres) == (8, 8, "gpu:8")  # of env/slurm/slurm.conf.in
    assert list((tmp_path / "runs").glob(".survey-*")) == []


@pytest.mark.slurm
def test_a_node_that_is_down_is_named_and_not_waited_for(live_slurm, small):
    subprocess.run(["scontrol", "update", "node=node2", "state=down", "reason=no power"], check=True)
    try:
        found = survey.survey(Cluster("x", Nodes(count=2), slurm=Slurm("gpu")), say=lambda _: None)
    finally:
        subprocess.run(["scontrol", "update", "node=node2", "state=resume"], check=True)
    assert set(found.places) - {"Slurm", socket.gethostname()} == {"node1"}
    assert named(found.places["Slurm"], "node node2").value.startswith("DOWN: no power [")
    assert named(found.places["Slurm"], "node count").problem.startswith("the profile says 2")


@pytest.mark.slurm
def test_a_controller_that_does_not_answer_costs_seconds_and_the_rest_goes_on(live_slurm, small, tmp_path, monkeypatch):
    conf = re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", (live_slurm / "slurm.conf").read_text())
    (tmp_path / "slurm.conf").write_text(conf)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    start = time.monotonic()
    found = survey.survey(Cluster("x", slurm=Slurm("gpu")))
    assert time.monotonic() - start < 20
    assert found.places["Slurm"][0].problem == "look again when `scontrol ping` says UP"
    assert named(found.places[socket.gethostname()], "host").value


@pytest.mark.slurm
def test_a_job_that_does_not_start_in_time_is_cancelled_and_says_why(live_slurm, small):
    late = Cluster("x", slurm=Slurm("gpu", options=("--begin=now+1hour",)))
    (job,) = survey.ask_nodes(late, 1, "", lambda _: None, patience=3)["Slurm"]
    assert job.value.startswith("cancelled after 3 s: pending, reason BeginTime")
    assert job.problem.startswith("1 of 1 nodes gave no answer")
    assert Run.attach("latest").wait(timeout=30).state == "CANCELLED"


@pytest.mark.slurm
def test_ctrl_c_cancels_the_job(live_slurm, small, tmp_path):
    (tmp_path / "late.toml").write_text('name = "late"\n[slurm]\noptions = ["--begin=now+1hour"]\n')
    command = [sys.executable, "-m", "kit.cli", "check", "--cluster", "late.toml", "--nodes", "1"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as one:
        said = one.stderr.readline()
        assert said.endswith("looks at 1 nodes: a minute, once it has started\n")
        one.send_signal(signal.SIGINT)
        one.stderr.read()
    assert one.returncode != 0
    job = said.split()[1]
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    assert "JobState=CANCELLED" in shown


@pytest.mark.slurm
def test_a_job_that_slurm_refuses_is_told_in_its_words(live_slurm, small):
    asked = survey.ask_nodes(Cluster("x", slurm=Slurm("nope")), 1, "", lambda _: None)
    assert "invalid partition specified: nope" in asked["Slurm"][0].problem


@pytest.mark.slurm
def test_a_wrong_gres_in_the_profile_does_not_keep_the_job_from_looking(live_slurm, small):
    wrong = Cluster("x", Nodes(gpus=8), slurm=Slurm("gpu", "gpu:h100:8"))
    found = survey.survey(wrong, say=lambda _: None).places
    assert named(found["Slurm"], "node count").problem == "no node has gpu:h100:8: set slurm.gres to gpu:8"
    assert named(found["Slurm"], "job").value == "COMPLETED"


def test_a_runs_folder_that_cannot_be_made_is_told_and_nothing_is_submitted(tmp_path):
    (tmp_path / "file").write_text("")
    asked = survey.ask_nodes(Cluster("x", paths=Paths(str(tmp_path / "file" / "runs"))), 1, "", lambda _: None)
    assert asked["Slurm"][0].value == "not submitted" and "Not a directory" in asked["Slurm"][0].problem


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path):
    """In a mount namespace of its own the node has an empty folder where the login node has the runs."""
    (runs := tmp_path / "runs" / ".survey-1").mkdir(parents=True)
    (runs / "asked.json").write_text("{}")
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("hiding a folder from a process needs root and unshare")
    command = f"mount -t tmpfs none {tmp_path}/runs && exec {sys.executable} -m kit.check.survey {runs}"
    env = os.environ | {"SLURMD_NODENAME": "node2", "PYTHONPATH": str(REPOSITORY)}
    said = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, env=env)
    if "unshare" in said.stderr or "mount" in said.stderr:
        pytest.skip(f"hiding a folder needs more rights: {said.stderr}")
    assert said.returncode == 1
    assert said.stderr.strip().endswith("which the login node made: set paths.runs to a folder that all share.")
