"""The board: what it says, what it draws, and how it behaves in a real kernel."""

import base64
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import nbformat
import numpy as np
import papermill
import plotly.graph_objects
import pytest
import wandb
from jupyter_client.manager import start_new_kernel

import kit
from kit import files
from kit.cli import main
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.figures.base import PLOTLY
from kit.figures.charts import Chart, Line, number
from kit.figures.points import smoothed, thin
from kit.figures.svg import ticks
from kit.slurm.outcome import RunState
from kit.slurm.run import Run
from kit.slurm.states import JobState
from kit.watch import alerts, background, status
from kit.watch import board as board_module
from kit.watch.board import NO_CELL, watch
from kit.watch.hardware import heat_maps
from kit.watch.live import NO_MANAGER
from kit.watch.picture import as_json, chart_as_json, delta
from tests.conftest import until
from tests.watch.test_online import KEY

REPOSITORY = Path(__file__).resolve().parents[2]
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

WRITER = """
import sys, time, wandb
run = wandb.init(project="p", id="live", mode="offline", dir=sys.argv[1])
for step in range(1, 31):
    run.log({"train/loss": 3 / step, "train/learning_rate": 1e-4, "train/global_step": step})
    time.sleep(0.1)
run.finish()
"""


def log(folder, rows, exit_code=0):
    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True, x_disable_stats=True)
    run = wandb.init(project="p", id="abc", mode="offline", dir=str(folder / "wandb"), settings=settings)
    for row in rows:
        run.log(row)
    run.finish(exit_code=exit_code)
    wandb.teardown()  # finish() may return before the log is on disk


def cut_exit_record(folder):
    """Make the run look as if it went on; the log."""
    (path,) = folder.rglob("run-abc.wandb")
    path.write_bytes(path.read_bytes()[:-40])
    return path


def line(host, t, gpus, **changed):
    """What kit.train.sampler writes in a second; `changed` are readings of GPU 5."""
    gpu = {"util": 98.0, "mem_gib": 60.5, "mem_total_gib": 80.0, "power_w": 520.0, "temp_c": 60}
    report = [gpu | (changed if i == 5 else {}) | {"index": i, "uuid": f"GPU-{host}-{i}"} for i in range(gpus)]
    traffic = {"net_gb_s": {"in": 3.1, "out": 2.9}, "disk_gb_s": None}
    return json.dumps({"t": t, "host": host, "cpu": 12.5, "ram_gib": 100.0, "gpus": report} | traffic)


def sample(folder, host, t, gpus):
    (folder / "nodes").mkdir(exist_ok=True)
    with (folder / "nodes" / f"{host}.jsonl").open("a") as stream:
        stream.write(line(host, t, gpus) + "\n")


def steps(first, last):
    rest = {"train/grad_norm": 0.5, "train/tokens_per_s": 9000.0}
    return [{"train/loss": 3.0 / i, "train/global_step": i, **rest} for i in range(first, last)]


def texts(svg):
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def writer_env():
    return os.environ | {"WANDB_SILENT": "true", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1"}


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (3, "failed (exit code 3)")])
def test_a_plain_wandb_run_ends_with_its_exit_record(tmp_path, code, state):
    log(tmp_path, steps(1, 6), exit_code=code)
    status = watch(tmp_path).status()
    assert status.startswith(f"{state} · step 5 · newest row ")
    assert "damaged" not in status
    assert status.endswith("run-abc.wandb")


def test_a_log_without_an_exit_record_is_stale_after_ten_minutes_without_writes(tmp_path):
    log(tmp_path, steps(1, 6))
    (path,) = tmp_path.rglob("run-abc.wandb")
    path.write_bytes(path.read_bytes()[:-40])  # cuts the exit record off
    assert watch(tmp_path).status().startswith("running · step 5")
    long_ago = time.time() - 11 * 60
    os.utime(path, (long_ago, long_ago))
    assert watch(tmp_path).status().startswith("stale (nothing was written for 11 min)")


