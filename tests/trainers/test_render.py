"""Recipes rendered for other trainers: what their parsers said, what their rows are, and what is refused."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.handover import LINE_FILES, TOKEN_FILES, Rows, documents, replies, write
from kit.errors import InputError
from kit.lint.lint import lint
from kit.slurm.environment import NOTHING_LEAVES
from kit.slurm.render import render
from kit.trainers.catalog import OTHERS
from tests.trainers.rendered import CASES, HERE, ask, config_lines, render_case

RECORDED = {name: json.loads((HERE / f"{name}.json").read_text()) for name in CASES}
CACHE = os.environ.get("KIT_TRAINERS", "")


@pytest.fixture(scope="module")
def prepared(smollm2, tmp_path_factory):
    from kit.data.dataset import prepare

    return prepare(Recipe.load("demo"), tmp_path_factory.mktemp("prepared"), progress=False)


@pytest.mark.parametrize("name", CASES)
def test_the_trainers_own_parser_accepted_every_case_in_the_versions_that_the_renderer_knows(name):
    assert set(RECORDED[name]["cases"]) == set(CASES[name][1])
    assert {case: said["answer"] for case, said in RECORDED[name]["cases"].items()} == dict.fromkeys(
        CASES[name][1], "accepted"
    )
    assert RECORDED[name]["versions"].items() <= dict(OTHERS[name].KNOWN).items()


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in CASES for case in CASES[name][1]])
def test_what_is_rendered_is_what_the_parser_accepted(name, case, smollm2, tmp_path):
    render_case(name, case, tmp_path / case)
    again = f"python -m tests.trainers.rendered CACHE {name}"
    recorded = RECORDED[name]["cases"][case]["file"]
    assert config_lines(tmp_path / case, name) == recorded, f"changed: ask the parser again: {again}"


@pytest.mark.parametrize("name", CASES)
def test_the_trainers_own_parser_accepts_what_is_rendered_now(name, smollm2, tmp_path):
    if not (Path(CACHE) / name / ".ready").is_file():
        pytest.skip(f"no environment of {name}: bash env/trainers/{name} CACHE, then set KIT_TRAINERS=CACHE")
    assert ask(name, CACHE, tmp_path) == RECORDED[name]


@pytest.mark.parametrize("name", CASES)
def test_the_job_script_sends_nothing_and_the_linter_finds_no_error(name, smollm2, tmp_path):
    case = next(iter(CASES[name][1]))
    render_case(name, case, tmp_path / case)
    script = (tmp_path / case / "job.sbatch").read_text()
    exported = dict(re.findall(r"^export (\w+)=(\S*)$", script, re.MULTILINE))
    assert NOTHING_LEAVES.items() <= exported.items() and exported["WANDB_MODE"] == "offline"
    assert [found for found in lint(script, "job.sbatch") if found.severity == "error"] == []


def test_packed_rows_keep_their_labels_and_the_bounds_of_their_documents(prepared, tmp_path):
    import datasets

    counts = write(prepared, Rows.PACKED, tmp_path / "data")
    ours, theirs = prepared.rows("train"), datasets.load_from_disk(str(tmp_path / "data"))["train"]
    assert counts["train"] == len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine["input_ids"], mine["labels"]) == (other["input_ids"], other["labels"])
        mask = other["attention_mask"]
        assert [mask.count(number) for number in sorted(set(mask))] == mine["seq_lengths"] and mask == sorted(mask)


def test_pairs_encode_to_the_tokens_of_the_documents_and_count_each_reply_once(prepared, tmp_path):
    from tokenizers import Tokenizer

    write(prepared, Rows.PAIRS, tmp_path / "data")
    pairs = json.loads((tmp_path / "data" / "val.json").read_text())
    tokenizer = Tokenizer.from_file(str(prepared.path / "tokenizer" / "tokenizer.json"))
    wanted = [(ids[:start], ids[start:end]) for ids, labels in documents(prepared, "eval")
              for start, end in replies(labels)]  # fmt: skip
    found = [tuple(tokenizer.encode(pair[key]).ids for key in ("instruction", "output")) for pair in pairs]
    assert found == wanted
    assert sum(len(reply) for _, reply in found) == prepared.manifest["splits"]["eval"]["loss_tokens"]


def test_rows_of_tokens_are_the_documents_with_their_labels(prepared, tmp_path):
    import datasets

    counts = write(prepared, Rows.TOKENS, tmp_path / "data")
    assert counts == {split: len(prepared.rows(split)) for split in ("train", "eval")}
    for split, name in TOKEN_FILES.items():
        found = datasets.Dataset.from_parquet(str(tmp_path / "data" / name), cache_dir=str(tmp_path / "cache"))
        wanted = list(documents(prepared, split))
        assert [(row["input_ids"], row["labels"]) for row in found] == wanted
        assert all(row["attention_mask"] == [1] * len(row["input_ids"]) for row in found)


def test_lines_encode_to_the_tokens_of_the_documents(prepared, tmp_path):
    from tokenizers import Tokenizer

    write(prepared, Rows.LINES, tmp_path / "data")
    tokenizer = Tokenizer.from_file(str(prepared.path / "tokenizer" / "tokenizer.json"))
    lines = (tmp_path / "data" / LINE_FILES["eval"]).read_text().splitlines()
    assert [tokenizer.encode(json.loads(line)["text"]).ids for line in lines] == [
        ids for ids, _ in documents(prepared, "eval")
    ]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("litgpt", {}, "litgpt cannot express data.packing = true: set it to false"),
        ("litgpt", {"data.packing": False}, "litgpt runs several ranks only on GPUs, and local has no GPUs"),
        ("litgpt", {"schedule.scheduler": "linear"}, 'schedule.scheduler = "linear": set it to "cosine"'),
        ("litgpt", {"data.packing": False, "parallel.gpus_per_node": 1, "tuning.target_modules": ["up_proj"]},
         "gives all of down_proj, gate_proj, up_proj LoRA, or none"),
        ("llamafactory", {"parallel.strategy": "zero3"}, 'llamafactory cannot express parallel.strategy = "zero3"'),
        ("llamafactory", {"model.attention": "varlen"}, 'llamafactory cannot express model.attention = "varlen"'),
        ("axolotl", {"parallel.strategy": "fsdp1"}, 'axolotl cannot express parallel.strategy = "fsdp1"'),
        ("axolotl", {"model.attention": "eager"}, 'axolotl cannot express model.attention = "eager"'),
        ("automodel", {}, "automodel cannot express data.packing = true: set it to false"),
        ("torchtitan", {}, 'torchtitan cannot express tuning.method = "lora": set it to "full"'),
        ("torchtitan", {"tuning.method": "full", "data.loss": "all"}, "torchtitan has no configuration for"),
        ("megatron", {"tuning.method": "full", "data.loss": "all", "parallel.strategy": "ddp"},
         "megatron trains only on GPUs, and local has no GPUs"),
        ("megatron", {"tuning.method": "full", "data.loss": "all"}, 'parallel.strategy = "fsdp2": set it to "ddp" or'),
        ("megatrno", {}, "trainer 'megatrno' has no renderer; it must be"),
    ],
)  # fmt: skip
def test_what_a_trainer_cannot_express_is_refused_before_anything_is_written(name, changes, words, smollm2, tmp_path):
    with pytest.raises(InputError, match=re.escape(words)):
        render(Recipe.load("demo", **changes), Cluster.load("local"), tmp_path / "out", name)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_changed(smollm2, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists already and was not changed"):
        render(Recipe.load("demo"), Cluster.load("local"), tmp_path / "out", "llamafactory")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "megatron trains from random weights here"),
        ({"parallel.tensor": 2, "parallel.gpus_per_node": 2}, "num_attention_heads of"),
        ({"parallel.tensor": 3, "parallel.gpus_per_node": 3}, "only where CUDA_DEVICE_MAX_CONNECTIONS is 1 before"),
    ],
)
def test_megatron_says_what_a_model_lacks_for_it(changes, words, smollm2):
    job = {"tuning.method": "full", "data.loss": "all", "parallel.strategy": "ddp"} | changes
    recipe = Recipe.load("demo", **job)
    if changes:
        recipe = recipe.override(**{"model.name": f"{recipe.model.name}/config.json"})
    with pytest.raises(InputError, match=words):
        OTHERS["megatron"].check(recipe, Cluster.load("two-node-pcie"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "not rendered for a model with attention_bias = true"),
        ({"hidden_act": "gelu"}, 'not rendered for a model with hidden_act = "gelu"'),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "not rendered for rotary embeddings of type yarn"),
        ({"model_type": "gemma2"}, "rendered for llama, qwen2, qwen3, not for gemma2"),
    ],
)
def test_megatron_is_not_rendered_for_a_model_that_its_flags_would_change(changes, words, smollm2, tmp_path):
    job = {"tuning.method": "full", "data.loss": "all", "parallel.strategy": "ddp"}
    recipe = Recipe.load("demo", **job)
    config = json.loads((Path(models.source(recipe.model.name)) / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InputError, match=words):
        OTHERS["megatron"].check(
            recipe.override(**{"model.name": str(tmp_path / "config.json")}), Cluster.load("two-node-pcie")
        )


def test_indexed_rows_are_the_documents_of_both_splits(prepared, tmp_path):
    counts = write(prepared, Rows.INDEXED, tmp_path / "data")
    for split in ("train", "eval"):
        wanted = [ids for ids, _ in documents(prepared, split)]
        assert counts[split] == (sum(map(len, wanted)) - 1) // prepared.manifest["settings"]["data"]["seq_len"]
        stored = np.fromfile(tmp_path / "data" / f"{split}.bin", dtype=np.uint16)
        assert stored.tolist() == [token for ids in wanted for token in ids]
