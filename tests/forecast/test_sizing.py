import pytest

from kit.errors import InputError
from kit.forecast.shape import load_shape
from kit.forecast.sizing import parallel_split, sizing, zero_table

LLAMA_8B, LLAMA_70B, LLAMA_405B = (f"meta-llama/Llama-3.1-{n}" for n in ("8B", "70B", "405B"))


def test_the_smallest_number_of_gpus_agrees_with_what_was_measured() -> None:
    """h100.csv: an 8B LoRA and a full 8B in pure bf16 ran on one GPU, a 70B LoRA on four."""
    assert sizing(LLAMA_8B, "lora", 79.2)["ddp"] == 1
    assert sizing(LLAMA_8B, "full", 79.2)["ddp"] == 1
    found = sizing(LLAMA_70B, "lora", 79.2)
    assert found["fsdp2"] == 4
    assert found["ddp"] is None


def test_zero_stages_divide_what_the_paper_says() -> None:
    """ZeRO paper, table 1: a 7.5B model on 64 GPUs takes 120, 31.4, 16.6 and 1.88 GB at 16 bytes a parameter."""
    shape = load_shape(LLAMA_8B)
    rows = zero_table(shape, 64)
    paper = [120 / 7.5, 31.4 / 7.5, 16.6 / 7.5, 1.88 / 7.5]
    for row, each in zip(rows, paper, strict=True):
        assert row["total"] == pytest.approx(each * shape.total / 2**30, rel=0.01)
    assert [row["replicated"] for row in rows] == [
        "weights, gradients, optimizer", "weights, gradients", "weights", "",
    ]  # fmt: skip


def test_a_split_holds_its_part_of_the_model() -> None:
    shape = load_shape(LLAMA_405B)
    assert parallel_split(shape).parameters == shape.total
    split = parallel_split(shape, tensor=8, pipeline=16)
    stage = 8 * shape.layer + shape.embedding  # 126 layers on 16 stages: 8 on the fullest
    assert split.parameters == pytest.approx(stage / 8, rel=0.001)
    assert split.state_gib == pytest.approx(split.parameters * 16 / 2**30)


def test_expert_ranks_divide_experts_alone() -> None:
    shape = load_shape("mistralai/Mixtral-8x7B-v0.1")
    experts = 32 * 8 * 3 * 4096 * 14336
    assert parallel_split(shape, expert=8).parameters == shape.total - experts * 7 // 8


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ({"tensor": 3}, "tensor = 3 does not divide the 32 attention heads"),
        ({"pipeline": 64}, "pipeline = 64 is more than the 32 layers"),
        ({"expert": 2}, "expert = 2 needs experts"),
        ({"tensor": 0}, "count ranks, from 1; they are 0, 1, 1"),
    ],
)
def test_an_impossible_split_names_what_does_not_divide(split: dict[str, int], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parallel_split(load_shape(LLAMA_8B), **split)
