"""Load times on real files and ranks: the labels and their proof, what each figure counts, and what is refused."""

import dataclasses
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

from kit.checkpoints import loaders, pagecache, weights
from kit.checkpoints import processes as ranks
from kit.checkpoints import timing as loadtime
from kit.checkpoints.load_sample import RankSample
from kit.checkpoints.loaders import loaders_for
from kit.checkpoints.loaders.base import EVERY, LoadRequest
from kit.checkpoints.storage import PlainReads, mount
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
        pytest.skip(f"{tmp_path} is on a file system that keeps its pages (tmpfs), so nothing can be cold there")
    return path


@pytest.mark.slow
def test_warm_and_cold_loads_are_labelled_by_their_proof(model_file):
    loadtime.time_load(model_file, ["load_file"], repeats=1)  # reads the pages of the code that loads
    (warm,) = loadtime.time_load(model_file, ["load_file"], repeats=2).methods
    assert (warm.label, warm.residency_before) == ("warm", 1)
    assert warm.device_gb < 0.05 * warm.wanted_gb
    (cold,) = loadtime.time_load(model_file, ["load_file"], cold=True, repeats=2).methods
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
    (0, 1, "client-cold"), (0.02, 1, "mixed"), (0, 0.9, "mixed"), (1, 0, "warm"), (1, 0.1, "mixed"),
    (1, 1, "past the cache"), (0.5, 0.5, "mixed"),
])  # fmt: skip
def test_a_cache_label_needs_both_proofs(residency, amplification, label):
    assert loadtime.cache_state(residency, amplification) == label


@pytest.mark.slow
def test_two_ranks_of_dcp_read_each_byte_twice_and_the_kits_reader_once(tmp_path):
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {f"layer{n}": torch.rand(1024, 1024) for n in range(16)}
        dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)  # 64 MiB
    methods = ["dcp.load", "dcp.load, kit's reader", "kit"]
    theirs, reader, kit = loadtime.time_load(tmp_path, methods, repeats=1, ranks=(2,)).methods
    assert [t.ranks for t in (theirs, reader, kit)] == [2] * 3
    assert theirs.amplification == pytest.approx(2.0, rel=0.1)  # pytorch#76331: every rank reads complete items
    assert reader.amplification == pytest.approx(1.0, rel=0.1)
    assert kit.amplification == pytest.approx(1.0, rel=0.1)
    assert theirs.wanted_gb == reader.wanted_gb == kit.wanted_gb == pytest.approx(64 * 2**20 / 1e9)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["one", "safetensors", "lit_model.pth"])
def test_every_method_of_a_format_loads_the_same_tensors(source):
    import warnings

    import torch

    held = weights.read_headers(saves() / source)
    sizes = sorted(tensor.nbytes for tensor in tensors().values())
    for loader in loaders_for(held.format):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(loader.load(LoadRequest(held, saves() / source)))
        name = loader.name
        assert sorted(tensor.nbytes for tensor in found) == sizes, name
        for mine in tensors().values():
            assert any(mine.shape == t.shape and mine.dtype == t.dtype and torch.equal(
                mine.view(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)) for t in found), name  # fmt: skip


@pytest.mark.slow
def test_several_paths_are_timed_side_by_side():
    found = loadtime.time_load([saves() / "one", saves() / "rows"], ["kit"], repeats=1, ranks=(1, 2)).methods
    assert [(Path(t.path).name, t.ranks) for t in found] == [("one", 1), ("one", 2), ("rows", 1), ("rows", 2)]
    assert all(0 < t.call_s <= t.touched_s and t.label == "warm" for t in found)


def reference(*rates: float) -> PlainReads:
    return PlainReads([], cold=False, rates={1: list(rates), 4: [0.1]})


def rank_sample(wanted: int, touched_s: float) -> RankSample:
    return RankSample(call_s=1, touched_s=touched_s, wanted=wanted, asked=0, device=0, residency=1)


def test_the_rate_counts_the_bytes_of_all_ranks_to_the_end_of_the_slowest(model_file):
    rows = [rank_sample(10**9, seconds) for seconds in (1, 2, 4)]
    held = weights.read_headers(model_file)
    found = loadtime.summarize(held, model_file, "kit", "cpu", [rows], reference(1.0))
    assert found.gb_s == 0.75
    assert found.mount == mount(model_file)


def test_statistics_are_medians_and_ranges_over_samples(model_file):
    held = weights.read_headers(model_file)
    samples = [[rank_sample(10**9, seconds)] for seconds in (4, 1, 2)]
    found = loadtime.summarize(held, model_file, "kit", "cpu", samples, reference(2.0, 4.0, 1.0))
    assert (found.samples, found.touched_s, found.touched_range_s) == (3, 2, (1, 4))
    assert (found.gb_s, found.gb_s_range) == (0.5, (0.25, 1.0))
    assert (found.reference, found.reference_gb_s, found.reference_range) == ("pread, 1 deep", 2.0, (1.0, 4.0))
    assert found.of_reference == 0.25


