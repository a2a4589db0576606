"""The sharded loader on checkpoints saved and loaded by real ranks: right values, each byte once, clear errors."""

import os
import pickle
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from kit.checkpoints import pagecache, weights
from kit.checkpoints import sharded as shards
from kit.checkpoints.formats.base import Piece
from kit.errors import InputError, KitError
from tests import shared
from tests.ranks import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]


def tensors() -> dict[str, torch.Tensor]:
    """Large and small, odd row counts, all ranks, a scalar, none at all, and the dtypes that checkpoints have."""
    draw = torch.Generator().manual_seed(3)
    return {
        "embed": torch.randn(1003, 768, generator=draw).to(torch.bfloat16),
        "head": torch.randn(517, 1024, generator=draw),
        "norm": torch.randn(768, generator=draw),
        "lora_A": torch.randn(3, 768, generator=draw),
        "experts": torch.randn(5, 64, 96, generator=draw).half(),
        "eight": torch.randn(64, 32, generator=draw).to(torch.float8_e4m3fn),
        "ids": torch.arange(70),
        "none": torch.empty(0, 4),
        "step": torch.tensor(7.0),
    }


def rank_main(out: Path, tasks: str) -> None:
    """One rank's part of what the tests ask of several: saves and loads through DCP."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, empty

    dist.init_process_group("gloo")
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), tensors()
    if "save" in tasks:
        for name, dim in (("rows", 0), ("columns", 1)):
            spread = {
                n: distribute_tensor(t, mesh, [Shard(min(dim, t.ndim - 1))]) if t.ndim and "eight" not in n else t
                for n, t in whole.items()
            }
            dcp.save(spread | {"object": {"lr": 0.1}}, checkpoint_id=str(out / name))
    if "load" in tasks:
        for place in (Shard(0), Shard(1), Replicate()):
            for source in ("rows", "columns"):
                state = {
                    n: empty(t.shape, dtype=t.dtype, device_mesh=mesh, placements=[place])
                    if t.ndim > 1 and "eight" not in n
                    else torch.empty_like(t)
                    for n, t in whole.items()
                }
                state["object"] = {"lr": 0.0}
                dcp.load(state, storage_reader=shards.Reader(out / source))
                assert state.pop("object") == {"lr": 0.1}
                for name, t in state.items():
                    full = t.full_tensor() if hasattr(t, "full_tensor") else t
                    assert same(full, whole[name]), (place, source, name)
    if "resume" in tasks:
        resume_through_accelerate(out / "resume")
        resume_from_another_rank_count(out / "reshaped")
    dist.destroy_process_group()


def resume_through_accelerate(folder: Path) -> None:
    """What a trainer's resume does, with kit's reader in the place of DCP's: weights and optimizer come back."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import fully_shard

    state = PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(129, 600), torch.nn.Linear(600, 31))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.rand(4, 129)).sum().backward()
        optimizer.step()
        return model, optimizer

    def contents(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
        moments = [t for entry in optimizer.state_dict()["state"].values() for t in entry.values()]
        return [
            t.full_tensor().tolist() if hasattr(t, "full_tensor") else t.tolist()
            for t in (*model.parameters(), *moments)
        ]

    saved, fresh = made(1), made(2)
    fsdp_utils.save_fsdp_model(plugin, state, saved[0], str(folder))
    fsdp_utils.save_fsdp_optimizer(plugin, state, saved[1], saved[0], str(folder))
    torch.distributed.checkpoint.FileSystemReader = shards.Reader
    fsdp_utils.load_fsdp_model(plugin, state, fresh[0], str(folder))
    fsdp_utils.load_fsdp_optimizer(plugin, state, fresh[1], fresh[0], str(folder))
    assert contents(*saved) == contents(*fresh)


def resume_from_another_rank_count(folder: Path) -> None:
    """A checkpoint that one rank wrote, on two: DCP's reader reads all of it on both, the kit's once between them."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import fsdp_utils
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.fsdp import fully_shard

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    torch.manual_seed(5)
    whole = torch.nn.Sequential(torch.nn.Linear(1024, 2050), torch.nn.Linear(2050, 1024))  # 17 MB
    if dist.get_rank() == 0:
        dcp.save({"model": whole.state_dict()}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"), no_dist=True)
    dist.barrier()
    for reader, least, most in ((FileSystemReader, 1.9, 2.1), (shards.Reader, 1.0, 1.1)):
        fresh = torch.nn.Sequential(torch.nn.Linear(1024, 2050), torch.nn.Linear(2050, 1024))
        fully_shard(fresh)
        dcp.FileSystemReader = reader
        before = pagecache.read_bytes()
        fsdp_utils.load_fsdp_model(plugin, PartialState(), fresh, str(folder))
        asked = torch.tensor(pagecache.read_bytes() - before)
        dist.all_reduce(asked)
        size = sum(t.nbytes for t in whole.state_dict().values())
        assert least * size < asked < most * size, (reader, asked / size)
        for name, parameter in fresh.named_parameters():
            assert same(parameter.full_tensor(), whole.state_dict()[name])


def saves() -> Path:
    """one/ (one process), rows/ and columns/ (three), safetensors/ and a nested lit_model.pth, all of one state."""
    return shared.once("sharded-saves", make_saves)


def make_saves(root: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process is one process
        dcp.save(tensors(), checkpoint_id=str(root / "one"), no_dist=True)
    (root / "safetensors").mkdir()
    save_file(tensors(), root / "safetensors" / "model.safetensors")
    torch.save({"model": tensors()}, root / "lit_model.pth")
    run_ranks(3, __file__, root, "save")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()


def rows_of(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """What FSDP2 gives to a rank."""
    chunks = tensor.chunk(world) if tensor.ndim else [tensor] * world
    return chunks[rank] if rank < len(chunks) else tensor[:0]


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("source", ["one", "rows", "columns", "safetensors", "lit_model.pth"])
def test_every_rank_gets_the_rows_that_fsdp2_gives_it(source, world, cold):
    path = saves() / source
    (pagecache.evict if cold else pagecache.warm)(weights.read_headers(path).files)
    prefix = "model." if source == "lit_model.pth" else ""
    for rank in range(world):
        state = shards.load_sharded(path, rank, world)
        assert state.keys() - {"object"} == {prefix + name for name in tensors()}
        for name, tensor in tensors().items():
            assert same(state[prefix + name], rows_of(tensor, rank, world)), name


def test_a_resumed_trainer_uses_the_reader(tmp_path):
    run_ranks(2, __file__, tmp_path, "resume")


def test_dcp_loads_through_the_reader_into_any_placement():
    run_ranks(2, __file__, saves(), "load")


@pytest.fixture
def large(tmp_path):
    """64 MiB in 16 tensors, saved by one process."""
    import torch.distributed.checkpoint as dcp

    state = {f"layer{n}": torch.rand(1024, 1024) for n in range(16)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(tmp_path / "large"), no_dist=True)
    return tmp_path / "large"


@pytest.mark.parametrize("world", [2, 4, 8])
def test_all_ranks_together_read_each_byte_once(large, world):
    held = weights.read_headers(large)
    pagecache.evict(held.files)
    if pagecache.residency(held.files) > 0.01:
        pytest.skip(f"{large} is on a file system that keeps its pages (tmpfs), so nothing can be cold there")
    shards.load_sharded(large, 0, 64)  # imports are no part of it
    pagecache.evict(held.files)
    asked, device = pagecache.read_bytes(), pagecache.device_bytes()
    for rank in range(world):
        shards.load_sharded(large, rank, world)
    assert held.bytes <= pagecache.read_bytes() - asked < 1.1 * held.bytes
    assert 0.95 * held.bytes < pagecache.device_bytes() - device < 1.1 * held.bytes


def test_cached_files_are_not_read_from_the_device(large):
    held = weights.read_headers(large)
    pagecache.warm(held.files)
    before = pagecache.device_bytes()
    shards.load_sharded(large)
    assert pagecache.device_bytes() - before < 0.01 * held.bytes


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    path = tmp_path_factory.mktemp("noise") / "noise"
    path.write_bytes(os.urandom(3 << 20))
    return path


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3 << 20), st.integers(0, 3 << 20), st.integers(0, 5000), st.booleans())
def test_any_range_of_bytes_is_read_to_any_alignment(noise, start, size, shift, cold):
    size = min(size, (3 << 20) - start)
    (pagecache.evict if cold else pagecache.warm)([noise])
    around = torch.full((size + shift + 64,), 7, dtype=torch.uint8)
    piece = Piece((0,), (size,), "uint8", noise, start, size)
    shards.read_into([shards.Cut(around[shift : shift + size], piece, (0,))])
    assert around[shift : shift + size].numpy().tobytes() == noise.read_bytes()[start : start + size]
    assert (around[:shift] == 7).all()
    assert (around[shift + size :] == 7).all()


def test_a_file_system_in_memory_works_too():
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shutil.copytree(saves() / "one", Path(folder) / "one")
        state = shards.load_sharded(Path(folder) / "one", 1, 2)
        assert all(same(state[name], rows_of(tensor, 1, 2)) for name, tensor in tensors().items())


def test_a_damaged_checkpoint_is_not_loaded(tmp_path):
    folder = Path(shutil.copytree(saves() / "one", tmp_path / "one"))
    os.truncate(folder / "__0_0.distcp", 1 << 20)
    with pytest.raises(KitError, match=r"cannot be loaded: .*__0_0.distcp is truncated"):
        shards.load_sharded(folder)


@pytest.mark.parametrize("cold", [True, False])
def test_a_file_truncated_while_it_is_read_is_an_error_not_a_crash(tmp_path, cold):
    path = Path(shutil.copy(saves() / "safetensors" / "model.safetensors", tmp_path / "model.safetensors"))
    places = weights.pieces(weights.read_headers(path))
    os.truncate(path, 1 << 20)
    (pagecache.evict if cold else pagecache.warm)([path])
    target = torch.empty(1003, 768, dtype=torch.bfloat16)
    with pytest.raises(KitError, match=r"model.safetensors was truncated while it was read"):
        shards.read_into([shards.Cut(target, places["embed"][0], (0, 0))])


def test_a_torch_file_with_transposed_tensors_is_refused(tmp_path):
    torch.save({"w": torch.rand(4, 6).T}, tmp_path / "pytorch_model.bin")
    with pytest.raises(KitError, match=r"holds w with its dimensions exchanged"):
        shards.load_sharded(tmp_path)


class Hostile:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_metadata_that_would_run_code_is_not_run(tmp_path):
    import torch.distributed.checkpoint as dcp

    folder = Path(shutil.copytree(saves() / "one", tmp_path / "one"))
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with warnings.catch_warnings(), pytest.raises(CheckpointException) as caught:
        warnings.simplefilter("ignore")
        dcp.load({"step": torch.zeros(())}, storage_reader=shards.Reader(folder), no_dist=True)
    assert "it asks for posix.mkdir" in str(caught.value.failures)
    assert not (tmp_path / "ran").exists()


def test_an_object_that_would_run_code_is_not_run(tmp_path):
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"object": Hostile(tmp_path / "ran")}, checkpoint_id=str(tmp_path / "save"), no_dist=True)
        with pytest.raises(CheckpointException, match=r"posix\.mkdir"):
            dcp.load({"object": None}, storage_reader=shards.Reader(tmp_path / "save"), no_dist=True)
    assert not (tmp_path / "ran").exists()


def odd_tensor(name: str) -> torch.Tensor:
    """A tensor of this dtype, or with this view; large enough that its values alone are read."""
    if name == "transposed":
        return torch.arange(20_000.0).reshape(100, 200).T
    dtype = torch.complex64 if name in ("conjugate", "negative") else getattr(torch, name)
    count = 6 if dtype is torch.complex32 else 9000
    tensor = torch.arange(count).remainder(50).to(torch.float32)
    if dtype.is_complex:
        tensor = torch.complex(tensor, torch.ones(count))
    tensor = tensor.to(dtype)
    return {"conjugate": tensor.conj(), "negative": tensor.conj().imag if dtype.is_complex else tensor}.get(
        name, tensor
    )


ODD = (
    "complex128", "complex64", "complex32", "conjugate", "negative", "transposed", "uint64", "uint32", "uint16",
    "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip


def save_alone(state: dict[str, object], folder: Path, **options: object) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def load_alone(state: dict[str, object], reader: shards.Reader) -> dict[str, object]:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def values(tensor: torch.Tensor) -> object:
    if tensor.dtype is torch.complex32:
        return torch.view_as_real(tensor).tolist()
    return (tensor.float() if "float8" in str(tensor.dtype) else tensor).tolist()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ODD)
def test_complex_unsigned_and_scale_dtypes_are_read(tmp_path, name):
    from kit.checkpoints.inspect import inspect

    saved = odd_tensor(name)
    folder = save_alone({name: saved}, tmp_path / "save")
    assert inspect(folder, values=True).problems == ()
    held = weights.read_headers(folder)
    read = dict(weights.read_tensors(held, [name]))[name]
    loaded = load_alone({name: empty_like(saved)}, shards.Reader(folder))[name]
    whole = shards.load_sharded(folder)[name]
    for found in (read, loaded, whole):
        assert found.dtype == saved.dtype and values(found) == values(saved)


def test_a_save_with_an_extension_of_the_caller_is_read(tmp_path):
    from torch.distributed.checkpoint._extension import ExtensionRegistry
    from torch.testing._internal.distributed.checkpoint_utils import Rot13Example

    from kit.checkpoints.inspect import inspect

    state = {"weight": torch.arange(9000.0).reshape(90, 100), "small": torch.ones(3), "object": {"Step": "Text"}}
    folder = save_alone(state, tmp_path / "save", _extensions=[Rot13Example()])
    registry = ExtensionRegistry()
    registry.register(Rot13Example)
    empty = {"weight": torch.empty(90, 100), "small": torch.empty(3), "object": {"Step": ""}}
    loaded = load_alone(empty, shards.Reader(folder, _extension_registry=registry))
    assert all(torch.equal(loaded[name], state[name]) for name in ("weight", "small"))
    assert loaded["object"] == state["object"]

    with pytest.raises(KitError, match=r"stored with DCP's extension stream.rot13/1, which cannot be read"):
        shards.load_sharded(folder)  # as nobody has registered it here
    assert "stream.rot13/1" in str(inspect(folder).problems[0])
    with pytest.raises(CheckpointException, match=r"stream.rot13/1"):
        load_alone(empty, shards.Reader(folder))


def test_a_save_with_zstandard_is_read_or_refused_for_want_of_its_package(tmp_path):
    from torch.distributed.checkpoint._extension import ZStandard

    from kit.checkpoints.inspect import inspect

    state = {"weight": torch.arange(9000.0).reshape(90, 100)}
    if ZStandard.is_available():
        folder = save_alone(state, tmp_path / "save", _extensions=[ZStandard()])
        assert inspect(folder, values=True).problems == ()
        assert torch.equal(shards.load_sharded(folder)["weight"], state["weight"])
        return
    folder = save_alone(state, tmp_path / "save")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for item in metadata.storage_data.values():
        item.transform_descriptors = ["stream.zstd/1"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "no module named 'zstandard'" in str(inspect(folder).problems[0])


@pytest.mark.parametrize("resident", [0.0, 1.0], ids=["direct", "cached"])
def test_values_of_another_dtype_are_converted_block_by_block(tmp_path, monkeypatch, resident):
    monkeypatch.setattr(pagecache, "residency", lambda paths: resident)
    stored = torch.randn(2203, 1001, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)  # 4.4 MB
    path = tmp_path / "odd"
    path.write_bytes(b"odd" + stored.view(torch.int16).numpy().tobytes())  # no value is at an even position
    piece = Piece((0, 0), tuple(stored.shape), "bfloat16", path, 3, stored.nbytes)
    target = torch.zeros(2200, 1001)
    shards.read_into([shards.Cut(target, piece, (2, 0))])
    assert torch.equal(target, stored[2:2202].float())


def test_a_folder_without_a_checkpoint_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no weights that kit knows"):
        shards.load_sharded(tmp_path)


if __name__ == "__main__":  # a rank
    rank_main(Path(sys.argv[1]), sys.argv[2])
