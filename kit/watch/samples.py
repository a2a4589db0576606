"""Format and reader of node samples (nodes/<host>.jsonl), and the names of W&B's own system metrics.

kit.train.sampler writes one JSON line a second on each node: time `t` (unix), `host`, `cpu` (%), `ram_gib`, `net_gb_s`
(in, out), `disk_gb_s` (read, write), and for each entry of `gpus` its index, uuid, `util` (%), `mem_gib`,
`mem_total_gib`, `power_w` and `temp_c`. A value that cannot be read is null.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kit import files

GB, GIB = 1e9, 1 << 30
CHUNK = 1 << 20  # bytes a poll at most, about 12 ms of work; a line has 1 kB on a node of eight GPUs
ALL_CHUNKS = 1 << 22  # bytes a poll of all files of a run together, where these are many
SMALLEST = 1 << 15


def chunk_of(files_of_run: int) -> int:
    """Bytes that a poll reads of each of so many files."""
    return max(SMALLEST, min(CHUNK, ALL_CHUNKS // max(1, files_of_run)))


class Reading(NamedTuple):
    """What a value of a node measures: the key of its series."""

    host: str
    device: int | str  # GPU index, UUID of a MIG instance, or CPU for what the node has once
    name: str  # util, mem_gib, mem_total_gib, power_w, temp_c, net_gb_s_in, disk_gb_s_read, ...


CPU = "cpu"
TRAFFIC = ("net_gb_s", "disk_gb_s")
NAMES_OF_GPU = ("index", "uuid")
_reading = lru_cache(1 << 16)(Reading)  # a day of 64 GPUs has 37 million values of 500 readings


def parse_sample(sample: dict[str, Any]) -> dict[Reading, float]:
    """The values of one line of the sampler that are not null.

    Raises LookupError, TypeError, ValueError, ArithmeticError or AttributeError for anything else.
    """
    host = sample["host"]
    if not isinstance(host, str) or not math.isfinite(sample["t"]):
        raise ValueError("a sample has the name of its host and a time")
    found: dict[Reading, float] = {}

    def add(device: int | str, values: Iterable[tuple[str, Any]]) -> None:
        for name, value in values:
            if value is not None and name not in NAMES_OF_GPU:
                found[_reading(host, device, name)] = float(value)

    add(CPU, (("util", sample["cpu"]), ("mem_gib", sample["ram_gib"])))
    for traffic in TRAFFIC:
        add(CPU, ((f"{traffic}_{way}", rate) for way, rate in (sample[traffic] or {}).items()))
    for gpu in sample["gpus"]:
        add(device_of(gpu["index"], gpu["uuid"]), gpu.items())
    return found


def device_of(index: int | None, uuid: str) -> int | str:
    """The device of a reading: instances of each MIG GPU are counted from 0, so these have their UUID."""
    return uuid if index is None or uuid.startswith("MIG-") else index


class SampleFile:
    """Reads the JSON lines that were appended to a file since the last poll.

    It starts at the first line that begins behind the byte `start`.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.damaged = 0  # lines that are not a sample
        self.left = path.stat().st_size  # bytes not read, at the last poll
        self._offset = max(0, start)
        self._starts_inside_a_line = start > 0

    @property
    def position(self) -> int:
        """The byte up to which the file has been read."""
        return self._offset

    def poll(self, size: int = CHUNK) -> bytes:
        """The next complete lines of so many bytes; an incomplete one is left for later. Raises OSError."""
        with files.open_regular(self.path) as stream:
            self.left = stream.seek(0, os.SEEK_END) - self._offset
            stream.seek(self._offset)
            data = stream.read(size)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == size:
            self._skip_long_line(size)
            return b""
        start = data.find(b"\n") + 1 if end and self._starts_inside_a_line else 0
        self._starts_inside_a_line = self._starts_inside_a_line and not end
        self._offset += end
        self.left -= end
        return data[start:end]

    def _skip_long_line(self, size: int) -> None:
        """Go on behind the present chunk, which is a part of one line; no sample is that long."""
        if not self._starts_inside_a_line:
            self._starts_inside_a_line = True
            self.damaged += 1
        self._offset += size
        self.left -= size


