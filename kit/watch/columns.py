"""Columns of node samples: of each reading its times and values.

Long files are parsed by pyarrow, which neither holds the interpreter's lock nor makes objects: a day of 64 GPUs has
seven million dicts, for which the garbage collector would stop the cells of a notebook for 60 ms at a time. Of pyarrow
only what its JSON reader needs is used: to_numpy() would import pandas, and cast() or unique() pyarrow.compute.
"""

import json
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kit.figures.points import Floats
from kit.watch.samples import CPU, NAMES_OF_GPU, TRAFFIC, Reading, device_of, parse_sample
from kit.watch.wandb_log import UNDECODABLE

if TYPE_CHECKING:
    import pyarrow

BULK = 1 << 17  # bytes from which pyarrow pays; its import takes 70 ms


class Columns(NamedTuple):
    """Samples of nodes. `readings` has unix times and values, `newest` the time of each host's newest sample."""

    readings: dict[Reading, tuple["array[float]", "array[float]"]]
    newest: dict[str, float]
    damaged: int  # lines that are not a sample


def parse_lines(data: bytes) -> Columns:
    """The samples in complete lines. A reading that is null has no point."""
    found = _parse_bulk(data) if len(data) >= BULK else None
    return found or _parse_each(data.splitlines())


def _parse_each(lines: list[bytes]) -> Columns:
    readings: dict[Reading, tuple[array[float], array[float]]] = {}
    newest: dict[str, float] = {}
    damaged = 0
    for sample in _decoded(lines):
        try:
            host, moment, values = sample["host"], float(sample["t"]), parse_sample(sample)
        except UNDECODABLE:
            damaged += 1
            continue
        newest[host] = max(moment, newest.get(host, 0.0))
        for reading, value in values.items():
            if reading not in readings:
                readings[reading] = array("d"), array("d")
            steps, numbers = readings[reading]
            steps.append(moment)
            numbers.append(value)
    return Columns(readings, newest, damaged)


def _decoded(lines: list[bytes]) -> Iterable[Any]:
    """The JSON of the lines; None for one that is not JSON."""
    try:
        return list(json.loads(b"[%b]" % b",".join(lines)))
    except (ValueError, RecursionError):
        return (_decoded_line(line) for line in lines)


def _decoded_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _parse_bulk(data: bytes) -> Columns | None:
    """The samples, or None unless all are of one host with the same GPUs, without anything unusual."""
    import pyarrow
    import pyarrow.json

    options = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    try:
        table = pyarrow.json.read_json(pyarrow.BufferReader(data), options)
        return _columns(table)
    except (pyarrow.ArrowException, LookupError, TypeError, ValueError):
        return None


def _columns(table: "pyarrow.Table") -> Columns | None:
    times, hosts = _numbers(_one_array(table["t"])), _one_array(table["host"])
    host = hosts[0].as_py()
    if not (isinstance(host, str) and _repeats(hosts, 1) and np.isfinite(times).all()):
        return None
    columns = {Reading(host, *key): values for key, values in [*_of_node(table), *_of_gpus(table)]}
    readings = {}
    for reading, values in columns.items():
        known = ~np.isnan(values)
        if known.any():
            readings[reading] = _array(times[known]), _array(values[known])
    return Columns(readings, {host: float(times.max())}, 0)


def _of_node(table: "pyarrow.Table") -> Iterator[tuple[tuple[str, str], Floats]]:
    yield (CPU, "util"), _numbers(_one_array(table["cpu"]))
    yield (CPU, "mem_gib"), _numbers(_one_array(table["ram_gib"]))
    for traffic in TRAFFIC:
        rates_of = _one_array(table[traffic])
        if rates_of.null_count < len(table):
            for way, rates in zip(rates_of.type, rates_of.flatten(), strict=True):
                yield (CPU, f"{traffic}_{way.name}"), _numbers(rates)


def _of_gpus(table: "pyarrow.Table") -> Iterator[tuple[tuple[int | str, str], Floats]]:
    """Readings of each GPU. Raises ValueError where its place among the GPUs changes."""
    lists = _one_array(table["gpus"])
    counts, gpus = np.diff(np.from_dlpack(lists.offsets)), lists.values
    count = int(counts[0])
    if not len(gpus):
        return
    names = [field.name for field in gpus.type]
    parts = dict(zip(names, gpus.flatten(), strict=True))
    if (counts != count).any() or not all(_repeats(parts[name], count) for name in NAMES_OF_GPU):
        raise ValueError("samples of other GPUs")
    indices, uuids = (parts[name][:count].to_pylist() for name in NAMES_OF_GPU)
    devices = [device_of(index, uuid) for index, uuid in zip(indices, uuids, strict=True)]
    for name in names:
        if name not in NAMES_OF_GPU:
            values = _numbers(parts[name]).reshape(len(table), count)
            for place, device in enumerate(devices):
                yield (device, name), values[:, place]


def _repeats(values: Any, period: int) -> bool:
    """Whether each value is that of so many places before."""
    return bool(values[:-period].equals(values[period:]))


def _one_array(column: Any) -> Any:
    """A column as one array."""
    import pyarrow

    return pyarrow.concat_arrays(column.chunks)


def _numbers(column: Any) -> Floats:
    """Values as float64, NaN where they are null. Raises TypeError or ValueError where another one is not a number."""
    nulls = column.null_count
    values = np.array(column.to_pylist(), float) if nulls else np.from_dlpack(column).astype(float)
    if np.isnan(values).sum() != nulls:
        raise ValueError("NaN")
    return values


def _array(values: Floats) -> "array[float]":
    return array("d", values.tobytes())