def test_progress_and_time_left_come_from_the_job_report(tmp_path):
    log(tmp_path, steps(1, 4))
    (path,) = tmp_path.rglob("run-abc.wandb")
    path.write_bytes(path.read_bytes()[:-40])
    report = tmp_path / "state" / "progress.json"
    report.parent.mkdir()
    files.write_json(report, {"step": 5, "max_steps": 1000, "eta_s": 1800.0})
    assert "step 5 of 1,000" in watch(tmp_path).status()
    assert "about 30 min left" in watch(tmp_path).status()
    ten_minutes_ago = time.time() - 600
    os.utime(report, (ten_minutes_ago, ten_minutes_ago))
    assert "about 20 min left" in watch(tmp_path).status()


def test_a_silent_node_is_named_in_the_status(tmp_path):
    log(tmp_path, steps(1, 3))
    (path,) = tmp_path.rglob("run-abc.wandb")
    path.write_bytes(path.read_bytes()[:-40])
    sample(tmp_path, "node1", time.time(), gpus=8)
    sample(tmp_path, "node2", time.time() - 40, gpus=8)
    assert "1 of 2 nodes reporting (node2 silent for 40 s)" in watch(tmp_path).status()


def test_missing_nodes_are_counted_in_the_status(tmp_path, local):
    local = dataclasses.replace(local, paths=dataclasses.replace(local.paths, runs=str(tmp_path / "runs")))
    run = Run.create(Recipe.load("demo", **{"parallel.nodes": 2}), local, tmp_path, "digest")
    run.note(job_id="local-1")
    files.write_json(run.path / "state" / "exit.0.json", {"time": time.time(), "job_id": "local-1", "exit_code": 0})
    files.write_json(run.path / "state" / "local.json", {"pid": os.getpid(), "created": 0.0})  # a runner that is gone
    assert "0 of 2 nodes reported" in watch(run).status()
    sample(run.path, "node1", time.time(), gpus=1)
    for ref in (run, run.path, "local-1"):
        assert watch(ref).status().startswith("completed · step 0 of 24 · no row yet · 1 of 2 nodes reported · ")
    assert watch(run).wait(30) == "COMPLETED"


@pytest.fixture
def run(tmp_path, local):
    """A run that was submitted to a Slurm that is not there."""
    local = dataclasses.replace(local, paths=dataclasses.replace(local.paths, runs=str(tmp_path / "runs")))
    run = Run.create(Recipe.load("demo"), local, tmp_path, "digest")
    run.note(job_id="4711")
    return run


def test_an_error_of_the_state_function_is_shown_and_does_not_block(run, monkeypatch, capsys):
    monkeypatch.setattr(Run, "state", property(lambda run: int("copy")))
    board = watch(run)
    assert board.status().startswith("unknown (ValueError: invalid literal for int()")
    assert board.wait(0.1) == "UNKNOWN"
    assert main(["watch", str(run.path), "--once"]) == 0
    assert "ValueError" in capsys.readouterr().out
    board.finish()


def test_a_foreign_file_in_the_state_folder_does_not_block_the_board(run):
    (run.path / "state").mkdir(exist_ok=True)
    (run.path / "state" / "exit.0.copy.json").write_text("{}")
    board = watch(run)
    assert "no row yet" in board.status()
    board.finish()


