"""The plan says what a launch would do, and does none of it."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest

from kit.cli import main
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.slurm import launch as slurm
from kit.slurm.plan import plan
from kit.slurm.run import Run, find_runs
from kit.slurm.script import render_script


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(
        'name = "two"\n[nodes]\ncount = 2\ncpus = 2\nram_gib = 10\n[slurm]\npartition = "gpu"\ntime = "00:20:00"\n'
        '[environment]\nGLOO_SOCKET_IFNAME = "lo"\n[paths]\nruns = "runs"\n'
    )
    return path


@pytest.mark.slurm
def test_it_tells_the_ranks_the_batch_the_start_and_makes_nothing(live_slurm, recipe, profile):
    job = recipe.override(**{"parallel.nodes": 2, "parallel.gpus_per_node": 1, "schedule.grad_accum": 3})
    facts = plan(job, Cluster.load(profile)).facts
    assert facts["nodes"] == "2 nodes x 1 CPU rank = 2 ranks, fsdp2, partition gpu, at most 00:20:00"
    assert facts["batch"] == "1 row x 3 accumulated x 2 ranks = 6 rows of up to 128 tokens a step"
    assert "Memory: fits" in facts["forecast"] and "chosen by the job id" in facts["rendezvous"]
    assert re.match(r"about \d{4}-\d\d-\d\d \d\d:\d\d:\d\d on node\[1-2\]", facts["starts"])
    assert not Path("runs").exists() and not Path("prepared").exists()
    assert subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.slurm
def test_what_slurm_would_refuse_is_told_before_it_is_submitted(live_slurm, recipe, profile):
    bad = dataclasses.replace(Cluster.load(profile).slurm, partition="nope")
    facts = plan(recipe, dataclasses.replace(Cluster.load(profile), slurm=bad)).facts
    assert facts["starts"].startswith("Slurm would not take it: invalid partition specified: nope")
    assert "Set slurm.partition to one of: gpu*, low." in facts["starts"]


def test_the_script_of_the_plan_is_the_one_that_is_launched_but_for_its_names(recipe, local):
    shown = plan(recipe, local)
    assert "at once, on this machine" in shown.facts["starts"]
    run = slurm.launch(recipe, local)
    run.cancel()
    names = r"runs/tiny-[\d-]+|drawn-at-launch|prepared[\w/-]*|" + run.info["wandb_id"]
    assert re.sub(names, "", shown.script) == re.sub(names, "", render_script(run))


def test_ranks_that_split_layers_are_a_group_with_rows_of_their_own_and_have_no_forecast(recipe, local):
    job = recipe.override(**{"tuning.method": "full", "parallel.tensor": 2, "schedule.grad_accum": 3})
    facts = plan(job, local).facts
    assert facts["nodes"].startswith("1 node x 2 CPU ranks = 2 ranks, fsdp2, each layer split over 2 ranks")
    assert facts["batch"].startswith("1 row x 3 accumulated x 1 group = 3 rows")
    assert "no formulas yet for parallel.tensor" in facts["forecast"]


def test_findings_are_shown_with_their_lines_as_text_and_in_the_notebook(recipe, local):
    assert plan(recipe, local).findings == ()  # without Slurm there is no queue that needs a time limit
    shown = plan(recipe, dataclasses.replace(local, slurm=dataclasses.replace(local.slurm, partition="gpu")))
    assert [f.rule for f in shown.findings] == ["KS301"]
    assert re.search(r"^ *1  #!/bin/bash +warning KS301", str(shown), re.MULTILINE)
    page = shown._repr_mimebundle_()["text/html"]
    assert "KS301" in page and "<summary>the job script</summary>" in page and "#SBATCH --nodes=1" in page


def test_the_plan_says_what_each_open_choice_becomes_and_why(recipe, local):
    shown = plan(recipe, local)
    lines = shown.facts["choices"].splitlines()
    assert lines[0].startswith("attention: varlen, each document")
    assert lines[1].startswith("activation checkpointing: off, fits without it: up to ")
    assert lines[2] == "compile: off, the processes run on CPUs"
    assert [choice["key"] for choice in json.loads(json.dumps(shown.as_dict()))["choices"]] == [
        "model.attention", "parallel.activation_checkpointing", "parallel.compile",
    ]  # fmt: skip
    fixed = {"model.attention": "eager", "parallel.compile": "off", "parallel.activation_checkpointing": "true"}
    assert plan(recipe.override(**fixed), local).facts["choices"] == "the recipe leaves none open"


def test_what_cannot_run_has_no_plan(recipe, local):
    with pytest.raises(InputError, match="fsdp1 needs GPUs"):
        plan(recipe.override(**{"parallel.strategy": "fsdp1"}), local)


def test_the_command_line_shows_the_same_plan_and_launches_nothing(recipe, tmp_path, capsys):
    (tmp_path / "r.toml").write_text(recipe.toml())
    assert main(["launch", "r.toml", "--cluster", "local", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["nodes"].startswith("1 node x 2 CPU ranks") and found["script"].startswith("#!/bin/bash")
    assert list(find_runs()) == []
    assert main(["launch", "r.toml", "--cluster", "local", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("linter") < shown.index("#!/bin/bash\n") and found["script"].rstrip() in shown


@pytest.mark.parametrize("name", ["chat.jsonl", "chats.jsnl"])
def test_a_missing_data_file_is_noticed_before_anything_else(name, recipe, local, capsys, tmp_path):
    (tmp_path / "chats.jsonl").touch()
    missing = recipe.override(**{"data.source": name})
    (tmp_path / "r.toml").write_text(missing.toml())
    with pytest.raises(InputError, match=rf"Data '{name}' not found: .* did you mean 'chats.jsonl'"):
        slurm.launch(missing, local)
    assert main(["launch", "r.toml"]) == 2 and "did you mean 'chats.jsonl'" in capsys.readouterr().err
    assert main(["predict", "r.toml"]) == 0 and f"Warning: Data '{name}' not found" in capsys.readouterr().out
    assert main(["prepare", "r.toml"]) == 2 and "did you mean 'chats.jsonl'" in capsys.readouterr().err


def test_a_launch_ends_with_what_to_do_next(recipe, local, capsys, tmp_path):
    (tmp_path / "r.toml").write_text(recipe.toml())
    assert main(["launch", "r.toml"]) == 0
    name = next(find_runs()).name
    assert f"next: kit watch {name} " in capsys.readouterr().err
    assert main(["cancel", name]) == 0


@pytest.mark.slurm
def test_the_commands_of_a_job(live_slurm, profile, recipe, tmp_path, capsys):
    two, told = Cluster.load(profile), lambda: capsys.readouterr().out
    body = "#!/bin/bash\n#SBATCH --mem=10\n"
    array = slurm.launch_script(f"{body}exit $((SLURM_ARRAY_TASK_ID == 2))\n", two, "array", count=5)
    first = slurm.launch_script(f"{body}#SBATCH --begin=now+1hour\n", two, "first")
    (tmp_path / "r.toml").write_text(recipe.toml())
    assert main(["launch", "r.toml", "--cluster", str(profile), "--after", first.path.name, "--json"]) == 0
    second = Run.attach(json.loads(told())["run"])
    assert main(["state", first.path.name]) == 0
    assert re.search(r"pending, reason BeginTime: .*; estimated start \d{4}-", told())
    array.wait(60)
    assert main(["state", str(second.path), "--json"]) == 0
    assert json.loads(told())["pending"].startswith("pending, reason Dependency: the run that it follows has not ended")
    assert main(["runs"]) == 0
    assert re.search(rf"array-\S+ +{array.job_id} +FAILED +\d+ (s|min) +0-1 3-4 COMPLETED, 2 FAILED\n", told())
    assert main(["requeue", array.path.name, "2"]) == 0
    assert main(["cancel", first.path.name]) == 0 and first.wait(60).state == "CANCELLED"
    assert second.wait(60).state == "CANCELLED"  # it follows a good end only
    assert main(["cancel", first.path.name]) == 2 and "nothing to cancel" in capsys.readouterr().err


@pytest.mark.slurm
def test_logs_in_a_terminal_of_all_ranks_or_of_some(live_slurm, profile, capsys):
    script = "#!/bin/bash\n#SBATCH --mem=10\nfor i in 1 2 3; do echo line $i; sleep 1; done\n"
    run = slurm.launch_script(script, Cluster.load(profile), "talk")
    for rank in (0, 1):
        (run.path / "logs" / f"rank-{rank:03}.log").write_text(f"rank {rank} a\nrank {rank} b\n")
    assert main(["tail", run.path.name, "--follow", "-n", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "rank" in line] == ["[rank-000] rank 0 b", "[rank-001] rank 1 b"]
    assert [line for line in lines if "slurm" in line] == [f"[slurm-{run.job_id}] line {i}" for i in (1, 2, 3)]
    assert main(["tail", run.path.name, "--rank", "1", "-n", "2"]) == 0
    assert capsys.readouterr().out == "== rank-001.log\nrank 1 a\nrank 1 b\n"
    assert main(["tail", run.path.name, "--rank", "7"]) == 0 and "has no such log yet" in capsys.readouterr().out


def test_the_published_plan_is_shown_without_weights_and_without_that_cluster():
    """Source of the sizes: the published 405B LoRA run, two nodes of eight GPUs."""
    facts = plan(Recipe.load("llama405b-oasst2"), Cluster.load("two-node-pcie")).facts
    assert facts["nodes"] == "2 nodes x 8 GPUs = 16 ranks, fsdp2, partition gpu, at most 48:00:00"
    assert "tight" in facts["forecast"]
    assert "no weights (*.safetensors)" in facts["weights"] and "hf download meta-llama" in facts["weights"]
    assert facts["starts"].startswith("No Slurm answers here, and two-node-pcie names the partition gpu")
