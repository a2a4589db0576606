import dataclasses
import os
import subprocess

import pytest
import yaml

from kit.cluster import Cluster
from kit.recipe import Recipe
from kit.run import Run
from kit.sbatch import render_accelerate, render_script


@pytest.fixture
def run(recipe, local, tmp_path):
    return Run.create(recipe, local, tmp_path / "data", "digest")


def big(**changes):
    return Recipe.load("llama405b-oasst2", **changes), Cluster.load("two-node-pcie")


def script_of(recipe, cluster, tmp_path):
    table = Cluster.load(cluster).toml().replace(cluster.paths.runs, str(tmp_path / "runs"))
    (tmp_path / "c.toml").write_text(table)
    return render_script(Run.create(recipe, Cluster.load(tmp_path / "c.toml"), tmp_path, "digest"))


def test_the_script_is_valid_shell(run, tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(render_script(run))
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_a_full_node_is_asked_for_whole_with_the_profiles_own_words(tmp_path):
    lines = script_of(*big(), tmp_path).splitlines()
    for wanted in ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:rtx_pro_6000:8", "--exclusive", "--mem=0",
                   "--partition=gpu", "--time=48:00:00", "--cpus-per-task=256"):  # fmt: skip
        assert f"#SBATCH {wanted}" in lines
    assert "export NCCL_SOCKET_IFNAME=bond0" in lines


def test_part_of_a_node_leaves_the_rest_to_others(tmp_path):
    script = script_of(*big(**{"parallel.gpus_per_node": 2, "parallel.nodes": 1}), tmp_path)
    assert "--gres=gpu:rtx_pro_6000:2" in script and "--cpus-per-task=64" in script
    assert "--exclusive" not in script


def test_the_node_rank_is_read_on_the_node_and_the_port_comes_from_the_job(run):
    script = render_script(run)
    batch_side, node_side = script.split("bash -c '")
    assert "SLURM_NODEID" not in batch_side and '--machine_rank "$SLURM_NODEID"' in node_side
    assert (
        "SLURM_JOB_ID % 12000" in batch_side
        and "29500" not in script
        and "localhost" not in batch_side.split("# The head")[1].split("\n", 1)[1]
    )


def test_set_up_lines_may_read_unset_variables_and_the_rest_may_not(recipe, local, tmp_path):
    slurm = dataclasses.replace(local.slurm, setup=('echo "before[$NEVER_SET]"',))
    script = render_script(Run.create(recipe, dataclasses.replace(local, slurm=slurm), tmp_path, "digest"))
    setup = script.split('SLURM_JOB_NODELIST\\""\n\n')[1].split("# The head")[0]
    done = subprocess.run(["bash", "-c", f"set -u\n{setup}\necho $NEVER_SET"], capture_output=True, text=True)
    assert done.stdout == "before[]\n" and "NEVER_SET: unbound variable" in done.stderr


def test_rows_reach_the_disk_within_a_second(run):
    script = render_script(run)
    assert "export WANDB_MODE=offline" in script and "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL=1" in script
    assert f"export WANDB_RUN_ID={run.info['wandb_id']}" in script


@pytest.mark.parametrize("name", ["a b", "a'; touch pwned; '", 'a"$(touch pwned)', "ä*?"])
def test_a_hostile_path_stays_one_word(recipe, tmp_path, name):
    cluster = Cluster.load("local")
    (tmp_path / name).mkdir()
    os.chdir(tmp_path / name)
    run = Run.create(recipe, cluster, tmp_path, "digest")
    head = render_script(run).split("export KIT_PYTHON")[0].split("pipefail")[1]
    shown = subprocess.run(["bash", "-c", head + '\nprintf %s "$KIT_RUN"'], capture_output=True, text=True)
    assert shown.stdout == str(run.path)
    assert not (tmp_path / name / "pwned").exists()


@pytest.mark.parametrize(
    ("changes", "gpus", "expected"),
    [
        ({}, True, {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 16}),
        ({"parallel.strategy": "ddp"}, True, {"distributed_type": "MULTI_GPU"}),
        ({"parallel.strategy": "fsdp1"}, True, {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"}),
        ({"parallel.sharding": "grad_op"}, True, {"fsdp_version": 2, "fsdp_reshard_after_forward": False}),
        ({"parallel.nodes": 1, "parallel.gpus_per_node": 1}, False, {"distributed_type": "NO", "use_cpu": True}),
        ({}, False, {"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_cpu_ram_efficient_loading": False}),
    ],
)
def test_accelerate_is_told_what_the_recipe_says(changes, gpus, expected):
    recipe, cluster = big(**changes)
    config = yaml.safe_load(render_accelerate(recipe, cluster if gpus else Cluster.load("local")))
    flat = config | config.get("fsdp_config", {})
    assert {k: flat[k] for k in expected} == expected
