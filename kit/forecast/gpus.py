"""What GPUs can do, by name: the compute capability of NVIDIA's data-centre, workstation and common desktop GPUs."""

import re
from dataclasses import dataclass

from kit.config.cluster import Link

# The first pattern that occurs in a name counts, so that longer names come before those that they contain.
# Source: NVIDIA's table "CUDA GPU Compute Capability", developer.nvidia.com/cuda-gpus.
CAPABILITIES = {
    r"GB300|B300": (10, 3),
    r"GB200|B200|B100": (10, 0),
    r"Blackwell|RTX 50\d\d": (12, 0),
    r"H[128]00|H20|GH200": (9, 0),
    r"Ada|L40|L4\b|L20|RTX 40\d\d": (8, 9),
    r"A100|A800|A30\b": (8, 0),
    r"A10\b|A10G|A16\b|A40\b|A2\b|RTX A\d|RTX 30\d\d": (8, 6),
    r"T4\b|T4G|RTX 20\d\d|Quadro RTX|TITAN RTX": (7, 5),
    r"V100|TITAN V": (7, 0),
    r"P100": (6, 0),
    r"P40\b|P4\b|GTX 10\d\d": (6, 1),
}


def capability(gpu: str) -> tuple[int, int] | None:
    """The compute capability of a GPU by its name in a profile; None for a name that is not in the table."""
    name = gpu.replace("_", " ")
    return next((value for pattern, value in CAPABILITIES.items() if re.search(pattern, name, re.IGNORECASE)), None)


@dataclass(frozen=True)
class GpuType:
    """A GPU to compare with: memory that programs can use, dense bf16 peak, and its link to the others of a node.

    pattern: matches the names that its driver gives to GPUs with this peak.
    """

    name: str
    pattern: str
    memory_gib: float
    bf16_tflops: float
    link: Link


# Peaks and links are those of the vendor's data sheets, one direction, without sparsity; memory is what the driver
# leaves to programs. The efficiency of NVLink is that of env/clusters/h100-8x8.toml.
GPU_TYPES = (
    GpuType("A100 40GB", "A100.*40GB", 39.4, 312.0, Link("nvlink3", 300.0, 0.68)),
    GpuType("A100 80GB", "A100.*80GB", 79.1, 312.0, Link("nvlink3", 300.0, 0.68)),
    GpuType("H100 80GB HBM3", "H100 80GB HBM3", 79.1, 989.0, Link("nvlink4", 450.0, 0.68)),
    GpuType("H200", "H200(?! NVL)", 139.8, 989.0, Link("nvlink4", 450.0, 0.68)),
    GpuType("B200", r"(?<!G)B200\b", 178.3, 2250.0, Link("nvlink5", 900.0, 0.68)),
    GpuType("L40S", "L40S", 44.4, 362.0, Link("pcie4", 25.0)),
    GpuType("RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell(?! Max-Q)", 95.0, 503.8, Link("pcie5", 50.0)),
)


def vendor_peak(gpu: str) -> float | None:
    """The dense bf16 peak in TFLOP/s of a GPU by the name that its driver gives; None for a name that is not known."""
    return next((one.bf16_tflops for one in GPU_TYPES if re.search(one.pattern, gpu)), None)
