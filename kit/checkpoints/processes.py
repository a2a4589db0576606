"""Fresh processes for every sample: forked from one that has done the imports, or started by a launcher.

    python -m kit.checkpoints.processes serve MODULE           serves samples of a module on forked ranks
    python -m kit.checkpoints.processes rank MODULE WORD...    one rank of one sample, as a launcher starts it

A module has `prepare()`, which imports, and `sample(*words)`, which returns JSON-ready values.
"""

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.slurm.variables import Variable

Row = dict[str, Any]
_THIS_MODULE = "kit.checkpoints.processes"


@contextmanager
def fresh_ranks(module: str, launcher: Sequence[str] = ()) -> Iterator[Callable[..., list[Row]]]:
    """Yields run(world, *words), which calls the module's `sample(*words)` on `world` fresh ranks: a row of each.

    Imports happen once, which takes seconds. A launcher starts the ranks of other nodes too, as ("srun", "-N2", "-n16")
    with MASTER_ADDR set; those import for every sample. run raises KitError where a rank fails.
    """
    if launcher:
        yield lambda world, *words: run_ranks(("-m", _THIS_MODULE, "rank", module, *words), world, launcher)
        return
    command, pipe = [sys.executable, "-m", _THIS_MODULE, "serve", module], subprocess.PIPE
    with tempfile.TemporaryFile("w+") as errors:  # a pipe would fill up while it is not read
        server = subprocess.Popen(command, env=_environment(), text=True, stdin=pipe, stdout=pipe, stderr=errors)
        requests: Any = server.stdin
        answers: Any = server.stdout

        def run(world: int, *words: str) -> list[Row]:
            begin = errors.seek(0, os.SEEK_END)
            print(json.dumps([world, *words]), file=requests, flush=True)
            rows = json.loads(answers.readline() or "[]")  # no line: the server has ended
            errors.seek(begin)
            return _checked(rows, errors.read(), world, words)

        with server:
            yield run


def run_ranks(arguments: Sequence[str], world: int = 1, launcher: Sequence[str] = ()) -> list[Row]:
    """The JSON objects that `world` processes `python ARGUMENTS` print, one each. Raises KitError."""
    command = [*launcher, sys.executable, "-X", "faulthandler", *arguments]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return _checked([] if done.returncode else rows, done.stderr, world, arguments)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    # Without NVML torch's look for GPUs starts CUDA, which a forked process cannot use.
    fork = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {"OMP_NUM_THREADS": "1"} | os.environ | fork | {"PYTHONPATH": path}


def _checked(rows: list[Row], errors: str, world: int, words: Sequence[str]) -> list[Row]:
    """The rows, if there is one for each rank. Raises KitError with the end of the processes' stderr."""
    if len(rows) == world:
        return rows
    reason = ""
    if "Bus error" in errors:  # faulthandler's name of SIGBUS
        reason = "a mapped file was truncated, or its file system failed (SIGBUS): "
    raise KitError(f"{' '.join(words)}: only {len(rows)} of {world} ranks finished: {reason}{errors.strip()[-800:]}")


def join(device: str = "cpu") -> tuple[int, int]:
    """(rank, world) of this process; starts a process group for tensors on the device if there is more than one."""
    import torch.distributed as dist

    rank, world = _number("RANK", "SLURM_PROCID", 0), _number("WORLD_SIZE", "SLURM_NTASKS", 1)
    if world > 1:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"  # NCCL refuses two ranks on one GPU
        dist.init_process_group(backend, os.environ.get(Variable.RENDEZVOUS), rank=rank, world_size=world)
    return rank, world


def _number(name: str, slurm_name: str, default: int) -> int:
    return int(os.environ.get(name) or os.environ.get(slurm_name) or default)


def _run_rank(sample: Callable[..., Row], words: list[str], world: int, folder: str, rank: int) -> Row:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.update(
        {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | place | {Variable.RENDEZVOUS: f"file://{folder}/ranks"}
    )
    try:
        return sample(*words)
    except BaseException:  # DCP's errors do not derive from Exception
        traceback.print_exc()
        os._exit(1)  # the pool then ends the ranks that wait for this one


def _serve(module: Any) -> None:
    """For each line [world, word...] of stdin print a line with the ranks' rows; with none where a rank failed."""
    faulthandler.enable()
    module.prepare()
    for line in sys.stdin:
        world, *words = json.loads(line)
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, get_context("fork")) as pool:
            tasks = [pool.submit(_run_rank, module.sample, words, world, folder, rank) for rank in range(world)]
            broken = any(isinstance(task.exception(), BrokenProcessPool) for task in tasks)
        print(json.dumps([] if broken else [task.result() for task in tasks]), flush=True)


def main(role: str, module_name: str, *words: str) -> None:
    """The two uses of the module's docstring."""
    module = importlib.import_module(module_name)
    if role == "serve":
        _serve(module)
    else:
        print(json.dumps(module.sample(*words)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
