import contextlib
import dataclasses
import itertools
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit.slurm import launch as slurm
from kit.slurm.handshake import Peer, StrangerError
from kit.slurm.rendezvous import ExitCode, Head, Node, RendezvousError, Software, join, software
from kit.trainers import trl
from tests.conftest import REPOSITORY, until

SAME = Software({"Python": "3.11.2", "torch": "2.13.0", "kit": "abc", "driver": "570.1"})


KEY = secrets.token_hex(32)
JOBS = itertools.count(10_000 + os.getpid() % 10_000, 16)
job_of_this_test = next(JOBS)


@pytest.fixture(autouse=True)
def new_ports(monkeypatch):
    """Each test has ports on which no connection of another test is left."""
    monkeypatch.setitem(globals(), "job_of_this_test", next(JOBS))


def node(number=0, hosts="node1 node2", job=None, address="127.0.0.1", key=KEY, **more):
    job = job or str(job_of_this_test)
    here = {"SLURM_JOB_ID": job, "SLURM_NODEID": str(number), "KIT_HOSTS": hosts, "KIT_ADDRESS": address}
    here |= {"KIT_KEY": key}
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
        head.close()


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


FACTS = [1, dataclasses.asdict(SAME)]
HOSTILE = {
    "nothing": [],
    "closed at once": None,
    "facts of a node, without a proof": [json.dumps(FACTS)],
    "a wrong proof": [f"{'0' * 64} {'0' * 64}", json.dumps(FACTS)],
    "a short challenge": ["00 00"],
    "no facts": ["[1, {}]"],
    "TLS": ["\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],
    "a line without an end": ["x" * 200_000],
    "not text": ["\udc80\udcff" * 100],
}


def attack(port, lines):
    """What a program without the key can send to a head node; the connection then stays open unless lines is None."""
    connection = socket.create_connection(("127.0.0.1", port))
    if lines is None:
        connection.close()
    for line in lines or ():
        with contextlib.suppress(OSError):  # the head node has closed the connection
            connection.sendall(line.encode(errors="surrogateescape") + b"\n" * (len(line) < 1000))
    return connection


@pytest.mark.parametrize("name", HOSTILE)
def test_a_connection_without_the_key_changes_nothing_and_is_counted(name):
    head = Head(node(0), timeout_s=20)
    with attack(head.port, HOSTILE[name]), ThreadPoolExecutor(2) as pool:
        ports = [pool.submit(head.meet, SAME), pool.submit(join, node(1), SAME)]
        assert [port.result() for port in ports] == [head.port] * 2
        until(lambda: head.strangers == 1)
    head.close()


def test_many_silent_connections_at_once_do_not_delay_a_node():
    head = Head(node(0), timeout_s=20)
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as silent:
        port = pool.submit(head.meet, SAME)
        for _ in range(50):
            silent.enter_context(attack(head.port, []))
        assert join(node(1), SAME) == port.result() == head.port
    head.close()


def test_one_byte_at_a_time_does_not_extend_the_time_of_a_connection():
    near, far = socket.socketpair()

    def drip():
        with contextlib.suppress(OSError):
            for _ in range(100):
                far.sendall(b"0")
                time.sleep(0.05)

    with near, far, ThreadPoolExecutor(1) as pool:
        pool.submit(drip)
        with pytest.raises(StrangerError, match="timed out"):
            Peer(near, b"key", is_head=True).greet(timeout_s=0.5)
        far.shutdown(socket.SHUT_RDWR)


def test_a_nodes_facts_with_another_shape_are_not_those_of_a_node():
    head = Head(node(0), timeout_s=20)
    wrong = ([1, {}], [1, []], [0, FACTS[1]], [-1, FACTS[1]], [2, FACTS[1]], [1, {"versions": {"torch": 2}}], 5)
    with ThreadPoolExecutor(2) as pool:
        port = pool.submit(head.meet, SAME)
        for facts in wrong:
            with socket.create_connection(("127.0.0.1", head.port)) as connection:
                peer = Peer(connection, bytes.fromhex(KEY), is_head=False)
                peer.greet(5)
                peer.send(json.dumps(facts), 5)
                with pytest.raises(StrangerError):
                    peer.receive(5)
        assert join(node(1), SAME) == port.result()
        assert head.strangers == len(wrong)
    head.close()


def test_a_program_that_listens_on_the_heads_port_and_does_not_have_the_key_is_not_believed():
    head = node(0)
    with socket.create_server(("127.0.0.1", head.ports[0])) as other, contextlib.ExitStack() as links:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    link = links.enter_context(other.accept()[0])
                    link.sendall(f"{'0' * 64}\n{'0' * 64}\n{'0' * 64} {head.ports[5]}\n".encode())

        threading.Thread(target=answer, daemon=True).start()
        assert gather((head, SAME), (node(1), SAME), timeout_s=20) == [head.ports[1]] * 2
        other.shutdown(socket.SHUT_RDWR)


def test_a_message_that_is_changed_on_its_way_is_refused():
    near, far = socket.socketpair()
    head, guest = Peer(near, b"key", is_head=True), Peer(far, b"key", is_head=False)
    with near, far, ThreadPoolExecutor(1) as pool:
        greeted = pool.submit(head.greet, 5)
        guest.greet(5)
        greeted.result()
        guest.send("torch 2.13.0", 5)
        text = near.recv(4096)
        far.sendall(text.replace(b"2.13.0", b"2.12.0"))
        with pytest.raises(StrangerError, match="wrong key"):
            head.receive(5)
        far.sendall(text)  # and so is one of the other direction
        with pytest.raises(StrangerError):
            guest.receive(0.2)


def test_nodes_without_a_key_do_not_meet():
    with pytest.raises(RendezvousError) as lost:
        node(1, key="")
    assert "earlier version of the kit" in lost.value.reason
    assert node(0, hosts="node1", key="").key == b""  # one node has nobody to meet


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"versions": SAME.versions | {"torch": "2.12.0"}},
            "node2 has torch 2.12.0 (2.13.0 on node1): give all nodes one environment",
        ),
        (
            {"versions": SAME.versions | {"Python": "3.12.1", "driver": "550.5"}},
            "node2 has Python 3.12.1 (3.11.2 on node1), driver 550.5 (570.1 on",
        ),
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

    assert found["versions"]["torch"] == torch.__version__ == software()["torch"]
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
