"""Sharded loading: each rank reads its rows in parallel, past the page cache, straight into place. Imports torch."""

import ctypes
import io
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future
from torch.serialization import skip_data

from kit.checkpoints import pagecache
from kit.checkpoints.formats import dcp
from kit.checkpoints.formats.base import Piece, TensorInfo, join_messages
from kit.checkpoints.formats.torch_archives import ArchiveError, FilePart, needed_bytes, record_sizes
from kit.checkpoints.weights import check_tensor, load_piece, pieces, read_headers, torch_dtype, undo_extensions
from kit.errors import KitError

BLOCK = 4 << 20  # bytes of one read: large enough for the device, small enough that all threads share one tensor
DEPTH = 16  # reads in flight
SMALL = 1 << 20  # bytes; below, a plain read costs less than an aligned one
OVER_READ = 1.1  # rows read per wanted row, up to which a small archive is read completely, without its head first
HEAD = 16 << 10  # bytes; reading the head of a smaller archive reads as much as the archive
OBJECT_LIMIT = 1 << 30  # bytes of a stored object, such as the settings of an optimizer, once it is decompressed
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Cut:
    """A part of a stored piece, from `offset` in the piece on, and the tensor of its shape that it goes into."""

    target: torch.Tensor
    piece: Piece
    offset: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the file."""
        return self.target.numel() * self.piece.length // max(1, math.prod(self.piece.shape))


def load_sharded(path: Path, rank: int = 0, world: int = 1, device: str = "cpu") -> dict[str, torch.Tensor]:
    """This rank's rows of every tensor, as FSDP2 cuts them (torch.chunk on dim 0; a scalar goes to every rank).

    Every rank calls it with its number and reads its rows alone; rank 0 of 1 reads the complete state.
    Raises KitError for a damaged checkpoint, InputError where there is none.
    """
    weights = read_headers(Path(path))
    if weights.problems:
        raise KitError(f"This checkpoint cannot be loaded: {join_messages(weights.problems)}")
    places, state, cuts = pieces(weights), {}, []
    ranges = {name: rows_of_rank(tensor.shape, rank, world) for name, tensor in weights.tensors.items()}
    overlaps = {name: list(_overlaps(places[name], wanted)) for name, wanted in ranges.items()}
    located = _locate_all([(part.piece, len(part.rows)) for parts in overlaps.values() for part in parts])
    for name, wanted in ranges.items():
        parts = [replace(part, piece=next(located)) for part in overlaps[name]]
        state[name] = target = _empty(weights.tensors[name], len(wanted), device, parts)
        cuts += [_cut(target, wanted, part) for part in parts]
    read_into(cuts)
    return state


def rows_of_rank(shape: tuple[int, ...], rank: int, world: int) -> range:
    """The indices on dim 0 of a rank: torch.chunk's, so that the last ranks may get fewer rows, or none."""
    if not shape:
        return range(1)
    each = -(-shape[0] // world)
    return range(min(rank * each, shape[0]), min((rank + 1) * each, shape[0]))


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor, counted in the tensor, that one stored piece holds."""

    piece: Piece
    rows: range


def _overlaps(stored: list[Piece], wanted: range) -> Iterator[_Part]:
    """The pieces that hold some of the wanted rows, and which of them."""
    for piece in stored:
        low, size = (piece.offset[0], piece.shape[0]) if piece.shape else (0, 1)
        rows = range(max(wanted.start, low), min(wanted.stop, low + size))
        if rows:
            yield _Part(piece, rows)


def _cut(target: torch.Tensor, wanted: range, part: _Part) -> Cut:
    """The read that fills one part's rows, in all columns that its piece holds."""
    piece, rows = part.piece, part.rows
    if not target.ndim:
        return Cut(target, piece, ())
    columns = (slice(start, start + size) for start, size in zip(piece.offset[1:], piece.shape[1:], strict=True))
    place = target[(slice(rows.start - wanted.start, rows.stop - wanted.start), *columns)]
    return Cut(place, piece, (rows.start - piece.offset[0], *(0 for _ in piece.shape[1:])))


def _empty(tensor: TensorInfo, length: int, device: str, parts: list[_Part]) -> torch.Tensor:
    """Memory for `length` rows; on the CPU in huge pages, and page-aligned as the only part's bytes are in the file."""
    dtype, shape = torch_dtype(tensor.dtype), (length, *tensor.shape[1:]) if tensor.shape else ()
    phase = 0
    if shape and len(parts) == 1:
        piece, rows = parts[0].piece, parts[0].rows
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        phase = (piece.start + (rows.start - piece.offset[0]) * row_bytes) % _PAGE
    return empty(shape, dtype, device, 0 if phase % dtype.itemsize else phase)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: str, phase: int = 0) -> torch.Tensor:
    """Memory to read into; on the CPU, large tensors are in huge pages and begin `phase` bytes after a page does."""
    size = math.prod(shape) * dtype.itemsize
    if device != "cpu" or size < SMALL:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size + _PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[phase : phase + size].view(dtype).view(shape)


