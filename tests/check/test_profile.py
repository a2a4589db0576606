"""Profiles are filled, and what a person wrote stays."""

from pathlib import Path

import pytest

from kit.check import profile
from kit.config.cluster import Cluster
from kit.errors import InputError
from tests.conftest import REPOSITORY

FACTS = {
    "nodes.gpus": 7, "nodes.gpu": "H100", "nodes.cpus": 220, "nodes.ram_gib": 900.0,
    "links.inter": {"kind": "100GbE", "gb_s": 12.5}, "slurm.partition": "gpu",
}  # fmt: skip


def test_existing_keys_and_comments_are_kept():
    written = (
        '# Ours\nname = "ours"\n\n[nodes]  # rack 4\ngpus = 8  # one is away\n[links]\nintra = { kind = "pcie5" }\n'
    )
    text = profile.fill(written, FACTS)
    assert all(line in text.splitlines() for line in written.splitlines())
    (path := Path("ours.toml")).write_text(text)
    filled = Cluster.load(path)
    assert (filled.nodes.gpus, filled.nodes.gpu, filled.nodes.cpus) == (8, "H100", 220)
    assert (filled.links.intra.kind, filled.links.inter.gb_s, filled.slurm.partition) == ("pcie5", 12.5, "gpu")
    assert profile.fill(text, FACTS) == text
    assert profile.fill('name = "x"\n[nodes]', {"nodes.gpus": 1}) == 'name = "x"\n[nodes]\ngpus = 1\n'
    assert profile.fill('name = "x"\nnodes = { count = 2 }\n', {"nodes.gpus": 1}).endswith("{ count = 2, gpus = 1}\n")


@pytest.mark.parametrize("path", sorted((REPOSITORY / "env/clusters").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_profile_can_be_filled(path):
    more = FACTS | {"storage.scratch": {"path": "/scratch", "kind": "xfs", "gb_s": 1.0}}
    text = profile.fill(path.read_text(), more)
    Path("c.toml").write_text(text)
    assert Cluster.load("c.toml").storage["scratch"].kind == "xfs"
    assert Cluster.load("c.toml").nodes.count == Cluster.load(path).nodes.count


def test_other_files_are_never_overwritten(tmp_path):
    (tmp_path / "a.toml").write_text('name = "a"\n')
    for base in (None, REPOSITORY / "env/clusters/local.toml"):
        with pytest.raises(InputError, match=r"a\.toml exists, and is not the profile that is checked"):
            profile.start_profile(tmp_path / "a.toml", base)
    assert profile.start_profile(tmp_path / "a.toml", tmp_path / "a.toml")[1].name == "a"
    assert profile.start_profile(tmp_path / "new.toml", None)[0] == 'name = "new"\n'
