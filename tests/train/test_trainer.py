import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from traceback import StackSummary
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerState

from kit.errors import InputError, KitError
from kit.slurm.folder import RunFolder
from kit.slurm.run import Run
from kit.slurm.states import Phase
from kit.train import patches
from kit.train.__main__ import report
from kit.train.batch import collate, collator, count_tokens
from kit.train.callbacks import Progress, WandbRows, lost_rows
from kit.train.isolation import check_isolation
from kit.train.output import write_durably
from kit.train.pace import Pace, Wait, Waits
from kit.train.trainer import is_sharded, settings
from kit.watch.metrics import Metrics
from kit.watch.wandb_log import find_logs
from tests.conftest import REPOSITORY, kit_in
from tests.train import forked

COMMON = {
    "schedule.max_steps": 6, "schedule.save_every": 0, "tuning.dropout": 0.0, "schedule.lr": 1e-3,
    "model.attention": "sdpa", "parallel.activation_checkpointing": True,
}  # fmt: skip
UNINTERRUPTED = {"schedule.eval_every": 0}
ALONE = {"parallel.gpus_per_node": 1, "schedule.micro_batch": 2}


def assert_paced(rows):
    assert all(row["tokens_per_s"] > 0 and row["step_s"] > 0 for row in rows[1:])
    assert "tokens_per_s" not in rows[0]  # the first step is timed from nowhere


def assert_same_training(two, one):
    """Compare the logged values of a run of two ranks with those of one process."""
    assert_paced(two)
    assert_paced(one)
    assert [h["step"] for h in two] == [h["step"] for h in one] == [1, 2, 3, 4, 5, 6]
    for ours, reference in zip(two, one, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        # Adam magnifies rounding; 1.1e-4 was measured.
        assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=3e-4)
        assert ours["num_tokens"] == reference["num_tokens"]
        assert ours["entropy"] == pytest.approx(reference["entropy"], rel=1e-5)
        assert ours["mean_token_accuracy"] == pytest.approx(reference["mean_token_accuracy"])
    assert two[0]["loss"] != two[-1]["loss"]


def assert_eval_loss_fell(run):
    result = json.loads((run.path / "state" / "result.json").read_text())
    assert result["eval_loss_after"] < result["eval_loss_before"]


@pytest.mark.slow
def test_a_full_fine_tune_under_fsdp2_on_two_ranks_learns_as_one_process_does_with_the_same_batch(recipe, local):
    job = recipe.override(**COMMON, **{"tuning.method": "full", "name": "full"})
    both = [forked.freeze(job, local), forked.freeze(job.override(**ALONE), local)]
    for run in both:
        forked.train(run)
    assert_same_training(*map(forked.history, both))
    assert_eval_loss_fell(both[0])


@pytest.mark.slow
def test_lora_under_fsdp2_on_two_ranks_learns_as_one_process_does_with_the_same_batch(finished_run, tmp_path):
    """The run on two ranks also evaluates and saves at one step, and has variable-length attention, not sdpa.

    The one process is launched by the command line.
    """
    (tmp_path / "alone.toml").write_text(finished_run.recipe.override(**COMMON, **ALONE, **UNINTERRUPTED).toml())
    launched = json.loads(kit_in(tmp_path, "launch", "alone.toml", "--cluster", "local", "--wait", "--json"))
    alone = Run(tmp_path / launched["run"])
    assert alone.path != finished_run.path and alone.state.state == "COMPLETED", alone.log.read_text()
    assert_same_training(forked.history(finished_run), forked.history(alone))
    assert_eval_loss_fell(finished_run)


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_is_complete_trains_no_further_step_where_its_result_is_missing(finished_run):
    before = json.loads((finished_run.path / "state" / "result.json").read_text())
    (finished_run.path / "state" / "result.json").unlink()
    (log,) = find_logs(finished_run.path)
    history = json.loads((finished_run.checkpoints()[-1] / "trainer_state.json").read_text())["log_history"]
    assert lost_rows(finished_run.path, history) == []
    os.truncate(log, log.read_bytes().rfind(b"train/loss", 0, log.stat().st_size * 3 // 4))  # as when it was killed
    assert lost_rows(finished_run.path, history)
    forked.train(finished_run)
    after = json.loads((finished_run.path / "state" / "result.json").read_text())
    assert after["resumed"]
    assert {key: after[key] for key in ("steps", "loss")} == {key: before[key] for key in ("steps", "loss")}
    assert after["eval_loss_after"] == before["eval_loss_after"]
    assert lost_rows(finished_run.path, history) == []  # logged again from the checkpoint


def rows():
    return [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8], "seq_lengths": [2, 2]},
        {"input_ids": [9, 10], "labels": [-100, 10], "seq_lengths": [2]},
    ]


