"""Load times on real files and ranks: the labels and their proof, what each figure counts, and what is refused."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit import loadtime, pagecache, weights
from kit.errors import InputError, KitError
from tests.test_shards import saves, tensors


@pytest.fixture
def model_file(tmp_path):
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({f"layer{n}": torch.rand(1 << 20) for n in range(4)}, path)  # 16 MiB
    pagecache.evict([path])
    if pagecache.residency([path]) > 0.01:
        pytest.skip(f"{tmp_path} lies on a file system that keeps its pages (tmpfs), so nothing can be cold there")
    return path


def test_warm_and_cold_loads_are_labelled_by_their_proof(model_file):
    (warm,) = loadtime.time_load(model_file, ["load_file"], repeats=2)
    assert (warm.label, warm.residency_before, warm.device_gb) == ("warm", 1, 0)
    (cold,) = loadtime.time_load(model_file, ["load_file"], cold=True, repeats=2)
    assert cold.label == "client-cold"
    assert cold.residency_before < 0.01
    assert 0.95 < cold.amplification < 1.1
    for found in (warm, cold):
        assert found.wanted_gb == pytest.approx(16 * 2**20 / 1e9)
        assert found.call_s < found.touched_s  # load_file maps; the bytes come with the first touch
        assert found.gb_s_range[0] <= found.gb_s <= found.gb_s_range[1]
        assert found.reference_range[0] <= found.reference_gb_s <= found.reference_range[1]
        assert found.of_reference == pytest.approx(found.gb_s / found.reference_gb_s)
        assert found.samples == 2


def test_a_file_that_cannot_be_evicted_gets_no_cold_label(model_file):
    with model_file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[:: mmap.PAGESIZE]) > 4000
        with pytest.raises(KitError, match=r"No cold figure .* pages were in memory after eviction"):
            loadtime.time_load(model_file, ["load_file"], cold=True, repeats=1)


@pytest.mark.parametrize(("residency", "amplification", "label"), [
    (0, 1, "client-cold"), (0.02, 1, "mixed"), (0, 0.9, "mixed"), (1, 0, "warm"), (1, 1, "past the cache"),
    (0.5, 0.5, "mixed"),
])  # fmt: skip
def test_a_label_needs_both_proofs(residency, amplification, label):
    assert loadtime.label(residency, amplification) == label


@pytest.mark.slow
def test_two_ranks_of_dcp_read_what_they_want_twice_and_kits_once(tmp_path):
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {f"layer{n}": torch.rand(1024, 1024) for n in range(16)}
        dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)  # 64 MiB
    methods = ["dcp.load", "dcp.load, kit's reader", "kit", "kit, handed over"]
    theirs, reader, kit, handed = loadtime.time_load(tmp_path, methods, repeats=1, ranks=(2,))
    assert [t.ranks for t in (theirs, reader, kit, handed)] == [2] * 4
    assert theirs.amplification == pytest.approx(2.0, rel=0.1)  # pytorch#76331: every rank reads whole items
    assert reader.amplification == pytest.approx(1.0, rel=0.1)
    assert kit.amplification == pytest.approx(1.0, rel=0.1)
    assert theirs.wanted_gb == kit.wanted_gb == pytest.approx(64 * 2**20 / 1e9)
    assert handed.wanted_gb == pytest.approx(2 * 64 * 2**20 / 1e9)  # the whole state on both
    assert handed.amplification == pytest.approx(0.5, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["one", "safetensors", "lit_model.pth"])
def test_every_method_of_a_format_brings_the_same_tensors(source):
    import warnings

    import torch

    held = weights.weights(saves() / source)
    sizes = sorted(tensor.nbytes for tensor in tensors().values())
    for name in loadtime.known(held.format):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(loadtime.METHODS[held.format][name](loadtime.Job(held, saves() / source)))
        assert sorted(tensor.nbytes for tensor in found) == sizes, name
        for mine in tensors().values():
            assert any(mine.shape == t.shape and mine.dtype == t.dtype and torch.equal(
                mine.view(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)) for t in found), name  # fmt: skip


@pytest.mark.slow
def test_several_paths_are_timed_side_by_side():
    found = loadtime.time_load([saves() / "one", saves() / "rows"], ["kit"], repeats=1, ranks=(1, 2))
    assert [(Path(t.path).name, t.ranks) for t in found] == [("one", 1), ("one", 2), ("rows", 1), ("rows", 2)]
    assert all(0 < t.call_s <= t.touched_s and t.label == "warm" for t in found)


@pytest.mark.slow
def test_a_spread_state_is_timed_for_each_node_and_mount():
    (rate,) = loadtime.time_spread(saves() / "lit_model.pth", 3, repeats=2)
    assert rate.ranks == 3
    assert rate.gb == pytest.approx(sum(t.nbytes for t in tensors().values()) / 1e9)
    assert rate.gb_s_range[0] <= rate.gb_s <= rate.gb_s_range[1]
    assert rate.mount == loadtime.mount(saves())


def test_a_mount_is_the_deepest_that_holds_the_path(tmp_path):
    assert loadtime.mount(Path("/proc/self")).endswith("on /proc (proc)")
    assert loadtime.mount(tmp_path / "not" / "there").endswith(")")


def test_an_unknown_method_and_a_harmed_file_are_not_timed(model_file):
    with pytest.raises(InputError, match="there are load_file"):
        loadtime.time_load(model_file, ["magic"])
    os.truncate(model_file, 1 << 20)
    with pytest.raises(KitError, match="is cut off"):
        loadtime.time_load(model_file)


def test_a_method_that_is_not_installed_says_what_it_needs():
    missing = [m for m in ("fastsafetensors", "runai-model-streamer") if m not in loadtime.known("safetensors")]
    if not missing:
        pytest.skip("both optional loaders are installed here")
    with pytest.raises(InputError, match=f"it needs pip install {missing[0]}"):
        loadtime.known("safetensors", missing)


def test_a_file_cut_off_while_it_is_mapped_is_told_as_such(model_file):
    code = (
        "import os, sys; from safetensors.torch import load_file; t = load_file(sys.argv[1]);"
        "os.truncate(sys.argv[1], 1 << 20); print(sum(x.sum() for x in t.values()))"
    )
    with pytest.raises(KitError, match=r"exit -7.*a mapped file was cut off, or its file system failed \(SIGBUS\)"):
        loadtime.run_ranks(("-c", code, str(model_file)), 1)


def test_a_file_system_without_mmap_is_told_as_such():
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        pytest.skip("there is no such file in sysfs here")
    with pytest.raises(KitError, match="maps no files, so neither cold nor warm can be proven"):
        pagecache.residency([path])


def timed(method: str, low: float, middle: float, high: float) -> loadtime.LoadTime:
    return loadtime.LoadTime(
        "model", "ext4", method, "safetensors", 1, "cpu", "warm", 3, 1, 1, (1, 1), 1, 0, 0, 0, 1, middle, (low, high),
        "pread, 1 deep", 2, (2, 2), 0.5, 0,
    )  # fmt: skip


def test_overlapping_ranges_are_not_separable():
    said = loadtime.separable([timed("slow", 1, 1.5, 2), timed("fast", 8, 9, 10), timed("slower", 0.5, 1, 1.2)])
    assert said == [
        "fast is 6.00 times as fast as slow.",
        "slow and slower are not separable: their ranges overlap over 3 samples.",
    ]


def test_a_figure_is_json_and_a_sentence():
    figure = timed("kit", 1, 2, 3)
    assert json.loads(json.dumps(figure.as_dict()))["method"] == "kit"
    assert "kit, 1 rank: 2.00 GB/s (1.00 to 3.00), warm" in str(figure)


def test_the_module_is_light():
    code = "import sys, kit.loadtime, kit.savetime, kit.interval; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0
