from typing import Any

import pytest

from kit.cluster import Cluster, Link, Links, Nodes, Paths, Storage
from kit.errors import InputError
from kit.recipe import Data, Model, Parallel, Recipe, Schedule, Tuning
from kit.timing import predict

LLAMA_8B = "meta-llama/Llama-3.1-8B"
# The published 405B run: 2 nodes of 8 RTX PRO 6000 (503.8 TFLOPS dense bf16), 100 GbE, NFS; 8 h 24 min, 36 steps.
PCIE = Cluster(
    "two-node-pcie",
    Nodes(count=2, gpus=8, gpu="RTX PRO 6000", gpu_memory_gib=95.0, gpu_bf16_tflops=503.8, cpus=128, ram_gib=3900.0),
    Links(Link("pcie5", 50.0), Link("100GbE", 12.5, 0.47)),
    paths=Paths("/pool/checkpoints", "/pool/hf_cache"),
    storage={"root": Storage("/", "local", 1.0), "pool": Storage("/pool", "nfs", 10.0)},
)
H100 = Cluster(
    "h100",
    Nodes(count=8, gpus=8, gpu_memory_gib=79.6, gpu_bf16_tflops=989.0, cpus=96, ram_gib=1900.0),
    Links(Link("nvlink", 450.0), Link("rdma", 400.0)),
)
REFERENCE = Recipe(
    "reference",
    Model("meta-llama/Llama-3.1-405B-Instruct"),
    Data("OpenAssistant/oasst2", seq_len=2048, tokens=2_298_000, eval_tokens=123_000),
    Tuning("lora", 32, 64),
    Parallel("fsdp2", nodes=2, gpus_per_node=8),
    Schedule(micro_batch=1, grad_accum=2, eval_every=2, save_every=20),
)


def recipe(**changes: Any) -> Recipe:
    base = Recipe(
        "test",
        Model(LLAMA_8B),
        Data("none", tokens=10_000_000, eval_tokens=100_000),
        Tuning("full"),
        Parallel("fsdp2", gpus_per_node=8),
    )
    return base.override(**{key.replace("__", "."): value for key, value in changes.items()})


def test_the_published_405b_run_takes_its_wall_time_within_ten_percent() -> None:
    time = predict(REFERENCE, PCIE).time
    assert time.optimizer_steps == 36
    assert time.wall_h == pytest.approx(8.4, rel=0.10)
    assert time.split_h is not None
    assert sum(time.split_h.values()) == pytest.approx(time.wall_h)
    assert 0.25 < time.split_h["eval"] / time.wall_h < 0.40  # 18 evaluations of 4 batches gather the model 72 times


def test_the_published_405b_run_leaves_files_of_its_size() -> None:
    stored = predict(REFERENCE, PCIE).storage
    assert stored.adapter_gb == pytest.approx(1.62, abs=0.005)
    assert stored.checkpoint_gb == pytest.approx(3 * stored.adapter_gb)  # fp32 adapters with two Adam states
    assert stored.merged_gb == pytest.approx(811.7, abs=0.05)


def test_the_answer_has_the_contract_s_keys_and_plain_values() -> None:
    found = predict(REFERENCE, PCIE).as_dict()
    assert set(found) == {"parameters", "trainable_parameters", "memory", "time", "storage", "warnings"}
    assert {
        "allocated_gib", "reserved_gib", "device_gib", "peak_phase", "terms_gib", "capacity_gib", "verdict",
        "cheapest_fix",
    } <= set(found["memory"])  # fmt: skip
    assert {"optimizer_steps", "step_s", "tokens_per_s_per_gpu", "mfu", "wall_h", "split_h"} <= set(found["time"])
    assert set(found["time"]["split_h"]) == {"train", "eval", "save", "load"}
    assert set(found["storage"]) == {"checkpoint_gb", "adapter_gb", "merged_gb"}
    assert isinstance(found["memory"]["reserved_gib"], list)


def test_evaluation_and_a_slow_link_are_warned_of() -> None:
    words = " ".join(predict(REFERENCE, PCIE).warnings)
    assert "Evaluation takes 34% of the run" in words
    assert "Communication takes 13 times as long as compute" in words
    assert predict(recipe(schedule__micro_batch=4), H100).warnings == ()