def test_positions_restart_at_each_document_and_padding_counts_for_nothing():
    batch = collate(rows())
    assert batch["position_ids"][:, :4].tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]
    assert batch["labels"][:, :4].tolist() == [[-100, 6, -100, 8], [-100, 10, -100, -100]]
    assert not batch["position_ids"][:, 4:].any() and (batch["labels"][:, 4:] == -100).all()
    assert "attention_mask" not in batch
    assert count_tokens(batch["position_ids"]) == 6


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager", "varlen"])
def test_packed_documents_do_not_see_each_other(recipe, attention):
    assert check_isolation(recipe.override(**{"model.attention": attention})) < 1e-6


def test_the_check_of_compiled_layers_runs_both_ways(recipe, monkeypatch):
    compiled = []
    monkeypatch.setattr("kit.train.isolation.compile_layers", compiled.append)
    assert check_isolation(recipe.override(**{"model.attention": "varlen", "parallel.compile": "on"})) < 1e-6
    assert len(compiled) == 1


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_the_proof_before_training_fails_where_documents_leak(recipe, monkeypatch, attention):
    def leaky(recipe):
        collate = collator(recipe)
        return lambda rows: collate([row | {"seq_lengths": [len(row["input_ids"])]} for row in rows])

    monkeypatch.setattr("kit.train.isolation.collator", leaky)
    words = rf"model\.attention {attention}, packed documents of .*tiny.* see each other: 100% of"
    with pytest.raises(KitError, match=words):
        check_isolation(recipe.override(**{"model.attention": attention}))


def test_the_proof_leaves_no_trace_in_the_random_numbers(recipe):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    check_isolation(recipe)
    assert torch.equal(torch.rand(3), expected)


def test_the_pace_leaves_out_evaluations_and_saves_and_begins_at_the_first_loss(monkeypatch):
    clock = iter([100.0, 110.0, 140.0, 141.0])
    monkeypatch.setattr("kit.train.trainer.time.monotonic", lambda: next(clock))
    pace = Pace(torch.tensor(0))
    pace.leave_out(50.0)  # the evaluation before the first step
    assert pace.at_loss(1, 1000) == {}
    assert pace.at_loss(3, 5000) == {"step_s": 5.0, "tokens_per_s": 400.0}
    pace.leave_out(20.0)
    assert pace.at_loss(4, 6000) == {"step_s": 10.0, "tokens_per_s": 100.0}
    assert pace.at_loss(4, 6000) == {}  # a save logs at a step that was logged


