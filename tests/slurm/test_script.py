import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kit.config.cluster import Cluster, Container
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast.timing import predict
from kit.lint.lint import lint
from kit.slurm.launch import launch
from kit.slurm.linting import site_of
from kit.slurm.run import Run
from kit.slurm.script import forecast, render_script, warning_s
from kit.slurm.template import fill
from kit.trainers.trl import render_accelerate
from tests.conftest import REPOSITORY


@pytest.fixture
def run(recipe, local, tmp_path):
    return Run.create(recipe, local, tmp_path / "data", "digest")


def big(**changes):
    return Recipe.load("llama405b-oasst2", **changes), Cluster.load("two-node-pcie")


def script_of(recipe, cluster, tmp_path):
    table = Cluster.load(cluster).toml().replace(cluster.paths.runs, str(tmp_path / "runs"))
    (tmp_path / "c.toml").write_text(table)
    return render_script(Run.create(recipe, Cluster.load(tmp_path / "c.toml"), tmp_path, "digest"))


def shellcheck(text, *options):
    """What shellcheck finds in a bash script."""
    program = Path(sys.executable).with_name("shellcheck")
    command = [program, "--shell=bash", "--format=gcc", *options, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False).stdout


def test_shellcheck_finds_nothing_in_the_templates_and_in_a_rendered_script(run):
    templates = [path for path in (REPOSITORY / "kit" / "slurm").iterdir() if path.suffix in (".sh", ".sbatch")]
    assert {"job.sbatch", "node.sh", "tokens.sh"} <= {path.name for path in templates}
    assert {path.name: shellcheck(path.read_text()) for path in templates} == {path.name: "" for path in templates}
    script = render_script(run)
    assert shellcheck(script) == ""
    node_script = shlex.split(script[script.index("srun --ntasks") : script.index(" &\nstep=$!")])[-1]
    assert shellcheck(node_script) == ""
    assert shellcheck("rm $1") != ""


def test_every_placeholder_of_a_template_is_filled_and_no_other_value_is_taken():
    filled = fill("tokens.sh", {"file": "a file"}, {})
    assert "{{" not in filled and "'a file'" in filled
    for values, code in (({}, {}), ({"file": "a", "more": "b"}, {}), ({"file": "a"}, {"more": "b"})):
        with pytest.raises(ValueError, match=r"tokens.sh: the placeholders for (value|code) are"):
            fill("tokens.sh", values, code)


def test_a_value_that_looks_like_a_placeholder_is_not_filled_again():
    text = fill("node.sh", {"python": "'{{launcher}}'", "launcher": ["a b", "$c"]}, {"python_path": "# {{python}}\n"})
    assert f"python={shlex.quote(chr(39) + '{{launcher}}' + chr(39))}\n" in text
    assert "# {{python}}\n" in text and "'a b' '$c'" in text


def test_a_job_that_uses_all_gpus_of_its_nodes_is_exclusive(tmp_path):
    lines = script_of(*big(), tmp_path).splitlines()
    for wanted in ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:rtx_pro_6000:8", "--exclusive", "--mem=0",
                   "--partition=gpu", "--time=48:00:00", "--cpus-per-task=256"):  # fmt: skip
        assert f"#SBATCH {wanted}" in lines
    assert "export NCCL_SOCKET_IFNAME=bond0" in lines


def test_a_job_on_part_of_a_node_is_not_exclusive(tmp_path):
    script = script_of(*big(**{"parallel.gpus_per_node": 2, "parallel.nodes": 1}), tmp_path)
    assert "--gres=gpu:rtx_pro_6000:2" in script and "--cpus-per-task=64" in script
    assert "--exclusive" not in script


def test_a_job_asks_for_the_recipes_gpus_and_for_the_other_resources_of_the_profile(tmp_path):
    recipe, cluster = big(**{"parallel.gpus_per_node": 4, "parallel.nodes": 1})
    slurm = dataclasses.replace(cluster.slurm, gres="gpu:a100:8,nvme:1")
    script = script_of(recipe, dataclasses.replace(cluster, slurm=slurm), tmp_path)
    assert "#SBATCH --gres=gpu:a100:4,nvme:1\n" in script


def test_each_node_meets_the_others_at_slurms_address_before_anything_runs(run):
    script = render_script(run)
    batch_side, node_side = script.split("bash -c '")
    assert f"python={sys.executable}\n" in node_side and 'exec "$python" -m kit.slurm.rendezvous' in node_side
    assert "SLURM_NODEID" not in batch_side
    assert "export KIT_HOSTS KIT_ADDRESS" in batch_side and "NodeAddr=" in batch_side
    assert "29500" not in script and not re.search("^[^#]*localhost", script, re.MULTILINE)


