"""Load times on real files and ranks: the labels and their proof, what each figure counts, and what is refused."""

import dataclasses
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

from kit.checkpoints import pagecache, weights
from kit.checkpoints import processes as ranks
from kit.checkpoints import timing as loadtime
from kit.cli import main
from kit.errors import InputError, KitError
from tests.checkpoints.test_sharded import saves, tensors


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

    held = weights.read_headers(saves() / source)
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
    (rate,) = loadtime.time_load(saves() / "lit_model.pth", ["spread"], repeats=2, ranks=(3,))
    assert rate.ranks == 3
    assert rate.wanted_gb == pytest.approx(sum(t.nbytes for t in tensors().values()) / 1e9)  # between them, once
    assert rate.mount == loadtime.mount(saves())
    assert rate.node_gb_s == {socket.gethostname(): pytest.approx(rate.gb_s, rel=0.5)}


def test_each_nodes_rate_is_that_of_its_own_ranks(model_file):
    one = {"residency": 1, "call": 1, "asked": 0, "device": 0}
    rows = [one | {"node": n, "wanted": 10**9, "touched": s} for n, s in (("a", 1), ("a", 2), ("b", 4))]
    found = loadtime._load_time(
        weights.read_headers(model_file), model_file, "spread", 3, "cpu", [rows], [1.0], "pread"
    )
    assert found.node_gb_s == {"a": 1.0, "b": 0.25}
    assert found.gb_s == 0.75
    assert str(found).endswith("by node: a 1.00, b 0.25")


def test_a_mount_is_the_deepest_that_holds_the_path(tmp_path):
    assert loadtime.mount(Path("/proc/self")).endswith("on /proc (proc)")
    assert loadtime.mount(tmp_path / "not" / "there").endswith(")")


def test_an_unknown_method_and_a_harmed_file_are_not_timed(model_file):
    with pytest.raises(InputError, match="there are load_file"):
        loadtime.time_load(model_file, ["magic"])
    os.truncate(model_file, 1 << 20)
    with pytest.raises(KitError, match="is truncated"):
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
    with pytest.raises(
        KitError, match=r"0 of 1 ranks .*a mapped file was cut off, or its file system failed \(SIGBUS\)"
    ):
        ranks.run_ranks(("-c", code, str(model_file)))


def test_a_file_system_without_mmap_is_told_as_such():
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        pytest.skip("there is no such file in sysfs here")
    with pytest.raises(KitError, match="maps no files, so neither cold nor warm can be proven"):
        pagecache.residency([path])


def timed(method: str, low: float, middle: float, high: float) -> loadtime.LoadTime:
    return loadtime.LoadTime(
        "model", "ext4", method, "safetensors", 1, "cpu", "warm", 3, 1, 1, (1, 1), 1, 0, 0, 0, 1, middle, (low, high),
        {"here": middle}, "pread, 1 deep", 2, (2, 2), 0.5, 0,
    )  # fmt: skip


def test_only_what_the_ranges_support_is_said_and_cold_apart_from_warm():
    times = [timed("slow", 1, 1.5, 2), timed("fast", 8, 9, 10), timed("slower", 0.5, 1, 1.2)]
    assert loadtime.separable(times) == ["warm: fast is 6.00 times as fast as slow."]
    cold = [dataclasses.replace(t, label="client-cold", path="/b") for t in (times[0], times[2])]
    assert loadtime.separable(times + cold) == [
        "client-cold: slow on /b and slower on /b are not separable: their ranges overlap over 3 samples.",
        "warm: fast on model is 6.00 times as fast as slow on model.",
    ]
    near = timed("near", 7, 8.5, 9)
    assert loadtime.separable([*times, near]) == [
        "warm: fast and near are not separable: their ranges overlap over 3 samples; "
        "fast is 6.00 times as fast as slow."
    ]
    once = [dataclasses.replace(t, samples=1) for t in times[:2]]
    assert "are not separable" in loadtime.separable(once)[0]
    assert loadtime.separable(times[:1]) == []