def test_a_state_function_that_hangs_is_mentioned_and_does_not_block(run, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(Run, "state", property(lambda run: answer.wait(60)))
    monkeypatch.setattr(status, "NO_ANSWER", 0.3)
    board = watch(run)
    assert "no answer about the job for" in board.status()
    answer.set()
    board.finish()


def test_an_error_while_drawing_is_shown_and_the_board_goes_on(tmp_path, monkeypatch):
    log(tmp_path, steps(1, 6))
    path = cut_exit_record(tmp_path)
    monkeypatch.setattr(board_module, "find_alerts", lambda run: 1 / 0)
    board = watch(tmp_path)
    assert "! ZeroDivisionError: division by zero" in str(board)
    monkeypatch.setattr(board_module, "find_alerts", alerts.find_alerts)
    until(lambda: "ZeroDivisionError" not in str(board))
    assert board.status().startswith("running")
    assert path.exists()
    board.finish()


def test_a_board_whose_thread_has_ended_says_why(tmp_path, monkeypatch):
    log(tmp_path, steps(1, 6))
    monkeypatch.setattr(status.RunStatus, "update", lambda self: 1 / 0)
    board = watch(tmp_path)
    assert board.status()
    assert "! the board has stopped: ZeroDivisionError: division by zero" in str(board)
    assert board.ended


def test_files_that_cannot_be_read_do_not_block_the_board(tmp_path, monkeypatch):
    log(tmp_path, steps(1, 6))
    answer = threading.Event()
    monkeypatch.setattr(board_module, "NO_ANSWER", 0.3)
    monkeypatch.setattr(status.RunStatus, "update", lambda self: answer.wait(60))
    board = watch(tmp_path)
    assert "the files of the run could not be read for" in str(board)
    board.stop()
    answer.set()


def test_a_file_system_that_hangs_raises_an_alert_and_does_not_block(tmp_path, monkeypatch):
    log(tmp_path, steps(1, 6))
    cut_exit_record(tmp_path)
    answer = threading.Event()
    monkeypatch.setattr(status.shutil, "disk_usage", lambda path: answer.wait(60) or SimpleNamespace(total=1, free=1))
    monkeypatch.setattr(alerts, "NO_ANSWER", 0.0)
    board = watch(tmp_path)
    assert board.status().startswith("running")
    assert f"! the file system of {tmp_path} has not answered for" in str(board)
    answer.set()
    board.finish()


def test_the_switch_interval_of_the_process_is_restored(tmp_path, monkeypatch):
    log(tmp_path, steps(1, 6))
    usual, during = pytest.approx(0.005), set()  # Python's default
    update = status.RunStatus.update

    def observed(self):
        during.add(sys.getswitchinterval())
        return update(self)

    monkeypatch.setattr(status.RunStatus, "update", observed)
    for _ in range(2):
        board = watch(tmp_path)
        assert board.wait(60) == "FINISHED"
    assert list(during) == [pytest.approx(background.SWITCH_INTERVAL)]
    until(lambda: sys.getswitchinterval() == usual)  # boards of other tests may be at work


def test_kit_watch_returns_a_board_with_json_values(tmp_path):
    log(tmp_path, [*steps(1, 6), {"train/loss": math.nan, "train/global_step": 6}])
    board = kit.watch(tmp_path)
    facts = json.loads(json.dumps(board.as_dict(), allow_nan=False))
    (one,) = facts["runs"]
    assert (one["state"], one["step"], one["damaged_records"], one["problem"]) == ("FINISHED", 6, 0, None)
    assert one["metrics"]["train/loss"] is None
    assert one["metrics"]["train/tokens_per_s"] == 9000
    assert facts["alerts"][0]["text"] == "train/loss is not finite since step 6 (1 times)"


def test_a_file_that_is_not_a_log_is_reported_on_the_board(tmp_path):
    (tmp_path / "run-x.wandb").write_bytes(b"something else")
    board = watch(tmp_path)
    assert "run-x.wandb is not a W&B log: it starts with b'somethi'" in board.status()
    assert "nothing logged yet" in board.svg()


@pytest.mark.parametrize("ref", ["nowhere", "123456", "."])
def test_a_reference_that_is_not_a_run_is_reported_on_the_board(ref):
    board = watch(ref)
    assert "run.json" in board.refused
    assert board.status() == board.refused
    with pytest.raises(InputError, match=r"run\.json"):
        board.wait(10)
    ElementTree.fromstring(board.svg())


def test_the_watch_command_prints_and_writes_a_board_and_refuses_other_references(tmp_path, capsys):
    assert main(["watch", "nowhere", "--once"]) == 2
    assert "No run 'nowhere'" in capsys.readouterr().err
    log(tmp_path / "run", steps(1, 6))
    assert main(["watch", str(tmp_path / "run"), "--html", "board.html"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("finished · step 5 · ")
    assert "█▃▂▁▁" in out
    assert "<svg" in Path("board.html").read_text()


def test_an_empty_log_is_waiting_and_a_newer_format_is_reported(tmp_path):
    path = tmp_path / "run-x.wandb"
    path.write_bytes(b"")
    assert watch(path).status().startswith("running · no row yet")
    path.write_bytes(b":W&B\xe1\xbe\x07" + bytes(40))
    assert "is a W&B log of version 7; only version 0 can be read." in watch(path).status()


def test_additional_metrics_are_drawn_and_unknown_ones_get_a_suggestion(tmp_path):
    log(tmp_path, [row | {"train/entropy": 1.5} for row in steps(1, 6)])
    board = watch(tmp_path, also=["train/entropy", "train/los"])
    assert "train/entropy" in texts(board.svg())
    assert "No metric 'train/los'. Did you mean 'train/loss'? Logged so far:" in str(board)


def test_several_runs_share_panels_and_each_has_a_status(tmp_path):
    for name, first in (("one", 1), ("two", 3)):
        log(tmp_path / name, steps(first, 9))
    board = watch(tmp_path / "one", tmp_path / "two")
    assert [line.startswith("finished · step 8") for line in board.status().splitlines()] == [True, True]
    loss = next(chart for chart in board.charts() if chart.title == "Loss")
    assert [(line.name, line.x[0]) for line in loss.lines] == [("one train", 1), ("two train", 3)]
    assert {"one", "two", "one train 0.375", "two train 0.375"} <= set(texts(board.svg()))


def test_a_log_axis_has_powers_of_ten_and_smoothing_keeps_what_was_logged(tmp_path):
    log(tmp_path, [{"train/loss": 10.0**-i, "train/global_step": i} for i in range(4)])
    svg = watch(tmp_path, log=["Loss"], smooth=0.9).svg()
    assert {"0.01", "0.1", "1"} <= set(texts(svg))
    assert 'stroke-opacity="0.25"' in svg
    assert np.allclose(smoothed(np.array([3.0, math.nan, 3.0]), 0.9)[[0, 2]], 3)


def test_a_zoomed_range_is_drawn_with_more_points(tmp_path):
    log(tmp_path, [{"train/loss": math.sin(i), "train/global_step": i} for i in range(3000)])
    board = watch(tmp_path)
    board.view.zoom = {"optimizer step": [1000, 1100]}
    (line,) = board.charts()[0].lines
    assert sum(1000 <= x <= 1100 for x in line.x) == 101
    assert len(line.x) < 1000


def test_an_update_contains_only_new_points(tmp_path):
    log(tmp_path, steps(1, 200))
    before = {"panels": [chart_as_json(chart) for chart in watch(tmp_path).charts()]}
    log(tmp_path, steps(200, 210))
    now = {"panels": [chart_as_json(chart) for chart in watch(tmp_path).charts()]}
    report = delta(before, now)
    (line,) = report["panels"][0]["lines"]
    assert (line["keep"], len(line["x"])) == (199, 10)
    (known,) = before["panels"][0]["lines"]
    assert known["x"][: line["keep"]] + line["x"] == now["panels"][0]["lines"][0]["x"]


def test_a_sync_runs_in_the_background(server, tmp_path):
    log(tmp_path, steps(1, 6))
    release = threading.Event()
    server.fault = lambda operation: None if release.wait(60) else 500
    board = watch(tmp_path)
    board.sync()
    assert "sync: done" not in board.status()  # it returned while the server is silent
    release.set()
    until(lambda: board.status().endswith(" · sync: done"))
    assert server.runs["abc"]["state"] == "finished"


def test_a_sync_that_takes_too_long_is_stopped_and_reported(server, tmp_path):
    log(tmp_path, steps(1, 6))
    server.fault = lambda operation: time.sleep(30)
    board = watch(tmp_path)
    board.sync(timeout=3)
    until(lambda: "wandb sync did not end within 3 s and was stopped" in str(board))


def test_the_board_of_a_run_on_a_server_reports_that_the_server_is_silent(monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    board = watch("ent/p/live")
    assert "W&B" in board.status()
    assert "from W&B ent/p/live" in board.status()
    board.finish()


def test_the_picture_shows_every_gpu_and_marks_what_is_not_finite(tmp_path):
    bad = [{"train/loss": value, "train/global_step": 10 + i} for i, value in enumerate([math.nan, math.inf])]
    log(tmp_path, [*steps(1, 10), *bad, *steps(12, 20)])
    for t in range(3):
        for host in ("node1", "node2"):
            sample(tmp_path, host, time.time() + t, gpus=8)
    svg = watch(tmp_path).svg()
    shown = texts(svg)
    assert {"NaN or infinite: 2", "node1 98 (mean of 8)", "node2 98 (mean of 8)", "capacity 80"} <= set(shown)
    assert {"optimizer step", "minutes since the start", "GiB", "%", "tokens/s"} <= set(shown)
    panels = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}svg")
    load = next(panel for panel in panels if panel.get("aria-label") == "GPU utilisation")
    lines = [path for path in load.iter("{http://www.w3.org/2000/svg}path") if path.get("stroke-opacity")]
    assert len([line for line in lines if line.get("fill") == "none"]) == 16
    assert len(svg) < 100_000


def test_64_gpus_and_long_runs_stay_below_100_kb(tmp_path):
    log(tmp_path, steps(1, 3000))
    for t in range(300):
        for host in range(8):
            sample(tmp_path, f"node{host}", 1e9 + t, gpus=8)
    board = watch(tmp_path)
    assert len(board.svg()) < 100_000
    complete = as_json([], [], board.charts(), heat_maps(board.runs, board.view))
    assert len(json.dumps(delta({}, complete))) < 100_000


def test_a_finished_run_is_a_plotly_figure_and_a_small_picture(tmp_path):
    bad = {"train/loss": math.nan, "train/global_step": 50}
    log(tmp_path, [*steps(1, 50), bad])
    for t in range(200):
        for host in ("node1", "node2"):
            sample(tmp_path, host, time.time() - 200 + t, gpus=8)
    data, _ = watch(tmp_path)._repr_mimebundle_()
    figure = plotly.graph_objects.Figure(data[PLOTLY])  # refuses what plotly does not know
    kinds = [trace.type for trace in figure.data]
    assert kinds.count("heatmap") == 1
    names = {trace.name for trace in figure.data}
    assert {"train", "all ranks", "node1", "node2", "capacity"} <= names
    (loss,) = [trace for trace in figure.data if trace.name == "train"]
    values = np.frombuffer(base64.b64decode(loss.y["bdata"]), np.float32)
    assert values == pytest.approx([*(3.0 / i for i in range(1, 50)), math.nan], nan_ok=True)
    (heat_map,) = [trace for trace in figure.data if trace.type == "heatmap"]
    cells = np.frombuffer(base64.b64decode(heat_map.z["bdata"]), np.float32).reshape(16, -1)
    assert np.nanmax(np.abs(cells - 98)) < 0.3
    assert [button.label for menu in figure.layout.updatemenus for button in menu.buttons] == [
        "linear scale", "log scale", "as logged", "smoothed",
    ]  # fmt: skip
    assert any("NaN or infinite: 1" in annotation.text for annotation in figure.layout.annotations)
    assert len(json.dumps(data)) < 150_000


def test_a_run_that_goes_on_is_a_picture(tmp_path):
    log(tmp_path, steps(1, 6))
    cut_exit_record(tmp_path)
    board = watch(tmp_path)
    assert PLOTLY not in board._repr_mimebundle_()[0]
    board.finish()


def test_mfu_and_time_left_are_forecast_before_the_first_row(run, monkeypatch):
    monkeypatch.setattr(Run, "state", property(lambda run: RunState(run.name, run.job_id, JobState.RUNNING)))
    board = watch(run)
    assert re.search(r"step 0 of 24 · no row yet · about .* left", board.status())
    assert "MFU" in board.status()
    assert "MFU" in [chart.title for chart in board.charts()]
    board.finish()


@pytest.mark.parametrize(
    ("phase", "compiles", "words"),
    [("loading", False, "loading the model for 42 s"), ("first step", True, "compiling for 42 s"),
     ("first step", False, "first step for 42 s"), ("evaluating", True, "evaluating for 42 s")],
)  # fmt: skip
def test_the_status_says_what_the_job_does_where_it_does_not_train(run, monkeypatch, phase, compiles, words):
    monkeypatch.setattr(Run, "state", property(lambda run: RunState(run.name, run.job_id, JobState.RUNNING)))
    (run.path / "state").mkdir(exist_ok=True)
    record = {"phase": phase, "since": time.time() - 42, "compiles": compiles}
    files.write_json(run.state_folder.phase, record)
    board = watch(run)
    assert words in board.status().replace("43 s", "42 s")
    board.finish()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"phase": "dancing", "since": 1}', '{"phase": "loading", "since": "x"}']
)
def test_a_damaged_phase_is_no_phase(run, monkeypatch, text):
    monkeypatch.setattr(Run, "state", property(lambda run: RunState(run.name, run.job_id, JobState.RUNNING)))
    (run.path / "state").mkdir(exist_ok=True)
    run.state_folder.phase.write_text(text)
    board = watch(run)
    assert board.status().startswith("running · step 0 of 24 · no row yet")
    board.finish()


def test_tokens_epochs_and_tokens_per_gpu_are_in_the_status(tmp_path):
    rows = [
        row | {"train/num_tokens": 1e6 * row["train/global_step"], "train/loss_tokens": 4e5, "train/epoch": 0.1}
        for row in steps(1, 11)
    ]
    log(tmp_path, rows)
    sample(tmp_path, "node1", time.time(), gpus=8)
    status = watch(tmp_path).status()
    assert "10 M tokens (4 M trained on) · epoch 0.10 · 9,000 tokens/s (1,125 per GPU)" in status


def test_the_load_of_the_base_is_in_the_status_until_tokens_are(tmp_path):
    load = {"train/base_load_s": 42.0, "train/base_load_gb": 812.0, "train/base_load_gb_s": 19.33}
    log(tmp_path, [load | {"train/global_step": 0}])
    assert "base loaded in 42 s (812 GB, 19.3 GB/s)" in watch(tmp_path).status()


def test_the_html_page_is_self_contained(tmp_path):
    log(tmp_path, steps(1, 6))
    page = watch(tmp_path).html()
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_an_executed_notebook_contains_one_small_picture_and_no_widget(tmp_path, writer_env):
    run = tmp_path / "run"
    (run / "wandb").mkdir(parents=True)
    cells = ["from kit.watch.board import watch\nboard = watch('run')\nboard", "board.wait(60)", "1 + 1"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=KERNEL)
    nbformat.write(notebook, tmp_path / "in.ipynb")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(run / "wandb")], env=writer_env)
    papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", progress_bar=False, cwd=tmp_path)
    assert writer.wait() == 0
    done = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    (picture,) = done.cells[0].outputs
    (state,) = done.cells[1].outputs
    assert picture.data.keys() == {PLOTLY, "image/png", "text/plain"}
    assert len(picture.data["image/png"]) < 100_000
    assert base64.b64decode(picture.data["image/png"]).startswith(b"\x89PNG")
    assert picture.data["text/plain"].startswith("finished · step 30 · ")
    assert "Loss, train" in picture.data["text/plain"]
    assert NO_CELL not in picture.data["text/plain"]  # the run is over: nothing is missing
    assert state.data["text/plain"] == "'FINISHED'"
    assert "widgets" not in done.metadata


