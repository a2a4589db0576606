import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kit
from kit.cli import main
from kit.config.recipe import Recipe
from tests.conftest import REPOSITORY

HEAVY = ("torch", "transformers", "wandb", "plotly", "pandas", "datasets")


def kit_command(*words):
    return subprocess.run([sys.executable, "-m", "kit.cli", *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    "code",
    [
        "import kit",
        "from kit.cli import main; main(['predict', 'llama405b-oasst2', '--cluster', 'two-node-pcie'])",
        f"from kit.cli import main; main(['lint', {str(REPOSITORY / 'env/setup')!r}])",
        "from kit.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
    ],
)
def test_what_runs_on_a_login_node_loads_nothing_heavy(code):
    shown = f"{code}\nimport sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stderr


def test_the_public_names_are_these():
    assert sorted(kit.__all__) == [
        "Cluster", "InputError", "KitError", "Recipe", "Run", "check", "checkpoints", "compare", "explore",
        "form", "launch", "launcher",
        "load_ipython_extension", "plan", "predict", "prepare", "runs", "tune", "watch",
    ]  # fmt: skip
    assert all(callable(getattr(kit, name)) for name in kit.__all__)


@pytest.mark.parametrize("room", ["check", "watch", "checkpoints"])
def test_a_room_can_be_called_and_imported_from(room):
    package = getattr(kit, room)
    assert callable(package) and package.__path__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kit.nothing


def test_the_forecast_is_one_json_object_with_the_promised_keys(capsys):
    assert main(["predict", "llama405b-oasst2", "--cluster", "two-node-pcie", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"parameters", "trainable_parameters", "memory", "time", "storage", "warnings"} <= set(found)
    assert found["parameters"] == 405_853_388_800 and found["trainable_parameters"] == 404_619_264
    assert found["time"]["optimizer_steps"] == 36
    # Published: 8 h 24 min.
    assert found["time"]["wall_h"] == pytest.approx(8.4, rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "lama8b"], "did you mean 'llama8b'"),
        (["predict", "llama8b", "--cluster", "h100"], "did you mean 'h100-8x8'"),
        (["predict", "llama8b", "-s", "schedule.lrr=1"], "did you mean 'schedule.lr'"),
        (["predict", "llama8b", "-s", "schedule.lr"], "Expected NAME=VALUE"),
        (["predict", "llama8b", "-s", "parallel.strategy=fsdp"], "Valid: ddp, fsdp1, fsdp2"),
        (["state", "nothing"], "No run 'nothing'"),
        (["lint", "absent.sbatch"], "absent.sbatch"),
        (["adapter", "export", "absent", "out"], "absent"),
        (["prepare", "llama8b"], "model.name"),
    ],
)
def test_a_wrong_call_exits_2_and_says_what_to_do(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("kit: ") and message in error


def test_an_unknown_command_suggests_the_nearest(capsys):
    assert main(["pedict", "llama8b"]) == 2
    assert "Did you mean 'predict'?" in capsys.readouterr().err


def test_an_option_of_a_wrong_kind_exits_2(capsys):
    assert main(["tail", "latest", "-n", "-5"]) == 2
    assert main(["checkpoint", "time", "absent", "--ranks", "0"]) == 2


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"kit {kit.__version__}"


def test_help_is_grouped_by_subject(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(
        group in shown for group in ("Cluster", "Data and forecast", "Jobs", "Checkpoints and models", "Notebooks")
    )


def test_what_does_not_fit_exits_1(capsys):
    assert main(["predict", "llama405b-oasst2", "--cluster", "two-node-pcie", "-s", "parallel.strategy=ddp"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_lint_exits_1_on_an_error_and_mends_what_is_safe(tmp_path, capsys):
    script = tmp_path / "a.sbatch"
    script.write_bytes(b"#!/bin/bash\r\n#SBATCH \xe2\x80\x93nodes=1\r\n#SBATCH --time=1:00:00\r\nsrun -u hostname\r\n")
    assert main(["lint", str(script), "--json"]) == 1
    rules = {f["rule"] for f in json.loads(capsys.readouterr().out)["findings"]}
    assert {"KS101", "KS105"} <= rules
    main(["lint", str(script), "--fix"])
    assert script.read_text().splitlines()[1] == "#SBATCH --nodes=1" and b"\r" not in script.read_bytes()


def test_the_kits_own_job_scripts_have_no_finding_that_matters(tmp_path, recipe, capsys):
    from kit.config.cluster import Cluster
    from kit.lint.lint import lint
    from kit.slurm.linting import site_of
    from kit.slurm.run import Run
    from kit.slurm.script import render_script

    for cluster in ("local", "two-node-pcie", "h100-8x8"):
        profile = Cluster.load(cluster)
        text = profile.toml().replace(f'runs = "{profile.paths.runs}"', f'runs = "{tmp_path / "runs"}"')
        (tmp_path / "c.toml").write_text(text)
        job = recipe if cluster == "local" else Recipe.load("llama8b")
        script = render_script(Run.create(job, Cluster.load(tmp_path / "c.toml"), tmp_path, "digest"))
        found = lint(script, site=site_of(profile))
        assert not [f for f in found if f.severity == "error"], found
        assert {f.rule for f in found if f.severity == "warning"} <= {"KS301"}  # local sets no time limit


def test_prepare_and_launch_speak_json(recipe, tmp_path, capsys):
    (tmp_path / "r.toml").write_text(recipe.toml())
    assert main(["prepare", "r.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"folder", "digest", "splits", "ledger", "dropped_rows", "optimizer_steps"} <= set(found)
    assert {"conversations", "rows", "tokens", "loss_tokens"} <= set(found["splits"]["train"])


@pytest.mark.slow
def test_the_commands_of_a_finished_run_from_its_state_to_the_merged_model(finished_run, recipe, tmp_path, capsys):
    run = str(finished_run.path)
    assert main(["state", run, "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["state"] == "COMPLETED" and state["exit_code"] == 0 and state["conflicts"] == []
    assert main(["runs"]) == 0 and "COMPLETED" in capsys.readouterr().out
    assert main(["watch", run, "--once", "--html", "board.html"]) == 0
    assert "step 6 of 6" in capsys.readouterr().out and "<svg" in (tmp_path / "board.html").read_text()
    assert main(["checkpoint", "inspect", f"{run}/checkpoints/checkpoint-4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lora_tensors"] == 16  # 2 layers x 4 modules x A and B
    assert main(["checkpoint", "plan", "r.toml"]) == main(["checkpoint", "plan", Path(run).name]) == 0
    assert main(["checkpoint", "plan", "absent"]) == 2
    assert re.search("No recipe 'absent'.* No run 'absent'", capsys.readouterr().err)
    assert "FutureWarning" not in (Path(run) / "logs" / "rank-000.log").read_text()
    assert main(["adapter", "export", run, "adapter"]) == 0
    assert main(["adapter", "merge", "adapter", recipe.model.name, "merged"]) == 0
    assert (tmp_path / "merged" / "config.json").is_file()
    assert main(["adapter", "export", run, "adapter"]) == 2  # never overwritten
    assert "exists already" in capsys.readouterr().err


def test_every_command_of_the_readme_exists(capsys):
    readme = (REPOSITORY / "README.md").read_text()
    second = "inspect|time|save|plan|export|merge|push"
    commands = set(re.findall(rf"^ +kit ([a-z]+(?: (?:{second}))?)", readme, re.MULTILINE))
    assert len(commands) >= 10
    for command in commands:
        assert main([*command.split(), "--help"]) == 0, command


@pytest.mark.parametrize("command", ["prepare", "predict", "tune", "lint", "launch", "state", "run", "sweep", "replay"])
def test_the_example_of_a_command_is_refused_for_its_missing_files_and_not_for_its_options(command, capsys):
    assert main([command, "--help"]) == 0
    words = re.search(r"Example: (kit [^│]*)", " ".join(capsys.readouterr().out.split()))[1].split()
    assert words[1] == command
    assert main(words[1:]) == 2
    assert "No such option" not in (refused := capsys.readouterr().err) and refused.startswith("kit: ")


def test_every_link_of_the_readme_leads_to_a_file():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (REPOSITORY / "README.md").read_text())
    assert links and all((REPOSITORY / link).exists() for link in links)


def test_a_reader_that_closes_the_pipe_early_ends_a_command_without_a_word():
    """As `kit predict ... | head -1` does; 141 is the exit code of a program that SIGPIPE ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kit.cli", "predict", "demo", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
    process.stderr.close()