def test_a_mount_is_the_deepest_that_holds_the_path(tmp_path):
    assert mount(Path("/proc/self")).endswith("on /proc (proc)")
    # findmnt reads the kernel's own table
    command = ["findmnt", "--noheadings", "--output", "TARGET,FSTYPE", "--target", str(tmp_path)]
    target, kind = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert mount(tmp_path / "not" / "there").endswith(f" on {target} ({kind})")


def test_an_unknown_method_and_a_damaged_file_are_not_timed(model_file):
    with pytest.raises(InputError, match=r"there are .*load_file"):
        loadtime.time_load(model_file, ["magic"])
    os.truncate(model_file, 1 << 20)
    with pytest.raises(KitError, match="is truncated"):
        loadtime.time_load(model_file)


def test_a_method_that_is_not_installed_names_its_package():
    installed = {loader.name for loader in loaders_for("safetensors")}
    missing = [name for name in ("fastsafetensors", "runai-model-streamer") if name not in installed]
    if not missing:
        pytest.skip("both optional loaders are installed here")
    with pytest.raises(
        InputError, match=f"{missing[0]} is not available here: not installed: run `pip install {missing[0]}`"
    ):
        loaders_for("safetensors", missing)


def test_methods_that_this_machine_cannot_use_are_named_with_the_reason(model_file):
    found = loadtime.time_load(model_file, repeats=1)
    assert found.left_out == loaders.left_out("safetensors") == found.as_dict()["left_out"]
    assert not {time.method for time in found.methods} & found.left_out.keys()
    for name, reason in found.left_out.items():
        assert f"{name}: {reason}." in list(found.parts())
    expected = {"kvikio, GPUDirect", "kvikio, POSIX", "instanttensor"}  # for GPUs
    assert expected <= found.left_out.keys()
    with pytest.raises(InputError, match="kvikio, GPUDirect is not available here: "):
        loadtime.time_load(model_file, ["kvikio, GPUDirect"])


def test_a_method_for_gpus_refuses_the_cpu():
    (loader,) = (one for one in loaders.all_loaders() if one.name == "instanttensor")
    installed = dataclasses.replace(loader, package="torch")
    assert installed.unavailable() == "it loads to cuda only: add --device cuda"
    assert installed.unavailable("cuda") == ""


def test_every_loader_has_its_own_name_and_every_format_has_a_loader():
    names = [loader.name for loader in loaders.all_loaders()]
    assert len(names) == len(set(names))
    assert {format_name for loader in loaders.all_loaders() for format_name in loader.formats} == EVERY | {"orbax"}


