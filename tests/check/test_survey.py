import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from kit.check import mounts, node_job, survey
from kit.check.facts import Finding
from kit.cli import main
from kit.config.cluster import Cluster, Nodes, Paths, Slurm
from kit.lint.lint import lint
from kit.slurm.linting import site_of
from kit.slurm.run import Run
from tests.conftest import REPOSITORY, until


@pytest.fixture
def small(monkeypatch):
    """Trials of a few MiB, and hosts that answer at once: no process listens on port 9 of this machine."""
    monkeypatch.setattr(mounts, "SIZE", 16 << 20)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def named(found, name):
    (one,) = [f for f in found if f.name == name]
    return one


@pytest.fixture
def found():
    gpus = Finding("GPUs", "7 x H100", "nvidia-smi", "", {"nodes.gpus": 7, "nodes.gpu": "H100"})
    here = [Finding("software", "torch 2", "python", "", {"torch": "2"})]
    places = {"Slurm": [Finding("n", "v", "h", "", {"nodes.cpus": 220, "slurm.partition": "gpu"})], "login": here}
    node = [*here, gpus, Finding("host", "224 CPUs", "psutil", "", {"nodes.cpus": 224, "nodes.ram_gib": 1000.0})]
    link = {"links.inter": {"kind": "100GbE", "gb_s": 12.5}}
    return survey.Survey(
        Cluster("x"),
        places | {"a": node, "b": [Finding("host", "x", "h", "low", {"nodes.ram_gib": 900.0} | link)]},
        ("a", "b"),
    )


def test_equal_machines_share_a_column():
    same = [Finding("software", "torch 2", "python"), Finding("host", "8 CPUs", "psutil")]
    places = {"Slurm": [], "login": [Finding("software", "torch 2", "python")], "a": same, "b": same}
    table = survey.Survey(Cluster("x"), places, ("a", "b")).machines
    assert list(table.columns) == ["what", "login", "a, b", "how it was found"]
    assert table.rows[1] == ("host", "", "8 CPUs", "psutil")


def test_problems_come_first(found):
    assert found.problems.rows == [("b", "host", "x", "low")]
    assert found.as_dict()["findings"][0]["problem"] == "low"
    assert str(found).startswith("Problems\nplace  what  value  what to do\nb      host  x      low")


def test_facts_are_the_minimum_of_the_nodes_unless_slurm_knows(found):
    assert found.facts == {
        "nodes.gpus": 7, "nodes.gpu": "H100", "nodes.cpus": 220, "nodes.ram_gib": 900.0,
        "links.inter": {"kind": "100GbE", "gb_s": 12.5}, "slurm.partition": "gpu",
    }  # fmt: skip


def test_a_node_below_its_profile_or_with_other_software_is_a_problem():
    machine = Cluster("x", Nodes(gpus=8, cpus=64, ram_gib=1000.0))
    judged = survey.judge_node(Finding("GPUs", "", "", "", {"nodes.gpus": 7}), machine, {})
    assert judged.problem == "the profile says nodes.gpus = 8: set it to 7"
    assert not survey.judge_node(
        Finding("host", "", "", "", {"nodes.cpus": 64, "nodes.ram_gib": 990.0}), machine, {}
    ).problem
    login = {"Python": "3.12", "torch": "2.13", "driver": "none"}
    node = Finding("software", "", "", "", login | {"Python": "3.9", "driver": "580"})
    assert survey.judge_node(node, machine, login).problem == (
        "Python 3.12 on the login node: give all nodes one environment by slurm.setup"
    )


@pytest.mark.parametrize("name", ["two-node-pcie", "h100-8x8", "local"])
def test_the_job_script_passes_the_linter(tmp_path, name):
    cluster = Cluster.load(name)
    script = node_job.render_script(cluster, tmp_path / "a folder", cluster.nodes.count, cluster.slurm.gres)
    assert [f for f in lint(script, site=site_of(cluster)) if f.severity != "info"] == []
    assert f"#SBATCH --nodes={cluster.nodes.count}\n" in script and "#SBATCH --time=00:05:00\n" in script
    assert ("#SBATCH --gres=gpu:" in script) == bool(cluster.nodes.gpus)


def test_without_slurm_this_process_inspects_the_machine(small, tmp_path, capsys, monkeypatch):
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
    assert "the profile says nodes.ram_gib = 1000000.0: set it to" in capsys.readouterr().out


