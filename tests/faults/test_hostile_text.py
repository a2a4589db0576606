"""Text and files that want to be run: text stays text, and no file's code is executed.

Other tests send hostile text to the rendezvous, to profiles, notebooks, weights and W&B logs.
"""

import json
import os
import pickle
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kit.checkpoints.inspect import inspect
from kit.cli import main
from kit.config.cluster import Cluster
from kit.errors import KitError
from kit.slurm.run import Run
from kit.slurm.script import render_script
from kit.watch.board import watch
from tests.watch.test_damaged_logs import items, message, record, row, write_log

TOUCH = "touch executed"
COMMANDS = {
    "a command substitution": f"$({TOUCH})",
    "backticks": f"`{TOUCH}`",
    "a closing single quote": f"'; {TOUCH}; '",
    "a closing double quote": f'"; {TOUCH}; "',
    "a closing brace": f"}}; {TOUCH}; {{",
    "an end of a command": f"; {TOUCH} #",
    "a pipe and a background job": f"| {TOUCH} & {TOUCH}",
    "a redirection": "> executed",
    "a backslash at the end": f"a\\' ; {TOUCH} \\",
    "a placeholder": "{{setup}}{setup}{0}%s%j$0",
    "history and patterns": "!! ~ * ? [a-z]",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_text_of_a_profile_reaches_the_job_as_it_is(recipe, local, tmp_path, name):
    text = COMMANDS[name]
    settings = replace(local.slurm, python=f"/opt/{text}")
    cluster = replace(local, slurm=settings, environment={"HOSTILE": text})
    script = render_script(Run.create(recipe, cluster, tmp_path, "digest"))
    subprocess.run(["bash", "-n", "-c", script], check=True)
    head = script[: script.index("\nrestart=")] + '\nprintf "%s\\n" "$HOSTILE" "$KIT_PYTHON"'
    shown = subprocess.run(["bash", "-c", head], capture_output=True, text=True, check=True)
    assert shown.stdout == f"{text}\n/opt/{text}\n"
    assert not list(tmp_path.rglob("executed"))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("kind", "word"), [("apptainer", "{}"), ("pyxis", "--container-image={}")])
def test_the_name_of_an_image_reaches_srun_as_it_is(recipe, local, tmp_path, kind, word, name):
    image = replace(local.slurm.container, kind=kind, image=COMMANDS[name])
    script = render_script(
        Run.create(recipe, replace(local, slurm=replace(local.slurm, container=image)), tmp_path, "digest")
    )
    end = "' &\nstep=$!"
    step = script[script.index("KIT_KEY=$key srun") : script.index(end) + len(end)]
    shown = 'srun() { printf "%s\\n" "$@"; }\nkey=secret\n' + step + "\nwait\n"
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert word.format(COMMANDS[name]) in done.stdout.splitlines()
    assert not list(tmp_path.rglob("executed"))


class Executed:
    """Runs a command where it is unpickled without restrictions."""

    def __reduce__(self):
        return os.system, (TOUCH,)


def torch_file(path, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")


PICKLES = {
    "metadata of DCP": lambda folder, code: (folder / ".metadata").write_bytes(code),
    "a torch file": lambda folder, code: torch_file(folder / "pytorch_model.bin", code),
    "an old torch file": lambda folder, code: (folder / "pytorch_model.bin").write_bytes(code),
    "a shard of DCP": lambda folder, code: (
        (folder / ".metadata").write_bytes(code), (folder / "__0_0.distcp").write_bytes(code)
    ),
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", PICKLES)
def test_no_pickle_of_a_checkpoint_is_executed(tmp_path, capsys, name, protocol):
    PICKLES[name](tmp_path, pickle.dumps({"a": Executed()}, protocol))
    assert inspect(tmp_path, values=True).problems
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["adapter", "export", str(tmp_path), str(tmp_path / "out")]) in (1, 2)
    assert not Path("executed").exists()


def test_no_code_of_a_models_folder_is_executed(tiny, recipe, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "own.py").write_text("open('executed', 'w')\nclass A: pass\n")
    for name, key in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        settings = json.loads((folder / name).read_text())
        own = {"AutoTokenizer": ["own.A", "own.A"]} if key == "AutoTokenizer" else {key: "own.A"}
        (folder / name).write_text(json.dumps(settings | {"auto_map": own | {"AutoModelForCausalLM": "own.A"}}))
    (tmp_path / "r.toml").write_text(recipe.override(**{"model.name": str(folder)}).toml())
    for words in (["predict"], ["prepare"], ["launch", "--dry-run"]):
        main([words[0], str(tmp_path / "r.toml"), "--cluster", "local", *words[1:]])
    assert not list(tmp_path.rglob("executed"))


MARKUP = ["<script>x</script>", "<img src=x onerror=x>", '"><svg onload=x>', "</title><b>", "'-x-'", "&lt;b&gt;<b>"]


@pytest.mark.parametrize("text", MARKUP)
def test_names_in_a_wandb_log_are_no_markup_of_the_page(tmp_path, text):
    folder = tmp_path / "run"
    folder.mkdir()
    step, name = b"train/global_step", text.encode()
    rows = [row({step: str(n).encode(), b"train/loss": b"2", name: b"1"}) for n in range(3)]
    config = record(5, items({name: json.dumps(text).encode()}))
    host = record(17, message(13, name) + message(4, items({name: b'"x"'})))
    write_log(folder / "run-x.wandb", config, host, *rows)
    page = watch(folder).html()
    assert not any(tag in page for tag in ("<script", "<img", "onload=x>", "onerror=x>", "</title><b>"))


def test_a_command_in_a_cluster_file_that_is_loaded_is_not_run(tmp_path):
    for key in ("name", "account", "partition", "gres"):
        text = json.dumps(f"$({TOUCH})")
        body = f"name = {text}\n" if key == "name" else f'name = "x"\n[slurm]\n{key} = {text}\n'
        (tmp_path / "c.toml").write_text(body)
        try:
            Cluster.load(tmp_path / "c.toml")
        except KitError as refused:
            assert "c.toml" in str(refused)
    assert not list(tmp_path.rglob("executed"))
