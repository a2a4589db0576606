import contextlib
import dataclasses
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kit.slurm import launch as slurm
from kit.slurm.rendezvous import ExitCode, Head, Node, RendezvousError, Software, join, software
from kit.trainers import trl
from tests.conftest import REPOSITORY

SAME = Software("3.11.2", "2.13.0", "abc", "570.1")


def node(number=0, hosts="node1 node2", job=None, address="127.0.0.1", **more):
    job = job or str(10_000 + os.getpid() % 10_000)
    here = {"SLURM_JOB_ID": job, "SLURM_NODEID": str(number), "KIT_HOSTS": hosts, "KIT_ADDRESS": address}
    return Node.from_environment(here | more)


@contextlib.contextmanager
def gathered(*who, timeout_s=2.0):
    """What each (node, software) ended with: a port, or RendezvousError. Heads keep their ports in the block."""
    ends, heads = [None] * len(who), []

    def take_part(index, one, own):
        try:
            if one.number:
                ends[index] = join(one, own, timeout_s=5.0)
            else:
                heads.append(head := Head(one, timeout_s=timeout_s))
                ends[index] = head.meet(own)
        except RendezvousError as error:
            ends[index] = error

    threads = [threading.Thread(target=take_part, args=(index, *one)) for index, one in enumerate(who)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield ends
    for head in heads:
        head.server.close()


def gather(*who, **more):
    with gathered(*who, **more) as ends:
        return ends


def test_all_nodes_get_one_port_of_the_head_which_is_kept_for_the_launcher_alone():
    from torch.distributed import TCPStore

    three = [node(number, "a b c") for number in range(3)]
    with gathered(*((one, SAME) for one in three)) as ports:
        assert len(set(ports)) == 1 and ports[0] in three[0].ports and 20000 <= ports[0] < 32000
        (other,) = gather((node(0, "a"), SAME))  # a job that starts at this moment
        assert other != ports[0] and other in three[0].ports
        store = TCPStore("127.0.0.1", ports[0], is_master=True, wait_for_workers=False)
        store.set("hello", "launcher")
        assert store.get("hello") == b"launcher"


def test_a_port_that_another_program_or_another_job_uses_is_passed_over():
    head = node(0)
    with socket.create_server(("", head.ports[0])) as stranger, socket.create_server(("", head.ports[1])) as other:
        other.listen()

        def greet():
            link = other.accept()[0]
            link.sendall(b"kit 7.0\n")
            link.close()

        threading.Thread(target=greet, daemon=True).start()
        stranger.settimeout(0.1)
        assert gather((head, SAME), (node(1), SAME)) == [head.ports[2]] * 2
    assert node(1).start_id == head.start_id != node(SLURM_RESTART_COUNT="1").start_id


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.12.0"}, "node2 has torch 2.12.0 (2.13.0 on node1): give all nodes one environment"),
        ({"python": "3.12.1", "driver": "550.5"}, "node2 has Python 3.12.1 (3.11.2 on node1), driver 550.5 (570.1 on"),
        (
            {"missing_interface": "NCCL_SOCKET_IFNAME=bond0 (it has lo 127.0.0.1)"},
            "node2 lacks NCCL_SOCKET_IFNAME=bond0 (it has lo",
        ),
    ],
)
def test_a_node_that_differs_is_named_with_what_differs_and_only_the_head_logs_it(changes, words):
    head, guest = gather((node(0), SAME), (node(1), dataclasses.replace(SAME, **changes)))
    assert head.code == guest.code == ExitCode.SOFTWARE_DIFFERS == 42
    assert words in head.reason and guest.reason == ""


def test_other_software_than_on_the_machine_that_launched_the_job_is_an_error():
    head, _ = gather((node(KIT_SOFTWARE=json.dumps({"torch": "2.12.0"})), SAME), (node(1), SAME))
    assert "node1 has torch 2.13.0 (2.12.0 where it was launched)" in head.reason and head.code == 42


