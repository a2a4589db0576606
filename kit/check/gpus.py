"""GPUs of this machine, the memory that programs get of them, and how they are linked."""

import collections
import os
import re
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from kit.check.facts import Finding, run_program
from kit.forecast.gpus import vendor_peak

Matrix = dict[str, dict[str, str]]  # GPU -> device -> connection
CONNECTIONS = {
    "PIX": "under one PCIe switch", "PXB": "over several PCIe switches", "PHB": "over a PCIe host bridge",
    "NODE": "over host bridges of one NUMA node", "SYS": "from socket to socket",
}  # fmt: skip
NVLINK_GB_S = 25.0  # of one NVLink of the 2nd to 4th generation, one direction (NVIDIA's H100 white paper: 18 make 450)
PCIE3_LANE_GB_S = 0.985  # of a lane of the 3rd generation (8 GT/s, 128b/130b); twice that in each later generation


def find_gpus() -> list[Finding]:
    """GPUs with their usable memory, and their topology; one finding where nvidia-smi reports none."""
    keys = "name,memory.total,memory.reserved,pcie.link.gen.max,pcie.link.width.max"
    answer = run_program("nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in answer.splitlines()]
    allocated = int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
    problem = ""
    if allocated > len(rows):
        problem = f"Slurm gave this job {allocated} GPUs: have the driver, or Slurm's gres, repaired"
    if not rows:
        return [Finding("GPUs", "none seen", "nvidia-smi", problem, {"nodes.gpus": 0})]
    # A cell is [N/A] where the driver does not know.
    name, total, reserved, generation, lanes = ("0" if cell.startswith("[") else cell for cell in rows[0])
    gib = (float(total) - float(reserved)) / 1024
    facts: dict[str, Any] = {"nodes.gpus": len(rows), "nodes.gpu": name, "nodes.gpu_memory_gib": round(gib, 1)}
    if peak := vendor_peak(name):
        facts["nodes.gpu_bf16_tflops"] = peak
    models = ", ".join(f"{count} x {model}" for model, count in Counter(row[0] for row in rows).items())
    text = run_program("nvidia-smi", "topo", "-m")
    matrix = read_topology(text)
    link = {"links.intra": slowest_link(matrix, int(generation), int(lanes))} if len(matrix) > 1 else {}
    return [
        Finding("GPUs", f"{models}, {gib:.1f} GiB each", "nvidia-smi --query-gpu", problem, facts),
        Finding("topology", describe(matrix), "nvidia-smi topo -m", facts=link | {"topology": text}),
    ]


def read_topology(text: str) -> Matrix:
    """A row for each GPU of `nvidia-smi topo -m`: its connection to every device, its "CPUs" and "NUMA node".

    A connection is NV<number of NVLinks> or a key of CONNECTIONS. Cells are separated by tabs, the header may be
    underlined, and NICs get their own names from the legend.
    """
    lines = [line.split("\t") for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    header = next((cells for cells in lines if "CPU Affinity" in cells), ["CPU Affinity"])
    names = [cell for cell in header[: header.index("CPU Affinity")] if cell]
    nics = dict(re.findall(r"^\s*(NIC\d+): (\S+)", text, re.MULTILINE))
    columns = [*(nics.get(name, name) for name in names), "CPUs", "NUMA node"]
    rows = [cells for cells in lines if re.fullmatch(r"GPU\d+", cells[0]) and cells != header]
    return {name: dict(zip(columns, map(str.strip, cells), strict=False)) for name, *cells in rows}


def count_connections(matrix: Mapping[str, Mapping[str, str]]) -> "Counter[str]":
    """How many pairs of GPUs have each connection."""
    return Counter(matrix[one][other] for one, other in combinations(matrix, 2))


def slowest_link(matrix: Mapping[str, Mapping[str, str]], generation: int, lanes: int) -> dict[str, Any]:
    """The profile's links.intra, by the slowest pair: GB/s of one direction; PCIe where a pair has no NVLink."""
    pairs = count_connections(matrix)
    nvlinks = [int(connection[2:]) for connection in pairs if connection.startswith("NV")]
    if len(nvlinks) == len(pairs):
        return {"kind": f"nvlink x{min(nvlinks)}", "gb_s": NVLINK_GB_S * min(nvlinks)}
    return {"kind": f"pcie{generation}", "gb_s": round(PCIE3_LANE_GB_S * 2 ** (generation - 3) * lanes, 1)}


def describe(matrix: Mapping[str, Mapping[str, str]]) -> str:
    """How the pairs are connected, and which GPUs and CPUs belong to one NUMA node, as text."""
    places = collections.defaultdict[str, list[str]](list)
    for gpu, row in matrix.items():
        places[f"NUMA node {row['NUMA node'] or '?'}, CPUs {row['CPUs'] or '?'}"].append(gpu)
    pairs = [f"{count} pairs {_connection_text(name)}" for name, count in count_connections(matrix).most_common()]
    return "; ".join(pairs + [f"{', '.join(gpus)}: {place}" for place, gpus in places.items()])


def _connection_text(name: str) -> str:
    return f"by {name[2:]} NVLinks" if name.startswith("NV") else CONNECTIONS.get(name, name)
