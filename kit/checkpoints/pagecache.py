"""Measure and evict the page cache without root: the proof behind the labels cold and warm. Linux only."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from kit.errors import KitError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value
_BLOCK = 8 << 20


def evict(files: Iterable[Path]) -> None:
    """Ask the kernel to drop the files' pages. Pages that a process has mapped stay, and so does tmpfs."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # DONTNEED skips dirty pages
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(files: Iterable[Path]) -> None:
    """Read every byte once, into one reused buffer."""
    buffer = bytearray(_BLOCK)
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def evictable(folder: Path) -> bool:
    """True if the folder's files can be evicted: not on tmpfs, nor while a process has them mapped."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    with suppress(OSError, KitError):
        evict(files)
        return residency(files) < 0.01
    return False


def residency(files: Iterable[Path]) -> float:
    """The part of the files' pages that is in memory, 0 to 1.

    From mincore(2), which since Linux 5.2 reports every page as resident if the caller neither owns the file nor may
    write to it: an error on the side of warm, so that cold is never claimed by mistake.
    Raises KitError for a file system that cannot map files.
    """
    counts = [_resident(path) for path in files]
    return sum(resident for resident, _ in counts) / max(1, sum(pages for _, pages in counts))


def _resident(path: Path) -> tuple[int, int]:
    """(pages in memory, pages) of one file."""
    size = path.stat().st_size
    if size == 0:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    vector = ctypes.create_string_buffer(pages)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            raise KitError(f"{path}: its file system cannot map files, so neither cold nor warm can be proven there.")
        failed = _libc.mincore(address, size, vector)
        error = ctypes.get_errno()
        _libc.munmap(address, size)
        if failed:
            raise OSError(error, "mincore failed", str(path))
    finally:
        os.close(descriptor)
    return vector.raw.count(b"\x01"), pages


def device_bytes() -> int:
    """Bytes that this process has fetched from the block device so far, page faults of mapped files included.

    read_bytes of /proc/self/io (man 5 proc). Reads that another process on the node did for this one are not in it.
    """
    return int(psutil.Process().io_counters().read_bytes)


def read_bytes() -> int:
    """Bytes of this process's read calls so far, cached or not; mapped files are not in it."""
    return int(psutil.Process().io_counters().read_chars)