@pytest.mark.parametrize(
    ("rows", "changes", "steps"),
    [
        (1123, {}, 36),  # 71 batches of 16 rows, two to a step
        (1123, {"schedule__epochs": 2.0}, 72),
        (1123, {"schedule__epochs": 0.5}, 18),
        (1, {}, 1),
        (1123, {"schedule__max_steps": 5}, 5),
    ],
)
def test_optimizer_steps_are_counted_as_the_trainer_does(rows: int, changes: dict[str, Any], steps: int) -> None:
    job = REFERENCE.override(**{key.replace("__", "."): value for key, value in changes.items()})
    assert job.optimizer_steps(rows) == steps


def test_a_manifest_wins_over_the_recipe_s_tokens() -> None:
    manifest = {"splits": {"train": {"rows": 640, "tokens": 640 * 2000}, "eval": {"rows": 16, "tokens": 32000}}}
    assert predict(recipe(), H100, manifest).time.optimizer_steps == 80


def test_without_sizes_only_the_step_is_forecast() -> None:
    found = predict(recipe(data__tokens=0), H100)
    assert found.time.step_s is not None
    assert found.time.wall_h is None
    assert "only the step is forecast" in found.warnings[0]
    assert predict(recipe(data__packing=False), H100).time.wall_h is None


def test_a_profile_without_tflops_gives_memory_and_says_why_no_time() -> None:
    found = predict(recipe(), Cluster("bare", Nodes(gpus=8, gpu_memory_gib=79.6, ram_gib=1900.0)))
    assert found.time.step_s is None
    assert found.memory.verdict == "fits"
    assert "gpu_bf16_tflops" in found.warnings[0]


def test_a_link_that_moves_nothing_is_refused() -> None:
    still = Cluster("still", H100.nodes, Links(Link("nvlink", 0.0), Link("rdma", 400.0)))
    with pytest.raises(InputError, match="'nvlink' link has gb_s = 0"):
        predict(recipe(), still)


def test_frozen_weights_and_recomputation_are_told_apart() -> None:
    """Per weight and token 6 FLOPs full and 4 with adapters; checkpointing adds 2 that are not useful."""
    full = predict(recipe(parallel__activation_checkpointing=False), H100).time
    lora = predict(recipe(parallel__activation_checkpointing=False, tuning__method="lora"), H100).time
    again = predict(recipe(), H100).time
    assert full.compute_s and lora.compute_s and again.compute_s and full.mfu and full.step_s
    tokens, weights = 2048, 8.03e9 - 128256 * 4096
    assert full.mfu * full.step_s * 989e12 == pytest.approx(6 * weights * tokens, rel=0.05)  # and attention
    assert lora.compute_s / full.compute_s == pytest.approx(4 / 6, rel=0.05)
    assert again.compute_s / full.compute_s == pytest.approx(8 / 6, rel=0.05)


def test_gathers_cross_the_slowest_link_once_forward_and_once_backward() -> None:
    """All of the model but the 1/16 a rank holds, over one 100 GbE NIC: 60.9 s a gather at line rate."""
    line = Cluster("line", PCIE.nodes, Links(Link("pcie5", 50.0), Link("100GbE", 12.5, 1.0)))
    job = REFERENCE.override(**{"parallel.strategy": "zero3", "schedule.grad_accum": 1})
    time = predict(job, line).time
    assert time.communication_s == pytest.approx(2 * 60.9, rel=0.01)
    kept = predict(job.override(**{"parallel.strategy": "fsdp2", "parallel.sharding": "grad_op"}), line).time
    assert kept.communication_s == pytest.approx(60.9, rel=0.01)


def test_hybrid_sharding_keeps_the_weights_off_the_slow_link() -> None:
    full, hybrid = (predict(REFERENCE.override(**{"parallel.sharding": s}), PCIE).time for s in ("full", "hybrid"))
    assert full.communication_s and hybrid.communication_s
    assert hybrid.communication_s < 0.3 * full.communication_s


def test_one_process_communicates_nothing() -> None:
    time = predict(recipe(parallel__gpus_per_node=1, parallel__strategy="ddp"), H100).time
    assert time.communication_s == 0
    assert time.step_range_s == (time.compute_s, time.compute_s)


def test_a_cpu_profile_states_what_a_process_sustains() -> None:
    cpu = Cluster("cpu", Nodes(gpus=0, gpu_bf16_tflops=0.05, cpus=2, ram_gib=24.0))
    job = recipe(model__name="HuggingFaceTB/SmolLM2-135M-Instruct", parallel__gpus_per_node=2, data__seq_len=512)
    time = predict(job, cpu).time
    assert time.mfu is not None
    assert 0.6 < time.mfu < 1.0  # all of the rate but what recomputation and communication take