def test_rank_and_device_are_not_fixed_when_the_modules_are_imported(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert is_sharded(recipe.override(**{"parallel.gpus_per_node": 1, "tuning.method": "full"}))
    assert not is_sharded(recipe.override(**{"parallel.gpus_per_node": 1, "tuning.method": "lora"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not is_sharded(recipe.override(**{"parallel.gpus_per_node": 1}))
    with warnings.catch_warnings():
        patches.ignore_renamed_arguments()
        arguments = settings(tmp_path, recipe, 7)
    assert arguments.use_cpu and not arguments.bf16 and arguments.max_steps == 7


def test_progress_is_logged_by_rank_0_alone_in_lines_and_a_file(recipe, local, tmp_path):
    run, console = Run.create(recipe, local, tmp_path, "digest"), io.StringIO()
    state = SimpleNamespace(global_step=2, max_steps=4, logging_steps=1)
    arguments = SimpleNamespace(output_dir=run.path / "checkpoints")
    (run.path / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    (run.path / "checkpoints" / "checkpoint-2" / "trainer_state.json").touch()
    for rank in (1, 0):
        progress = Progress(run, rank, console)
        progress.began = time.monotonic()
        progress.on_log(None, state, None, {"loss": 1.5})
        assert (run.path / "state" / "progress.json").exists() == (rank == 0)
        progress.on_log(arguments, state, None, {"save_blocked_s": 0.4})
        progress.on_log(None, state, None, {"eval_loss": 1.25})
    lines = console.getvalue().splitlines()
    assert lines[0].startswith("step 2/4  loss 1.5000  ") and lines[0].endswith(" left")
    assert lines[1:] == ["step 2/4  saved checkpoint-2 (training blocked 0.40 s)", "step 2/4  eval loss 1.2500"]
    (run.path / "checkpoints" / "checkpoint-2" / "trainer_state.json").unlink()
    progress.on_log(arguments, state, None, {"save_blocked_s": 0.1})
    progress.report_complete(run.path / "checkpoints" / "checkpoint-2", 2.5)
    assert console.getvalue().splitlines()[3:] == [
        "step 2/4  writing checkpoint-2 (training blocked 0.10 s)",
        "checkpoint-2 is complete (2.50 s in the background)",
    ]
    assert json.loads((run.path / "state" / "progress.json").read_text())["step"] == 2


def test_progress_that_cannot_be_written_is_reported_once_and_training_goes_on(recipe, local, tmp_path):
    run, console = Run.create(recipe, local, tmp_path, "digest"), io.StringIO()
    progress = Progress(run, 0, console)
    run.state_folder.progress.mkdir()  # no file can take its place
    for step in (1, 2, 3):
        if step == 3:
            run.state_folder.progress.rmdir()
        progress.on_log(None, SimpleNamespace(global_step=step, max_steps=4, logging_steps=1), None, {"loss": 1.5})
    assert console.getvalue().count("progress.json cannot be written") == 1
    assert json.loads(run.state_folder.progress.read_text())["step"] == 3


FULL = """
import os, sys
from pathlib import Path
from kit.slurm.folder import RunFolder
from kit.train.output import redirect_output
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
console = redirect_output(RunFolder(Path(sys.argv[1])), 0)
if sys.argv[2] == "full":
    os.dup2(1, 3)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    os.dup2(1, 2)
for _ in range(1000):
    print("a line" * 100, file=console, flush=True)
    print("another" * 100)
    print("a third", file=sys.stderr)
console.flush()
sys.stdout.flush()
sys.exit(7)
"""


@pytest.mark.parametrize("log", ["good", "absent", "full"])
def test_output_that_cannot_be_written_is_lost_and_the_process_goes_on(tmp_path, log):
    if log != "absent":
        (tmp_path / "logs").mkdir()
    command = [sys.executable, "-c", FULL, tmp_path, log]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    if log == "good":
        assert (tmp_path / "logs" / "rank-000.log").read_text().count("a third") == 1000


def test_the_result_is_written_as_soon_as_that_is_possible_again_and_else_is_an_error(tmp_path):
    path, said = tmp_path / "state" / "result.json", []

    def say(text):
        said.append(text)
        path.parent.mkdir()

    write_durably(path, "{}", say, pauses=(0, 0))
    assert path.read_text() == "{}" and len(said) == 1 and "cannot be written (No such file" in said[0]
    with pytest.raises(OSError, match="No such file"):
        write_durably(tmp_path / "nowhere" / "result.json", "{}", said.append, pauses=(0, 0))
    assert len(said) == 3


def test_training_goes_on_without_wandb_where_that_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "neither")
    said = []
    rows, state = WandbRows(RunFolder(tmp_path), said.append), TrainerState(is_world_process_zero=True)
    arguments = SimpleNamespace(to_dict=dict, run_name="r", output_dir="o", logging_steps=1)
    rows.on_train_begin(arguments, state, None, model=None)
    rows.on_log(arguments, state, None, logs={"loss": 1.0})
    assert len(said) == 1 and "W&B does not log any more" in said[0] and "training goes on" in said[0]


@pytest.mark.parametrize("how", ["file", "signal", "no"])
def test_training_saves_and_stops_after_the_step_at_which_it_is_asked_to(recipe, local, tmp_path, how, monkeypatch):
    run = Run.create(recipe, local, tmp_path, "digest")
    progress = Progress(run, 0, io.StringIO())
    monkeypatch.setattr("kit.train.callbacks.reduce", lambda tensor: tensor)  # of one rank
    before = signal.getsignal(signal.SIGTERM)
    progress.on_train_begin(None, SimpleNamespace(global_step=0), None)
    try:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif how == "file":
            (run.path / "state" / "stop").touch()
        control = SimpleNamespace(should_save=False, should_training_stop=False, should_log=False)
        progress.on_step_end(SimpleNamespace(device=torch.device("cpu")), None, control)
    finally:
        signal.signal(signal.SIGTERM, before)
    asked = how != "no"
    assert vars(control) == {"should_save": asked, "should_training_stop": asked, "should_log": asked}
    assert progress.terminated == (how == "signal")


def test_an_error_is_one_line_in_the_jobs_log_and_ends_with_its_own_exit_code(recipe, local, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    run, console = Run.create(recipe, local, tmp_path, "digest"), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert report(InputError("wrong key\nmore"), Progress(run, 3, console)) == 2
        assert report(RuntimeError("boom"), Progress(run, 3, console)) == 1
        full = {rank: (OSError(28, "No space left on device"), StackSummary()) for rank in (1, 0)}
        assert report(CheckpointException("", full), Progress(run, 0, console)) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    first, second, third = console.getvalue().splitlines()
    assert first == "[rank 3 on node7] InputError: wrong key (logs/rank-003.log)"
    assert second == "[rank 3 on node7] RuntimeError: boom (logs/rank-003.log)"
    words = "OSError: [Errno 28] No space left on device, on 2 ranks in a save or load of a checkpoint"
    assert third == f"[rank 0 on node7] {words} (logs/rank-000.log)"


def test_waits_are_seconds_a_step_and_begin_anew_after_each_row():
    waits, accelerator = Waits(), Accelerator(cpu=True)
    assert waits.row(accelerator) == {}
    for _ in range(2):
        with waits.timed(Wait.DATA):
            time.sleep(0.02)
        waits.steps += 1
    assert waits.row(accelerator)["wait_data_s"] == pytest.approx(0.02, abs=0.019)
    assert waits.row(accelerator) == {}


@pytest.mark.slow
def test_a_run_logs_its_waits_and_the_tokens_that_it_trains_on_and_says_what_it_does(finished_run):
    metrics = Metrics(finished_run.path)
    while metrics.poll():
        pass
    series = metrics.series
    assert len(series["train/wait_data_s"].values) == len(series["train/loss"].values)
    assert set(series["train/slowest_rank"].values) <= {0, 1}
    waits, step_s = series["train/wait_data_s"].values[1:], series["train/step_s"].values  # the first log has no pace
    assert all(0 <= wait < seconds for wait, seconds in zip(waits, step_s, strict=True))
    assert 0 < sum(series["train/loss_tokens"].values) < series["train/num_tokens"].values[-1]
    assert finished_run.state_folder.read_phase().phase is Phase.TRAINING
