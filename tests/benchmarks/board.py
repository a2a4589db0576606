"""What the board costs on this machine: `python -m tests.benchmarks.board [NAME...]` writes board.json next to it.

Measured in a real kernel, in a real JupyterLab in a headless Chromium, with the real SDK. Times are wall-clock times;
the lateness of an undisturbed event loop is given for comparison, as the machine may be busy.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import nbformat
import numpy as np
import papermill
from jupyter_client.manager import start_new_kernel
from playwright.sync_api import sync_playwright

from kit.watch import panels, picture
from kit.watch.board import watch
from kit.watch.metrics import Metrics
from kit.watch.series import Series
from kit.watch.status import RunStatus
from tests.benchmarks import metrics as logs
from tests.watch import test_board, test_browser

BEAT = """
import asyncio, time
import kit.watch.board
late = []
async def beat():
    while True:
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(1e3 * (time.perf_counter() - start - 0.001))
task = asyncio.get_event_loop().create_task(beat())
"""
MORTAL = """
import sys, time, wandb
run = wandb.init(project="p", mode="offline", dir=sys.argv[1])
for step in range(100_000):
    run.log({"t": time.time()})
    print(time.time(), flush=True)
    time.sleep(0.02)
"""
# How late each turn of the page's event loop is, in ms, and when lines and the heat map of the board are drawn.
PAGE_BEAT = """() => { window.late = []; let last = performance.now();
  const pressed = e => { if (e.key === "Enter" && e.ctrlKey) window.pressed = performance.now(); };
  addEventListener("keydown", pressed, true);
  const beat = () => { const now = performance.now();
    window.late.push(Math.max(0, now - last - 4)); last = now; setTimeout(beat, 4); };
  beat();
  const look = () => { const board = document.querySelector(".kit-board");
    if (board?.querySelector(".map image") && board.querySelector("path[stroke-linejoin]"))
      window.painted = performance.now();
    else requestAnimationFrame(look); };
  look(); }"""
ALL_READ = "() => !document.querySelector('.kit-board .status').textContent.includes('still to read')"
FLUSH = {"WANDB_SILENT": "true", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1"}


def spread(values, digits=1):
    p50, p95, p99, most = np.quantile(values, [0.5, 0.95, 0.99, 1.0])
    return {name: round(float(v), digits) for name, v in (("p50", p50), ("p95", p95), ("p99", p99), ("max", most))}


def ask(client, code, cell):
    """Run a cell as JupyterLab does; the id of the request."""
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    message = client.session.msg("execute_request", content, metadata={"cellId": cell})
    client.shell_channel.send(message)
    return message["header"]["msg_id"]


def hear(client, true):
    """The next message for which this holds."""
    while True:
        message = client.get_iopub_msg(timeout=120)
        assert message["msg_type"] != "error", message["content"]
        if true(message):
            return message


def drawn(message):
    """Whether it brings lines, to the widget or as a picture."""
    data = message["content"].get("data", {})
    sent = data["state"] if message["msg_type"] in ("comm_open", "comm_msg") and "state" in data else {}
    known = [state for name in ("complete", "delta") if (state := sent.get(name))]
    lines = any(panel["lines"] for state in known for panel in state["panels"])
    return lines or 'stroke-width="1.5"' in data.get("image/svg+xml", "")


def late(client, cell):
    """How late the kernel's event loop was since the last question, in ms."""
    ask(client, "import numpy; print(*numpy.quantile(late, [0.5, 0.95, 0.99, 1])); late.clear()", cell)
    found = hear(client, lambda m: m["msg_type"] == "stream" and m["content"]["name"] == "stdout")
    values = [round(float(word), 1) for word in found["content"]["text"].split()]
    return dict(zip(("p50", "p95", "p99", "max"), values, strict=True))


