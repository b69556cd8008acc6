"""The content of an archive's entries: decompressed in bounded memory, and checked against size and CRC.

`RandomAccess` reads any part of an entry and returns only verified bytes.  The first read of an entry decompresses all
of it and compares it with its CRC.  A small entry then stays in a cache.  Of a larger one the CRC of each piece is
kept, and the state of the decompressor at several places, from which later reads start: they decompress a small part of
the entry and verify each piece that they return.  So an archive that is truncated or overwritten meanwhile causes
errors, not wrong bytes.

Threading: one thread at a time calls `read`; others may call `RandomAccess.prepare` meanwhile, and `stop` ends those
calls.
"""

from __future__ import annotations

import errno
import threading
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

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
    yield from _verified(_Decompressor.of(file, member, _CHUNK_BYTES), member, size)


def _verified(source: _Decompressor, member: Member, size: int) -> Iterator[bytes]:
    """Yield what `source` reads in pieces of `size` bytes; the last may be shorter.  Errors as for `decompressed`."""
    done = crc = 0
    while done < member.size:
        piece = source.read(min(size, member.size - done))
        if not piece:
            break
        done += len(piece)
        crc = zlib.crc32(piece, crc)
        yield piece
    if source.read(1):
        raise ArchiveError("the entry is larger than it declares", member.shown)
    if source.is_truncated:
        raise ArchiveError("the entry is truncated", member.shown)
    if done != member.size:
        raise ArchiveError("the entry has fewer bytes than the archive says", member.shown)
    if not source.is_at_end:
        raise ArchiveError("the entry has bytes after its compressed data", member.shown)
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


# -- random access ---------------------------------------------------------------------------------
PIECE_BYTES: Final = 128 * 1024
_WHOLE_BYTES: Final = 1 << 20
_INPUT_BYTES: Final = 16 * 1024  # a decompressor keeps the input that it has not used; so do the copies
_STATE_BYTES: Final = 64 * 1024  # of a decompressor: a window of 32 KiB, tables, input
_MOST_STATES: Final = 256  # of one entry
_PIECES_CACHED: Final = 8


