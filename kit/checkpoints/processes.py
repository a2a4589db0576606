"""Fresh processes for every sample, forked from a server that has done the imports.

    python -m kit.checkpoints.processes MODULE

The module has `sample(*words)`, which returns JSON-ready values.
"""

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from kit import files
from kit.errors import KitError
from kit.slurm.variables import Variable

Row = dict[str, Any]
# What any sample needs, so that none includes the time for it. DTensor imports dynamo at its first use.
_IMPORTS = (
    "safetensors.torch", "torch.distributed.checkpoint.hf_storage", "torch._dynamo", "kit.checkpoints.sharded",
)  # fmt: skip


@contextmanager
def fresh_ranks(module: str) -> Iterator[Callable[..., list[Row]]]:
    """Yields run(world, *words), which calls the module's `sample(*words)` on `world` fresh ranks: a row of each.

    Imports happen once, which takes seconds. run raises KitError, with the end of the ranks' stderr, where one fails.
    """
    command, pipe = [sys.executable, "-m", "kit.checkpoints.processes", module], subprocess.PIPE
    path = os.pathsep.join([str(files.REPOSITORY), os.environ.get("PYTHONPATH", "")])
    # Without NVML torch's look for GPUs starts CUDA, which a forked process cannot use.
    settings = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONPATH": path}
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | settings
    with tempfile.TemporaryFile("w+") as errors:  # a pipe would fill up while it is not read
        server = subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=errors)
        requests: Any = server.stdin
        answers: Any = server.stdout

        def run(world: int, *words: str) -> list[Row]:
            begin = errors.seek(0, os.SEEK_END)
            print(json.dumps([world, *words]), file=requests, flush=True)
            rows: list[Row] = json.loads(answers.readline() or "[]")  # no line: the server has ended
            errors.seek(begin)
            if len(rows) == world:
                return rows
            reason = errors.read().strip()
            if "Bus error" in reason:  # faulthandler's name of SIGBUS
                reason = f"a mapped file was truncated, or its file system failed (SIGBUS): {reason[-800:]}"
            raise KitError(f"{' '.join(words)}: a rank of {world} failed: {reason[-1000:]}")

        with server:
            yield run


def join(device: str = "cpu") -> tuple[int, int]:
    """(rank, world) of this process; starts a process group for tensors on the device if there is more than one."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"  # NCCL refuses two ranks on one GPU
        dist.init_process_group(backend, os.environ.get(Variable.RENDEZVOUS), rank=rank, world_size=world)
    return rank, world


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
    for name in _IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        world, *words = json.loads(line)
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, get_context("fork")) as pool:
            tasks = [pool.submit(_run_rank, module.sample, words, world, folder, rank) for rank in range(world)]
            broken = any(isinstance(task.exception(), BrokenProcessPool) for task in tasks)
        print(json.dumps([] if broken else [task.result() for task in tasks]), flush=True)


if __name__ == "__main__":
    _serve(importlib.import_module(sys.argv[1]))