def _locate_all(wanted: list[tuple[Piece, int]]) -> Iterator[Piece]:
    """The pieces, of which so many rows are wanted, as raw bytes where that saves reads."""
    with ThreadPoolExecutor(DEPTH) as pool:
        return iter(list(pool.map(_locate, wanted)))


def _locate(wanted: tuple[Piece, int]) -> Piece:
    """A torch.save archive as raw bytes, found from its head; one that may as well be read completely stays one."""
    piece, count = wanted
    nearly_all = not piece.shape or piece.shape[0] <= OVER_READ * count
    if not piece.packed or piece.extensions or piece.length <= HEAD or (piece.length <= SMALL and nearly_all):
        return piece
    with piece.file.open("rb", buffering=0) as stream, suppress(ArchiveError, RuntimeError, UnpicklingError):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return _raw_bytes(piece, FilePart(stream, piece.start, piece.length)) or piece
    return piece  # load_piece says what is wrong with it


def _raw_bytes(piece: Piece, view: Any) -> Piece | None:
    """The values in an archive as a piece without the archive; None where they are not one run of bytes."""
    with skip_data():  # only shape and strides
        archive: Any = torch._C.PyTorchFileReader(view)
        start = piece.start + archive.get_record_offset("data/0")
        stored = record_sizes(view).get("data/0", 0)
        view.seek(0)
        tensor = torch.load(view, map_location="cpu", weights_only=True)
    check_tensor(piece, tensor)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or stored < needed_bytes(tensor):
        return None
    start += tensor.storage_offset() * tensor.element_size()
    return replace(piece, start=start, length=tensor.nbytes, packed=False)


def read_into(cuts: list[Cut]) -> None:
    """Fill the target of every cut. Raises KitError where a file ends early."""
    with ExitStack() as stack, ThreadPoolExecutor(DEPTH) as pool:
        files = {path: stack.enter_context(_File(path)) for path in {cut.piece.file for cut in cuts}}
        jobs = []
        for cut in cuts:
            if _is_one_run(cut):
                file = files[cut.piece.file]
                same_dtype = cut.target.dtype == torch_dtype(cut.piece.dtype)
                read: Callable[..., None] = file.read if same_dtype else file.read_converted
                jobs += [pool.submit(read, *block) for block in _blocks(cut)]
            else:
                jobs.append(pool.submit(_copy, cut))
        for job in jobs:
            job.result()


def _is_one_run(cut: Cut) -> bool:
    """True if the file holds the target's values one after the other as they are in memory."""
    same_columns = cut.target.shape[1:] == cut.piece.shape[1:]
    return not cut.piece.packed and same_columns and cut.target.is_contiguous()


def _blocks(cut: Cut) -> Iterator[tuple[torch.Tensor, int, torch.dtype]]:
    """(memory, position in the file, stored dtype) of reads of at most BLOCK bytes.

    They end where pages of memory do, unless the values are converted.
    """
    stored = torch_dtype(cut.piece.dtype)
    flat, step, first_edge = cut.target.view(-1), BLOCK // stored.itemsize, BLOCK // stored.itemsize
    width = stored.itemsize  # bytes in the file of one element of `flat`
    if cut.target.dtype == stored:
        flat, step, width = flat.view(torch.uint8), BLOCK, 1
        first_edge = BLOCK - flat.data_ptr() % _PAGE
    start = cut.piece.start + sum(cut.offset[:1]) * math.prod(cut.piece.shape[1:]) * stored.itemsize
    for first, last in pairwise((0, *range(first_edge, flat.numel(), step), flat.numel())):
        yield flat[first:last], start + first * width, stored


def _copy(cut: Cut) -> None:
    """Read complete rows and copy from them: columns are cut, or the archive is read completely."""
    piece, first_row = cut.piece, 0
    if not piece.packed and piece.shape:
        first_row = cut.offset[0]
        row_bytes = piece.length // piece.shape[0]
        shape = (len(cut.target), *piece.shape[1:])
        piece = replace(piece, start=piece.start + first_row * row_bytes, shape=shape, length=shape[0] * row_bytes)
    place = [slice(start, start + size) for start, size in zip(cut.offset, cut.target.shape, strict=True)]
    if place:
        place[0] = slice(place[0].start - first_row, place[0].stop - first_row)
    cut.target.copy_(load_piece(piece)[tuple(place)])