def shown(client, code, cell, everyone=False):
    """What a cell displays, or everyone; asked for as JupyterLab does, which names the cell, or as papermill does."""
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    request = client.session.msg("execute_request", content, metadata={"cellId": cell} if cell else {})
    client.shell_channel.send(request)
    out = []
    while True:
        message = client.get_iopub_msg(timeout=60)
        own = message["parent_header"].get("msg_id") == request["header"]["msg_id"]
        if not own and not everyone:
            continue
        assert message["msg_type"] != "error", message["content"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            out.append((message["msg_type"], message["content"]))
        if own and message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return out


def test_jupyterlab_gets_a_picture_and_a_live_view_and_keeps_the_picture(tmp_path):
    log(tmp_path, steps(1, 6))
    (path,) = tmp_path.rglob("run-abc.wandb")
    path.write_bytes(path.read_bytes()[:-40])  # still running
    view = "application/vnd.jupyter.widget-view+json"
    manager, client = start_new_kernel()
    try:
        shown(client, f"from kit.watch.board import watch; board = watch({str(tmp_path)!r})", None)
        ((_, alone),) = shown(client, "board", None)
        assert view not in alone["data"]
        assert NO_CELL in alone["data"]["text/plain"]
        (_, picture), (_, live), *_ = shown(client, "board", "cell-1")
        assert "image/svg+xml" in picture["data"]
        assert NO_CELL not in picture["data"]["text/plain"]
        said = shown(client, "import time; time.sleep(4)", "cell-2", everyone=True)
        (made,) = [content for kind, content in said if view in content["data"]]
        assert made["transient"] == live["transient"]
        assert made["data"]["text/plain"] == NO_MANAGER
        assert any(
            "image/png" in content["data"] and content["transient"] == picture["transient"] for _, content in said
        )
        last = shown(client, "board.finish()", "cell-3", everyone=True)
        emptied = [content["transient"] for _, content in last if content["data"] == {"text/plain": ""}]
        assert live["transient"] in emptied
        assert [kind for kind, content in last][-1] == "display_data"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_without_the_widget_package_jupyterlab_gets_pictures_and_the_reason(tmp_path):
    log(tmp_path, steps(1, 6))
    cut_exit_record(tmp_path)
    manager, client = start_new_kernel()
    try:
        shown(client, "import sys; sys.modules['anywidget'] = None; from kit.watch.board import watch", "cell-0")
        shown(client, f"board = watch({str(tmp_path)!r}); board", "cell-1")
        said = shown(client, "import time; time.sleep(4)", "cell-2", everyone=True)
        texts_shown = [content["data"]["text/plain"] for _, content in said if "image/png" in content["data"]]
        assert "renewed every 10 s: the kernel has no package anywidget; pip install anywidget" in texts_shown[-1]
        assert not any("widget-view" in kind for _, content in said for kind in content["data"])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_thinning_keeps_every_extreme_and_gaps():
    x, y = np.arange(100_000), np.zeros(100_000)
    y[12_345], y[77_777], y[50_000] = 9.0, -9.0, math.nan
    thin_x, thin_y = thin(x, y, 300)
    assert len(thin_x) < 330
    assert (12_345, 9.0) in set(zip(thin_x, thin_y, strict=True))
    assert (77_777, -9.0) in set(zip(thin_x, thin_y, strict=True))
    assert 50_000 in thin_x[np.isnan(thin_y)]
    assert (thin_x[0], thin_x[-1]) == (0, 99_999)


def test_axes_have_round_numbers():
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(1.1e-5, 5e-5) == [2e-5, 3e-5, 4e-5, 5e-5]
    assert [number(v) for v in (0, 5e-5, 0.25, 12345.6, 3e9, math.nan)] == ["0", "5e-5", "0.25", "12,346", "3e9", "nan"]


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0], [math.nan], [math.inf, -math.inf], [0, 1e-9], [9e99, -9e99]])
def test_any_values_give_a_well_formed_svg(values):
    svg = Chart("a < b & c", "x", "y", [Line("<one>", list(range(len(values))), values)]).svg()
    ElementTree.fromstring(svg)
    assert "nan" not in "".join(part for part in svg.split('"') if part.startswith("M"))


def test_the_first_steps_have_an_axis_of_whole_steps():
    for x, numbers in (([0], "0 1 2 3 4 5"), ([7, 8], "7 8 9 10 11 12"), ([0, 1000], "0 200 400 600 800 1,000")):
        drawn = texts(Chart("Loss", "optimizer step", "y", [Line("a", x, [1.0] * len(x))]).svg())
        assert [text for text in drawn if re.fullmatch(r"[\d,.]+", text)][-6:] == numbers.split()
