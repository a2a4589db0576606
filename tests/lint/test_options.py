"""Options and directives are read as sbatch 22.05.8 reads them, and refused where it refuses them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kit.lint.lint import Finding, lint
from kit.lint.options import SBATCH_OPTIONS, SRUN, directives, parse_options
from kit.lint.script import Script
from tests.lint.scripts import GOOD


def header(*rows: str) -> list[list[str]]:
    return [words for _, words in directives("\n".join(["#!/bin/bash", *rows, "hostname", ""]))]


def value(directive: str, name: str) -> str:
    return Script(f"#!/bin/bash\n#SBATCH {directive}\nhostname\n").request.value(name)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("#SBATCH --nodes=5", ["--nodes=5"]),
        ("#SBATCH --nodes=5 # comment", ["--nodes=5"]),
        ("#SBATCH --job-name=a#b", ["--job-name=a"]),
        ("#SBATCH--nodes=5", ["--nodes=5"]),
        ("#SBATCH --job-name='x # y' -N 2", ["--job-name=x # y", "-N", "2"]),
        ('#SBATCH --job-name="a b"', ["--job-name=a b"]),
        ("#SBATCH --nodes=4 \\", ["--nodes=4"]),
        ("#SBATCH --nodes\u00a0=4", ["--nodes\u00a0=4"]),
        ("#SBATCH", []),
    ],
)
def test_a_directive_is_split_as_sbatch_splits_it(row: str, expected: list[str]) -> None:
    assert header(row) == [expected]


@pytest.mark.parametrize("row", ["##SBATCH -N 2", " #SBATCH -N 2", "# SBATCH -N 2", "#sbatch -N 2", "#SABTCH -N 2"])
def test_a_line_that_only_resembles_a_directive_is_ignored(row: str) -> None:
    assert header(row, "#SBATCH -n 1") == [["-n", "1"]]


def test_directives_end_at_the_first_command_but_not_at_blank_lines_and_comments() -> None:
    assert header("", "# text", "  # text", "#SBATCH -n 1", "set -e", "#SBATCH -n 2") == [["-n", "1"]]


def test_the_last_duplicate_wins() -> None:
    assert value("--nodes=2 -N 3", "nodes") == "3"


def test_unambiguous_abbreviations_and_short_forms_are_accepted() -> None:
    found, rest = parse_options(["--out=a", "--err", "b", "-N2", "-n", "3", "-HO", "--nice=5", "x", "-c4"], 1)
    assert [(o.name, o.value, o.problem) for o in found] == [
        ("output", "a", ""),
        ("error", "b", ""),
        ("nodes", "2", ""),
        ("ntasks", "3", ""),
        ("hold", "", ""),
        ("overcommit", "", ""),
        ("nice", "5", ""),
    ]
    assert rest == ["x", "-c4"]


@pytest.mark.parametrize("word", ["--no=1", "--ntask=2", "--bogus=1", "--requeue=1", "--nodes", "-j", "-jx=1"])
def test_an_option_that_getopt_refuses_is_a_problem_and_the_others_are_read(word: str) -> None:
    found, rest = parse_options([*word.split(), "-n3"] if word != "--nodes" else ["-n3", word], 1)
    assert [o.name for o in found if not o.problem] == ["ntasks"]
    assert len([o for o in found if o.problem]) == 1 and rest == []


def test_the_refused_option_is_reported_as_written() -> None:
    found, _ = parse_options(["--nodes=2", "--no=1", "-Jjob", "-jx", "-n3"], 1)
    assert [(o.name, o.value) for o in found if not o.problem] == [("nodes", "2"), ("job-name", "job"), ("ntasks", "3")]
    assert [o.value for o in found if o.problem] == ["--no=1", "-jx"]


def test_srun_has_more_options_than_sbatch() -> None:
    found, rest = parse_options(["-K1", "-u", "--cpu-bind=none", "-l", "python", "-u"], 1, SRUN)
    assert [o.name for o in found] == ["kill-on-bad-exit", "unbuffered", "cpu-bind", "label"]
    assert rest == ["python", "-u"]


def sbatch(folder: Path, text: str) -> tuple[bool, dict[str, str], str]:
    """Whether sbatch takes a script, and the options it resolved. Its controller does not answer."""
    conf, script = folder / "slurm.conf", folder / "job.sh"
    conf.write_text(
        "ClusterName=client\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=1\nAuthType=auth/none\n"
        "CredType=cred/none\nGresTypes=gpu\nSelectType=select/cons_tres\n"
    )
    script.write_text(text)
    command = ["sbatch", "--test-only", "-v", str(script)]
    environment = {"SLURM_CONF": str(conf), "PATH": str(Path(str(shutil.which("sbatch"))).parent), "LANG": "C.UTF-8"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    rows = [r.removeprefix("sbatch: ").partition(" : ") for r in done.stderr.splitlines() if " : " in r]
    return "connect failure" in done.stderr, {k.strip(): v.strip() for k, _, v in rows}, done.stderr


def refused(text: str) -> list[Finding]:
    """What the linter says that sbatch itself would refuse: errors of the KS1 family."""
    return [f for f in lint(text) if f.severity == "error" and f.rule.startswith("KS1")]


needs_sbatch = pytest.mark.skipif(
    shutil.which("sbatch") is None, reason="sbatch (Debian: slurm-client) is not installed"
)

DIRECTIVES = [
    "--nodes=2 --ntasks-per-node=1 --gres=gpu:8 --time=1-12:30 --mem=64G",
    "-N2 -n16 -c8 -pgpu -J x -t 15",
    "--nodes 2-4 --signal=B:USR1@90 --open-mode=append --requeue",
    "--out=x --err=y --job=z",
    "--tasks-per-node=3",
    "--job-name=a#b",
    "--job-name='x # y' # comment",
    "--nodes=4 \\",
    "--mem=500000mb --time=UNLIMITED --exclusive=user --nice=5",
    "--nodes=2 --ntasks=4 --ntasks-per-node=4",
    "--nodes=1 --ntasks=16 --ntasks-per-node=8",
    "--mem=64",
    "hetjob",
    "--no=1",
    "--ntask=2",
    "--ntasks-per-nod=2 --gpus-per-node=a100:4",
    "--ntask-per-node=4",
    "--time=48h",
    "--time=2 days",
    "--time = 1:00",
    "--time=1:2:3:4",
    "--mem=64GiB",
    "--mem=1.5G",
    "--gres=gpus:4",
    "--gres=gpu=4",
    "--gres=4",
    "--signal=USR1:90",
    "--signal=SIGUSR2@60",
    "--signal=WINCH@60",
    "--open-mode=new",
    "--exclusive=yes",
    "--requeue=1",
    "--nodes=two",
    "--nodes=$N",
    "--nodes",
    "--ntasks=0",
    "--cpus-per-task=4.5",
    "--mem=4G --mem-per-cpu=1G",
    "--mem-per-cpu=4G --mem-per-gpu=1G",
    "--cpus-per-gpu=2 --cpus-per-task=2",
    "-N=4",
    "-t=1:00",
    "-job_name x",
    "-x",
    "nodes=4",
    "\u2013nodes=4",
    "--nodes\u00a0=4",
    "--nodes=2 --nodes=3 --mail-type=END --mail-type=FAIL",
]


@needs_sbatch
@pytest.mark.parametrize("directive", DIRECTIVES)
def test_options_are_refused_as_sbatch_refuses_them(tmp_path: Path, directive: str) -> None:
    text = f"#!/bin/bash\n#SBATCH {directive}\nhostname\n"
    taken, resolved, said = sbatch(tmp_path, text)
    assert taken == (not refused(text)), said
    if taken:
        assert resolved.keys() - {"test-only", "verbose"} == Script(text).request.accepted.keys()
        same = resolved.keys() & {"nodes", "ntasks", "job-name", "partition", "gpus-per-node", "cpus-per-task"}
        assert {name: Script(text).request.value(name) for name in same} == {name: resolved[name] for name in same}


@needs_sbatch
@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/bash\r\nhostname\r\n",
        "\n#!/bin/bash\nhostname\n",
        "\ufeff#!/bin/bash\nhostname\n",
        "#!/usr/bin/env python\n#SBATCH -n 1\nprint()\n",
        GOOD,
    ],
)
def test_files_are_refused_as_sbatch_refuses_them(tmp_path: Path, text: str) -> None:
    taken, _, said = sbatch(tmp_path, text)
    assert taken == (not refused(text)), said


@needs_sbatch
def test_the_known_options_are_those_of_sbatch(tmp_path: Path) -> None:
    later = ("container-id", "tres-bind", "tres-per-task", "oom-kill-step", "segment", "stepmgr", "resv-ports")
    later += ("consolidate-segments",)
    for word in SBATCH_OPTIONS.replace("extra= ", "").split():  # in 22.05 --extra is short for --extra-node-info
        name = word.rpartition("|")[2].rstrip("=?")
        _, _, said = sbatch(tmp_path, f"#!/bin/bash\n#SBATCH --{name}\nhostname\n")
        assert ("unrecognized" in said) == (name in later), said
        assert ("requires an argument" in said) == (word.endswith("=") and name not in later), said
