"""Sharded loading, for every rank at once: each byte is read once a node, straight into place. Imports torch."""

import ctypes
import io
import math
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future
from torch.serialization import skip_data

from kit.checkpoints import pagecache
from kit.checkpoints.formats import dcp
from kit.checkpoints.formats.base import Piece, TensorInfo, Weights, join_messages
from kit.checkpoints.weights import load_piece, pieces, read_headers
from kit.errors import KitError

BLOCK = 4 << 20  # bytes of one read: large enough for the device, small enough that all threads share one tensor
DEPTH = 16  # reads in flight
SMALL = 1 << 20  # bytes; below, a plain read costs less than arranging an aligned one
OVER_READ = 1.1  # bytes read per wanted byte, up to which a small blob is read whole, without looking at its head
HEAD = 16 << 10  # bytes; looking at a smaller blob's head reads as much as the blob
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Cut:
    """A part of a stored piece, from `offset` in the piece on, and the tensor of its shape that it goes into."""

    target: torch.Tensor
    piece: Piece
    offset: tuple[int, ...]


def load_sharded(
    path: Path, rank: int = 0, world: int = 1, group: Any = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """This rank's rows of every tensor, as FSDP2 cuts them (torch.chunk on dim 0; a scalar goes to every rank).

    Every rank calls it with its own number and reads its rows alone; rank 0 of 1 wants the whole state. The ranks of
    `group`, where given, all want the same rows: each reads its share and hands it to the others.
    Raises KitError for a harmed checkpoint.
    """
    held = read_headers(Path(path))
    boxes = {name: rows(entry.shape, rank, world) for name, entry in held.tensors.items()}
    if group is None:
        return _load(held, boxes, device)
    me, shares = dist.get_rank(group), {}
    for name, (first, last) in boxes.items():
        shape = (last - first,) if held.tensors[name].shape else ()
        shares[name] = [(first + a, first + b) for a, b in (rows(shape, n, group.size()) for n in range(group.size()))]
    state = _load(held, {name: share[me] for name, share in shares.items()}, device)
    for name, part in state.items():
        if part.ndim:  # a scalar is there already
            first, last = boxes[name]
            state[name] = part.new_empty((last - first, *part.shape[1:]))
            for member, (a, b) in enumerate(shares[name]):
                handed = state[name][a - first : b - first]
                handed = handed.copy_(part) if member == me else handed
                dist.broadcast(handed.view(torch.uint8), group_src=member, group=group)
    return state


def rows(shape: tuple[int, ...], rank: int, world: int) -> tuple[int, int]:
    """(first, last + 1) of dim 0 for a rank: torch.chunk's, so that the last ranks may get fewer rows, or none."""
    if not shape:
        return 0, 1
    each = -(-shape[0] // world)
    return min(rank * each, shape[0]), min((rank + 1) * each, shape[0])


def load_balanced(path: Path, rank: int, world: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Whole tensors, spread over the ranks by `balance`."""
    held = read_headers(Path(path))
    names = balance(held.tensors, world)[rank]
    return _load(held, {name: rows(held.tensors[name].shape, 0, 1) for name in names}, device)


def balance(tensors: dict[str, TensorInfo], world: int) -> list[list[str]]:
    """The names of whole tensors for each rank, even in bytes: the largest first, each to the rank with least."""
    bins: list[list[str]] = [[] for _ in range(world)]
    sizes = [0] * world
    for name in sorted(tensors, key=lambda n: (-tensors[n].bytes, n)):
        rank = sizes.index(min(sizes))
        sizes[rank] += tensors[name].bytes
        bins[rank].append(name)
    return bins


def _load(held: Weights, boxes: dict[str, tuple[int, int]], device: str) -> dict[str, torch.Tensor]:
    """New tensors of the named rows."""
    if held.problems:
        raise KitError(f"This checkpoint cannot be loaded: {join_messages(held.problems)}")
    places, state, cuts = pieces(held), {}, []
    found = iter(_located([(p, b - a) for name, box in boxes.items() for p, a, b in _overlaps(places[name], *box)]))
    for name, (first, last) in boxes.items():
        parts = [(next(found), a, b) for _, a, b in _overlaps(places[name], first, last)]
        state[name] = target = _empty(held.tensors[name], last - first, device, parts)
        for piece, a, b in parts:
            columns = (slice(o, o + n) for o, n in zip(piece.offset[1:], piece.shape[1:], strict=True))
            part = target[(slice(a - first, b - first), *columns)] if target.ndim else target
            cuts.append(Cut(part, piece, (a - sum(piece.offset[:1]), *(0 for _ in piece.shape[1:]))[: part.ndim]))
    read_into(cuts)
    return state


def _overlaps(places: list[Piece], first: int, last: int) -> Iterator[tuple[Piece, int, int]]:
    """The pieces that hold some of the rows, and which: (piece, first, last + 1)."""
    for piece in places:
        low, size = (piece.offset[0], piece.shape[0]) if piece.shape else (0, 1)
        if max(first, low) < min(last, low + size):
            yield piece, max(first, low), min(last, low + size)


def _empty(entry: TensorInfo, length: int, device: str, parts: list[tuple[Piece, int, int]]) -> torch.Tensor:
    """Memory for rows; on the CPU in huge pages, and as far into a page as the only part's bytes lie in the file."""
    dtype, shape = getattr(torch, entry.dtype), (length, *entry.shape[1:]) if entry.shape else ()
    size = math.prod(shape) * dtype.itemsize
    if device != "cpu" or size < SMALL:
        return torch.empty(shape, dtype=dtype, device=device)
    (piece, first, _), *more = parts
    phase = (piece.start + (first - piece.offset[0]) * (size // length)) % _PAGE
    memory = mmap.mmap(-1, size + _PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)[0 if more or phase % dtype.itemsize else phase :][:size]
    return flat.view(dtype).view(shape)


def _located(wanted: list[tuple[Piece, int]]) -> list[Piece]:
    """The pieces, of which so many rows are wanted, as raw bytes."""
    with ThreadPoolExecutor(DEPTH) as pool:
        return list(pool.map(_locate, wanted))


def _locate(wanted: tuple[Piece, int]) -> Piece:
    """Raw bytes are found from the head of a torch.save blob; a blob that may as well be read whole stays one."""
    piece, count = wanted
    whole = piece.shape[:1] <= (OVER_READ * count,)
    if not piece.packed or piece.length <= HEAD or (piece.length <= SMALL and whole):
        return piece
    with piece.file.open("rb", buffering=0) as stream, skip_data():  # shape and strides alone
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        blob: Any = _create_file_view(stream, piece.start, piece.length)
        archive: Any = torch._C.PyTorchFileReader(blob)
        start = piece.start + archive.get_record_offset("data/0")
        blob.seek(0)
        t = torch.load(blob, map_location="cpu", weights_only=True)
    if not t.is_contiguous():
        return piece
    return replace(piece, start=start + t.storage_offset() * t.element_size(), length=t.nbytes, packed=False)


def read_into(cuts: list[Cut]) -> None:
    """Fill the target of every cut. Raises KitError where a file ends early."""
    with ExitStack() as stack, ThreadPoolExecutor(DEPTH) as pool:
        files = {path: stack.enter_context(_File(path)) for path in {cut.piece.file for cut in cuts}}
        jobs = []
        for cut in cuts:
            target, piece, dtype = cut.target, cut.piece, getattr(torch, cut.piece.dtype)
            rows_only = target.shape[1:] == piece.shape[1:] and target.is_contiguous() and target.dtype == dtype
            if piece.packed or not rows_only:
                jobs.append(pool.submit(_copy, cut))
                continue
            flat = target.view(-1).view(torch.uint8)
            start = piece.start + sum(cut.offset[:1]) * math.prod(piece.shape[1:]) * dtype.itemsize
            edges = range(BLOCK - flat.data_ptr() % _PAGE, flat.numel(), BLOCK)  # blocks end where pages do
            for a, b in pairwise((0, *edges, flat.numel())):
                jobs.append(pool.submit(files[piece.file].read, flat[a:b], start + a))
        for job in jobs:
            job.result()


def _copy(cut: Cut) -> None:
    """By way of whole rows, where columns are cut, types differ, or the blob may as well be read whole."""
    piece, first = cut.piece, 0
    if not piece.packed and piece.shape:
        row, first = piece.length // piece.shape[0], cut.offset[0]
        shape = (len(cut.target), *piece.shape[1:])
        piece = replace(piece, start=piece.start + first * row, shape=shape, length=shape[0] * row)
    at = [slice(o, o + n) for o, n in zip(cut.offset, cut.target.shape, strict=True)]
    at[:1] = [slice(a.start - first, a.stop - first) for a in at[:1]]
    cut.target.copy_(load_piece(piece)[tuple(at)])


class _File(AbstractContextManager["_File"]):
    """A file that is read in blocks: past the page cache, where it can be and most of the file is not there yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.plain, self.direct = path, os.open(path, os.O_RDONLY), -1
        os.posix_fadvise(self.plain, 0, 0, os.POSIX_FADV_RANDOM)
        with suppress(OSError, KitError):  # a file system without O_DIRECT, or without mmap
            if pagecache.residency([path]) < 0.5:
                self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def __exit__(self, *_: object) -> None:
        os.close(self.plain)
        if self.direct >= 0:
            os.close(self.direct)

    def read(self, memory: torch.Tensor, position: int) -> None:
        """Fill uint8[bytes] from this position on; on the CPU in place, to a GPU by way of a pinned block."""
        size, block = memory.numel(), _block(memory.is_cuda)
        if memory.is_cuda:
            lead = position % _PAGE
            self._fill([block[: -(-(lead + size) // _PAGE) * _PAGE]], position - lead, lead + size)
            memory.copy_(block[lead : lead + size])
            return
        head = -memory.data_ptr() % _PAGE
        whole = (size - head) // _PAGE * _PAGE
        if self.direct < 0 or whole < SMALL // 2:
            self._fill([memory], position, size, plain=True)
            return
        lead = (position + head) % _PAGE
        middle = memory[head : head + whole]
        self._fill([middle, block[: _PAGE if lead else 0]], position + head - lead, lead + whole)
        if lead:  # both ends of an aligned read lie inside a page, so all bytes move down by the first one's place
            ctypes.memmove(middle.data_ptr(), middle.data_ptr() + lead, whole - lead)
            middle[-lead:] = block[:lead]
        for a, b in ((0, head), (head + whole, size)):
            if a < b:
                self._fill([memory[a:b]], position + a, b - a, plain=True)

    def _fill(self, buffers: list[torch.Tensor], position: int, wanted: int, plain: bool = False) -> None:
        descriptor = self.plain if plain or self.direct < 0 else self.direct
        views: list[Any] = [buffer.numpy() for buffer in buffers]
        if os.preadv(descriptor, views, position) < wanted:
            raise KitError(f"{self.path} was truncated while it was read: {position + wanted} bytes are needed.")


_local = threading.local()


def _block(pinned: bool) -> torch.Tensor:
    """This thread's own uint8[bytes] from a page's beginning on."""
    if not hasattr(_local, "block"):
        memory = torch.empty(BLOCK + 3 * _PAGE, dtype=torch.uint8, pin_memory=pinned)
        _local.block = memory[-memory.data_ptr() % _PAGE :]
    block: torch.Tensor = _local.block
    return block


class Reader(FileSystemReader):
    """DCP's reader with ranged, parallel reads, and no pickle run: `dcp.load(state, storage_reader=Reader(folder))`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The checkpoint's Metadata. Raises InputError where it is absent, damaged or asks for foreign classes."""
        metadata = dcp.read_metadata(Path(self.path))
        self.places = dcp.stored_pieces(Path(self.path), metadata)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's tensors: of each stored item the wanted bytes alone."""
        filled, wanted = [], []
        for item in plan.items:
            index, info = item.storage_index, self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                with (Path(self.path) / info.relative_path).open("rb") as stream:
                    stream.seek(info.offset)
                    blob = stream.read(info.length)
                torch.load(io.BytesIO(blob), weights_only=True)  # DCP's planner would run what is pickled there
                planner.load_bytes(item, io.BytesIO(blob))
                continue
            filled.append((item, planner.resolve_tensor(item).detach()))
            wanted.append((self.places[index.fqn, tuple(index.offset or ())], sum(item.lengths[:1])))
        found = zip(filled, _located(wanted), strict=True)
        read_into([Cut(target, piece, tuple(item.storage_offsets)) for (item, target), piece in found])
        for item, target in filled:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
