"""File systems of the profile, from tables like /proc/mounts and trials of a few MiB."""

import re
import time

import pytest

from kit.check import mounts
from kit.check.facts import within
from kit.config.cluster import Cluster, Paths, Storage


@pytest.fixture
def small(monkeypatch):
    """Trials of a few MiB."""
    monkeypatch.setattr(mounts, "SIZE", 16 << 20)


def test_mounts_are_listed_by_kind_and_those_of_the_profile_are_measured(tmp_path, small):
    table = (
        f"/dev/sda1 / ext4 rw 0 0\nfiler:/vol/a {tmp_path} nfs4 rw,vers=4.2 0 0\n"
        f"/mnt/a:/mnt/b {tmp_path}/absent\\040pool fuse.mergerfs rw 0 0\nbeegfs_nodev {tmp_path}/none beegfs rw 0 0\n"
    )
    found = {f.name: f for f in mounts.find_mounts(Cluster("x", paths=Paths(runs=str(tmp_path / "runs"))), table)}
    runs = found[f"mount {tmp_path}"]
    assert re.match(r"nfs from filer:/vol/a \(runs(, scratch)?\), \d", runs.value) and not runs.problem
    assert runs.facts["write_gb_s"] > 0 and runs.facts["read_gb_s"] > 0
    (key,) = [k for k in runs.facts if "." in k]
    assert runs.facts[key]["kind"] == "nfs" and runs.facts[key]["path"] == str(tmp_path)
    # Other networks' mounts are listed, not tried; these are not there at all.
    assert found[f"mount {tmp_path}/absent pool"].value.startswith("mergerfs from /mnt/a:/mnt/b")
    assert found[f"mount {tmp_path}/none"].value.startswith("beegfs from beegfs_nodev")
    assert list(tmp_path.glob(".trial*")) == []


def test_symbolic_links_are_followed_to_their_mount(tmp_path, small):
    (tmp_path / "pool").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pool")
    table = f"root / ext4 rw 0 0\nfiler:/a {tmp_path / 'pool'} nfs rw 0 0\n"
    found = mounts.find_mounts(Cluster("x", paths=Paths(str(tmp_path / "link" / "runs"))), table)
    assert found[0].name == f"mount {tmp_path / 'pool'}"


def test_a_missing_mount_of_the_profile_is_a_problem(tmp_path, small):
    *_, gone = mounts.find_mounts(Cluster("x", storage={"pool": Storage(str(tmp_path / "pool"))}))
    assert (gone.name, gone.value) == ("storage pool", f"{tmp_path / 'pool'} is not there")
    assert gone.problem == "mount it, or correct [storage] of the profile"


def test_a_full_disk_is_a_problem_and_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "SIZE", 1 << 60)
    found = mounts.find_mounts(Cluster("x", paths=Paths(str(tmp_path))))
    runs = next(f for f in found if "runs" in f.value)
    assert runs.problem.startswith("nearly full") and "writes" not in runs.value


def test_a_profiles_storage_keeps_its_name(tmp_path, small):
    cluster = Cluster("x", paths=Paths(str(tmp_path / "runs")), storage={"pool": Storage(str(tmp_path))})
    (runs,) = [f for f in mounts.find_mounts(cluster) if "runs" in f.value and "pool" in f.value]
    assert not [key for key in runs.facts if key.startswith("storage.")]


def test_a_read_only_folder_is_a_problem_with_advice(tmp_path, small):
    (tmp_path / "file").write_text("")
    found = mounts.find_mounts(
        Cluster("x", paths=Paths(str(tmp_path / "file" / "runs"))), f"root / ext4 rw 0 0\ndisk {tmp_path} ext4 rw 0 0\n"
    )
    assert found[0].problem == f"{tmp_path / 'file'}: Not a directory; set another path"


def test_a_mount_that_does_not_answer_is_not_measured(monkeypatch):
    with pytest.raises(TimeoutError):
        within(0.05, time.sleep, 0.5)
    assert within(5, sum, [1, 2]) == 3
    monkeypatch.setattr(mounts, "within", lambda *_: (_ for _ in ()).throw(TimeoutError))
    found = mounts.find_mounts(Cluster("x"), "filer:/a / nfs rw 0 0\n")
    assert found[0].problem == "it does not answer: its server may be gone"