def test_set_up_lines_may_read_unset_variables_and_the_rest_may_not(recipe, local, tmp_path):
    slurm = dataclasses.replace(local.slurm, setup=('echo "before[$NEVER_SET]"',))
    script = render_script(Run.create(recipe, dataclasses.replace(local, slurm=slurm), tmp_path, "digest"))
    setup = script[script.index("set +u") : script.index("# ---- Training")]
    done = subprocess.run(["bash", "-c", f"set -u\n{setup}\necho $NEVER_SET"], capture_output=True, text=True)
    assert done.stdout == "before[]\n" and "NEVER_SET: unbound variable" in done.stderr


def test_slurm_warns_in_time_for_two_steps_and_saves_and_never_before_half_of_the_limit(recipe, local, tmp_path):
    def warned(job, cluster, limit):
        slurm = dataclasses.replace(cluster.slurm, time=limit)
        paths = dataclasses.replace(cluster.paths, runs=str(tmp_path / "runs"))
        run = Run.create(job, dataclasses.replace(cluster, slurm=slurm, paths=paths), tmp_path, "digest")
        seconds = warning_s(run.recipe, run.cluster, forecast(run.recipe, run.cluster))
        assert f"#SBATCH --signal=B:USR2@{seconds}\n" in render_script(run)
        return seconds

    assert warned(recipe, local, "") == warned(recipe, local, "1-0") == 120
    assert warned(recipe, local, "1") == 30
    job, cluster = big()
    time = predict(job, cluster).time
    assert time.step_range_s[1] > 60
    slow = warned(job, cluster, "48:00:00")
    assert slow >= 2 * (time.step_range_s[1] + time.evaluation_s)
    assert warned(job, cluster, "2") == 60


@pytest.mark.parametrize("kind", ["pyxis", "apptainer"])
def test_an_image_gets_what_the_ranks_read_and_write_under_the_same_paths(tmp_path, kind, tiny):
    """On the rendered script alone: neither runtime is here. Options: NVIDIA/pyxis README; apptainer-exec(1)."""
    job, cluster = big(**{"model.name": str(tiny)})
    image = Container(kind=kind, image="/images/kit 1.sqsh", mounts=("/scratch:/tmp/big",))
    slurm = dataclasses.replace(cluster.slurm, container=image)
    paths = dataclasses.replace(cluster.paths, runs=str(tmp_path / "runs"))
    cluster = dataclasses.replace(cluster, slurm=slurm, paths=paths)
    assert Cluster.load(write(tmp_path / "c.toml", cluster.toml())) == cluster
    run = Run.create(job, cluster, tmp_path / "data", "digest")
    script = render_script(run)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    words = shlex.split(script[script.index("srun --ntasks") : script.index(" &\nstep=$!")])
    mounts = [str(run.path.parent), str(tmp_path / "data"), str(REPOSITORY), "/pool/hf_cache", str(tiny)]
    mounts = ",".join([*(f"{m}:{m}" for m in mounts), "/scratch:/tmp/big"])
    if kind == "pyxis":
        assert words[3:5] == ["--container-image=/images/kit 1.sqsh", f"--container-mounts={mounts}"]
        assert words[5].startswith("--container-env=") and "NCCL_SOCKET_IFNAME" in words[5]
    else:
        assert words[3:9] == ["apptainer", "exec", "--nv", "--bind", mounts, "/images/kit 1.sqsh"]
    assert words[-3:-1] == ["bash", "-c"]
    assert "python=python3\n" in words[-1] and f"PYTHONPATH={REPOSITORY}" in words[-1]
    assert "KIT_SOFTWARE" not in script  # what runs in the image need not run where the job is launched


def test_the_profiles_interpreter_runs_the_ranks_without_a_version_check(recipe, local, tmp_path):
    slurm = dataclasses.replace(local.slurm, python="/shared/venv/bin/python", setup=("module load cuda",))
    script = render_script(Run.create(recipe, dataclasses.replace(local, slurm=slurm), tmp_path, "digest"))
    assert "\npython=/shared/venv/bin/python\n" in script and "KIT_SOFTWARE" not in script
    assert sys.executable not in script


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


