"""GPUs and their topology, read off recorded answers of nvidia-smi."""

import os

from kit.check import gpus


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


def test_nvlink_between_all_pairs_is_read_from_the_matrix():
    near = gpus.read_topology(DGX)
    assert gpus.count_connections(near) == {"NV18": 28}
    assert near["GPU5"]["mlx5_5"] == "PXB" and near["GPU5"]["mlx5_0"] == "SYS" and near["GPU0"]["GPU0"] == "X"
    assert gpus.slowest_link(near, 5, 16) == {
        "kind": "nvlink x18",
        "gb_s": 450.0,
    }  # 18 x 25 GB/s, as the profile h100-8x8
    assert gpus.describe(near) == (
        "28 pairs by 18 NVLinks; GPU0, GPU1, GPU2, GPU3: NUMA node 0, CPUs 0-55,112-167; "
        "GPU4, GPU5, GPU6, GPU7: NUMA node 1, CPUs 56-111,168-223"
    )


def test_pcie_over_two_sockets_is_read_from_the_matrix():
    near = gpus.read_topology(TWO_SOCKETS)
    assert gpus.count_connections(near) == {"SYS": 28}
    assert near["GPU6"]["mlx5_1"] == "PHB" and near["GPU7"]["NUMA node"] == "1"
    assert gpus.describe(near).startswith("28 pairs from socket to socket; ")
    # 0.985 GB/s a lane of generation 3 (8 GT/s, 128b/130b), four times that at generation 5.
    assert gpus.slowest_link(near, 5, 16) == {"kind": "pcie5", "gb_s": 63.0}


def test_a_matrix_of_at_most_one_gpu_has_no_pairs():
    one = gpus.read_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t\t0\t\tN/A\n")
    assert gpus.describe(one) == "GPU0: NUMA node 0, CPUs ?"
    assert gpus.read_topology("") == {}


def test_gpu_memory_is_what_programs_can_use(tmp_path, monkeypatch):
    (tmp_path / "topo").write_text(DGX)
    rows = "NVIDIA H100 80GB HBM3, 81559, 551, 5, 16\\n" * 8  # so that 79.1 GiB are left, as in probe_h100x4.json
    stand_in(tmp_path / "bin", "nvidia-smi", f"[ $1 = topo ] && exec cat {tmp_path}/topo\nprintf '{rows}'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    found, topology = gpus.find_gpus()
    assert found.value == "8 x NVIDIA H100 80GB HBM3, 79.1 GiB each" and not found.problem
    assert (found.facts["nodes.gpu_memory_gib"], found.facts["nodes.gpu_bf16_tflops"]) == (79.1, 989.0)
    assert topology.facts["links.intra"]["gb_s"] == 450.0
    (tmp_path / "topo").write_text("")  # an old driver, a container
    assert [f.facts.get("links.intra") for f in gpus.find_gpus()] == [None, None]
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "9")
    assert gpus.find_gpus()[0].problem.startswith("Slurm gave this job 9 GPUs")