class RandomAccess:
    """Reads entries of `file`.  `another` opens the file again, without a buffer.

    `cache_bytes` bounds what is kept, at least some MiB.
    """

    def __init__(self, file: BinaryIO, another: Callable[[], BinaryIO], cache_bytes: int) -> None:
        self._file = file
        self._another = another
        self._lock = threading.Lock()  # of the entries
        self._is_stopped = False
        self._small: OrderedDict[int, bytes] = OrderedDict()  # by the offset of the local header
        self._small_left = cache_bytes // 2
        self._large: OrderedDict[int, LargeEntry] = OrderedDict()
        self._states_left = max(2, cache_bytes // 2 // _STATE_BYTES)
        self._most_states = min(_MOST_STATES, self._states_left // 2)

    def read(self, member: Member, offset: int, size: int, locate: Callable[[Member], None] = lambda _: None) -> bytes:
        """Return `size` bytes of an entry from `offset`, fewer at its end.  ArchiveError, OSError.

        `locate` sets `member.data`; it is called before the first read of an entry.
        """
        if offset >= member.size or size <= 0:
            return b""
        if member.size <= _WHOLE_BYTES:
            return self._small_entry(member, locate)[offset : offset + size]
        with self._lock:
            entry = self._large.get(member.header)
            if entry is not None:
                self._large.move_to_end(member.header)
        if entry is None:
            entry = self.prepare(member, locate)
        return entry.read(offset, min(size, member.size - offset))

    def is_ready(self, member: Member) -> bool:
        """Whether a read of the entry takes no longer than any other."""
        with self._lock:
            return member.size <= _WHOLE_BYTES or member.header in self._large

    def prepare(self, member: Member, locate: Callable[[Member], None]) -> LargeEntry:
        """Verify a large entry, so that it is ready.  Any thread.  ArchiveError, OSError; ECANCELED after `stop`."""
        locate(member)
        entry = LargeEntry(self._another(), member, self._most_states, self._keep_going)
        with self._lock:
            replaced = self._large.pop(member.header, None)
            self._large[member.header] = entry
            self._states_left += (len(replaced.states) if replaced is not None else 0) - len(entry.states)
            while self._states_left < 0 and len(self._large) > 1:
                self._states_left += len(self._large.popitem(last=False)[1].states)
        return entry

    def stop(self) -> None:
        """End the calls of `prepare`, soon."""
        self._is_stopped = True

    def _keep_going(self) -> None:
        if self._is_stopped:
            raise OSError(errno.ECANCELED, "the archive is closed")

    def _small_entry(self, member: Member, locate: Callable[[Member], None]) -> bytes:
        data = self._small.get(member.header)
        if data is not None:
            self._small.move_to_end(member.header)
            return data
        locate(member)
        data = b"".join(decompressed(self._file, member))
        self._small[member.header] = data
        self._small_left -= len(data)
        while self._small_left < 0 and len(self._small) > 1:
            self._small_left += len(self._small.popitem(last=False)[1])
        return data


class LargeEntry:
    """An entry that was verified: the CRC of each piece, and the decompressor at the beginning of some pieces."""

    def __init__(self, file: BinaryIO, member: Member, most_states: int, keep_going: Callable[[], None]) -> None:
        """Decompress and verify the entry.  ArchiveError, OSError."""
        self._file = file
        self._member = member
        pieces = -(-member.size // PIECE_BYTES)
        self._every = -(-pieces // most_states)  # pieces between two states
        self.states: list[_Decompressor] = []
        self._crcs = array("I")
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        source = _Decompressor.of(file, member, _INPUT_BYTES)
        self.states.append(source.copy())
        for number, piece in enumerate(_verified(source, member, PIECE_BYTES), 1):
            keep_going()
            self._crcs.append(zlib.crc32(piece))
            if not number % self._every and number < pieces:
                self.states.append(source.copy())
        self._next = 0  # the piece that `_source` returns next
        self._source = self.states[0].copy()

    def _length(self, number: int) -> int:
        return min(PIECE_BYTES, self._member.size - number * PIECE_BYTES)

    def read(self, offset: int, size: int) -> bytes:
        first, start = divmod(offset, PIECE_BYTES)
        last = (offset + size - 1) // PIECE_BYTES
        if first == last:
            return self._piece(first)[start : start + size]
        return b"".join(self._pieces(first, last, start, size))

    def _pieces(self, first: int, last: int, start: int, size: int) -> Iterator[bytes]:
        for number in range(first, last + 1):
            part = self._piece(number)[start : start + size]
            start = 0
            size -= len(part)
            yield part

    def _piece(self, number: int) -> bytes:
        found = self._recent.get(number)
        if found is not None:
            return found
        nearest = number // self._every * self._every
        if not nearest <= self._next <= number:
            self._source = self.states[number // self._every].copy()
            self._next = nearest
        while True:
            at = self._next
            self._next = -1  # if the next line fails, the source cannot be used again
            piece = self._source.read(self._length(at))
            if zlib.crc32(piece) != self._crcs[at]:
                raise ArchiveError("the archive was changed while it was in use", self._member.shown)
            self._next = at + 1
            if at == number:
                break
        self._recent[number] = piece
        if len(self._recent) > _PIECES_CACHED:
            self._recent.popitem(last=False)
        return piece


class _Decompressor:
    """Reads the content of an entry from its beginning; can be copied at any place."""

    __slots__ = ("_at", "_end", "_file", "_inflate", "_input_bytes", "_member")

    def __init__(self, file: BinaryIO, member: Member, at: int, inflate: Any, input_bytes: int) -> None:
        self._file = file
        self._member = member
        self._at = at
        self._end = member.data + member.compressed
        self._inflate = inflate
        self._input_bytes = input_bytes

    @classmethod
    def of(cls, file: BinaryIO, member: Member, input_bytes: int) -> _Decompressor:
        """One at the beginning of `member`, which reads `input_bytes` at once."""
        inflate = None if member.method == zr.STORED else zlib.decompressobj(-zlib.MAX_WBITS)
        return cls(file, member, member.data, inflate, input_bytes)

    def copy(self) -> _Decompressor:
        inflate = None if self._inflate is None else self._inflate.copy()
        return _Decompressor(self._file, self._member, self._at, inflate, self._input_bytes)

    @property
    def is_truncated(self) -> bool:
        """Whether the compressed data ended early, as seen by a read that returned less than it was asked for."""
        return self._at < self._end if self._inflate is None else not self._inflate.eof

    @property
    def is_at_end(self) -> bool:
        """Whether it has returned everything, and used all compressed data."""
        if self._at < self._end:
            return False
        return self._inflate is None or (
            self._inflate.eof and not self._inflate.unused_data and not self._inflate.unconsumed_tail
        )

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end.  ArchiveError, OSError."""
        if self._inflate is None:
            return self._input(size)
        parts = []
        try:
            while size and not self._inflate.eof:
                data = self._inflate.unconsumed_tail or self._input(self._input_bytes)
                part = self._inflate.decompress(data, size)
                if not data and not part:
                    break  # truncated
                size -= len(part)
                parts.append(part)
        except zlib.error as error:
            raise ArchiveError(f"the entry is damaged: {error}", self._member.shown) from None
        return b"".join(parts)

    def _input(self, size: int) -> bytes:
        self._file.seek(self._at)
        data = self._file.read(min(size, self._end - self._at))
        self._at += len(data)
        return data
