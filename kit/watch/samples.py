"""Format and reader of node samples (nodes/<host>.jsonl), and the names of W&B's own system metrics.

kit.train.sampler writes one JSON line a second on each node: time `t` (unix), `host`, `cpu` (%), `ram_gib`, `net_gb_s`
(in, out), `disk_gb_s` (read, write), and for each entry of `gpus` its index, uuid, `util` (%), `mem_gib`,
`mem_total_gib`, `power_w` and `temp_c`. A value that cannot be read is null.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

GB, GIB = 1e9, 1 << 30
CHUNK = 1 << 18  # bytes a poll, about 3 ms of work; a line has 1.5 kB on a node of eight GPUs


class Reading(NamedTuple):
    """What a value of a node measures: the key of its series."""

    host: str
    device: int | str  # GPU index, UUID of a MIG instance, or CPU for what the node has once
    name: str  # util, mem_gib, mem_total_gib, power_w, temp_c, net_gb_s_in, disk_gb_s_read, ...


CPU = "cpu"


def parse_sample(sample: dict[str, Any]) -> dict[Reading, float]:
    """The values of one line of the sampler that are not null.

    Raises LookupError, TypeError, ValueError or AttributeError for anything else.
    """
    host = sample["host"]
    values = {Reading(host, CPU, "util"): sample["cpu"], Reading(host, CPU, "mem_gib"): sample["ram_gib"]}
    for traffic in ("net_gb_s", "disk_gb_s"):
        values |= {Reading(host, CPU, f"{traffic}_{way}"): rate for way, rate in (sample[traffic] or {}).items()}
    for gpu in sample["gpus"]:
        mig = gpu["index"] is None or gpu["uuid"].startswith("MIG-")  # the instances of each GPU are counted from 0
        device = gpu["uuid"] if mig else gpu["index"]
        values |= {Reading(host, device, name): gpu[name] for name in gpu if name not in ("index", "uuid")}
    return {reading: float(value) for reading, value in values.items() if value is not None}


class SampleFile:
    """Reads the JSON lines that were appended to a file since the last poll.

    It starts at the first line that begins behind the byte `start`.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.damaged = 0  # lines that are not JSON
        self.left = path.stat().st_size  # bytes not read, at the last poll
        self._offset = max(0, start)
        self._starts_inside_a_line = start > 0

    def poll(self) -> list[Any]:
        """The next complete lines, parsed; a line that is still being written is left for later. Raises OSError."""
        with self.path.open("rb") as stream:
            self.left = stream.seek(0, os.SEEK_END) - self._offset
            stream.seek(self._offset)
            data = stream.read(CHUNK)
        end = data.rfind(b"\n") + 1
        lines = data[:end].splitlines()
        if end and self._starts_inside_a_line:
            self._starts_inside_a_line, lines = False, lines[1:]
        self._offset += end
        self.left -= end
        try:
            return list(json.loads(b"[%b]" % b",".join(lines)))
        except ValueError:
            return [sample for line in lines for sample in self._parse(line)]

    def _parse(self, line: bytes) -> list[Any]:
        try:
            return [json.loads(line)]
        except ValueError:
            self.damaged += 1
            return []


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


class WandbSample(NamedTuple):
    """wandb's own sample: `levels` are values, `totals` are GB since the start, whose rate is the reading."""

    levels: dict[Reading, float]
    totals: dict[Reading, float]


def parse_wandb_sample(host: str, values: dict[str, float]) -> WandbSample:
    """The values of a wandb system metrics record that have a place here.

    A name that ends in /l:<label> belongs to the node of that label, others to `host`.
    """
    sample = WandbSample({}, {})
    for full_name, value in values.items():
        name, _, label = full_name.partition("/l:")
        parts = name.split(".")
        kind, node = (parts[0], parts[-1]), label or host
        is_gpu = parts[0] == "gpu"
        # gpu.process.N repeats gpu.N for the GPUs that the process uses.
        device = int(parts[1]) if is_gpu and parts[1].isdigit() else CPU
        if kind in _TOTALS:
            reading_name, factor = _TOTALS[kind]
            reading = Reading(node, CPU, reading_name)
            sample.totals[reading] = sample.totals.get(reading, 0.0) + value * factor
        elif kind in _LEVELS and is_gpu == (device != CPU):
            reading_name, factor = _LEVELS[kind]
            sample.levels[Reading(node, device, reading_name)] = value * factor
    return sample
