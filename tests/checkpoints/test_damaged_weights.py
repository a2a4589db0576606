"""Weights that are damaged or foreign: one problem each, never a traceback, never silence, and no adapter from them."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.checkpoints import inspect as checkpoint
from kit.checkpoints.formats import dcp, safetensors_files
from kit.checkpoints.formats.base import ProblemKind
from kit.checkpoints.formats.boxes import Box, covers
from kit.cli import main

WEIGHTS = "model.safetensors"
TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def safetensors_file(path: Path, header: Any, size: int = 16) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


def header_of(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: safetensors_file(folder / WEIGHTS, {"a": TENSOR | changes})


def raw_header(text: str, size: int = 16) -> Callable[[Path], None]:
    return lambda folder: safetensors_file(folder / WEIGHTS, text.encode(), size)


def file_of(content: bytes, name: str = WEIGHTS) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def index_of(content: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        safetensors_file(folder / "model-00001-of-00001.safetensors", {"a": TENSOR})
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "model.safetensors.index.json").write_text(text)

    return build


def two_shards(folder: Path) -> None:
    """Each tensor is in the shard of the other one."""
    shards = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate("ab", 1)}
    safetensors_file(folder / shards["a"], {"b": TENSOR})
    safetensors_file(folder / shards["b"], {"a": TENSOR})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def long_header(folder: Path) -> None:
    """A file without blocks on the disk that is as large as its header claims to be."""
    path = folder / WEIGHTS
    path.write_bytes(struct.pack("<Q", 1 << 40))
    os.truncate(path, 6 << 30)


def loop(folder: Path) -> None:
    (folder / WEIGHTS).symlink_to(WEIGHTS)


def fifo(name: str) -> Callable[[Path], None]:
    return lambda folder: os.mkfifo(folder / name)


def torch_file(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        path = folder / "pytorch_model.bin"
        torch.save({"a": torch.ones(300), "b": torch.ones(300)}, path)
        change(path)

    return build


def deflate(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def shorten_record(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content[:8] if name.endswith("data/0") else content)


def dcp_folder(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        import torch.distributed.checkpoint as distributed

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that one process is one process
            state = {"a": torch.arange(12.0).reshape(6, 2), "b": torch.ones(3)}
            distributed.save(state, checkpoint_id=str(folder), no_dist=True)
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return build


def place(**changes: Any) -> Callable[[Any], None]:
    """Change where the metadata says that the values of `a` are."""

    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == "a")
        metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)

    return change


def size(*shape: int) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", torch.Size(shape))


def chunks(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[Any], None]:
    """Change which parts of `a` there are; all are at the same bytes."""

    def change(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["a"]
        index = next(index for index in metadata.storage_data if index.fqn == "a")
        item = metadata.storage_data.pop(index)
        tensor.chunks = [
            replace(tensor.chunks[0], offsets=torch.Size(offsets), sizes=torch.Size(sizes)) for offsets, sizes in boxes
        ]
        metadata.storage_data |= {replace(index, offset=torch.Size(offsets)): item for offsets, _ in boxes}

    return change


def forget(metadata: Any) -> None:
    index = next(index for index in metadata.storage_data if index.fqn == "a")
    del metadata.storage_data[index]


def unsupported(metadata: Any) -> None:
    tensor = metadata.state_dict_metadata["a"]
    tensor.properties = replace(tensor.properties, dtype=torch.quint8)


def pickle_of(content: bytes, name: str = ".metadata") -> Callable[[Path], None]:
    """A checkpoint whose pickle is this one: of DCP, or of an archive of torch.save."""

    def build(folder: Path) -> None:
        if name == ".metadata":
            (folder / name).write_bytes(content)
            return
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")

    return build


HUGE = struct.pack("<Q", 64 << 30)
LIST = b"]q%c(" + b"h%c" * 10 + b"e"  # ten times the list before
PICKLES = {  # a few bytes that ask for more memory than there is
    "bytes of 64 GiB": b"\x80\x04\x8e" + HUGE + b".",
    "text of 64 GiB": b"\x80\x04\x8d" + HUGE + b".",
    "a frame of 64 GiB": b"\x80\x04\x95" + HUGE + b"N.",
    "a number of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a memo of 2^29 places": b"\x80\x02]r\x00\x00\x00\x20.",
    "a memo of 2^29 places in digits": b"(lp536870912\n.",
    "10^60 elements": b"\x80\x02]q\x00" + b"".join(LIST % (n + 1, *[n] * 10) for n in range(60)) + b".",
}
MOST_MIB = 200  # that such a pickle may take


DAMAGED, MISSING = ProblemKind.DAMAGED_FILE, ProblemKind.MISSING_TENSOR
CASES: dict[str, tuple[Callable[[Path], None], ProblemKind]] = {
    "shape larger than the bytes": (header_of(shape=[1_000_000_000]), DAMAGED),
    "shape smaller than the bytes": (header_of(shape=[3]), DAMAGED),
    "negative offset": (header_of(data_offsets=[-8, 8]), DAMAGED),
    "offsets in the wrong order": (header_of(data_offsets=[16, 0]), DAMAGED),
    "offsets behind the end": (header_of(data_offsets=[0, 1 << 62]), ProblemKind.TRUNCATED_FILE),
    "missing offsets": (raw_header('{"a": {"dtype": "F32", "shape": [4]}}'), DAMAGED),
    "unknown dtype": (header_of(dtype="Q9"), DAMAGED),
    "empty dtype": (header_of(dtype=""), DAMAGED),
    "shape as text": (header_of(shape="4"), DAMAGED),
    "negative shape": (header_of(shape=[-4]), DAMAGED),
    "2^80 elements": (header_of(shape=[1 << 40, 1 << 40]), DAMAGED),
    "a name twice": (raw_header(f'{{"a": {json.dumps(TENSOR)}, "a": {json.dumps(TENSOR)}}}'), DAMAGED),
    "a list as header": (raw_header("[1, 2]"), DAMAGED),
    "a number as header": (raw_header("7"), DAMAGED),
    "an empty object as tensor": (raw_header('{"a": {}}'), DAMAGED),
    "deep JSON": (raw_header("[" * 100_000), DAMAGED),
    "deep JSON as a tensor": (raw_header('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"), DAMAGED),
    "bytes that are no text": (lambda folder: safetensors_file(folder / WEIGHTS, b"\xff\xfe\x00"), DAMAGED),
    "a gap at the begin": (raw_header(json.dumps({"a": TENSOR | {"data_offsets": [4, 20]}}), 20), DAMAGED),
    "bytes behind the last tensor": (raw_header(json.dumps({"a": TENSOR}), 20), DAMAGED),
    "header of 1 TB": (long_header, DAMAGED),
    "text": (file_of(b"this is not a file of weights"), DAMAGED),
    "a page of an error": (file_of(b"<html><head><title>404</title></head></html>"), DAMAGED),
    "a pointer of Git LFS": (file_of(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), DAMAGED),
    "no bytes": (file_of(b""), ProblemKind.EMPTY_FILE),
    "three bytes": (file_of(b"\x01\x00\x00"), ProblemKind.TRUNCATED_FILE),
    "a loop of links": (loop, ProblemKind.MISSING_FILE),
    "a FIFO as model": (fifo(WEIGHTS), ProblemKind.UNREADABLE),
    "a FIFO as torch file": (fifo("pytorch_model.bin"), ProblemKind.UNREADABLE),
    "a FIFO as index": (fifo("model.safetensors.index.json"), DAMAGED),
    "a folder as model": (lambda folder: (folder / WEIGHTS).mkdir(), ProblemKind.UNREADABLE),
    "an index of another folder": (index_of({"weight_map": {"a": "../x.safetensors"}}), DAMAGED),
    "an index of its own folder": (index_of({"weight_map": {"a": "."}}), DAMAGED),
    "an index of the folder above": (index_of({"weight_map": {"a": ".."}}), ProblemKind.UNREADABLE),
    "an index with a list": (index_of({"weight_map": ["a"]}), DAMAGED),
    "an index of deep JSON": (index_of("[" * 100_000), DAMAGED),
    "an index that exchanges shards": (two_shards, MISSING),
    "compressed records": (torch_file(deflate), DAMAGED),
    "a record too short": (torch_file(shorten_record), DAMAGED),
    "half an archive": (torch_file(lambda path: os.truncate(path, 1000)), DAMAGED),
    "DCP: a size of 2^45": (dcp_folder(size(1 << 45, 2)), MISSING),
    "DCP: a negative size": (dcp_folder(size(-6, 2)), MISSING),
    "DCP: a smaller size": (dcp_folder(size(5, 2)), MISSING),
    "DCP: a part less": (dcp_folder(chunks(((0, 0), (3, 2)))), MISSING),
    "DCP: parts that overlap": (dcp_folder(chunks(((0, 0), (3, 2)), ((2, 0), (3, 2)))), MISSING),
    "DCP: parts outside of the tensor": (dcp_folder(chunks(((0, 0), (3, 2)), ((4, 0), (3, 2)))), MISSING),
    "DCP: parts with another rank": (dcp_folder(size(12)), MISSING),
    "DCP: values without a place": (dcp_folder(forget), MISSING),
    "DCP: a negative offset": (dcp_folder(place(offset=-5)), DAMAGED),
    "DCP: a negative length": (dcp_folder(place(length=-5)), DAMAGED),
    "DCP: a file of another folder": (dcp_folder(place(relative_path="../../etc/passwd")), DAMAGED),
    "DCP: an absolute file": (dcp_folder(place(relative_path="/etc/passwd")), DAMAGED),
    "DCP: no file": (dcp_folder(place(relative_path="")), DAMAGED),
    "DCP: behind the end": (dcp_folder(place(offset=1 << 40)), ProblemKind.TRUNCATED_FILE),
    "DCP: quantised": (dcp_folder(unsupported), ProblemKind.NOT_SUPPORTED),
    "DCP: an unknown extension": (
        dcp_folder(place(transform_descriptors=["stream.made_up/1"])), ProblemKind.NOT_SUPPORTED
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_damaged_weights_have_one_problem(tmp_path, capsys, name):
    build, kind = CASES[name]
    build(tmp_path)
    found = checkpoint.inspect(tmp_path, values=True)
    harmful = [p for p in found.problems if p.kind not in (ProblemKind.NO_TENSORS, ProblemKind.HIDDEN_FROM_GROUP)]
    assert [problem.kind for problem in harmful] == [kind], found.problems
    assert str(tmp_path) in harmful[0].message and "\n" not in harmful[0].message
    assert main(["checkpoint", "inspect", str(tmp_path), "--values", "--json"]) == 1
    assert harmful[0].message in json.loads(capsys.readouterr().out)["problems"]


@pytest.mark.parametrize("name", ["DCP: a part less", "DCP: a size of 2^45", "DCP: a file of another folder"])
def test_no_adapter_is_exported_from_damaged_weights(tmp_path, capsys, name):
    CASES[name][0](tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["adapter", "export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "cannot be exported" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


MEASURED = """
import resource, sys
from kit.checkpoints.inspect import inspect
inspect(sys.argv[1])  # the imports
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in sys.argv[2:]:
    assert inspect(folder, values=True).problems, folder
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("name", [".metadata", "pytorch_model.bin"])
def test_a_pickle_takes_no_more_memory_than_its_file_allows(tmp_path, name):
    folders = [tmp_path / str(number) for number in range(len(PICKLES) + 1)]
    for folder, content in zip(folders, [pickle.dumps({}), *PICKLES.values()], strict=True):
        folder.mkdir()
        pickle_of(content, name)(folder)
    done = subprocess.run([sys.executable, "-c", MEASURED, *folders], capture_output=True, text=True, check=True)
    assert float(done.stdout) < MOST_MIB


