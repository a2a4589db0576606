"""What a board warns of, judged on real logs and on samples as kit.train.sampler writes them."""

import math
import shutil
import time

import pytest

from kit.watch import alerts
from kit.watch.alerts import run_command
from kit.watch.board import watch
from kit.watch.status import RunStatus
from tests.watch.test_board import line, log, steps, until

GB = 10**9


def warned(folder):
    """The alerts of what is in the folder now."""
    status = RunStatus(folder)
    while status.update() or not status.settled or not status.disk.answered:
        pass
    return [text for _, text in alerts.find_alerts(status)]


def running(folder, rows):
    log(folder, rows)
    (path,) = folder.rglob("run-abc.wandb")
    path.write_bytes(path.read_bytes()[:-40])  # cuts the exit record off


def sampled(folder, host="node1", seconds=180, until=0, gpus=8, **changed):
    """Minutes of samples up to now; `changed` are readings of GPU 5."""
    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    (folder / "nodes").mkdir(exist_ok=True)
    with (folder / "nodes" / f"{host}.jsonl").open("a") as stream:
        for second in range(seconds, until, -1):
            stream.write(line(host, time.time() - second, gpus, **changed) + "\n")


def test_a_healthy_run_raises_no_alert(tmp_path):
    running(tmp_path, steps(1, 100))
    sampled(tmp_path)
    assert warned(tmp_path) == []


def test_a_non_finite_loss_raises_an_alert_with_its_step_also_after_the_run_ended(tmp_path):
    log(tmp_path, [*steps(1, 40), *[{"train/loss": math.nan, "train/global_step": i} for i in (40, 41)]])
    assert warned(tmp_path) == ["train/loss is not finite since step 40 (2 times)"]


@pytest.mark.parametrize(
    ("height", "expected"), [(9.0, ["train/loss rose to 9 at step 95, from about 2.02"]), (2.05, [])]
)
def test_a_loss_spike_raises_an_alert_and_noise_does_not(tmp_path, height, expected):
    rows = [{"train/loss": 2 + 0.03 * (i % 7) / 7 + 0.2 / i, "train/global_step": i} for i in range(1, 101)]
    rows[94]["train/loss"] = height
    running(tmp_path, rows)
    assert warned(tmp_path) == expected


def test_gpus_idle_for_minutes_raise_one_alert(tmp_path):
    sampled(tmp_path, "node1")
    sampled(tmp_path, "node2", util=1, power_w=80)
    assert warned(tmp_path) == ["node2: GPU 5 idle for 2 min or longer"]
    sampled(tmp_path / "short", seconds=60, util=1)
    assert warned(tmp_path / "short") == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({"util": 40}, "node1 GPU 5 is at 40 %, the others at 98 %"), ({"power_w": 300}, "300 W, the others at 520 W")],
)
def test_a_gpu_that_differs_from_the_others_raises_an_alert(tmp_path, changed, expected):
    sampled(tmp_path, "node1", **changed)
    sampled(tmp_path, "node2")
    (text,) = warned(tmp_path)
    assert expected in text
    assert text.endswith("one rank is slower")


def test_a_node_that_stops_sampling_raises_an_alert(tmp_path):
    sampled(tmp_path, "node1")
    sampled(tmp_path, "node2", until=100)
    assert warned(tmp_path) == ["node2 has been silent for 101 s"]


def test_a_run_without_new_rows_raises_an_alert(tmp_path, monkeypatch):
    running(tmp_path, steps(1, 30))
    monkeypatch.setattr(alerts, "NO_ROW", 0.0)
    monkeypatch.setattr(alerts, "NO_ROW_FACTOR", 0.0)
    (text,) = warned(tmp_path)
    assert text.startswith("no new row for ")


def test_a_nearly_full_disk_raises_an_alert(tmp_path, monkeypatch):
    running(tmp_path, steps(1, 3))
    monkeypatch.setattr(alerts, "FREE_BYTES", shutil.disk_usage(tmp_path).free + GB)
    (text,) = warned(tmp_path)
    assert text.startswith(f"the file system of {tmp_path} has ")


def test_the_alert_command_gets_each_alert_once_without_a_shell(tmp_path):
    rows = [*steps(1, 40), {"train/loss": math.nan, "train/global_step": 40}]
    running(tmp_path / "a $(touch x) run", rows)
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$@" >> "$0.out"\n')
    program.chmod(0o755)
    board = watch(tmp_path / "a $(touch x) run", on_alert=[str(program), "first; second"])
    output = tmp_path / "program.out"
    until(output.exists)
    for _ in range(3):
        board.status()  # waits for another look, and its alerts
    assert output.read_text() == "first; second a $(touch x) run: train/loss is not finite since step 40 (1 times)\n"
    assert not (tmp_path / "x").exists()
    board.finish()


@pytest.mark.parametrize(
    ("command", "words"),
    [(["false"], "false ended with exit code 1"), (["no-such"], "no-such failed"), (["sleep"], "timed out")],
)
def test_a_failing_alert_command_is_shown_on_the_board(command, words, monkeypatch):
    monkeypatch.setattr(alerts, "COMMAND_TIMEOUT", 0.5)
    assert words in run_command(command, "30")
