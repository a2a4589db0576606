"""Probe: measure the GPUs, hosts and links of a cluster with a job of one process per GPU, for its profile."""

import os
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.config.cluster import Cluster, Link, Links
from kit.errors import InputError, KitError
from kit.slurm import environment as jobscript

LAUNCHES = 2000  # small kernels in a row: their time is the host's, not the GPU's
SLOWEST_PART = 0.011  # of a link that the profile can state: its efficiency is at least 0.01
CPU_RANKS = 2  # processes on a node without GPUs
NORM_BYTES = 36  # read and written per element by a norm of bf16 in fp32, as transformers computes it

BODY = """\
# The head node's address comes from Slurm: node names need not resolve.
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
[ -n "$MASTER_ADDR" ] || {{ echo "scontrol show node gives no NodeAddr for the head node $head." >&2; exit 1; }}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
export MASTER_ADDR MASTER_PORT LOCAL_WORLD_SIZE={ranks}
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}  # Slurm 22.05 and 23.02 do not hand it to srun
srun --ntasks-per-node={ranks} --kill-on-bad-exit=1 bash -c {task}"""
TASK = 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec "$0" -m kit.check.probe "$1"'


def render_script(cluster: Cluster, out: Path) -> str:
    """A job of two minutes on all nodes, one srun task per GPU. Rank 0 writes `out` as JSON on shared storage."""
    nodes, ranks = cluster.nodes, cluster.nodes.gpus or CPU_RANKS
    asked = jobscript.options(
        cluster, job_name="probe", nodes=nodes.count, ntasks_per_node=ranks, cpus_per_task=max(1, nodes.cpus // ranks),
        gres=cluster.slurm.gres, time="00:10:00",
    )  # fmt: skip
    task = f"{shlex.quote(TASK)} {jobscript.python(cluster)} {shlex.quote(str(out))}"
    hidden = {} if nodes.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return jobscript.render(cluster, asked, BODY.format(ranks=ranks, task=task), hidden)


def apply(found: dict[str, Any], cluster: Cluster) -> Cluster:
    """The cluster with the measured rates: a link is as fast as its slowest rank, a GPU as the median one.

    On CPUs only links are used, since training sustains far less than a matmul. Raises InputError where the probe ran
    on other hardware than the profile describes.
    """
    ranks, nodes = found["ranks"], cluster.nodes
    on_gpu = "gpu" in ranks[0]
    if on_gpu != bool(nodes.gpus):
        raise InputError(
            f"The probe ran on {ranks[0].get('gpu', 'CPUs')}, and {cluster.name} has nodes.gpus = {nodes.gpus}; "
            "probe the cluster that the profile describes."
        )

    def median(key: str) -> float:
        return float(statistics.median(rank[key] for rank in ranks))

    def link(old: Link, key: str) -> Link:
        if key not in ranks[0]:
            return old
        slowest = min(rank[key] for rank in ranks)
        if slowest >= old.gb_s or slowest < SLOWEST_PART * old.gb_s:  # the profile's figure describes another link
            return replace(old, gb_s=round(slowest, 6), efficiency=1.0)
        return replace(old, efficiency=round(slowest / old.gb_s, 3))

    links = Links(link(cluster.links.intra, "intra_gb_s"), link(cluster.links.inter, "inter_gb_s"))
    if on_gpu:
        part = median("matmul_tflops") / nodes.gpu_bf16_tflops if nodes.gpu_bf16_tflops else 0.0
        moved = round(median("norm_gb_s"), 1) if "norm_gb_s" in ranks[0] else nodes.gpu_memory_gb_s
        nodes = replace(
            nodes,
            gpu_efficiency=round(min(part, 1.0), 3),
            gpu_memory_gb_s=moved,
            launch_us=round(median("launch_us"), 2),
        )
    return replace(cluster, nodes=nodes, links=links)


# The job's side


def measure(cluster: Cluster, profile: Path, say: Callable[[str], None]) -> Path:
    """Run the probe as a job on all nodes, wait, and write the cluster with the measured rates as a new profile.

    Returns the path of the profile. Raises InputError where there is no Slurm or the profile exists, and KitError with
    the last lines of the log where the job fails.
    """
    from kit.files import read_json, write
    from kit.slurm import launch as slurm
    from kit.slurm.client import available

    if profile.exists():
        raise InputError(f"{profile} exists; name a new file, compare, and replace the old profile yourself.")
    if not available():
        raise InputError("No Slurm answers here, and the probe is a job.")
    out = Path(cluster.paths.runs).absolute() / f".probe-{os.getpid()}-{time.time_ns()}.json"
    run = slurm.launch_script(render_script(cluster, out), cluster, "probe")
    say(f"{run.path.name} is job {run.job_id}; it takes about two minutes once it has started")
    end = run.wait()
    if end.state != "COMPLETED" or not out.exists():
        raise KitError(f"The probe is {end.state}: {end.cause or run.tail()}")
    found = apply(read_json(out), cluster)
    out.rename(run.path / "found.json")
    write(profile, found.toml())
    return profile


def seconds(work: Callable[[], Any], repeats: int = 7) -> float:
    """Median time of one call, finished on the device; the first two calls do not count."""
    import torch

    wait: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(repeats + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def device_figures(side: int, device: str) -> dict[str, Any]:
    """TFLOP/s of a square matmul (2 n^3), GB/s of a norm, in bf16 on a GPU, and microseconds to issue an operation."""
    import torch

    kind = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    one = torch.zeros(1, device=device)

    def norm() -> Any:
        wide = a.to(torch.float32)
        return b[0] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(kind)

    def many() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    return {
        "matmul_tflops": 2 * side**3 / seconds(lambda: a @ b) / 1e12,
        "norm_gb_s": NORM_BYTES * side**2 / seconds(norm) / 1e9,
        "launch_us": seconds(many, 3) / LAUNCHES * 1e6,
    }


def gather_gb_s(group: Any, ranks: int, size: int, device: str) -> float:
    """GB/s that every link of a ring carries in an all-gather of `size` bytes: (ranks - 1) / ranks of it over time."""
    import torch

    part = torch.ones(size // 4 // ranks, device=device)
    whole = torch.empty(part.numel() * ranks, device=device)
    took = seconds(lambda: torch.distributed.all_gather_into_tensor(whole, part, group=group))
    return whole.nbytes * (ranks - 1) / ranks / took / 1e9


def probe(ranks: int, local: int, on_gpu: bool) -> dict[str, Any]:
    """This rank's rates, without links that the job does not have. A gather is about one layer of a 70B model."""
    import torch
    import torch.distributed as dist

    side, size, device = (8192, 2**30, "cuda") if on_gpu else (1024, 2**26, "cpu")
    found: dict[str, Any] = {"host": socket.gethostname()} | device_figures(side, device)
    if on_gpu:
        found |= {"gpu": torch.cuda.get_device_name(), "memory_gib": torch.cuda.mem_get_info()[1] / 2**30}
    if local > 1:
        groups = [dist.new_group(list(range(i, i + local))) for i in range(0, ranks, local)]
        found["intra_gb_s"] = gather_gb_s(groups[dist.get_rank() // local], local, size, device)
    if ranks > local:
        found["inter_gb_s"] = gather_gb_s(None, ranks, size, device)
    return found


def main() -> int:
    """Every rank probes; rank 0 writes the list of their results in one step."""
    import torch
    import torch.distributed as dist

    from kit.files import write_json

    on_gpu, ranks, local = torch.cuda.is_available(), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, probe(ranks, local, on_gpu))
    if dist.get_rank() == 0:
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
        write_json(Path(sys.argv[1]), {"ranks": everyone, "versions": versions})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
