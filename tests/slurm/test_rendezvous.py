import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from kit.slurm import launch as slurm
from kit.slurm.rendezvous import Failed, Meeting, facts, software
from tests.conftest import REPOSITORY

SAME = {"Python": "3.11.2", "torch": "2.13.0", "kit": "abc", "driver": "570.1", "lacks": ""}


def meeting(node=0, hosts="node1 node2", job=None, address="127.0.0.1", patience=2.0, **more):
    job = job or str(10_000 + os.getpid() % 10_000)
    here = {"SLURM_JOB_ID": job, "SLURM_NODEID": str(node), "KIT_HOSTS": hosts, "KIT_ADDRESS": address}
    return Meeting(here | more, patience)


@contextlib.contextmanager
def gathered(*who):
    """What each (meeting, facts) ended with: a port, or Failed."""
    ends = [None] * len(who)

    def take_part(n, one, mine):
        try:
            ends[n] = one.join(mine) if one.node else one.host(mine)
        except Failed as failed:
            ends[n] = failed

    threads = [threading.Thread(target=take_part, args=(n, *w)) for n, w in enumerate(who)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield ends
    for one, _ in who:
        if not one.node:
            one.server.close()


def test_all_nodes_hear_one_port_of_the_head_which_is_kept_for_the_launcher_alone():
    from torch.distributed import TCPStore

    three = [meeting(node, "a b c") for node in range(3)]
    with gathered(*((one, SAME) for one in three)) as ports:
        assert len(set(ports)) == 1 and ports[0] in three[0].ports and 20000 <= ports[0] < 32000
        (other,) = gather((meeting(0, "a"), SAME))  # a job that begins just now
        assert other != ports[0] and other in three[0].ports
        store = TCPStore("127.0.0.1", ports[0], is_master=True, wait_for_workers=False)
        store.set("hello", "launcher")
        assert store.get("hello") == b"launcher"


def test_a_port_in_use_is_passed_over_whether_a_stranger_or_another_job_holds_it():
    head, guest = meeting(0), meeting(1)
    with socket.create_server(("", head.ports[0])) as stranger, socket.create_server(("", head.ports[1])) as other:
        other.listen()

        def greet():
            link = other.accept()[0]
            link.sendall(b"kit 7.0\n")
            link.close()

        threading.Thread(target=greet, daemon=True).start()
        stranger.settimeout(0.1)
        assert gather((head, SAME), (meeting(1, patience=5), SAME)) == [head.ports[2]] * 2
    assert guest.key == head.key != meeting(SLURM_RESTART_COUNT="1").key


def gather(*who):
    with gathered(*who) as ends:
        return ends


@pytest.mark.parametrize(
    ("unlike", "words"),
    [
        ({"torch": "2.12.0"}, "node2 has torch 2.12.0 (2.13.0 on node1): give all nodes one environment"),
        ({"Python": "3.12.1", "driver": "550.5"}, "node2 has Python 3.12.1 (3.11.2 on node1), driver 550.5 (570.1 on"),
        (
            {"lacks": "NCCL_SOCKET_IFNAME=bond0 (it has lo 127.0.0.1)"},
            "node2 lacks NCCL_SOCKET_IFNAME=bond0 (it has lo",
        ),
    ],
)
def test_a_node_that_differs_is_named_with_what_differs_and_only_the_head_says_so(unlike, words):
    head, guest = gather((meeting(0), SAME), (meeting(1), SAME | unlike))
    assert head.code == guest.code == 42
    assert words in head.reason and guest.reason == ""


def test_a_job_on_other_software_than_the_machine_that_launched_it_says_so():
    head, _ = gather((meeting(KIT_SOFTWARE=json.dumps({"torch": "2.12.0"})), SAME), (meeting(1), SAME))
    assert "node1 has torch 2.13.0 (2.12.0 where it was launched)" in head.reason and head.code == 42


def test_a_node_that_never_comes_is_named_in_seconds():
    began = time.monotonic()
    head, guest = gather((meeting(0, "a b c", patience=-3.5), SAME), (meeting(1, "a b c"), SAME))
    assert (head.code, guest.code, guest.reason) == (41, 41, "")
    assert "c did not come to a (127.0.0.1)" in head.reason and "b did" not in head.reason
    assert time.monotonic() - began < 10


def test_a_head_that_does_not_answer_is_told_with_the_address_and_this_nodes_interfaces():
    (lost,) = gather((meeting(1, patience=0.5), SAME))
    assert lost.code == 41 and "node1 does not answer at 127.0.0.1:" in lost.reason
    assert "Connection refused" in lost.reason and "lo 127.0.0.1" in lost.reason
    assert "NCCL_SOCKET_IFNAME" in lost.reason and "[environment]" in lost.reason


def test_an_interface_that_the_profile_names_and_the_node_has_not_is_found(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nope")
    assert facts()["lacks"].startswith("NCCL_SOCKET_IFNAME=nope (it has lo 127.0.0.1")
    for good in ("lo", "=lo", "^docker", "nope,lo", ""):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", good)
        assert facts()["lacks"] == ""


def test_versions_are_true_and_cheap():
    code = "import sys, time; t = time.time(); from kit.slurm.rendezvous import facts; f = facts(); "
    code += "import json; print(json.dumps([f, 'torch' in sys.modules, time.time() - t]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    found, imported, seconds = json.loads(done.stdout)
    import torch

    assert found["torch"] == torch.__version__ == software()["torch"]
    assert not imported and seconds < 5


@pytest.mark.slurm
def test_a_job_whose_nodes_cannot_meet_ends_in_seconds_with_one_line(live_slurm, recipe, local):
    cluster = dataclasses.replace(
        local, nodes=dataclasses.replace(local.nodes, count=2), environment={"GLOO_SOCKET_IFNAME": "nope"},
        slurm=dataclasses.replace(local.slurm, partition="gpu"),
    )  # fmt: skip
    run = slurm.launch(recipe.override(**{"parallel.nodes": 2, "parallel.gpus_per_node": 1}), cluster)
    began = time.monotonic()
    end = slurm.wait(run, timeout=60)
    assert (end.state, end.exit_code) == ("FAILED", 42) and time.monotonic() - began < 30
    said = re.findall(r"^\[rendezvous on .*$", run.log.read_text(), re.MULTILINE)
    assert len(said) == 1 and said[0].startswith("[rendezvous on node1] node1 lacks GLOO_SOCKET_IFNAME=nope (it has lo")
