"""Gloo ranks of this machine for tests, forked from a process of the session that has done the imports.

What the kit launches starts as it does for users; this is for tests of what ranks do after their start. Imports of
PEFT, TRL and accelerate take each rank six seconds of CPU time, which the fork saves.
"""

import functools
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from tests import shared

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_S = 600.0
MODEL = "transformers.models.llama.modeling_llama"  # without PEFT, so that a script can use another release of it
TRAINING = "kit.train.__main__"
KINDS = ("stdout", "stderr")


def run_ranks(
    world: int, script: str | Path, *arguments: object, packages: Sequence[Path] = (), imports: str = MODEL
) -> str:
    """Run a script on so many ranks, as torchrun does; return what they print.

    The script's own folder and `packages`, folders of packages, come first in its path. `imports` is the module that
    the ranks have imported when they start; TRAINING finds `packages`, too. Raises AssertionError with the ranks'
    stderr where one fails.
    """
    first = [str(package) for package in packages if imports == TRAINING]
    name = "-".join(["ranks", imports, *(Path(package).name for package in first)])
    address = shared.once(name, functools.partial(start, imports, first)) / "socket"
    with Client(str(address), "AF_UNIX") as connection:
        request = [int(world), str(script), [str(a) for a in arguments], [str(p) for p in packages], str(Path.cwd())]
        connection.send(request)
        codes, output, errors = connection.recv()
    assert codes == [0] * world, f"exit codes {codes}\n{errors[-4000:]}"
    return str(output)


def start(imports: str, packages: list[str], folder: Path) -> None:
    """Start the process that the ranks are forked from; it is stopped when the session ends."""
    address = folder / "socket"
    path = os.pathsep.join([*packages, str(REPOSITORY)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "tests.ranks", address, imports]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    shared.stop_at_end("kill", server.pid)
    while not address.exists():
        assert server.poll() is None, (folder / "log").read_text()
        time.sleep(0.1)
    server.returncode = 0  # it outlives this process; without a code Popen warns


def serve(address: str, imports: str) -> None:
    """Import, then answer each request in its own process, so that tests of several workers run side by side."""
    importlib.import_module(imports)
    assert imports != MODEL or "peft" not in sys.modules
    gc.collect()
    gc.freeze()  # the collector of a fork does not touch, and thereby copy, these pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these processes
    with Listener(address, "AF_UNIX") as listener:
        while True:
            with listener.accept() as connection:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    answer(connection)
                    os._exit(0)


def answer(connection: Connection) -> None:
    """Fork the ranks of one request, wait for them, and send [exit codes, stdout, stderr]; one failure ends all."""
    world, script, arguments, packages, folder = connection.recv()
    with tempfile.TemporaryDirectory() as logs, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        ranks = []
        for rank in range(world):
            if (pid := os.fork()) == 0:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
                os.environ |= {name: str(value) for name, value in place.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                become_rank(Path(logs), rank, [script, *arguments], packages, folder)
            ranks.append(pid)
        codes = wait_for(ranks)
        output, errors = ("".join(path.read_text() for path in sorted(Path(logs).glob(f"{kind}.*"))) for kind in KINDS)
    connection.send([codes, output, errors])


def become_rank(logs: Path, rank: int, words: list[str], packages: list[str], folder: str) -> None:
    """In the forked process: run the script and exit."""
    code = 1
    try:
        for descriptor, kind in enumerate(KINDS, 1):
            os.dup2(os.open(logs / f"{kind}.{rank}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.chdir(folder)
        sys.argv = words
        sys.path[:0] = [str(Path(words[0]).resolve().parent), *packages]
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:  # an exit code for every end: what follows belongs to the forking process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(ranks: list[int]) -> list[int]:
    """The exit codes of these processes; those that are left are killed when one fails or the time is over."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            for left in set(ranks) - codes.keys():
                os.kill(left, signal.SIGKILL)
        if not pid:
            time.sleep(0.02)
    return [codes[pid] for pid in ranks]


if __name__ == "__main__":
    serve(*sys.argv[1:])
