"""What scripts of the kit's own commands take from the cluster profile; the linter has nothing to say of them."""

import subprocess
from dataclasses import replace

import pytest

from kit.check import node_job, probe
from kit.config.cluster import Cluster
from kit.deploy import evaluate
from kit.lint.lint import lint
from kit.notebook.sweep import BODY
from kit.slurm import environment as jobscript
from kit.slurm import prepare as batch
from kit.slurm.linting import site_of


def scripts(cluster, folder):
    """By command; of a sweep, that of a notebook."""
    body = BODY.format(how="trap : TERM\n", python=jobscript.python(cluster), run="'a run'")
    asked = jobscript.options(cluster, job_name="sweep", nodes=1, ntasks=1, cpus_per_task=1)
    return {
        "prepare": batch._script(cluster, folder), "evaluate": evaluate._script(cluster, folder),
        "check": node_job.render_script(cluster, folder, 2, cluster.slurm.gres),
        "probe": probe.render_script(cluster, folder), "sweep": jobscript.render(cluster, asked, body),
    }  # fmt: skip


@pytest.fixture
def cluster(tmp_path):
    """One with something in every key that scripts read."""
    (tmp_path / "tokens").write_text("SITE_TOKEN=1\n")
    (tmp_path / "tokens").chmod(0o600)
    cluster = Cluster.load("two-node-pcie")
    own = replace(
        cluster.slurm, time="12:00:00", setup=("module load cuda",), options=("--qos=high",), python="/opt/our python",
        env_file=str(tmp_path / "tokens"),
    )  # fmt: skip
    return replace(cluster, slurm=own)


@pytest.mark.parametrize("version", ["22.05.8", "24.11"])
def test_every_job_script_is_valid_and_complete(cluster, tmp_path, version):
    for name, script in scripts(cluster, tmp_path / "a folder").items():
        assert lint(script, name, site_of(cluster, version)) == [], script
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        head, _, body = script.partition("set -euo pipefail")
        for option in ("--partition=gpu", "--qos=high"):
            assert f"#SBATCH {option}\n" in head, name
        for line in (
            "export NCCL_SOCKET_IFNAME=bond0",
            "module load cuda",
            "export PYTHONPATH=",
            "/tokens",
            "our python",
        ):
            assert line in body, name


def test_requested_options_override_the_profile_and_slurm_options_come_last(cluster):
    assert jobscript.options(cluster, time="1", gres="") == ["--partition=gpu", "--time=1", "--qos=high"]


def test_the_profiles_environment_has_precedence(cluster):
    script = jobscript.render(cluster, [], "true", {"NCCL_IB_DISABLE": "0", "HF_HUB_OFFLINE": "1"})
    assert "export NCCL_IB_DISABLE=1\n" in script and "NCCL_IB_DISABLE=0" not in script
    assert "export HF_HUB_OFFLINE=1\n" in script