# What wandb samples itself, by the first and the last part of its name: our name, and the factor to our unit. Totals
# count from the start (wandb's core/internal/monitor: cpu.go, memory.go, network.go, disk.go; gpu.N.* by its sidecar).
_LEVELS = {
    ("cpu", "cpu"): ("util", 1.0),
    ("proc", "rssMB"): ("mem_gib", 1 / 1024),
    ("gpu", "gpu"): ("util", 1.0),
    ("gpu", "memoryAllocatedBytes"): ("mem_gib", 1 / GIB),
    ("gpu", "powerWatts"): ("power_w", 1.0),
    ("gpu", "temp"): ("temp_c", 1.0),
}
_TOTALS = {
    ("network", "recv"): ("net_gb_s_in", 1 / GB),
    ("network", "sent"): ("net_gb_s_out", 1 / GB),
    ("disk", "in"): ("disk_gb_s_read", (1 << 20) / GB),
    ("disk", "out"): ("disk_gb_s_write", (1 << 20) / GB),
}


LARGEST = 1e300  # of a value; a larger one has no use as a number of 64 bits
_GPU = re.compile(r"gpu\.([0-9]{1,4})\.")
_DISK = re.compile(r"disk\.(.+)\.(?:in|out)")
# Partitions as the kernel names them: behind a digit with a p (block/partitions/core.c, disk_name).
_PARTITION = re.compile(r"(.*[0-9])p[0-9]+|(.*[^0-9])[0-9]+")
# Device mapper (LVM, encryption), software RAID, loop and network copies, and the paths of a multipath NVMe disk.
_VOLUME = re.compile(r"(?:dm-|md|loop|bcache|drbd|mapper/).*|nvme[0-9]+c[0-9]+n[0-9]+")


class WandbSample(NamedTuple):
    """wandb's own sample: `levels` are values, `totals` are GB since the start, whose rate is the reading."""

    levels: dict[Reading, float]
    totals: dict[Reading, float]


def parse_wandb_sample(host: str, values: Mapping[str, Any]) -> WandbSample:
    """The values of a W&B system metrics record that the board shows; other keys, and texts, are skipped.

    A name that ends in /l:<label> belongs to the node of that label, others to `host`. The bytes of a disk are also
    those of its partitions, and of the volumes that are made of disks: they count once.
    """
    sample = WandbSample({}, {})
    repeated = _repeating_devices(values)
    for full_name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > LARGEST:
            continue
        name, _, label = full_name.partition("/l:")
        parts = name.split(".")
        kind, node = (parts[0], parts[-1]), label or host
        # gpu.process.N repeats gpu.N for the GPUs that the process uses.
        gpu = _GPU.match(name)
        device = int(gpu[1]) if gpu else CPU
        if kind in _TOTALS and name not in repeated:
            reading_name, factor = _TOTALS[kind]
            reading = Reading(node, CPU, reading_name)
            sample.totals[reading] = sample.totals.get(reading, 0.0) + value * factor
        elif kind in _LEVELS and (parts[0] == "gpu") == (device != CPU):
            reading_name, factor = _LEVELS[kind]
            sample.levels[Reading(node, device, reading_name)] = value * factor
    return sample


def _repeating_devices(values: Iterable[str]) -> set[str]:
    """The names of totals of disks whose bytes are those of another disk in the same sample."""
    names = {name.partition("/l:")[0] for name in values}
    devices = {name: match[1] for name in names if (match := _DISK.fullmatch(name))}
    present = set(devices.values())
    disks = {device for device in present if not _VOLUME.fullmatch(device)}
    repeating = {device for device in present if (match := _PARTITION.fullmatch(device)) and _disk(match) in present}
    if disks:
        repeating |= present - disks
    return {name for name, device in devices.items() if device in repeating}


def _disk(partition: "re.Match[str]") -> str:
    """The disk of a partition: nvme0n1 of nvme0n1p2, sda of sda1."""
    return partition[1] or partition[2]
