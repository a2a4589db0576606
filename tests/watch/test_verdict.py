"""What the board says that GPUs wait for."""

import shutil
import time

import pytest

import kit
from kit import files
from kit.slurm.run import Run
from kit.watch.board import watch
from kit.watch.status import Forecast, RunStatus, forecast_of
from kit.watch.verdict import Cause, verdict
from tests.watch.test_board import cut_exit_record, line, log, steps

QUIET = {"train/step_s": 8.0, "train/wait_data_s": 0.01, "train/wait_ranks_s": 0.02, "train/slowest_rank": 5.0}


def run_of(folder, util=98.0, **changed):
    """A run that goes on, whose rows have these waits and whose GPUs are so busy."""
    waits = QUIET | {f"train/{name}": value for name, value in changed.items()}
    log(folder, [row | waits for row in steps(1, 20)])
    cut_exit_record(folder)
    (folder / "nodes").mkdir()
    lines = [line("a", time.time() - 120 + second, 8).replace("98.0", str(util)) for second in range(120)]
    (folder / "nodes" / "a.jsonl").write_text("\n".join(lines) + "\n")
    run = RunStatus(folder)
    while run.update():
        pass
    return run


@pytest.mark.parametrize(
    ("util", "changed", "text"),
    [
        (98.0, {}, ""),
        (60.0, {"wait_data_s": 3.1}, "of each step of 8 s, 3.1 s for data: waiting"),
        (98.0, {"wait_ranks_s": 2.0}, "of each step of 8 s, 2 s for the slowest rank (rank 5): waiting"),
        (70.0, {"wait_gpu_s": 0.01},
         "of each step of 8 s, 2.4 s for the host, which starts kernels more slowly than the GPUs run them: waiting"),
        (98.0, {"wait_gpu_s": 6.0}, ""),
        (60.0, {"wait_gpu_s": 6.0}, "GPUs are busy 60 % of the time; the logged waits do not explain the rest"),
    ],
)  # fmt: skip
def test_the_verdict_names_the_cause_and_its_seconds(tmp_path, util, changed, text):
    assert str(verdict(run_of(tmp_path, util, **changed))) == text


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [({"wait_gpu_s": 6.0}, "1.5 s"), ({"wait_gpu_s": 1.0}, "1 s"), ({}, "1.5 s")],
)
def test_communication_has_the_seconds_of_the_forecast_but_no_more_than_the_gpu_was_waited_for(
    tmp_path, changed, seconds
):
    run = run_of(tmp_path, **changed)
    run.forecast = Forecast(links_s=1.5)
    assert str(verdict(run)) == f"of each step of 8 s, {seconds} for communication, as forecast: waiting"


def test_the_forecast_of_a_run_over_a_slow_link_has_seconds_of_communication(tmp_path):
    shipped = {"recipe": "recipes/llama405b-oasst2", "cluster": "clusters/two-node-pcie"}
    for name, path in shipped.items():
        shutil.copy(files.REPOSITORY / "env" / f"{path}.toml", tmp_path / f"{name}.toml")
    (tmp_path / "run.json").write_text('{"job_id": "1"}')
    run = Run(tmp_path)
    predicted = kit.predict(run.recipe, run.cluster).time
    assert 0 < forecast_of(run).links_s < min(predicted.step_s, predicted.communication_s)


def test_several_causes_come_in_order_of_their_seconds(tmp_path):
    found = verdict(run_of(tmp_path, 50.0, wait_data_s=1.0, wait_ranks_s=2.0, wait_gpu_s=0.0))
    assert found.waits == pytest.approx({Cause.HOST: 3.0, Cause.RANK: 2.0, Cause.DATA: 1.0}, abs=0.05)
    places = [str(found).index(cause.value) for cause in (Cause.HOST, Cause.RANK, Cause.DATA)]
    assert places == sorted(places)


def test_a_run_without_logged_waits_has_no_verdict(tmp_path):
    log(tmp_path, steps(1, 6))
    run = RunStatus(tmp_path)
    while run.update():
        pass
    assert verdict(run) is None


def test_the_verdict_is_on_the_board(tmp_path):
    run_of(tmp_path, 60.0, wait_data_s=3.1)
    board = watch(tmp_path)
    assert "3.1 s for data" in str(board)
    assert "3.1 s for data" in board.svg()
    board.finish()
