import io
import json
import os
import signal
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from kit.errors import InputError, KitError
from kit.slurm import launch as slurm
from kit.slurm.run import Run
from kit.train import patches
from kit.train.__main__ import report
from kit.train.callbacks import Progress
from kit.train.isolation import check_isolation, collate, count_tokens
from kit.train.trainer import Pace, is_sharded, settings

COMMON = {"schedule.max_steps": 6, "schedule.save_every": 0, "tuning.dropout": 0.0, "schedule.lr": 1e-3}
ALONE = {"parallel.gpus_per_node": 1, "schedule.micro_batch": 2}


def finished(run):
    end = run.wait(timeout=400)
    assert end.state == "COMPLETED", run.log.read_text()
    state = json.loads((run.checkpoints()[-1] / "trainer_state.json").read_text())
    history = [h for h in state["log_history"] if "loss" in h]
    assert all(h["tokens_per_s"] > 0 and h["step_s"] > 0 for h in history[1:])
    assert "tokens_per_s" not in history[0]  # the first step is timed from nowhere
    return history


@pytest.mark.slow
@pytest.mark.parametrize(("method", "interruptions"), [
    ("full", {}),
    ("lora", {"schedule.eval_every": 2, "schedule.save_every": 2}),  # also: an evaluation and a save at one step
])  # fmt: skip
def test_fsdp2_on_two_ranks_learns_as_one_process_does_with_the_same_batch(recipe, local, method, interruptions):
    job = recipe.override(**COMMON, **{"tuning.method": method, "name": method})
    both = [slurm.launch(job.override(**interruptions), local), slurm.launch(job.override(**ALONE), local)]
    two, one = map(finished, both)
    assert [h["step"] for h in two] == [h["step"] for h in one] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(two, one, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=3e-4)  # Adam magnifies rounding; 1.1e-4 seen
        assert a["num_tokens"] == b["num_tokens"]
    assert two[0]["loss"] != two[-1]["loss"]
    result = json.loads((both[0].path / "state" / "result.json").read_text())
    assert result["eval_loss_after"] < result["eval_loss_before"]


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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(recipe, attention):
    assert check_isolation(recipe.override(**{"model.attention": attention})) < 1e-6


def test_the_proof_before_training_fails_where_documents_leak(recipe, monkeypatch):
    def leaky(rows):
        return collate([row | {"seq_lengths": [len(row["input_ids"])]} for row in rows])

    monkeypatch.setattr("kit.train.isolation.collate", leaky)
    with pytest.raises(KitError, match=r"model\.attention sdpa, packed documents of .*tiny.* see each other: 100% of"):
        check_isolation(recipe)


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
    assert is_sharded(recipe.override(**{"parallel.gpus_per_node": 1}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not is_sharded(recipe.override(**{"parallel.gpus_per_node": 1}))
    with warnings.catch_warnings():
        patches.ignore_renamed_arguments()
        arguments = settings(tmp_path, recipe, 7)
    assert arguments.use_cpu and not arguments.bf16 and arguments.max_steps == 7


def test_progress_is_logged_by_rank_0_alone_in_lines_and_a_file(recipe, local, tmp_path):
    run, console = Run.create(recipe, local, tmp_path, "digest"), io.StringIO()
    state = SimpleNamespace(global_step=2, max_steps=4)
    for rank in (1, 0):
        progress = Progress(run, rank, console)
        progress.began = time.monotonic()
        progress.on_log(None, state, None, {"loss": 1.5})
        assert (run.path / "state" / "progress.json").exists() == (rank == 0)
        progress.on_log(None, state, None, {"save_blocked_s": 0.4})
        progress.on_log(None, state, None, {"eval_loss": 1.25})
    lines = console.getvalue().splitlines()
    assert lines[0].startswith("step 2/4  loss 1.5000  ") and lines[0].endswith(" left")
    assert lines[1:] == ["step 2/4  saved checkpoint-2 (training blocked 0.40 s)", "step 2/4  eval loss 1.2500"]
    assert json.loads((run.path / "state" / "progress.json").read_text())["step"] == 2


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
        progress.on_step_end(SimpleNamespace(device="cpu"), None, control)
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
    finally:
        signal.signal(signal.SIGTERM, before)
    first, second = console.getvalue().splitlines()
    assert first == "[rank 3 on node7] InputError: wrong key (logs/rank-003.log)"
    assert second == "[rank 3 on node7] RuntimeError: boom (logs/rank-003.log)"
