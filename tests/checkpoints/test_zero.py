"""Checkpoints that DeepSpeed itself has written, read without it."""

import json
import math
import shutil

import pytest
import torch

from kit.checkpoints.formats import zero
from kit.checkpoints.formats.base import ProblemKind
from kit.checkpoints.formats.boxes import boxes_of_range, covers
from kit.checkpoints.inspect import complete, inspect
from kit.checkpoints.weights import read_headers, read_tensors
from kit.errors import KitError
from tests import shared
from tests.conftest import oracle
from tests.ranks import run_ranks

RANKS = 3  # sizes below are not multiples of it, so the last rank's parts are padded
SAVE = """
import sys
import torch
import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cube = torch.nn.Parameter(torch.rand(5, 3, 7))
        self.matrix = torch.nn.Parameter(torch.rand(4, 11))
        self.one = torch.nn.Parameter(torch.rand(1))
        self.register_buffer("kept", torch.arange(6.0))

    def forward(self):
        return self.cube.sum() * self.matrix.square().sum() * self.one.sum()


for stage in (2, 3):
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "sub_group_size": 40},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.backward(engine())
        engine.step()
    folder = f"{sys.argv[1]}/stage{stage}/checkpoint-2"
    engine.save_checkpoint(folder)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        whole = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    if engine.global_rank == 0:
        torch.save(whole, f"{sys.argv[1]}/stage{stage}/whole.pt")
"""


def save(folder):
    package = oracle("deepspeed-0.19.8")
    (folder / "save.py").write_text(SAVE)
    run_ranks(RANKS, folder / "save.py", folder, packages=[package])
    for stage in (2, 3):  # what transformers' Trainer writes with it
        checkpoint = folder / f"stage{stage}" / "checkpoint-2"
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
        for rank in range(RANKS):
            torch.save({}, checkpoint / f"rng_state_{rank}.pth")


@pytest.fixture(params=[2, 3])
def stage(request):
    return request.param


@pytest.fixture
def checkpoint(stage, tmp_path):
    saved = shared.once("zero-checkpoints", save) / f"stage{stage}"
    shutil.copytree(saved, tmp_path / "saved")
    return tmp_path / "saved" / "checkpoint-2"


@pytest.mark.slow
def test_weights_are_those_that_deepspeed_gathers(checkpoint):
    whole = torch.load(checkpoint.parent / "whole.pt")
    weights = read_headers(checkpoint)
    assert (weights.format, weights.problems) == ("deepspeed", ())
    assert {name: info.shape for name, info in weights.tensors.items()} == {
        name: tuple(value.shape) for name, value in whole.items()
    }
    read = dict(read_tensors(weights, weights.tensors))
    assert read.keys() == whole.keys()
    assert all(torch.equal(read[name], whole[name]) for name in whole)
    assert whole["matrix"].unique().numel() == 44


@pytest.mark.slow
def test_a_complete_checkpoint_has_no_problems_and_all_values_are_read(checkpoint):
    found = inspect(checkpoint, values=True, world=RANKS)
    assert (found.problems, found.ranks, found.tensors, found.all_finite) == ((), RANKS, 4, True)
    assert complete(checkpoint, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("*zero_pp_rank_0_*optim_states.pt", "lacks the optimizer state of rank 0"),
        ("*zero_pp_rank_1_*optim_states.pt", "lacks the optimizer state of 1 of 3 ranks: 1"),
        ("*mp_rank_00_model_states.pt", "has the model states of"),
    ],
)
def test_a_file_that_is_missing_is_named(checkpoint, name, words):
    next((checkpoint / "global_step2").glob(name)).unlink()
    found = inspect(checkpoint, world=RANKS)
    assert [problem.kind for problem in found.problems if words in problem.message] == [ProblemKind.MISSING_FILE]
    assert not complete(checkpoint, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["*zero_pp_rank_2_*optim_states.pt", "*mp_rank_00_model_states.pt"])
def test_a_truncated_file_is_named(checkpoint, name):
    file = next((checkpoint / "global_step2").glob(name))
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    (problem,) = (each for each in inspect(checkpoint).problems if each.kind is ProblemKind.DAMAGED_FILE)
    assert str(file) in problem.message and "truncated" in problem.message
    assert not complete(checkpoint)


@pytest.mark.slow
def test_a_folder_that_was_not_copied_is_named(checkpoint):
    (checkpoint / "latest").write_text("global_step9\n")
    (problem,) = (each for each in inspect(checkpoint).problems if each.kind is ProblemKind.MISSING_FILE)
    assert "latest names global_step9, which does not exist" in problem.message


@pytest.mark.slow
def test_an_optimizer_that_lacks_a_rank_makes_a_checkpoint_with_an_adapter_incomplete(checkpoint):
    from safetensors.torch import save_file

    save_file(
        {"x.lora_A.weight": torch.ones(1), "x.lora_B.weight": torch.ones(1)}, checkpoint / "adapter_model.safetensors"
    )
    assert inspect(checkpoint, world=RANKS).format == "peft adapter"
    assert complete(checkpoint, RANKS)
    next((checkpoint / "global_step2").glob("*zero_pp_rank_2_*optim_states.pt")).unlink()
    assert ProblemKind.MISSING_FILE in inspect(checkpoint, world=RANKS).kinds
    assert not complete(checkpoint, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3])  # in stage 2 the weights are complete in one file
def test_a_part_of_another_save_is_refused_and_not_read_as_weights(checkpoint):
    (other,) = (shared.once("zero-checkpoints", save) / "stage2").rglob("*zero_pp_rank_1_*optim_states.pt")
    (file,) = checkpoint.rglob("*zero_pp_rank_1_*optim_states.pt")
    shutil.copy(other, file)
    weights = read_headers(checkpoint)
    with pytest.raises(KitError, match="does not hold all values of its rank's part"):
        list(read_tensors(weights, weights.tensors))


def test_classes_of_other_packages_than_deepspeed_are_not_made(tmp_path):
    class Bomb:
        def __reduce__(self):
            return print, ("run",)

    (tmp_path / "latest").write_text("global_step1")
    (tmp_path / "global_step1").mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"module": Bomb()}, tmp_path / "global_step1" / name)
    found = zero.read_headers([tmp_path / "latest"])
    assert [problem.kind for problem in found.problems] == [ProblemKind.DAMAGED_FILE]


@pytest.mark.parametrize("shape", [(), (7,), (4, 3), (3, 2, 5), (2, 1, 3, 2)])
def test_the_boxes_of_a_range_hold_its_values_in_their_order(shape):
    values = torch.arange(math.prod(shape)).reshape(shape)
    for start in range(values.numel()):
        for end in range(start + 1, values.numel() + 1):
            boxes = list(boxes_of_range(start, end, shape))
            parts = [
                values[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] for box in boxes
            ]
            assert torch.cat([part.flatten() for part in parts]).tolist() == list(range(start, end))
            rest = [*boxes_of_range(0, start, shape)] if start else []
            rest += boxes_of_range(end, values.numel(), shape) if end < values.numel() else []
            assert covers([*boxes, *rest], shape)
