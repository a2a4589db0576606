"""What kit.train refuses under DeepSpeed, and the config that it renders, which DeepSpeed's own parser accepts."""

import dataclasses
import importlib.util
import itertools
import json

import pytest
import yaml

from kit.config.cluster import Cluster
from kit.errors import InputError
from kit.slurm import launch as slurm
from kit.trainers import deepspeed, trainer_of, trl
from tests.conftest import oracle
from tests.ranks import run_ranks

PARSE = """
import json, sys
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
for path in sys.argv[1:]:
    try:
        parsed = DeepSpeedConfig(path)
    except Exception as error:
        print(json.dumps({"path": path, "error": str(error)}))
        continue
    zero = parsed.zero_config
    print(json.dumps({
        "path": path,
        "stage": int(zero.stage),
        "optimizer": zero.offload_optimizer and zero.offload_optimizer.device,
        "parameters": zero.offload_param and zero.offload_param.device,
        "buffer": zero.offload_param and zero.offload_param.buffer_size,
        "batch": parsed.train_batch_size,
        "clipping": parsed.gradient_clipping,
        "own_adam": parsed.zero_force_ds_cpu_optimizer,
        "bf16": parsed.bfloat16_config.enabled,
    }))
"""


@pytest.fixture
def gpus():
    machines = Cluster.load("h100-8x8")
    return dataclasses.replace(machines, paths=dataclasses.replace(machines.paths, nvme="/nvme"))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "deepspeed" or None)


def zero(recipe, strategy, offload="none", **more):
    return recipe.override(**{"parallel.strategy": strategy, "parallel.offload": offload} | more)


COMBINATIONS = [*itertools.product(("zero1", "zero2", "zero3"), ("none", "cpu")), ("zero3", "nvme")]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_strategies_without_zero_are_for_the_plain_trainer(recipe, strategy):
    assert trainer_of(recipe.override(**{"parallel.strategy": strategy})) is trl


@pytest.mark.parametrize(("strategy", "offload"), COMBINATIONS)
def test_each_stage_and_place_of_offload_can_be_launched(recipe, gpus, installed, strategy, offload):
    job = zero(recipe, strategy, offload)
    trainer = trainer_of(job)
    assert trainer is deepspeed
    trainer.check(job, gpus)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.sharding": "hybrid"}, "parallel.sharding hybrid is for FSDP: set it to full"),
        ({"tuning.method": "qlora"}, "model.base nf4 is not partitioned by zero2: set parallel.strategy to ddp"),
        ({"model.base": "fp8"}, "model.base fp8 is not partitioned by zero2"),
        ({"parallel.compile": "on"}, "set parallel.compile to auto or off"),
        ({"parallel.offload": "nvme"}, "nvme runs with parallel.strategy zero3 only"),
    ],
)
def test_what_zero_cannot_do_is_refused_with_what_to_change(recipe, gpus, installed, changes, words):
    with pytest.raises(InputError, match=words):
        deepspeed.check(zero(recipe, "zero2").override(**changes), gpus)