class _File(AbstractContextManager["_File"]):
    """A file that is read in blocks, past the page cache if the file system can and most of the file is not in it."""

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

    def read_converted(self, target: torch.Tensor, position: int, stored: torch.dtype) -> None:
        """Fill a run of elements, stored from this position on in another dtype, by way of a block, pinned for GPUs."""
        size, block = target.numel() * stored.itemsize, _block(target.is_cuda)
        plain = self.direct < 0 or size < SMALL
        lead = 0 if plain else position % _PAGE
        end = size if plain else -(-(lead + size) // _PAGE) * _PAGE
        self._fill([block[:end]], position - lead, lead + size, plain)
        values = block[lead : lead + size].to(target.device)  # a GPU converts faster than a CPU
        if values.storage_offset() % stored.itemsize:
            values = values.clone()
        target.copy_(values.view(stored))

    def read(self, memory: torch.Tensor, position: int, stored: torch.dtype) -> None:
        """Fill uint8[bytes] from this position on; on the CPU in place, to a GPU by way of a pinned block."""
        if memory.is_cuda:
            self.read_converted(memory, position, torch.uint8)
            return
        size, block = memory.numel(), _block(pinned=False)
        head = -memory.data_ptr() % _PAGE
        pages = (size - head) // _PAGE * _PAGE  # bytes of the complete pages in the middle
        if self.direct < 0 or pages < SMALL // 2:
            self._fill([memory], position, size, plain=True)
            return
        lead = (position + head) % _PAGE
        middle = memory[head : head + pages]
        self._fill([middle, block[: _PAGE if lead else 0]], position + head - lead, lead + pages)
        if lead:  # the aligned read began `lead` bytes too early and ended in `block`, so all bytes move down
            ctypes.memmove(middle.data_ptr(), middle.data_ptr() + lead, pages - lead)
            middle[-lead:] = block[:lead]
        for first, last in ((0, head), (head + pages, size)):
            if first < last:
                self._fill([memory[first:last]], position + first, last - first, plain=True)

    def _fill(self, buffers: list[torch.Tensor], position: int, wanted: int, plain: bool = False) -> None:
        descriptor = self.plain if plain or self.direct < 0 else self.direct
        views: list[Any] = [buffer.numpy() for buffer in buffers]
        if os.preadv(descriptor, views, position) < wanted:
            raise KitError(f"{self.path} was truncated while it was read: {position + wanted} bytes are needed.")


_local = threading.local()


def _block(pinned: bool) -> torch.Tensor:
    """This thread's buffer: uint8[bytes] that begin with a page."""
    if not hasattr(_local, "block"):
        memory = torch.empty(BLOCK + 3 * _PAGE, dtype=torch.uint8, pin_memory=pinned)
        _local.block = memory[-memory.data_ptr() % _PAGE :]
    block: torch.Tensor = _local.block
    return block


class Reader(FileSystemReader):
    """DCP's reader with ranged, parallel reads, which runs no pickled code: dcp.load(..., storage_reader=Reader(p))."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The checkpoint's Metadata. Raises InputError where it is absent, damaged or asks for foreign classes."""
        metadata = dcp.read_metadata(Path(self.path))
        self.places = dcp.stored_pieces(Path(self.path), metadata, self.transforms.extension_registry)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's tensors: of each stored item the wanted bytes alone."""
        filled, wanted = [], []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._checked_bytes(item.storage_index))
                continue
            index = item.storage_index
            filled.append((item, planner.resolve_tensor(item).detach()))
            wanted.append((self.places[index.fqn, tuple(index.offset or ())], sum(item.lengths[:1])))
        read_into(
            [
                Cut(target, piece, tuple(item.storage_offsets))
                for (item, target), piece in zip(filled, _locate_all(wanted), strict=True)
            ]
        )
        for item, target in filled:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _checked_bytes(self, index: Any) -> io.BytesIO:
        """A stored object, once torch has loaded it as plain weights: DCP's planner would run what is pickled there."""
        info = self.storage_data[index]
        with (Path(self.path) / info.relative_path).open("rb") as stream:
            stream.seek(info.offset)
            raw = io.BytesIO(stream.read(info.length))
        if info.transform_descriptors:
            extensions = dcp.extensions(info.transform_descriptors, self.transforms.extension_registry)
            raw = undo_extensions(extensions, raw, OBJECT_LIMIT)
        content = raw.getvalue()
        torch.load(io.BytesIO(content), weights_only=True)
        return io.BytesIO(content)
