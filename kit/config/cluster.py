"""Cluster: the machines. Nodes, GPUs, links, storage, Slurm settings and environment, from one TOML file.

Also the two small languages of Slurm that a profile holds: time limits and generic resources (gres).
"""

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from annotated_types import Ge, Le
from pydantic import AfterValidator

from kit.config import schema
from kit.config.schema import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, table
from kit.errors import InputError

NO_COMPILER = "none"  # nodes.compiler where a node has no C compiler


def parse_time_limit(text: str) -> float:
    """Seconds of a Slurm time limit; infinity for UNLIMITED, INFINITE, -1 and 0. Raises InputError for other text.

    Formats, from sbatch(1), --time: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM and D-HH:MM:SS.
    """
    if text.strip().upper() in ("UNLIMITED", "INFINITE", "-1"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        raise InputError(f"{text!r} is not a time limit; write it as 90 (minutes), 48:00:00, 2-12:00:00 or UNLIMITED.")
    days, first, second, third = (int(part or 0) for part in match.groups())
    hours_first = match[1] is not None or match[4] is not None
    seconds = 86_400 * days + (3600 * first + 60 * second + third if hours_first else 60 * first + second)
    return float(seconds) if seconds else math.inf


def _time_limit(text: str) -> str:
    try:
        if text:
            parse_time_limit(_one_line(text))
    except InputError:
        raise ValueError("it must be a time limit such as 90 (minutes), 48:00:00, 2-12:00:00 or UNLIMITED.") from None
    return text


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be one line of printable characters.")
    return text


def _variables(values: dict[str, str]) -> dict[str, str]:
    for name in values:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not the name of an environment variable: letters, digits and underscores.")
    return values


Line = Annotated[str, AfterValidator(_one_line)]  # text that becomes a word of the job script; only setup has code


@dataclass(frozen=True)
class Gres:
    """One generic resource of a node, such as gpu:a100:8: a name, a type or nothing, and a count."""

    name: str
    type: str
    count: int

    def __str__(self) -> str:
        return ":".join(part for part in (self.name, self.type, str(self.count)) if part)


def parse_gres(text: str) -> list[Gres]:
    """The entries of a gres value as profiles and `scontrol show node` spell it: gpu:h100:8(S:0-1),nvme:1.

    Grammar, from slurm.conf(5), Gres, and sbatch(1), --gres: name[:type][:no_consume][:count[K|M|G|T|P]], with commas
    in between; without a count it is 1. Sockets and indexes in parentheses are left out, "(null)" has no entries.
    """
    entries = re.sub(r"\([^)]*\)", "", text).split(",")
    return [_gres_entry(entry.strip().removeprefix("gres/")) for entry in entries if entry.strip()]


def _gres_entry(text: str) -> Gres:
    name, *parts = [part for part in text.split(":") if part != "no_consume"]
    count = re.fullmatch(r"(\d+)([KMGTP]?)", parts[-1], re.IGNORECASE) if parts else None
    if not count:
        return Gres(name, ":".join(parts), 1)
    return Gres(name, ":".join(parts[:-1]), int(count[1]) * 1024 ** " KMGTP".index(count[2].upper() or " "))


def gpus_of(gres: str, kind: str = "") -> int:
    """GPUs in a gres value, of all types or of one."""
    return sum(entry.count for entry in parse_gres(gres) if entry.name == "gpu" and kind in ("", entry.type))


def gres_for(gres: str, gpus: int) -> str:
    """A profile's gres value for a job that takes `gpus` GPUs of each node; other resources stay as they are.

    With GPUs of several types the value stays as it is: only a person can say which of them the job should take.
    """
    entries = parse_gres(gres)
    if sum(entry.name == "gpu" for entry in entries) != 1:
        return gres
    return ",".join(str(replace(entry, count=gpus) if entry.name == "gpu" else entry) for entry in entries)


@table
class Nodes:
    """What each node has. `kit check --probe` measures gpu_efficiency, gpu_memory_gb_s and launch_us."""

    count: PositiveInt = 1
    """Nodes."""
    gpus: NonNegativeInt = 0
    """GPUs of a node; 0 is a CPU cluster, whose processes share the node's memory."""
    gpu: str = ""
    """Name of the GPU."""
    gpu_memory_gib: NonNegativeFloat = 0.0
    """Memory of a GPU that programs can use, in GiB; 0 is unknown."""
    gpu_bf16_tflops: NonNegativeFloat = 0.0
    """Dense bf16 peak of a GPU in TFLOP/s, as its vendor states it; 0 is unknown."""
    gpu_efficiency: Fraction = 0.0
    """Part of gpu_bf16_tflops that a large matmul reaches; 0 is unknown."""
    gpu_memory_gb_s: NonNegativeFloat = 0.0
    """Bandwidth of a GPU's memory in GB/s; 0 is unknown."""
    compiler: str = ""
    """C compiler of a node, such as gcc, which compiled layers need; "none": the node lacks one; empty: unknown."""
    launch_us: NonNegativeFloat = 0.0
    """Microseconds in which the host issues one small operation; 0 is unknown."""
    cpus: PositiveInt = 2
    """CPUs of a node that jobs can use, as Slurm counts them."""
    ram_gib: Annotated[float, Ge(0.5)] = 16.0
    """Memory of a node in GiB."""


@table
class Link:
    """A link between GPUs or nodes."""

    kind: str
    """Name of the link, such as nvlink4, pcie5 or 100GbE."""
    gb_s: NonNegativeFloat = 10.0
    """Bandwidth of one direction in GB/s (1e9 bytes)."""
    efficiency: Annotated[float, Ge(0.01), Le(1)] = 0.8
    """Part of gb_s that collectives reach."""


@table
class Links:
    """What connects the GPUs."""

    intra: Link = field(default_factory=lambda: Link("memory"))
    """Inside a node; gb_s is per GPU."""
    inter: Link = field(default_factory=lambda: Link("none"))
    """Between nodes; gb_s is per node."""


@table
class Container:
    """The image in which the ranks run."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """What starts the image."""
    image: Line = ""
    """What enroot takes (pyxis), or a .sif file."""
    mounts: tuple[Line, ...] = ()
    """Further mounts, host or host:inside; the run folder, the dataset and the model are mounted anyway."""


@table
class Slurm:
    """What the job script asks of Slurm, and how it prepares a node."""

    partition: Line = ""
    """Partition; empty takes Slurm's default."""
    gres: Line = ""
    """Generic resources of a node, as Slurm spells them: gpu:h100:8. The number of GPUs follows the recipe."""
    time: Annotated[str, AfterValidator(_time_limit)] = ""
    """Time limit, as Slurm spells it: 90 (minutes), 48:00:00, 2-12:00:00; empty takes the partition's default."""
    account: Line = ""
    """Account that is charged."""
    setup: tuple[str, ...] = ()
    """Shell lines that run on each node first, such as "module load cuda/12.8"."""
    options: tuple[Line, ...] = ()
    """Further options of sbatch."""
    python: Line = ""
    """Interpreter on the nodes; "python" is that of the environment which the setup lines activate.

    Empty: the interpreter that launches, and python3 in an image.
    """
    env_file: Line = ""
    """File of NAME=VALUE lines with mode 600, such as tokens, that the job reads."""
    container: Container = field(default_factory=Container)

    @property
    def limit_s(self) -> float:
        """The time limit in seconds; infinity where the profile sets none."""
        return parse_time_limit(self.time) if self.time else math.inf


@table
class Paths:
    """Folders. Every node sees all but nvme."""

    runs: Line = "runs"
    """Folder for runs."""
    hf_home: Line = ""
    """Hugging Face cache of models, tokenizers and data (HF_HOME); empty takes the user's own."""
    nvme: Line = ""
    """Folder on the NVMe drives of each node, for parallel.offload nvme."""


@table
class Storage:
    """A mounted file system."""

    path: str
    """Mount point."""
    kind: str = "local"
    """File system, such as local, nfs or lustre."""
    gb_s: NonNegativeFloat = 1.0
    """Bandwidth in GB/s (1e9 bytes)."""


@table
class Cluster:
    """The machines."""

    name: str
    """Name of the cluster."""
    nodes: Nodes = field(default_factory=Nodes)
    links: Links = field(default_factory=Links)
    slurm: Slurm = field(default_factory=Slurm)
    environment: Annotated[dict[str, str], AfterValidator(_variables)] = field(default_factory=dict)
    """Environment variables of the job."""
    paths: Paths = field(default_factory=Paths)
    storage: dict[str, Storage] = field(default_factory=dict)
    """File systems by name; a path belongs to the one with the longest matching mount point."""

    @classmethod
    def load(cls, name: "str | Path | Cluster") -> "Cluster":
        """Return the profile of a file, or a shipped one by name.

        Raises InputError for an unknown key or a bad value, with the valid ones.
        """
        if isinstance(name, Cluster):
            return name
        path = schema.find(name, "clusters")
        return schema.build(cls, schema.read_toml(path), str(path))

    def toml(self, defaults: bool = True) -> str:
        """The profile as a file that loads to an equal cluster; without `defaults`, only the keys that differ."""
        tables = schema.as_dict(self)
        if not defaults:
            tables = {"name": self.name} | schema.differences(tables, schema.as_dict(Cluster(self.name)))
        return tomli_w.dumps(tables)