def test_nvme_needs_a_folder_in_the_profile(recipe, installed):
    with pytest.raises(InputError, match=r"set paths\.nvme in the profile h100-8x8, or parallel\.offload to cpu"):
        deepspeed.check(zero(recipe, "zero3", "nvme"), Cluster.load("h100-8x8"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_nvme_is_refused_where_deepspeed_does_not_run(recipe, gpus, strategy):
    with pytest.raises(InputError, match=r"nvme runs with parallel\.strategy zero3 only"):
        trl.check(recipe.override(**{"parallel.strategy": strategy, "parallel.offload": "nvme"}), gpus)


def test_one_cpu_process_is_refused(recipe, local, installed):
    with pytest.raises(InputError, match="needs several processes where there are no GPUs"):
        deepspeed.check(zero(recipe, "zero2", **{"parallel.gpus_per_node": 1}), local)


def test_deepspeed_that_is_not_installed_is_said_before_anything_is_made(recipe, local, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        slurm.launch(zero(recipe, "zero3"), local)
    message = str(caught.value)
    assert "zero3 needs DeepSpeed, which is not installed: DS_BUILD_OPS=0 pip install deepspeed" in message
    assert "pip wheel --wheel-dir FOLDER deepspeed" in message and "--no-index" in message
    assert list(tmp_path.iterdir()) == []


def test_another_interpreter_on_the_nodes_is_not_judged_by_the_packages_of_here(recipe, gpus, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    others = dataclasses.replace(gpus, slurm=dataclasses.replace(gpus.slurm, python="/venv/bin/python"))
    deepspeed.check(zero(recipe, "zero3"), others)


def test_accelerate_starts_deepspeed_as_it_starts_the_others_and_leaves_precision_to_its_config(recipe, gpus, tmp_path):
    rendering = deepspeed.render(zero(recipe, "zero3"), gpus, tmp_path / "run")
    accelerate = yaml.safe_load(rendering.files["accelerate.yaml"])
    plain = yaml.safe_load(trl.render(recipe, gpus, tmp_path / "run").files["accelerate.yaml"])
    assert accelerate.pop("distributed_type") == "DEEPSPEED"
    assert accelerate.pop("deepspeed_config") == {
        "deepspeed_config_file": str(tmp_path / "run" / "deepspeed.json"),
        "deepspeed_multinode_launcher": "standard",
        "zero3_init_flag": True,
    }
    assert accelerate.items() <= plain.items() and "mixed_precision" not in accelerate
    assert rendering.launcher == trl.launcher(tmp_path / "run")


@pytest.mark.slow
def test_deepspeeds_own_parser_accepts_what_is_rendered_and_reads_it_as_meant(recipe, gpus, tmp_path):
    package = oracle("deepspeed-0.19.8")
    (tmp_path / "parse.py").write_text(PARSE)
    paths = []
    for strategy, offload in COMBINATIONS:
        job = zero(recipe, strategy, offload, **{"schedule.grad_accum": 3, "schedule.micro_batch": 2})
        paths.append(tmp_path / f"{strategy}-{offload}.json")
        paths[-1].write_text(deepspeed.render(job, gpus, tmp_path / "run").files["deepspeed.json"])
    wrong = json.loads(paths[-1].read_text())
    wrong["zero_optimization"]["offload_optimizer"]["buffer_size"] = 1
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    output = run_ranks(2, tmp_path / "parse.py", *paths, tmp_path / "wrong.json", packages=[package])
    found = {row["path"]: row for row in (json.loads(line) for line in output.splitlines() if line.startswith("{"))}
    assert "buffer_size" in found.pop(str(tmp_path / "wrong.json"))["error"]  # the parser does refuse unknown keys
    for (strategy, offload), path in zip(COMBINATIONS, paths, strict=True):
        place = None if offload == "none" else offload
        assert found[str(path)] == {
            "path": str(path),
            "stage": deepspeed.STAGES[strategy],
            "optimizer": place and "cpu",
            "parameters": place if strategy == "zero3" else None,
            "buffer": 100_000_000 if place and strategy == "zero3" else None,
            "batch": 2 * 2 * 3,
            "clipping": 1.0,
            "own_adam": offload == "none",
            "bf16": True,
        }


def test_a_buffer_for_nvme_holds_a_ranks_part_of_a_large_embedding(gpus, tmp_path):
    """Llama 3.1 405B has 128,256 x 16,384 values in its embedding: on 2 ranks 1.05e9 each, above the default of 1e8."""
    from kit.config.recipe import Recipe

    one_node = {"parallel.nodes": 1, "parallel.gpus_per_node": 2}
    job = Recipe.load("llama405b-oasst2", **one_node)
    job = zero(job, "zero3", "nvme", **{"parallel.sharding": "full"})
    rendered = json.loads(deepspeed.render(job, gpus, tmp_path / "run").files["deepspeed.json"])
    parameters = rendered["zero_optimization"]["offload_param"]
    assert parameters["buffer_size"] == 128_256 * 16_384 // 2
    assert parameters["nvme_path"] == "/nvme/run"
    assert rendered["zero_optimization"]["offload_optimizer"]["device"] == "cpu"  # whose state is then in checkpoints


def test_nvme_is_refused_for_a_full_fine_tune(recipe, gpus, installed):
    with pytest.raises(InputError, match=r"nvme is for frozen weights, .*Set parallel\.offload to cpu"):
        deepspeed.check(zero(recipe, "zero3", "nvme", **{"tuning.method": "full"}), gpus)
