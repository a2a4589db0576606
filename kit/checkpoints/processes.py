"""Ranks: fresh processes for every sample, forked from one that has done the imports, or started by a launcher."""

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

Row = dict[str, Any]


@contextmanager
def fresh(module: str, launcher: Sequence[str] = ()) -> Iterator[Callable[..., list[Row]]]:
    """Gives run(world, *words): `sample(*words)` of a module on so many fresh ranks, and what each of them found.

    Its `prepare()` imports first, once, which takes seconds. A launcher starts the ranks of other nodes too, as
    ("srun", "-N2", "-n16") with MASTER_ADDR set; those import anew. run raises KitError where a rank fails.
    """
    if launcher:
        yield lambda world, *words: run_ranks(("-m", module, *words), world, launcher)
        return
    command, pipe = [sys.executable, "-m", "kit.checkpoints.processes", module], subprocess.PIPE
    with tempfile.TemporaryFile("w+") as errors:  # a pipe that nobody reads would fill up
        parent = subprocess.Popen(command, env=_environment(), text=True, stdin=pipe, stdout=pipe, stderr=errors)
        pipes: Any = (parent.stdin, parent.stdout)

        def run(world: int, *words: str) -> list[Row]:
            begin = errors.seek(0, os.SEEK_END)
            print(json.dumps([world, *words]), file=pipes[0], flush=True)
            rows = json.loads(pipes[1].readline() or "[]")  # no line: it has died
            errors.seek(begin)
            return _whole(rows, errors.read(), world, words)

        with parent:
            yield run


def run_ranks(arguments: Sequence[str], world: int = 1, launcher: Sequence[str] = ()) -> list[Row]:
    """What `python ARGUMENTS`, or each of those that a launcher starts, printed: one JSON object. Raises KitError."""
    command = [*launcher, sys.executable, "-X", "faulthandler", *arguments]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return _whole([] if done.returncode else rows, done.stderr, world, arguments)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    fork = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # else a look for GPUs before the fork spoils CUDA behind it
    return {"OMP_NUM_THREADS": "1"} | os.environ | fork | {"PYTHONPATH": path}


def _whole(rows: list[Row], errors: str, world: int, words: Sequence[str]) -> list[Row]:
    if len(rows) == world:
        return rows
    why = "a mapped file was cut off, or its file system failed (SIGBUS): " * ("Bus error" in errors)  # faulthandler's
    raise KitError(f"{' '.join(words)}: {len(rows)} of {world} ranks came to an end: {why}{errors.strip()[-800:]}")


def join(device: str = "cpu") -> tuple[int, int]:
    """(rank, world), with a process group for tensors on the device where there is more than one."""
    import torch.distributed as dist

    names = (("RANK", "SLURM_PROCID", 0), ("WORLD_SIZE", "SLURM_NTASKS", 1))
    rank, world = (int(os.environ.get(one) or os.environ.get(other) or default) for one, other, default in names)
    if world > 1:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"  # NCCL refuses two ranks on one GPU
        dist.init_process_group(backend, os.environ.get("KIT_RENDEZVOUS"), rank=rank, world_size=world)
    return rank, world


def _rank(sample: Callable[..., Row], words: list[str], world: int, folder: str, rank: int) -> Row:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | os.environ | place | {"KIT_RENDEZVOUS": f"file://{folder}/ranks"})
    try:
        return sample(*words)
    except BaseException:  # DCP's errors are no Exceptions
        traceback.print_exc()
        os._exit(1)  # the others wait for this rank: the pool ends them


def _serve(module: Any) -> None:
    """For each line of [world, word...] on stdin a line of the ranks' rows, or of none where one failed."""
    faulthandler.enable()
    module.prepare()
    for line in sys.stdin:
        world, *words = json.loads(line)
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, get_context("fork")) as pool:
            tasks = [pool.submit(_rank, module.sample, words, world, folder, rank) for rank in range(world)]
            broken = any(isinstance(task.exception(), BrokenProcessPool) for task in tasks)
        print(json.dumps([] if broken else [task.result() for task in tasks]), flush=True)


if __name__ == "__main__":
    _serve(importlib.import_module(sys.argv[1]))
