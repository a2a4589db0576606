"""The format of node samples and the names of W&B's system metrics."""

import json
import subprocess
import sys

import pytest

from kit.watch.columns import BULK, parse_lines
from kit.watch.metrics import Store
from kit.watch.samples import CPU, Reading, SampleFile, parse_wandb_sample
from tests.watch.test_board import line


def test_wandbs_system_metrics_are_converted_to_our_names_and_units():
    values = {  # names as wandb 0.31 writes them; those of GPUs are from its source, no machine of the tests has one
        "cpu": 12.0, "proc.memory.rssMB": 2048.0, "proc.cpu.threads": 4, "memory_percent": 50.0,
        "network.recv": 3e9, "network.sent": 1e9, "network.tcpRetransmits": 1,
        "disk.sda.in": 1000.0, "disk.sdb.in": 1000.0, "disk.sda.out": 0.0, "disk./.usageGB": 30.0,
        "gpu.3.gpu": 97.0, "gpu.3.memoryAllocatedBytes": 10 * 2**30, "gpu.3.powerWatts": 500.0, "gpu.3.temp": 60.0,
        "gpu.3.memory": 40.0, "gpu.process.3.gpu": 1.0, "gpu.0.gpu/l:node-1": 5.0, "cpu/l:node-1": 6.0,
    }  # fmt: skip
    levels, totals = parse_wandb_sample("n", values)
    assert levels == {
        ("n", "cpu", "util"): 12.0, ("n", "cpu", "mem_gib"): 2.0, ("n", 3, "util"): 97.0, ("n", 3, "mem_gib"): 10.0,
        ("n", 3, "power_w"): 500.0, ("n", 3, "temp_c"): 60.0,
        ("node-1", 0, "util"): 5.0, ("node-1", "cpu", "util"): 6.0,
    }  # fmt: skip
    read = totals.pop(("n", "cpu", "disk_gb_s_read"))
    assert read == pytest.approx(2000 * 2**20 / 1e9)
    write = ("n", "cpu", "disk_gb_s_write")
    assert totals == {("n", "cpu", "net_gb_s_in"): 3.0, ("n", "cpu", "net_gb_s_out"): 1.0, write: 0.0}


def test_a_long_file_is_read_in_parts_and_from_the_middle(tmp_path):
    path = tmp_path / "node1.jsonl"
    everything = [json.dumps({"t": i, "pad": "x" * 1000}).encode() + b"\n" for i in range(600)]
    path.write_bytes(b"".join(everything))
    found, lines = [], SampleFile(path)
    while part := lines.poll(300_000):
        assert len(part) < 300_000
        found += part.splitlines(keepends=True)
    assert found == everything
    assert lines.left == 0
    assert SampleFile(path, path.stat().st_size - 2500).poll() == b"".join(everything[-2:])


def odd(number, text):
    """Samples of a long file, of which one has another text."""
    found = [line("node1", 1e9 + second, 8) for second in range(300)]
    found[number] = text(found[number])
    return found


LONG = {
    "regular": odd(7, str),
    "a reading is null": odd(0, lambda text: text.replace('"power_w": 520.0', '"power_w": null')),
    "no reading but null": [text.replace("520.0", "null") for text in odd(7, str)],
    "rates of the disks": odd(
        7, lambda text: text.replace('"disk_gb_s": null', '"disk_gb_s": {"read": 0.5, "write": 1}')
    ),
    "nodes without GPUs": [line("node1", 1e9 + second, 0) for second in range(1500)],
    "instances of GPUs": [text.replace("GPU-", "MIG-") for text in odd(7, str)],
    "a GPU has failed": odd(7, lambda text: text.replace('"index": 6', '"index": null')),
    "fewer GPUs": odd(7, lambda text: line("node1", 1e9 + 7, 7)),
    "another host": odd(7, lambda text: text.replace("node1", "node2")),
    "not a number": odd(7, lambda text: text.replace("520.0", "NaN")),
    "no time": odd(7, lambda text: text.replace('"t":', '"time":')),
    "no utilisation of the CPU": odd(7, lambda text: text.replace("12.5", '"idle"')),
    "not JSON": odd(7, lambda text: text[:-5]),
}


def values_of(store):
    """The series as text, since NaN does not equal itself."""
    return {key: str(series) for key, series in store.series.items()}


@pytest.mark.parametrize("lines", LONG.values(), ids=LONG)
def test_samples_of_a_long_file_are_those_of_its_lines(lines):
    data = "\n".join(lines).encode() + b"\n"
    assert len(data) > BULK
    together, alone = parse_lines(data), Store()
    damaged = 0
    for text in lines:
        columns = parse_lines(text.encode())
        alone.add_samples(columns)
        damaged += columns.damaged
    store = Store()
    store.add_samples(together)
    assert values_of(store) == values_of(alone)
    assert (store.nodes, together.damaged) == (alone.nodes, damaged)


def test_the_reader_of_long_files_imports_neither_pandas_nor_compute_functions():
    code = (
        "import sys; from kit.watch.columns import parse_lines; parse_lines(sys.stdin.buffer.read())\n"
        "assert 'pyarrow.json' in sys.modules; assert not {'pandas', 'pyarrow.compute'} & set(sys.modules)"
    )
    data = "\n".join(LONG["regular"]).encode() + b"\n"
    subprocess.run([sys.executable, "-c", code], input=data, check=True)


@pytest.mark.parametrize(
    ("devices", "counted"),
    [
        (["sda", "sda1"], ["sda"]),
        (["nvme0n1", "nvme0n1p1", "nvme0n1p2", "nvme1n1"], ["nvme0n1", "nvme1n1"]),
        (["vda1", "vda2"], ["vda1", "vda2"]),  # a container may see only the partitions
        (["sda", "sda1", "sda12", "sdaa", "sdaa1"], ["sda", "sdaa"]),
        (["mmcblk0", "mmcblk0p1"], ["mmcblk0"]),
        (["sda", "dm-0", "dm-1"], ["sda"]),
        (["dm-0"], ["dm-0"]),
        (["md0", "sda", "sdb"], ["sda", "sdb"]),
        (["md0", "md0p1"], ["md0"]),
        (["loop0", "xvda1"], ["xvda1"]),
        (["nvme0n1", "nvme0c0n1"], ["nvme0n1"]),
        (["cciss/c0d0", "cciss/c0d0p1"], ["cciss/c0d0"]),
    ],
)
def test_the_bytes_of_a_disk_and_of_its_partitions_count_once(devices, counted):
    mib = {device: 2.0**place for place, device in enumerate(devices)}
    values = {f"disk.{device}.out": amount for device, amount in mib.items()}
    total = parse_wandb_sample("n", values).totals["n", CPU, "disk_gb_s_write"]
    assert total == pytest.approx(sum(mib[device] for device in counted) * 2**20 / 1e9)


def test_the_rate_of_a_disk_with_a_partition_is_that_of_the_disk():
    store = Store()
    for second, mib in ((0.0, 0.0), (10.0, 100.0)):
        store.add_wandb_sample("n", {"_timestamp": second, "disk.sda.out": mib, "disk.sda1.out": mib})
    (value,) = store.series[Reading("n", CPU, "disk_gb_s_write")].values
    assert value == pytest.approx(100 * 2**20 / 1e9 / 10)
