"""Why a job waits: Slurm's reason in words, and the nodes that it does not name."""

import os

import pytest

from kit.slurm.client import JobRow
from kit.slurm.pending import _explain


def waiting(reason):
    return JobRow.parse(["7", "PENDING", "0", "0", "1", reason, "N/A", "", "job.sbatch"])


@pytest.fixture
def sinfo(tmp_path, monkeypatch):
    """A sinfo that gives a recorded answer: two lines, as for two partitions."""
    (tmp_path / "sinfo").write_text("#!/bin/sh\nprintf 'node2\\nnode[5-6]\\n'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_the_nodes_are_named_where_slurms_reason_does_not_name_them(sinfo):
    reason = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
    text = _explain(waiting(reason))
    assert "down, drained or reserved: see `sinfo -R`; now unavailable: node2,node[5-6]" in text


def test_a_reason_that_names_its_nodes_is_enough(sinfo):
    text = _explain(waiting("ReqNodeNotAvail, UnavailableNodes:node2"))
    assert "down, drained or reserved" in text and "now unavailable" not in text


def test_a_job_that_slurm_has_not_looked_at_is_explained():
    assert _explain(waiting("None")) == (
        "pending, reason None: Slurm has not looked at it yet; estimated start not known yet"
    )


@pytest.mark.parametrize("reason", ["launch failed requeued held", "JobHeldUser"])
def test_a_job_that_slurm_holds_says_how_it_goes_on(reason):
    assert f"reason {reason}: " in _explain(waiting(reason)) and "`scontrol release` it" in _explain(waiting(reason))