def long_log(rows):
    """A log that is there already: from the request to the first picture with lines, and the event loop meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        size = logs.write(Path(folder, "run-x.wandb"), logs.records(rows))
        manager, client = start_new_kernel()
        try:
            ask(client, BEAT, "1")
            time.sleep(5)
            idle, start = late(client, "2"), time.perf_counter()
            ask(client, f"board = kit.watch.board.watch({folder!r}); board", "3")
            hear(client, drawn)
            painted = time.perf_counter() - start
            time.sleep(10)
            busy = late(client, "4")
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    found = {"rows": rows, "file_mb": size // 1_000_000, "first_paint_s": round(painted, 2)}
    return found | {"event_loop_late_ms": busy, "event_loop_late_ms_undisturbed": idle}


def tick():
    """All that is done for an update, of 20 series of a million points each, while each grows."""
    status, names = RunStatus("x"), [f"metric/{i}" for i in range(20)]
    status.state = "RUNNING"
    for i, name in enumerate(names):
        status.metrics.series[name] = Series.empty()
        status.metrics.series[name].extend(array("d", range(1_000_000)), array("d", np.sin(np.arange(1e6) * i)))
    times, cpu, sizes, before = [], [], [], {"panels": []}
    for step in range(40):
        for name in names:
            status.metrics.series[name].extend(array("d", [1e6 + step]), array("d", [0.5]))
        start, began = time.perf_counter(), time.thread_time()
        charts = panels.charts([status], panels.View(), names)
        now = {"panels": [picture.chart_as_json(chart) for chart in charts]}
        found = picture.delta(before, now, step // 4 % 20 if step % 4 == 0 else -1)
        times.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.thread_time() - began))
        sizes.append(len(json.dumps(found)) / 1e3)
        before = now
    return {
        "ms": spread(times),
        "cpu_ms": spread(cpu),
        "first_update_kb": round(sizes[0], 1),
        "update_kb": spread(sizes[1:]),
    }


def write_day(folder, hosts=8, gpus=8, seconds=86_400):
    """Samples of so many nodes at 1 Hz until now, of which one GPU is slow in the last third, and a log of the rows."""
    folder.mkdir()
    (folder / "nodes").mkdir()
    (folder / "wandb").mkdir()
    test_board.log(folder, test_board.steps(1, 3000))
    test_board.cut_exit_record(folder)
    start = time.time() - seconds
    for host in range(hosts):
        readings = [{"util": 41.0, "power_w": 260.0} if host == hosts - 1 and slow else {} for slow in (False, True)]
        ends = [test_board.line(f"node{host}", 0.0, gpus, **changed).partition(",")[2] for changed in readings]
        with (folder / "nodes" / f"node{host}.jsonl").open("w") as stream:
            for second in range(seconds):
                stream.write(f'{{"t": {start + second:.3f},{ends[second > 2 * seconds / 3]}\n')


def feed(folder, hosts=8, gpus=8):
    """Samples of now, once a second; a process that goes on until it is terminated."""
    names = [f"node{host}" for host in range(hosts)]
    code = (
        "import time\nfrom pathlib import Path\nfrom tests.watch import test_browser\n"
        f"while True:\n    test_browser.sample(Path({str(folder)!r}), {names}, time.time())\n    time.sleep(1)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code])


def day_of_64_gpus(seconds=86_400):
    """A day of 64 GPUs that is there already, in a kernel and in a browser: first paint, updates, and threads held."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        write_day(folder, seconds=seconds)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        process = feed(folder)
        try:
            kernel = day_in_kernel(folder)
            page = day_in_browser(Path(place), folder)
        finally:
            process.terminate()
            process.wait()
    return {"files_mb": size // 1_000_000} | kernel | {"browser": page}


def day_in_kernel(folder):
    """First paint, bytes of updates until twenty seconds after all is read, and the kernel's event loop meanwhile."""
    manager, client = start_new_kernel()
    try:
        ask(client, BEAT, "1")
        time.sleep(5)
        idle, start = late(client, "2"), time.perf_counter()
        ask(client, f"board = kit.watch.board.watch({str(folder)!r}); board", "3")
        hear(client, drawn)
        painted = time.perf_counter() - start
        cell = late(client, "4")["max"]
        read_after, sizes = None, []
        end = time.perf_counter() + 200
        while time.perf_counter() < end:
            message = client.get_iopub_msg(timeout=60)
            data = message["content"].get("data", {})
            state = data.get("state", {}) if message["msg_type"] == "comm_msg" else {}
            if "delta" in state:
                sizes.append(len(json.dumps(state)) / 1e3)
                reading = "still to read" in state["delta"]["runs"][0]["status"]
                read_after = read_after or (None if reading else time.perf_counter() - start)
                end = min(end, start + 20 + (read_after or 1e9))
        busy = late(client, "5")
        ask(client, "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)", "6")
        memory = hear(client, lambda m: m["msg_type"] == "stream")["content"]["text"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return {
        "first_paint_s": round(painted, 2),
        "cell_s": round(cell / 1e3, 2),
        "read_after_s": round(read_after or -1, 1),
        "update_kb": spread(sizes),
        "event_loop_late_ms": busy,
        "event_loop_late_ms_undisturbed": idle,
        "peak_memory_mb": int(memory) // 1000,
    }


def day_in_browser(place, folder):
    """From the key that runs the cell to the heat map and curves on the page, and how late the page's thread was."""
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=test_browser.CHROMIUM, args=["--no-sandbox"])
        lab = test_browser.Lab(place / "lab", chromium)
        page = lab.open("day", "import kit\nkit.watch", f"board = kit.watch({str(folder)!r})\nboard")
        test_browser.begin(page, 0)
        page.wait_for_selector(".jp-CodeCell >> nth=0 >> text=/\\[1\\]:/")
        page.evaluate(PAGE_BEAT)
        page.wait_for_timeout(10_000)
        idle = page.evaluate("window.late.splice(0)")
        test_browser.begin(page, 1)
        page.wait_for_function("() => window.painted")
        painted = page.evaluate("(window.painted - window.pressed) / 1000")
        start = page.evaluate("window.late.splice(0)")
        page.wait_for_function(ALL_READ, timeout=300_000)
        read = page.evaluate("window.late.splice(0)")
        page.wait_for_timeout(30_000)
        live = page.evaluate("window.late.splice(0)")
        chromium.close()
        lab.close()
    return {
        "first_paint_s": round(painted, 2),
        "late_ms_undisturbed": spread(idle),
        "late_ms_first_paint": spread(start),
        "late_ms_while_reading": spread(read),
        "late_ms_live": spread(live),
    }


def notebook():
    """The size of an executed notebook with three boards, of 1,000 rows and two nodes of eight GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        logs_of_run = test_board.steps(1, 1001)
        run.mkdir()
        test_board.log(run, logs_of_run)
        (run / "nodes").mkdir()
        for second in range(300):
            test_browser.sample(run, ["node1", "node2"], 1e9 + second)
        cells = [nbformat.v4.new_code_cell(f"from kit.watch.board import watch\nwatch({str(run)!r})") for _ in range(3)]
        made = nbformat.v4.new_notebook(cells=cells, metadata=test_board.KERNEL)
        nbformat.write(made, Path(folder, "in.ipynb"))
        papermill.execute_notebook(Path(folder, "in.ipynb"), Path(folder, "out.ipynb"), progress_bar=False)
        return {"three_boards_kb": round(Path(folder, "out.ipynb").stat().st_size / 1e3, 1)}


def killed():
    """Seconds of rows that a SIGKILL of the trainer loses."""
    lost = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", MORTAL, folder]
            process = subprocess.Popen(command, env=os.environ | FLUSH, stdout=subprocess.PIPE, text=True)
            process.stdout.readline()
            time.sleep(4 + 0.3 * len(lost))
            process.send_signal(signal.SIGKILL)
            last = float(process.communicate()[0].splitlines()[-1])
            time.sleep(2)
            metrics = Metrics(folder)
            while metrics.poll():
                pass
            lost.append(last - metrics.series["t"].values[-1])
    return {"lost_s": spread(lost, 2)}


def browser():
    """From `log` to the browser, and the gaps between frames of a page with 64 GPUs."""
    with tempfile.TemporaryDirectory() as place, sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=test_browser.CHROMIUM, args=["--no-sandbox"])
        lab = test_browser.Lab(Path(place), chromium)
        writer = test_browser.write(lab.folder / "run")
        page = lab.open("live", test_browser.WATCH.format("run"))
        test_browser.begin(page, 0)
        test_browser.shown_step(page)
        seconds = test_browser.seconds_to_visible(page, lab.folder / "run", 60)
        page.close()
        writer.kill()
        writer.wait()
        with test_browser.many_gpus(lab.folder / "many"):
            page = lab.open("many", test_browser.WATCH.format("many"))
            test_browser.begin(page, 0)
            page.wait_for_selector(".kit-board svg[aria-label='GPU power']")
            gaps = page.evaluate(test_browser.FRAMES)
        chromium.close()
        lab.close()
    return {"rows": len(seconds), "log_to_visible_s": spread(seconds, 2), "frames_of_64_gpus_ms": spread(gaps)}


def silent_server():
    """Seconds until the board mentions that a W&B server does not answer."""
    os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "local-" + "a" * 40}
    start, board = time.perf_counter(), watch("entity/project/run")
    while "no answer from W&B" not in board.status():
        pass
    seconds = time.perf_counter() - start
    board.finish()
    return {"mentioned_s": round(seconds, 2)}


def main(*wanted):
    """All measurements, or those named; the others keep their results. Each has the load of the machine."""
    path = Path(__file__).with_suffix(".json")
    results = json.loads(path.read_text()) if path.exists() else {}
    for name, measure in (
        ("log_of_100k_rows", lambda: long_log(100_000)),
        ("log_of_1m_rows", lambda: long_log(1_000_000)),
        ("tick_20_series_1m_points", tick),
        ("day_of_64_gpus", day_of_64_gpus),
        ("executed_notebook", notebook),
        ("sigkill", killed),
        ("silent_server", silent_server),
        ("browser", browser),
    ):
        if not wanted or name in wanted:
            load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
            results[name] = measure() | {"machine": load}
            print(name, results[name], flush=True)
            path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
