"""What reading metrics costs on this machine: `python tests/benchmarks/metrics.py` writes metrics.json next to it.

Long logs are written here, in wandb's format and with the records that its SDK writes for a row (two summaries and a
history, 790 bytes for eight metrics); the latency is that of the real SDK. Wall-clock times come with CPU times, which
a busy machine lengthens less, and with the lateness of an event loop that nothing disturbs.
"""

import asyncio
import json
import math
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from array import array
from collections import Counter
from pathlib import Path

import numpy as np

from kit.watch.metrics import Metrics
from kit.watch.series import Series
from kit.watch.wandb_log import BLOCK, Tail

METRICS = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "step_s", "epoch", "mfu")
LOGGER = """
import sys, time, wandb
run = wandb.init(project="p", mode="offline", dir=sys.argv[1])
for i in range(300):
    run.log({"t": time.time(), "train/global_step": i})
    time.sleep(0.1)
run.finish()
"""


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number, value):
    return varint(number << 3 | 2) + varint(len(value)) + value


def row(i):
    values = {f"train/{name}": math.sin(i * (k + 1)) for k, name in enumerate(METRICS)}
    return values | {"train/global_step": i, "_step": i, "_runtime": i * 0.1, "_timestamp": 1.8e9 + i * 0.1}


def records(count):
    """Those of so many rows."""
    number = 0
    for i in range(count):
        items = b"".join(field(1, field(2, k.encode()) + field(16, json.dumps(v).encode())) for k, v in row(i).items())
        runtime = field(1, field(2, b"_wandb") + field(2, b"runtime") + field(16, b"7"))
        for kind, message in ((3, runtime), (3, items), (2, items + field(2, b"\x08" + varint(i)))):
            number += 1
            yield b"\x08" + varint(number) + field(kind, message)


def write(path, payloads):
    """In LevelDB's framing, see kit.watch.wandb_log."""
    with path.open("wb") as stream:
        at = stream.write(b":W&B\xe1\xbe\x00")
        for payload in payloads:
            first = True
            while payload or first:
                room = BLOCK - at % BLOCK
                if room < 7:
                    at += stream.write(bytes(room))
                    room = BLOCK
                part, payload = payload[: room - 7], payload[room - 7 :]
                kind = (1 if first else 4) if not payload else (2 if first else 3)
                body = bytes([kind]) + part
                at += stream.write(struct.pack("<IH", zlib.crc32(body), len(part)) + body)
                first = False
    return path.stat().st_size


def load(folder):
    """Follow a run in a thread, as the board does, and see how late the main thread's event loop is meanwhile."""
    metrics, paint = Metrics(folder), []

    def follow():
        start, cpu = time.perf_counter(), time.thread_time()
        metrics.poll()
        metrics.line("train/loss", 1200)
        paint.append(time.perf_counter() - start)
        while metrics.poll():
            pass
        paint.extend([time.perf_counter() - start, time.thread_time() - cpu])

    async def beat(work):
        thread, late = threading.Thread(target=work), []
        thread.start()
        while thread.is_alive():
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append((time.perf_counter() - start - 0.001) * 1e3)
        return {"p99": round(np.quantile(late, 0.99), 1), "max": round(max(late), 1)}

    idle = asyncio.run(beat(lambda: time.sleep(3)))
    late = asyncio.run(beat(follow))
    return metrics, {
        "first_paint_s": round(paint[0], 3),
        "loaded_s": round(paint[1], 2),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "loaded_cpu_s": round(paint[2], 2),
        "event_loop_late_ms": late,
        "event_loop_late_ms_undisturbed": idle,
    }


def long_log(rows):
    """In a separate process, for its memory."""
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder, "run-x.wandb"), records(rows))
        command = [sys.executable, __file__, "--load", folder]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found.pop("rows") == rows
    return {"rows": rows, "metrics": 8, "file_mb": size // 1_000_000} | found


def tick():
    """Thinning 20 series of a million points, while each grows."""
    series = [Series.empty() for _ in range(20)]
    for i, one in enumerate(series):
        one.extend(array("d", range(1_000_000)), array("d", np.sin(np.arange(1e6) * i)))
    times = []
    for step in range(20):
        for one in series:
            one.extend(array("d", [1e6 + step]), array("d", [0.5]))
        start = time.perf_counter()
        drawn = [one.thin(1200) for one in series]
        times.append(time.perf_counter() - start)
    return {
        "median_ms": round(float(np.median(times)) * 1e3, 1),
        "max_ms": round(max(times) * 1e3, 1),
        "points": len(drawn[0][0]),
    }


def pieces(path):
    tail = Tail(path, patience=0.0)
    found = Counter()
    for _ in range(1000):
        read = tail.poll()
        for kind, values in read:
            if kind == "history":
                found.update(values["_step"])
        if not read:
            return found
    raise AssertionError("no end")


def fuzz(count):
    """Damaged files: truncated, flipped, with holes, with pieces twice; and how many rows each loses."""
    rng, worst = random.Random(0), Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run-x.wandb")
        write(path, records(150))
        data = path.read_bytes()
        undamaged, start = pieces(path), time.perf_counter()
        assert undamaged.total() == 150
        for i in range(count):
            kind, at, size = (
                ("flip", "cut", "hole", "twice")[i % 4],
                rng.randrange(7, len(data)),
                rng.randrange(1, 5000),
            )
            if kind == "flip":
                changed = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            elif kind == "cut":
                changed = data[:at]
            elif kind == "hole":
                changed = data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]
            else:
                changed = data[: at + size] + data[at:]
            path.write_bytes(changed)
            found = pieces(path)
            assert kind == "twice" or found <= undamaged
            worst[kind] = max(worst[kind], (undamaged - found).total() - (size // 800 + 2 if kind == "hole" else 0))
        return {"files": count, "exceptions": 0, "hangs": 0, "rows_lost_by_a_flip": worst["flip"],
                "files_per_s": round(count / (time.perf_counter() - start))}  # fmt: skip


def latency():
    """From `log` to a row that is read, at the settings that a job ships with and a look a second."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"WANDB_SILENT": "true", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1"}
        process = subprocess.Popen([sys.executable, "-c", LOGGER, folder], env=env)
        metrics, seen, known = Metrics(folder), [], 0
        while process.poll() is None or known < 300:
            time.sleep(1)
            while metrics.poll():
                pass
            times = metrics.series["t"].values if "t" in metrics.series else []
            seen += [time.time() - t for t in times[known:]]
            known = len(times)
    return {f"p{q}_s": round(float(np.quantile(seen, q / 100)), 2) for q in (50, 95, 100)}


def main():
    results = {"machine": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start"}
    for name, measure in (
        ("100k_rows", lambda: long_log(100_000)),
        ("1m_rows", lambda: long_log(1_000_000)),
        ("tick_20_series_1m_points", tick),
        ("damaged_files", lambda: fuzz(10_000)),
        ("log_to_metrics_latency", latency),
    ):
        results[name] = measure()
        print(name, results[name], flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        metrics, found = load(sys.argv[2])
        print(json.dumps({"rows": len(metrics.series["train/loss"].values)} | found))
    else:
        main()
