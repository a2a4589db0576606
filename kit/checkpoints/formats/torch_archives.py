"""The zip archives that torch.save writes, checked before torch unpickles them.

torch stores every record uncompressed (caffe2/serialize/inline_container.cc). A compressed record is therefore foreign,
and a few MB of it can fill the memory: torch.load decompresses it without a limit.
"""

import io
import struct
import zipfile
from typing import IO, Any

DIRECTORY_LIMIT = 100 << 20  # bytes of the list of records; torch writes about 100 for each tensor
_END, _END_OF_LARGE = b"PK\5\6", b"PK\6\6"  # end records of zip (APPNOTE.TXT 4.3.16) and of zip64 (4.3.14)
_END_BYTES, _LARGE_BYTES = 22, 56 + 20  # of the former without a comment, and of the latter with its locator (4.3.15)
_IN_LARGE = 0xFFFFFFFF  # the value of a field whose true value is in the zip64 record


class ArchiveError(ValueError):
    """An archive that torch.save did not write."""


class FilePart(io.RawIOBase):
    """A part of an open file as a file that can be read, such as one of the archives in a shard of DCP.

    torch has _ReaderView for this, whose seek() from the end goes the wrong way.
    """

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self.stream, self.start, self.length, self.position = stream, start, length, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Bytes from the begin of the part."""
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As io.IOBase.seek."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        self.position = max(0, origin + offset)
        return self.position

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase.readinto."""
        view = memoryview(buffer).cast("B")[: max(0, self.length - self.position)]
        self.stream.seek(self.start + self.position)
        count: int = self.stream.readinto(view)  # type: ignore[attr-defined]
        self.position += count
        return count


def record_sizes(stream: Any) -> dict[str, int]:
    """{record: bytes} of an archive in a binary stream, as in {"data/0": 16}.

    Raises ArchiveError where torch.save did not write it.
    """
    _check_directory(stream)
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ArchiveError(f"it is truncated or not an archive of torch.save: {error}") from None
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ArchiveError("its records are compressed, which torch.save never does")
    return {record.filename.partition("/")[2]: record.file_size for record in records}


def _check_directory(stream: Any) -> None:
    """Raises ArchiveError where the list of records is missing, or too long to be read."""
    end = stream.seek(0, 2)
    stream.seek(max(0, end - _END_BYTES - _LARGE_BYTES))
    tail = stream.read(_END_BYTES + _LARGE_BYTES)
    large, last = tail[:-_END_BYTES], tail[-_END_BYTES:]
    if len(last) < _END_BYTES or not last.startswith(_END):
        raise ArchiveError("it is truncated or not an archive of torch.save: it has no list of records at its end")
    size = struct.unpack_from("<I", last, 12)[0]
    if size == _IN_LARGE and large.startswith(_END_OF_LARGE):
        size = struct.unpack_from("<Q", large, 40)[0]
    if size > DIRECTORY_LIMIT:
        raise ArchiveError(f"its list of records has {size} bytes")


def needed_bytes(tensor: Any) -> int:
    """Bytes that a record must have for a tensor that refers to it. The tensor may be on the device meta."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return int(max(end, tensor.untyped_storage().nbytes()))