@pytest.fixture
def module_of_ranks(tmp_path, monkeypatch):
    """Writes a module that `fresh_ranks` can run; returns its name."""

    def make(text: str) -> str:
        (tmp_path / "code_of_ranks.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "code_of_ranks"

    return make


def test_a_file_truncated_while_it_is_mapped_is_named_as_the_cause(model_file, module_of_ranks):
    module = module_of_ranks(
        "import os\nfrom safetensors.torch import load_file\n"
        "def sample(path):\n"
        "    tensors = load_file(path)\n"
        "    os.truncate(path, 1 << 20)\n"
        "    return {'sum': float(sum(tensor.sum() for tensor in tensors.values()))}\n"
    )
    with (
        ranks.fresh_ranks(module) as run,
        pytest.raises(KitError, match=r"a rank of 1 failed: a mapped file was truncated, or .* failed \(SIGBUS\)"),
    ):
        run(1, str(model_file))


def test_a_file_system_without_mmap_is_an_error():
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        pytest.skip("there is no such file in sysfs here")
    with pytest.raises(KitError, match="cannot map files, so neither cold nor warm can be proven"):
        pagecache.residency([path])


def timed(method: str, low: float, middle: float, high: float) -> loadtime.LoadTime:
    return loadtime.LoadTime(
        path="model", mount="/dev/sda on / (ext4)", method=method, format="safetensors", ranks=1, device="cpu",
        label=loadtime.CacheState.WARM, samples=3, call_s=1, touched_s=1, touched_range_s=(1, 1), wanted_gb=1,
        asked_gb=0, device_gb=0, amplification=0, residency_before=1, gb_s=middle, gb_s_range=(low, high),
        reference="pread, 1 deep", reference_gb_s=2, reference_range=(2, 2),
        of_reference=0.5, load_average=0,
    )  # fmt: skip


def separable(*times: loadtime.LoadTime) -> list[str]:
    return loadtime.LoadTimes(times).separable()


def test_methods_are_compared_only_where_their_ranges_differ_and_per_cache_state():
    times = [timed("slow", 1, 1.5, 2), timed("fast", 8, 9, 10), timed("slower", 0.5, 1, 1.2)]
    assert separable(*times) == ["warm: fast is 6.00 times as fast as slow."]
    cold = [dataclasses.replace(t, label=loadtime.CacheState.COLD, path="/b") for t in (times[0], times[2])]
    assert separable(*times, *cold) == [
        "client-cold: slow on /b and slower on /b are not separable: their ranges overlap over 3 samples.",
        "warm: fast on model is 6.00 times as fast as slow on model.",
    ]
    near = timed("near", 7, 8.5, 9)
    assert separable(*times, near) == [
        "warm: fast and near are not separable: their ranges overlap over 3 samples; "
        "fast is 6.00 times as fast as slow."
    ]
    once = [dataclasses.replace(t, samples=1) for t in times[:2]]
    assert "are not separable" in separable(*once)[0]
    assert separable(*times[:1]) == []


def test_the_figure_shows_each_method_with_its_range_and_the_plain_reads():
    times = loadtime.LoadTimes((timed("kit & co", 1, 2, 3), timed("slow", 0.5, 1, 1.5)))
    figure = times.figure()
    assert figure.rows == {"kit & co": (1, 2, 3), "slow": (0.5, 1, 1.5)}
    assert figure.limit == ("plain reads (pread, 1 deep)", 2)
    assert xml.dom.minidom.parseString(figure.svg()).documentElement.tagName == "svg"
    assert "Loading, warm" in figure.svg()
    two_paths = loadtime.LoadTimes((times.methods[0], dataclasses.replace(times.methods[1], path="/b")))
    assert two_paths.figure().limit is None


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_the_next_sample_goes_on(module_of_ranks):
    """The first of two ranks waits for the other one, which does not come."""
    module = module_of_ranks(
        "import os\nfrom kit.checkpoints.processes import join\n"
        "def sample(word):\n"
        "    if word == 'bad' and os.environ['RANK'] == '1': raise ValueError('no shard here')\n"
        "    return {'rank': join()[0], 'pid': os.getpid()}\n"
    )
    with ranks.fresh_ranks(module) as run:
        assert [row["rank"] for row in run(2, "good")] == [0, 1]
        with pytest.raises(KitError, match=r"(?s)bad: a rank of 2 failed: .*no shard here"):
            run(2, "bad")
        assert len({row["pid"] for n in (1, 3) for row in run(n, "good")}) == 4  # none is used twice


def test_times_are_json_and_a_table():
    times = loadtime.LoadTimes((timed("kit", 1, 2, 3),))
    found = json.loads(json.dumps(times.as_dict()))
    assert found["methods"][0]["method"] == "kit"
    assert found["methods"][0]["label"] == "warm"
    assert found["separable"] == []
    assert re.search(r"kit +2 +1 to 3 +warm", str(times))


@pytest.mark.slow
def test_the_command_times_paths_side_by_side_and_compares_them(model_file, capsys):
    other = model_file.with_name("other.safetensors")
    shutil.copy(model_file, other)
    words = ["--method", "load_file", "--method", "kit", "--ranks", "1,2", "--repeats", "1", "--json"]
    assert main(["checkpoint", "time", str(model_file), str(other), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = [(m["path"], m["method"], m["ranks"]) for m in found["methods"]]
    assert keys == [(str(p), m, n) for p in (model_file, other) for m in ("load_file", "kit") for n in (1, 2)]
    assert len(found["separable"]) >= 1
    assert main(["checkpoint", "time", str(model_file), "--method", "kit", "--repeats", "1", "--cold"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"kit +[\d.]+ +[\d.]+ to [\d.]+ +client-cold", printed)
    assert mount(model_file) in printed


@pytest.mark.parametrize(("words", "code", "message"), [
    (["--method", "magic"], 2, "No method magic for safetensors; there are"),
    (["--ranks", "2,0"], 2, "Expected whole numbers from 1 with commas between, got '2,0'"),
    (["absent"], 2, "absent does not exist"),
])  # fmt: skip
def test_a_wrong_call_of_the_command_exits_2(model_file, capsys, words, code, message):
    try:
        assert main(["checkpoint", "time", str(model_file), *words]) == code
    except SystemExit as end:
        assert end.code == code
    assert message in capsys.readouterr().err


def test_the_command_exits_1_for_a_truncated_file(model_file, capsys):
    os.truncate(model_file, 1 << 20)
    assert main(["checkpoint", "time", str(model_file)]) == 1
    assert "is truncated" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fastsafetensors", "runai-model-streamer"])
def test_an_optional_loader_loads_the_same_bytes_in_a_fresh_process(model_file, name):
    if name not in {loader.name for loader in loaders_for("safetensors")}:
        pytest.skip(f"{name} is not installed here")
    (found,) = loadtime.time_load(model_file, [name], cold=True, repeats=1).methods
    assert (found.method, found.label) == (name, "client-cold")
    assert found.wanted_gb == pytest.approx(16 * 2**20 / 1e9)


def test_the_module_is_light():
    code = "import sys, kit.checkpoints.timing, kit.checkpoints.saving, kit.checkpoints.plan\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    import torch

    with pytest.raises(InputError, match=f"a GPU for each rank: 99 asked for, {torch.cuda.device_count()} here"):
        loadtime.time_load(tmp_path, ranks=(1, 99), device="cuda")
