"""The linter with a cluster profile, with this machine's Slurm, and sbatch's own verdict on a script."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kit.config.cluster import Cluster, Nodes, Slurm
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.lint.lint import lint
from kit.lint.site import Site
from kit.slurm.client import version
from kit.slurm.linting import lint_scripts, sbatch_verdict, site_of
from kit.slurm.run import Run
from kit.slurm.script import render_script
from tests.conftest import REPOSITORY

needs_sbatch = pytest.mark.skipif(
    shutil.which("sbatch") is None, reason="sbatch (Debian: slurm-client) is not installed"
)


def script_with(options: str) -> str:
    return f"#!/bin/bash\n#SBATCH --time=10 {options}\nhostname\n"


def client_configuration(folder: Path) -> Path:
    """A slurm.conf whose controller does not answer."""
    path = folder / "slurm.conf"
    path.write_text(
        "ClusterName=client\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=1\nAuthType=auth/none\n"
        "CredType=cred/none\nGresTypes=gpu\nSelectType=select/cons_tres\n"
    )
    return path


def test_what_the_linter_may_know_is_taken_from_the_profile() -> None:
    slurm = Slurm(options=("--frobnicate=1", "--qos high"))
    cluster = Cluster("c", Nodes(count=2, gpus=8), slurm=slurm, environment={"NCCL_IB_DISABLE": "1"})
    expected = Site(frozenset(["frobnicate", "qos"]), 2, 8, {"NCCL_IB_DISABLE": "1"}, "22.05.8")
    assert site_of(cluster, "22.05.8") == expected
    assert site_of() == Site()


@pytest.mark.parametrize("name", ["two-node-pcie", "h100-8x8"])
@pytest.mark.parametrize("version", ["22.05.8", "24.11"])
def test_job_scripts_of_the_kit_have_no_finding(tmp_path: Path, name: str, version: str) -> None:
    cluster = Cluster.load(name)
    here = replace(cluster, paths=replace(cluster.paths, runs=str(tmp_path / "runs")))
    script = render_script(Run.create(Recipe.load("llama8b"), here, tmp_path, "digest"))
    assert lint(script, site=site_of(cluster, version)) == []
    for path in (REPOSITORY / "env").rglob("*.sbatch"):
        assert lint(path.read_text(), str(path), site=site_of(None, version)) == []


@pytest.mark.slurm
def test_a_live_slurm_judges_what_the_linter_accepts(live_slurm: Path, tmp_path: Path) -> None:
    script = tmp_path / "a.sbatch"
    said = {}
    for asks in ("--nodes=1", "--nodes=99", "--partition=absent", "--mem=9999G"):
        script.write_text(script_with(asks))
        said[asks] = " ".join(f.message for f in lint_scripts([script]).findings)
    assert said["--nodes=1"] == ""
    assert "node configuration is not available" in said["--nodes=99"] and "9999G" not in said["--nodes=99"]
    assert "invalid partition" in said["--partition=absent"] and "not available" in said["--mem=9999G"]
    assert re.match(r"\d\d\.\d\d", version())


@needs_sbatch
def test_without_a_controller_sbatch_judges_options_but_not_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(client_configuration(tmp_path)))
    script = tmp_path / "a.sbatch"
    script.write_text(script_with("--nodes=99"))
    assert sbatch_verdict(script) == []
    script.write_text(script_with("--nodes=2-x"))
    assert "not a valid node count" in sbatch_verdict(script)[0].message


@needs_sbatch
def test_without_a_configuration_sbatch_gives_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    (tmp_path / "a.sbatch").write_text(script_with("--nodes=1"))
    assert sbatch_verdict(tmp_path / "a.sbatch") == []


def test_without_sbatch_no_verdict_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.sbatch").write_text(script_with("--nodes=2-x"))
    monkeypatch.setenv("PATH", "")
    assert sbatch_verdict(tmp_path / "a.sbatch") == []


def test_the_report_has_the_lines_of_all_scripts(tmp_path: Path) -> None:
    paths = [tmp_path / "a.sbatch", tmp_path / "b.sbatch"]
    for path in paths:
        path.write_text(script_with(f"--output={path.name}"))
    report = lint_scripts(paths)
    assert [(finding.file, finding.rule) for finding in report.findings] == [(str(path), "KS202") for path in paths]
    assert "--output=a.sbatch" in str(report) and "--output=b.sbatch" in str(report)


def test_a_script_that_cannot_be_read_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        lint_scripts([tmp_path / "absent.sbatch"])
