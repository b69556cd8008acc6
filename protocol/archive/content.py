"""The content of an archive's entries: decompressed in bounded memory, and checked against size and CRC."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

from protocol.archive import records as zr
from protocol.archive.members import Member
from protocol.errors import ArchiveError

_CHUNK_BYTES: Final = 256 * 1024
_SMALL_BYTES: Final = 64 * 1024  # read and decompressed in one call, which halves the time of an entry of 1 KB


def decompressed(file: BinaryIO, member: Member, size: int = _CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the content of `member` in chunks of at most `size` bytes.

    ArchiveError as soon as the content exceeds the declared size, and at the end if it is shorter or has another CRC.
    The file may be used for other reads between two chunks.
    """
    if member.size <= min(size, _SMALL_BYTES) and member.compressed <= _SMALL_BYTES:
        data = _small(file, member)
        if data is not None:
            if data:
                yield data
            return
    done = crc = 0
    for chunk in _raw(file, member, size) if member.method == zr.STORED else _inflated(file, member, size):
        done += len(chunk)
        if done > member.size:
            raise ArchiveError("the entry is larger than it declares", member.shown)
        crc = zlib.crc32(chunk, crc)
        yield chunk
    if done != member.size:
        raise ArchiveError("the entry is smaller than it declares", member.shown)
    if crc != member.crc:
        raise ArchiveError("the entry has a bad CRC", member.shown)


def _small(file: BinaryIO, member: Member) -> bytes | None:
    """The whole content of a small entry; None for a damaged one, whose fault `decompressed` names."""
    file.seek(member.data)
    data = file.read(member.compressed)
    if member.method != zr.STORED:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = inflate.decompress(data, member.size + 1)
        except zlib.error:
            return None
        if not inflate.eof or inflate.unused_data or inflate.unconsumed_tail:
            return None
    return data if len(data) == member.size and zlib.crc32(data) == member.crc else None


def _raw(file: BinaryIO, member: Member, size: int) -> Iterator[bytes]:
    at, end = member.data, member.data + member.compressed
    while at < end:
        file.seek(at)
        chunk = file.read(min(size, end - at))
        if not chunk:
            raise ArchiveError("the entry is truncated", member.shown)
        at += len(chunk)
        yield chunk


def _inflated(file: BinaryIO, member: Member, size: int) -> Iterator[bytes]:
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    source = _raw(file, member, _CHUNK_BYTES)
    try:
        while not inflate.eof:
            data = inflate.unconsumed_tail or next(source, b"")
            chunk = inflate.decompress(data, size)
            if chunk:
                yield chunk
            elif not data and not inflate.eof:
                # all input is consumed and gives no more output
                raise ArchiveError("the entry is truncated", member.shown)
    except zlib.error as error:
        raise ArchiveError(f"the entry is damaged: {error}", member.shown) from None
    if inflate.unused_data or inflate.unconsumed_tail or next(source, b""):
        raise ArchiveError("the entry has bytes after its compressed data", member.shown)


class ContentReader:
    """Random access to the content of entries, fast for reads that go forward.

    Keeps the position in the entry that was read last, because a deflated entry can only be read from its start.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._member: Member | None = None
        self._chunks: Iterator[bytes] = iter(())
        self._chunk = b""
        self._chunk_start = 0

    def read(self, member: Member, offset: int, size: int) -> bytes:
        """Read up to `size` bytes from `offset`; fewer only at the end."""
        if member.method == zr.STORED:
            self._file.seek(member.data + min(offset, member.size))
            return self._file.read(max(0, min(size, member.size - offset)))
        if member is not self._member or offset < self._chunk_start:
            self._member, self._chunks = member, decompressed(self._file, member)
            self._chunk, self._chunk_start = b"", 0
        return b"".join(self._parts(member, offset, min(offset + size, member.size)))

    def _parts(self, member: Member, at: int, end: int) -> Iterator[bytes]:
        while at < end:
            chunk_end = self._chunk_start + len(self._chunk)
            if at >= chunk_end:
                self._chunk_start = chunk_end
                self._chunk = next(self._chunks, b"")
                if not self._chunk:  # an earlier read failed at this point
                    raise ArchiveError("the entry is damaged", member.shown)
                continue
            part = self._chunk[at - self._chunk_start : end - self._chunk_start]
            at += len(part)
            yield part