ENVIRONMENTS = {
    "modules": {"setup": ("module purge", "module load cuda/12.8 gcc")},
    "conda": {
        "setup": ('source "$(conda info --base)/etc/profile.d/conda.sh"', "conda activate kit"),
        "python": "python",
    },
    "venv": {"setup": ("source /shared/venv/bin/activate",), "python": "python"},
    "pyxis": {"container": Container(kind="pyxis", image="nvcr.io#nvidia/pytorch:26.06-py3")},
    "apptainer": {
        "container": Container(kind="apptainer", image="/shared/kit.sif"),
        "setup": ("module load apptainer",),
    },
    "tokens": {"env_file": "tokens"},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_script_is_correct_and_lints_clean_in_every_environment(tmp_path, name):
    write(tmp_path / "tokens", "HF_TOKEN=x\n").chmod(0o600)
    job, cluster = big()
    paths = dataclasses.replace(cluster.paths, runs=str(tmp_path / "runs"))
    cluster = dataclasses.replace(
        cluster, paths=paths, slurm=dataclasses.replace(cluster.slurm, **ENVIRONMENTS[name])
    )  # fmt: skip
    assert Cluster.load(write(tmp_path / "c.toml", cluster.toml())) == cluster
    script = render_script(Run.create(job, cluster, tmp_path, "digest"))
    assert shellcheck(script, "--exclude=SC1090,SC1091") == ""  # it does not follow what set-up lines source
    assert [f for f in lint(script, site=site_of(cluster, "22.05.8")) if f.severity != "info"] == []
    for line in ENVIRONMENTS[name].get("setup", ()):
        places = [script.index(f"\n{words}") for words in ("set +u", f"{line}\n", "set -u\n", "KIT_KEY=$key srun ")]
        assert places == sorted(places)
    elsewhere = name in ("conda", "venv", "pyxis", "apptainer")  # an interpreter that need not have the kit
    assert (f"export PYTHONPATH={REPOSITORY}:" in script) == elsewhere == ("KIT_SOFTWARE" not in script)


@pytest.mark.slow
def test_modules_and_an_image_run_the_ranks_through_a_stand_in_for_apptainer(recipe, local, tmp_path, monkeypatch):
    """What a stand-in proves: words, environment and paths. An image of one's own, and pyxis, were not at hand."""
    body = 'printf "%s\\n" "$@" > "$KIT_RUN/state/asked"\nshift 5\nexec "$@"\n'
    write(stand_in := tmp_path / "bin" / "apptainer", f"#!/bin/sh\n{body}")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    module = 'module() { echo "loaded $2 after [$LOADEDMODULES]"; export FROM_MODULE=$2; }'  # reads an unset variable
    slurm = dataclasses.replace(
        local.slurm, setup=(module, "module load cuda/12.8"), python=sys.executable,
        container=Container(kind="apptainer", image="/images/kit.sif", mounts=("/scratch",)),
    )  # fmt: skip
    job = recipe.override(**{"schedule.max_steps": 1, "parallel.gpus_per_node": 1})
    run = launch(job, dataclasses.replace(local, slurm=slurm))
    assert run.wait(400).state == "COMPLETED", run.tail()
    assert "loaded cuda/12.8 after []" in run.log.read_text()
    asked = (run.path / "state" / "asked").read_text().splitlines()
    assert asked[:3] == ["exec", "--nv", "--bind"] and asked[3].endswith(",/scratch:/scratch")
    assert asked[4:7] == ["/images/kit.sif", "bash", "-c"]


def test_tokens_are_read_from_a_private_file_and_from_no_other(recipe, local, tmp_path):
    file = write(
        tmp_path / "my tokens", "# mine\nHF_TOKEN=hf_a b\nexport KEY=\"quoted\"\n  no line\nX=a=b'c\nLAST='end'"
    )
    profile = dataclasses.replace(local, slurm=dataclasses.replace(local.slurm, env_file=str(file)))
    for mode, words in ((0o644, "has mode 644"), (0o640, "has mode 640"), (0o604, "has mode 604")):
        file.chmod(mode)
        with pytest.raises(InputError, match=rf"my tokens {words}, so others can read its tokens: chmod 600 it"):
            launch(recipe, profile)
    assert not (tmp_path / "runs").exists()
    file.chmod(0o600)
    script = render_script(Run.create(recipe, profile, tmp_path, "digest"))
    assert "hf_a" not in script
    part = script[script.index("if [[ $(stat") : script.index("# ---- Training")]
    show = 'printf "<%s>" "$HF_TOKEN" "$KEY" "$X" "$LAST"'
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", part + show], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("<hf_a b><quoted><a=b'c><end>", "")
    file.chmod(0o640)  # after the launch
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", part + show], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and "chmod 600 it" in done.stderr
    file.unlink()
    with pytest.raises(InputError, match=r"slurm.env_file: .*my tokens does not exist. Write NAME=VALUE lines"):
        launch(recipe, profile)


def test_rows_reach_the_disk_within_a_second(run):
    script = render_script(run)
    assert "export WANDB_MODE=offline" in script and "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL=1" in script
    assert f"export WANDB_RUN_ID={run.info['wandb_id']}" in script


def test_a_path_that_sbatch_would_change_is_refused(recipe, tmp_path, monkeypatch):
    for sign in '"%':
        folder = tmp_path / f"a{sign}$(touch pwned)"
        folder.mkdir()
        monkeypatch.chdir(folder)
        with pytest.raises(InputError, match=f"paths.runs: .* contains {sign}"):
            Run.create(recipe, Cluster.load("local"), tmp_path, "digest")
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "a'; touch pwned; '", "a$(touch pwned)", "ä*?"])
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
def test_accelerates_config_follows_the_recipe(changes, gpus, expected):
    recipe, cluster = big(**changes)
    config = yaml.safe_load(render_accelerate(recipe, cluster if gpus else Cluster.load("local")))
    flat = config | config.get("fsdp_config", {})
    assert {k: flat[k] for k in expected} == expected