@pytest.mark.slurm
def test_a_job_inspects_both_nodes_of_a_live_slurm(live_slurm, small, capsys, tmp_path):
    profile = tmp_path / "two.toml"
    profile.write_text('name = "two"\n[nodes]\ncount = 2\n[slurm]\npartition = "gpu"\n[paths]\nruns = "runs"\n')
    # Plain files stand for its GPUs, so that what Slurm promises is absent, and the survey reports it.
    assert main(["check", "--cluster", str(profile), "--write", str(profile), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["findings"]
    problems = {(r["place"], r["name"]) for r in rows if r["problem"]}
    assert problems == {("node1", "GPUs"), ("node2", "GPUs")}, [r for r in rows if r["problem"]]
    at = {r["name"]: r for r in rows if r["place"] == "node2"}
    assert at["shared folder"]["value"] == f"{tmp_path / 'runs'}: seen by both"
    (login,) = {r["place"] for r in rows} - {"Slurm", "node1", "node2"}
    assert at["software"]["value"] in [r["value"] for r in rows if r["place"] == login]
    filled = Cluster.load(profile)
    assert (filled.nodes.cpus, filled.nodes.gpus, filled.slurm.gres) == (8, 8, "gpu:8")  # of env/slurm/slurm.conf.in
    assert list((tmp_path / "runs").glob(".survey-*")) == []


@pytest.mark.slurm
def test_a_down_node_is_reported_without_waiting(live_slurm, small):
    subprocess.run(["scontrol", "update", "node=node2", "state=down", "reason=no power"], check=True)
    try:
        found = survey.survey(Cluster("x", Nodes(count=2), slurm=Slurm("gpu")), say=lambda _: None)
    finally:
        # Refused where the node has registered again meanwhile (ReturnToService=2).
        subprocess.run(["scontrol", "update", "node=node2", "state=resume"], check=False)
    assert set(found.places) - {"Slurm", socket.gethostname()} == {"node1"}
    assert named(found.places["Slurm"], "node node2").value.startswith("DOWN: no power [")
    assert named(found.places["Slurm"], "node count").problem.startswith("the profile says 2")


@pytest.mark.slurm
def test_a_silent_controller_does_not_stop_the_survey(live_slurm, small, tmp_path, monkeypatch):
    conf = re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", (live_slurm / "slurm.conf").read_text())
    (tmp_path / "slurm.conf").write_text(conf)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    found = survey.survey(Cluster("x", slurm=Slurm("gpu")))
    assert found.places["Slurm"][0].problem == "try again when `scontrol ping` says UP"
    assert named(found.places[socket.gethostname()], "host").value


@pytest.mark.slurm
def test_a_job_pending_too_long_is_cancelled_with_its_reason(live_slurm, small):
    late = Cluster("x", slurm=Slurm("gpu", options=("--begin=now+1hour",)))
    (job,) = node_job.inspect_nodes(late, 1, "", lambda _: None, patience=3)["Slurm"]
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
        assert said.endswith("inspects 1 nodes; it takes a minute once it has started\n")
        one.send_signal(signal.SIGINT)
        one.stderr.read()
    assert one.returncode != 0
    job = said.split()[1]
    show = ["scontrol", "show", "job", job]
    until(lambda: "JobState=CANCELLED" in subprocess.run(show, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slurm
def test_a_refused_job_is_reported_with_slurms_message(live_slurm, small):
    asked = node_job.inspect_nodes(Cluster("x", slurm=Slurm("nope")), 1, "", lambda _: None)
    assert "invalid partition specified: nope" in asked["Slurm"][0].problem


@pytest.mark.slurm
def test_a_wrong_gres_in_the_profile_does_not_stop_the_job(live_slurm, small):
    wrong = Cluster("x", Nodes(gpus=8), slurm=Slurm("gpu", "gpu:h100:8"))
    found = survey.survey(wrong, say=lambda _: None).places
    assert named(found["Slurm"], "node count").problem == "no node has gpu:h100:8: set slurm.gres to gpu:8"
    assert named(found["Slurm"], "job").value == "COMPLETED"


def test_an_impossible_runs_folder_is_a_problem_and_nothing_is_submitted(tmp_path):
    (tmp_path / "file").write_text("")
    asked = node_job.inspect_nodes(Cluster("x", paths=Paths(str(tmp_path / "file" / "runs"))), 1, "", lambda _: None)
    assert asked["Slurm"][0].value == "not submitted" and "Not a directory" in asked["Slurm"][0].problem


def test_a_node_without_the_shared_folder_reports_it(tmp_path):
    """In a separate mount namespace the node has an empty folder where the login node has the runs."""
    (runs := tmp_path / "runs" / ".survey-1").mkdir(parents=True)
    (runs / "cluster.toml").write_text("")
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("hiding a folder from a process needs root and unshare")
    command = f"mount -t tmpfs none {tmp_path}/runs && exec {sys.executable} -m kit.check.node_job {runs}"
    env = os.environ | {"SLURMD_NODENAME": "node2", "PYTHONPATH": str(REPOSITORY)}
    said = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, env=env)
    if "unshare" in said.stderr or "mount" in said.stderr:
        pytest.skip(f"hiding a folder needs more rights: {said.stderr}")
    assert said.returncode == 1
    assert said.stderr.strip().endswith("which the login node made: set paths.runs to a folder that all share.")