def test_a_node_that_does_not_come_is_named_in_seconds():
    head, guest = gather((node(0, "a b c"), SAME), (node(1, "a b c"), SAME), timeout_s=-3.5)
    assert (head.code, guest.code, guest.reason) == (41, 41, "")
    assert "c did not connect to a (127.0.0.1)" in head.reason and "b did" not in head.reason


def test_a_head_that_does_not_answer_is_an_error_with_the_address_and_this_nodes_interfaces():
    with pytest.raises(RendezvousError) as lost:
        join(node(1), SAME, timeout_s=0.5)
    reason = lost.value.reason
    assert lost.value.code == ExitCode.NODE_MISSING and "node1 does not answer at 127.0.0.1:" in reason
    assert "Connection refused" in reason and "lo 127.0.0.1" in reason
    assert "NCCL_SOCKET_IFNAME" in reason and "[environment]" in reason


def test_an_interface_that_the_profile_names_and_the_node_does_not_have_is_found(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nope")
    assert Software.here().missing_interface.startswith("NCCL_SOCKET_IFNAME=nope (it has lo 127.0.0.1")
    for good in ("lo", "=lo", "^docker", "nope,lo", ""):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", good)
        assert Software.here().missing_interface == ""


@pytest.mark.parametrize("launcher", ["of the job script", "of a job script from before"])
def test_the_launcher_of_each_node_gets_its_number_and_the_port(tmp_path, monkeypatch, launcher):
    """Job scripts from before the launcher was an argument name the run alone: that means accelerate and kit.train."""
    stand_in = tmp_path / "accelerate" / "commands" / "launch.py"
    stand_in.parent.mkdir(parents=True)
    (stand_in.parents[1] / "__init__.py").touch()
    (stand_in.parent / "__init__.py").touch()
    show = "print(json.dumps([sys.argv[1:], __name__, os.environ['KIT_ADDRESS']]))"
    stand_in.write_text(f"import json, os, sys\n{show}\n")
    run = str(tmp_path / "run")
    words = trl.launcher(Path(run)) if launcher == "of the job script" else ()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPOSITORY}")
    here = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NODEID": "0", "KIT_HOSTS": "node1", "KIT_ADDRESS": "127.0.0.1"}
    command = [sys.executable, "-m", "kit.slurm.rendezvous", run, *words]
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True, check=True)
    arguments, name, address = json.loads(done.stdout)
    given = dict(itertools.pairwise(arguments))
    assert (name, address) == ("__main__", "127.0.0.1")
    assert given["--config_file"] == f"{run}/accelerate.yaml" and given["--machine_rank"] == "0"
    assert given["--main_process_ip"] == "127.0.0.1" and 20000 <= int(given["--main_process_port"]) < 32000
    assert arguments[-3:] == ["-m", "kit.train", run]


def test_versions_are_those_of_the_installed_packages_and_torch_is_not_imported():
    code = "import dataclasses, json, sys; from kit.slurm.rendezvous import Software; found = Software.here(); "
    code += "print(json.dumps([dataclasses.asdict(found), 'torch' in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    found, imported = json.loads(done.stdout)
    import torch

    assert found["torch"] == torch.__version__ == software()["torch"]
    assert not imported


@pytest.mark.slurm
def test_a_job_whose_nodes_cannot_meet_ends_in_seconds_with_one_line(live_slurm, recipe, local):
    cluster = dataclasses.replace(
        local, nodes=dataclasses.replace(local.nodes, count=2), environment={"GLOO_SOCKET_IFNAME": "nope"},
        slurm=dataclasses.replace(local.slurm, partition="gpu"),
    )  # fmt: skip
    run = slurm.launch(recipe.override(**{"parallel.nodes": 2, "parallel.gpus_per_node": 1}), cluster)
    end = run.wait(timeout=60)
    assert (end.state, end.exit_code) == ("FAILED", 42)
    said = re.findall(r"^\[rendezvous on .*$", run.log.read_text(), re.MULTILINE)
    assert len(said) == 1 and said[0].startswith("[rendezvous on node1] node1 lacks GLOO_SOCKET_IFNAME=nope (it has lo")