@pytest.mark.parametrize("where", [0.5, 0.05])
def test_values_that_cannot_be_unpickled_are_a_problem(tmp_path, where):
    dcp_folder(lambda metadata: None)(tmp_path)
    shard = next(tmp_path.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    item = next(iter(pickle.loads((tmp_path / ".metadata").read_bytes()).storage_data.values()))
    start = item.offset + int(item.length * where)
    content[start : start + 64] = bytes(255 - byte for byte in content[start : start + 64])
    shard.write_bytes(content)
    assert not checkpoint.inspect(tmp_path).problems  # the values are not read
    found = checkpoint.inspect(tmp_path, values=True)
    assert [problem.kind for problem in found.problems] == [DAMAGED]
    assert not found.values_read


def test_the_header_limit_is_that_of_safetensors(tmp_path):
    from safetensors import SafetensorError, safe_open

    path = tmp_path / WEIGHTS
    path.write_bytes(struct.pack("<Q", safetensors_files.HEADER_LIMIT + 1))
    os.truncate(path, safetensors_files.HEADER_LIMIT + 100)
    with pytest.raises(SafetensorError, match="header too large"):
        safe_open(path, "np").__enter__()
    os.truncate(path, 0)
    path.write_bytes(struct.pack("<Q", safetensors_files.HEADER_LIMIT))
    os.truncate(path, safetensors_files.HEADER_LIMIT + 100)
    with pytest.raises(SafetensorError, match=r"^(?!.*too large)"):
        safe_open(path, "np").__enter__()


def test_every_dtype_of_safetensors_is_read_or_refused_with_its_name(tmp_path):
    bits = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
            "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
            "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}  # fmt: skip
    refused = {}
    for dtype, width in bits.items():
        path = tmp_path / f"{dtype}.safetensors"
        safetensors_file(path, {"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, width]}}, width)
        found = checkpoint.inspect(path, values=True)
        if not found.values_read:
            refused[dtype] = [
                problem.message for problem in found.problems if problem.kind is ProblemKind.NOT_SUPPORTED
            ]
    assert set(refused) == {"F4", "F6_E2M3", "F6_E3M2"}
    assert all(f"dtype {dtype} " in messages[0] for dtype, messages in refused.items())


def test_parts_cover_a_tensor_only_if_they_hold_each_value_once():
    rows = [Box((row, 0), (1, 4)) for row in range(6)]
    columns = [Box((0, column), (6, 1)) for column in range(4)]
    quarters = [Box((row, column), (3, 2)) for row in (0, 3) for column in (0, 2)]
    for boxes in (rows, columns, quarters, [Box((0, 0), (6, 4))], rows[::-1]):
        assert covers(boxes, (6, 4))
        assert not covers(boxes[1:], (6, 4))
        assert not covers([*boxes[1:], boxes[-1]], (6, 4)) or len(boxes) == 1
    assert not covers([Box((0, 0), (4, 4)), Box((3, 0), (2, 4))], (6, 4))  # as many values as it has, one row twice
    assert covers([Box((), ())], ())
    assert not covers([Box((), ()), Box((), ())], ())


def test_a_checkpoint_with_a_made_up_extension_names_it(tmp_path):
    CASES["DCP: an unknown extension"][0](tmp_path)
    assert "stream.made_up" in str(checkpoint.inspect(tmp_path).problems[0])
    assert not any(word in str(checkpoint.inspect(tmp_path).problems[0]) for word in ("damaged", "corrupt"))


def test_a_large_metadata_file_is_not_read(tmp_path):
    dcp_folder(lambda metadata: None)(tmp_path)
    os.truncate(tmp_path / ".metadata", dcp.METADATA_LIMIT + 1)
    assert "metadata of a checkpoint has at most" in str(checkpoint.inspect(tmp_path).problems[0])


def test_a_fifo_among_the_shards_is_a_problem(tmp_path):
    dcp_folder(lambda metadata: None)(tmp_path)
    shard = next(tmp_path.glob("*.distcp"))
    shutil.move(shard, tmp_path / "kept")
    os.mkfifo(shard)
    assert ProblemKind.UNREADABLE in checkpoint.inspect(tmp_path).kinds
