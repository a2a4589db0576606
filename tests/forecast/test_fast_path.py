"""The forecast of variable-length attention, compiled layers and fp8 or nf4 weights against tests/truth/fast.csv."""

import csv
import json

import pytest

from kit.check import probe
from kit.config.cluster import Cluster, Link, Links, Nodes
from kit.config.recipe import Data, Model, Recipe
from kit.forecast.fit import memory
from kit.forecast.shape import load_shape
from kit.forecast.timing import predict
from kit.forecast.work import micro_batch
from tests.conftest import REPOSITORY

TRUTH = REPOSITORY / "tests" / "truth"


def rows():
    with (TRUTH / "fast.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def name(row):
    words = (
        row["code"],
        row["method"],
        row["base"],
        row["attention"],
        f"compile-{row['compile']}",
        row["strategy"],
        row["gpus"],
    )
    return "-".join((*words, f"b{row['micro_batch']}", f"{len(row['targets'].split())}-targets", row["dropout"]))


def recipe_of(row):
    keys = {
        "tuning.method": row["method"], "model.base": row["base"], "parallel.strategy": row["strategy"],
        "parallel.sharding": row["sharding"], "parallel.gpus_per_node": row["gpus"], "parallel.compile": row["compile"],
        "parallel.activation_checkpointing": row["checkpointing"].lower(), "data.seq_len": row["seq_len"],
        "schedule.micro_batch": row["micro_batch"], "schedule.grad_accum": row["grad_accum"],
    }  # fmt: skip
    if row["method"] != "full":
        keys |= {"tuning.target_modules": row["targets"].split(), "tuning.dropout": row["dropout"]}
    if row["base"] == "nf4":
        del keys["model.base"]  # the method sets it
    return Recipe("row", Model(row["model"], attention=row["attention"]), Data("none")).override(**keys)


def h200s():
    """Two H200s of one host, as kit.check.probe found them."""
    nodes = Nodes(gpus=2, gpu="H200", gpu_memory_gib=139.8, gpu_bf16_tflops=989.0, cpus=32, ram_gib=256.0)
    found = json.loads((TRUTH / "probe_h200x2.json").read_text())
    return probe.apply(found, Cluster("here", nodes, Links(Link("nvlink4", 450.0))))


def manifest_of(row):
    """Of a dataset whose documents are all as long as the row's are on average, weighted by tokens."""
    splits = {"train": {"rows": 1000, "tokens": 1000 * int(row["row_tokens"])}}
    return {"splits": splits, "lengths": {"upto": [int(row["document_tokens"])], "documents": [1]}}


def test_the_rows_name_their_card_and_versions():
    assert len(rows()) >= 16
    for row in rows():
        assert row["card"] and row["code"] and row["torch"] and row["transformers"] and row["trl"] and row["peft"]


@pytest.mark.parametrize("row", [row for row in rows() if row["allocated_gib"]], ids=name)
def test_no_measured_peak_is_above_its_forecast_and_none_is_ten_percent_below(row):
    measured = float(row["allocated_gib"])
    assert measured <= memory(recipe_of(row), h200s()).allocated_gib <= 1.1 * measured


@pytest.mark.parametrize("row", [row for row in rows() if row["tokens_per_s_per_gpu"]], ids=name)
def test_measured_speeds_are_forecast_within_ten_percent(row):
    found = predict(recipe_of(row), h200s(), manifest_of(row)).time
    assert found.tokens_per_s_per_gpu == pytest.approx(float(row["tokens_per_s_per_gpu"]), rel=0.1)


def test_fp8_weights_of_llama_8b_take_eight_and_a_half_gibibytes():
    row = next(row for row in rows() if row["base"] == "fp8")
    assert memory(recipe_of(row), h200s()).terms_gib["weights"] == pytest.approx(8.5, abs=0.05)


def test_mfu_leaves_recomputation_out_and_hfu_counts_it():
    row = next(row for row in rows() if row["method"] == "full")
    job = recipe_of(row)
    again = predict(job, h200s(), manifest_of(row)).time
    once = predict(job.override(**{"parallel.activation_checkpointing": False}), h200s(), manifest_of(row)).time
    assert again.mfu * again.step_s == pytest.approx(once.mfu * once.step_s)
    assert again.hfu * again.step_s > 1.25 * once.hfu * once.step_s
    assert once.hfu == pytest.approx(once.mfu, rel=0.05)
    assert once.of_matmul_rate == pytest.approx(once.mfu / h200s().nodes.gpu_efficiency)


def test_the_share_of_the_matmul_rate_is_unknown_where_none_was_measured():
    bare = Cluster("bare", Nodes(gpus=2, gpu="H200", gpu_memory_gib=139.8, gpu_bf16_tflops=989.0, ram_gib=256.0))
    row = rows()[0]
    assert predict(recipe_of(row), bare, manifest_of(row)).time.of_matmul_rate is None


def test_only_pairs_inside_of_documents_are_useful():
    row = rows()[0]
    short, long = (
        predict(recipe_of(row), h200s(), manifest_of(row | {"document_tokens": tokens})).time
        for tokens in ("100", "4096")
    )
    assert long.mfu * long.step_s > 1.05 * short.mfu * short.step_s
    assert long.step_s > short.step_s


def test_attention_work_follows_the_length_of_documents_under_varlen_alone():
    shape = load_shape("meta-llama/Llama-3.1-8B")
    for attention, changes in (("varlen", True), ("sdpa", False)):
        job = recipe_of(rows()[0]).override(**{"model.attention": attention})
        short, long = (micro_batch(shape, job, 4096, 4096, document).training.attention for document in (256, 4096))
        assert (long > short) == changes


def test_the_loss_of_a_frozen_head_projects_twice_and_not_three_times():
    shape, row = load_shape("meta-llama/Llama-3.1-8B"), rows()[0]
    plain = recipe_of(row).override(**{"model.attention": "sdpa"})
    head = 2 * shape.embedding * 4096

    def matmul(job):
        return micro_batch(shape, job, 4096, 4096).training.matmul

    saved = matmul(plain) - matmul(recipe_of(row))
    assert saved == pytest.approx(head)