def test_the_figure_shows_each_method_with_its_range_and_the_device():
    drawn = loadtime.figure([timed("kit & co", 1, 2, 3), timed("slow", 0.5, 1, 1.5)]).data
    assert xml.dom.minidom.parseString(drawn).documentElement.tagName == "svg"
    assert drawn.count("<rect") == 1 + 2 and drawn.count("stroke-dasharray") == 2
    assert all(word in drawn for word in ("kit &amp; co", "Loading, warm: median", ">1 GB/s<", "(pread, 1 deep)"))


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_the_next_sample_goes_on(tmp_path):
    """The first of two ranks waits for the other one, which does not come."""
    (tmp_path / "ranks_that_wait.py").write_text(
        "import os\nfrom kit.checkpoints.processes import join\n"
        "def prepare(): import torch.distributed\n"
        "def sample(word):\n"
        "    if word == 'bad' and os.environ['RANK'] == '1': raise ValueError('no shard here')\n"
        "    return {'rank': join()[0], 'pid': os.getpid()}\n"
    )
    os.environ["PYTHONPATH"], before = str(tmp_path), os.environ.get("PYTHONPATH", "")
    try:
        with ranks.fresh("ranks_that_wait") as run:
            assert [row["rank"] for row in run(2, "good")] == [0, 1]
            with pytest.raises(KitError, match=r"(?s)bad: 0 of 2 ranks came to an end: .*no shard here"):
                run(2, "bad")
            assert len({row["pid"] for n in (1, 3) for row in run(n, "good")}) == 4  # none is used twice
    finally:
        os.environ["PYTHONPATH"] = before


def test_a_launcher_that_starts_another_number_of_ranks_is_told_as_such():
    with pytest.raises(KitError, match="1 of 2 ranks came to an end"):
        ranks.run_ranks(("-c", "print('{}')"), 2, launcher=["env"])
    assert ranks.run_ranks(("-c", "print('{}')"), 1, launcher=["env"]) == [{}]


def test_a_figure_is_json_and_a_sentence():
    figure = timed("kit", 1, 2, 3)
    assert json.loads(json.dumps(figure.as_dict()))["method"] == "kit"
    assert "kit, 1 rank: 2.00 GB/s (1.00 to 3.00), warm" in str(figure)


@pytest.mark.slow
def test_the_command_times_paths_side_by_side_and_says_what_they_tell(model_file, capsys):
    other = model_file.with_name("other.safetensors")
    shutil.copy(model_file, other)
    words = ["--method", "load_file", "--method", "kit", "--ranks", "1,2", "--repeats", "1", "--json"]
    assert main(["checkpoint", "time", str(model_file), str(other), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = [(m["path"], m["method"], m["ranks"]) for m in found["methods"]]
    assert keys == [(str(p), m, n) for p in (model_file, other) for m in ("load_file", "kit") for n in (1, 2)]
    assert len(found["separable"]) >= 1
    assert main(["checkpoint", "time", str(model_file), "--method", "kit", "--repeats", "1", "--cold"]) == 0
    assert capsys.readouterr().out.startswith(f"{model_file}, {loadtime.mount(model_file)}: kit, 1 rank: ")


@pytest.mark.parametrize(("words", "code", "message"), [
    (["--method", "magic"], 2, "No method magic for safetensors here; there are load_file"),
    (["--ranks", "2,0"], 2, "argument --ranks: invalid"),
    (["absent"], 2, "absent does not exist"),
])  # fmt: skip
def test_a_wrong_call_of_the_command_exits_2(model_file, capsys, words, code, message):
    try:
        assert main(["checkpoint", "time", str(model_file), *words]) == code
    except SystemExit as end:
        assert end.code == code
    assert message in capsys.readouterr().err


def test_the_command_exits_1_for_a_file_that_is_cut_off(model_file, capsys):
    os.truncate(model_file, 1 << 20)
    assert main(["checkpoint", "time", str(model_file)]) == 1
    assert "is truncated" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fastsafetensors", "runai-model-streamer"])
def test_an_optional_loader_brings_the_same_bytes_in_a_fresh_process(model_file, name):
    if name not in loadtime.known("safetensors"):
        pytest.skip(f"{name} is not installed here")
    (found,) = loadtime.time_load(model_file, [name], cold=True, repeats=1)
    assert (found.method, found.label) == (name, "client-cold")
    assert found.wanted_gb == pytest.approx(16 * 2**20 / 1e9)


def test_the_module_is_light():
    code = "import sys, kit.checkpoints.timing, kit.checkpoints.saving, kit.checkpoints.plan\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_ranks_without_a_gpu_each_are_refused_in_a_sentence(tmp_path: Path) -> None:
    import torch

    with pytest.raises(InputError, match=f"a GPU for each rank: 99 asked for, {torch.cuda.device_count()} here"):
        loadtime.time_load(tmp_path, ranks=(1, 99), device="cuda")
