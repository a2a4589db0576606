"""The README's pictures of the board: `python -m tests.pictures` writes env/pictures/board-{light,dark}.png.

The run is made up, as no cluster of 16 GPUs was available: an hour of samples of two nodes of eight, in which GPU 5 of
node b becomes slow. The log, the sample files, JupyterLab and the board are real.
"""

import json
import math
import random
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from kit import files
from tests.watch import test_board, test_browser

PICTURES = files.REPOSITORY / "env" / "pictures"
NODES, GPUS, SECONDS, STEP_S = ("node-a", "node-b"), 8, 3600, 4.1
TOKENS, STEPS = 16 * 2 * 2048, 1400  # of a step; of the run
SLOW_FROM = 2400  # second from which one GPU is slow


def rows(began):
    """What training logs, a row for each step."""
    noise = random.Random(1)
    for step in range(1, int(SECONDS / STEP_S) + 1):
        slow = STEP_S * step > SLOW_FROM
        step_s = STEP_S * (1.4 if slow else 1.0) * noise.gauss(1, 0.01)
        waits = {"wait_data_s": 0.02, "wait_gpu_s": 2.0, "wait_ranks_s": 1.6 if slow else 0.05, "slowest_rank": 13.0}
        row = {
            "loss": 1.05 + 1.1 * math.exp(-step / 60) + noise.gauss(0, 0.03),
            "learning_rate": 1e-4 * min(1, step / 20) * 0.5 * (1 + math.cos(math.pi * step / STEPS)),
            "grad_norm": 0.35 + 0.6 * math.exp(-step / 40) + abs(noise.gauss(0, 0.04)),
            "step_s": step_s,
            "tokens_per_s": TOKENS / step_s,
            "num_tokens": float(TOKENS * step),
            "epoch": step / STEPS,
            **waits,
            "global_step": step,
        }
        logged = {f"train/{name}": value for name, value in row.items()}
        if step % 40 == 0:
            logged["eval/loss"] = row["loss"] + 0.06
        yield logged | {"_timestamp": began + STEP_S * step}


def sample(node, second):
    """The readings of a node in a second."""
    noise, evaluating = random.Random(f"{node} {second}"), second % 400 > 385
    reports = []
    for index in range(GPUS):
        slow = second > SLOW_FROM and (node, index) == ("node-b", 5)
        util = noise.gauss(62 if evaluating else 41 if slow else 96, 1.5)
        heat = 1 - math.exp(-second / 200)
        power = noise.gauss(330 if slow else 480 if evaluating else 655, 9)
        report = {"util": round(min(100, util)), "mem_gib": 24.3 + 0.2 * index, "mem_total_gib": 79.1}
        temperature = round(34 + heat * (0.033 * power + 1.2 * index))
        reports.append(
            report | {"power_w": power, "temp_c": temperature, "index": index, "uuid": f"GPU-{node}-{index}"}
        )
    traffic = {"net_gb_s": {"in": noise.gauss(9, 0.3), "out": noise.gauss(9, 0.3)}, "disk_gb_s": None}
    return {"host": node, "cpu": noise.gauss(14, 1), "ram_gib": 212.0, "gpus": reports} | traffic


@contextmanager
def running(folder):
    """A run folder whose job seems to be running, as this process is named as its runner."""
    began = time.time() - SECONDS
    for part in ("state", "nodes"):
        (folder / part).mkdir(parents=True)
    for kind, name in (("recipe", "recipes/llama70b"), ("cluster", "clusters/h100-8x8")):
        text = (files.REPOSITORY / "env" / f"{name}.toml").read_text()
        files.write(folder / f"{kind}.toml", text)
    own = psutil.Process()
    files.write_json(folder / "run.json", {"name": folder.name, "job_id": "local-1", "submitted": began})
    files.write_json(folder / "state" / "local.json", {"pid": own.pid, "created": own.create_time()})
    progress = {"step": SECONDS / STEP_S // 1, "max_steps": STEPS, "eta_s": (STEPS - SECONDS / STEP_S) * STEP_S * 1.4}
    files.write_json(folder / "state" / "progress.json", progress)
    test_board.log(folder, rows(began))
    test_board.cut_exit_record(folder)
    stop = threading.Event()
    thread = threading.Thread(target=go_on, args=(folder, began, stop))
    thread.start()
    yield
    stop.set()
    thread.join()


def go_on(folder, began, stop):
    """Write the samples, and go on until `stop` is set."""
    done = 0
    while not stop.wait(0.5):
        now = int(time.time() - began)
        for node in NODES:
            with (folder / "nodes" / f"{node}.jsonl").open("a") as stream:
                for second in range(done, now):
                    stream.write(json.dumps({"t": began + second} | sample(node, second)) + "\n")
        done = now


def main():
    """Write the run, and a picture of its board in each theme."""
    with tempfile.TemporaryDirectory() as place, sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=test_browser.CHROMIUM, args=["--no-sandbox"])
        lab = test_browser.Lab(Path(place), chromium)
        with running(lab.folder / "llama70b-20261129-1500"):
            for theme in ("light", "dark"):
                lab.choose_theme(f"JupyterLab {theme.title()}")
                page = lab.open(theme, 'import kit\nkit.watch("llama70b-20261129-1500")', height=1900, width=1650)
                test_browser.begin(page, 0)
                page.wait_for_selector(".kit-board .map image")
                page.wait_for_function(test_browser.PICTURE_HIDDEN)
                page.wait_for_selector(".kit-board .status >> text=2 of 2 nodes reporting")
                page.wait_for_function(
                    "() => !document.querySelector('.kit-board .status').textContent.includes('still')"
                )
                page.wait_for_timeout(3000)
                page.locator(".kit-board").screenshot(path=PICTURES / f"board-{theme}.png")
                page.close()
        chromium.close()
        lab.close()


if __name__ == "__main__":
    main()
