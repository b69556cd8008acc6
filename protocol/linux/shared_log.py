"""SharedLog: records in memory that outlive the process that writes them.

The log is an anonymous file (memfd_create(2)).  A successor that has a descriptor of it reads it after the writer
died, at whatever moment that was, and continues it.  Nothing is on disk: the log ends with the last descriptor.

Invariants:

1. The records lie between the offset in the first word of the file and the end of the file; a record that was not
   written completely is at the end, and does not count.
2. `replace` appends the records that stay, and only then moves the offset.  So the log is complete at every moment.

Threading: one thread, or under a lock of the caller's.  One process writes.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Final, Self

from protocol.linux import portable

_logger = logging.getLogger(__name__)
_HEADER_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("=I")
_SMALLEST_LARGE_BYTES: Final = 1 << 20
_KEEP_SIZE_PUNCH_HOLE: Final = 3  # linux/falloc.h
_CHUNK_BYTES: Final = 1 << 20


class SharedLog:
    """The log in the file `descriptor`, which `create` made.

    `slot` is a page's rest of memory, in words of 64 bits, for what changes all the time.  Each word is stored at once.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor: Final = descriptor
        words = memoryview(mmap.mmap(descriptor, _HEADER_BYTES)).cast("Q")
        self._header = words[:8]
        self.slot: Final = words[8:]
        self._end = self._kept_bytes = 0
        self._is_failed = False

    @classmethod
    def create(cls) -> Self:
        """Make an empty log."""
        descriptor = os.memfd_create("vfsd", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _HEADER_BYTES)
        made = cls(descriptor)
        made._header[0] = made._end = _HEADER_BYTES
        return made

    def records(self) -> Iterator[bytes]:
        """Yield every record; the log continues after the last one.  Read it to the end before you append."""
        at, pending = self._header[0], b""
        self._end = at
        while data := os.pread(self.descriptor, _CHUNK_BYTES, at):
            at += len(data)
            pending += data
            start = 0
            while start + _LENGTH.size <= len(pending):
                stop = start + _LENGTH.size + _LENGTH.unpack_from(pending, start)[0]
                if stop > len(pending):
                    break
                yield pending[start + _LENGTH.size : stop]
                self._end += stop - start
                start = stop
            pending = pending[start:]
        os.ftruncate(self.descriptor, self._end)

    @property
    def start(self) -> int:
        """The offset of the first record."""
        return self._header[0]

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return self._end

    def append(self, record: bytes) -> None:
        """Add a record.  If there is no memory, the log is incomplete from now on, and says so in the process's log."""
        data = _LENGTH.pack(len(record)) + record
        if self._write(data):
            self._end += len(data)

    def _write(self, data: bytes) -> bool:
        if self._is_failed:
            return False
        try:
            if os.pwrite(self.descriptor, data, self._end) == len(data):
                return True
            reason = "no memory"
        except OSError as error:
            reason = str(error.strerror)
        self._is_failed = True
        _logger.warning("files that are used from now on get ESTALE if the daemon dies: %s", reason)
        return False

    @property
    def is_large(self) -> bool:
        """Whether the log has grown so much since `replace` that it is worth to call that."""
        size_bytes = self._end - self._header[0]
        return size_bytes > max(_SMALLEST_LARGE_BYTES, 2 * self._kept_bytes)

    def replace(self, records: Iterable[bytes]) -> None:
        """Replace all records by these."""
        start, before = self._end, self._header[0]
        self._is_failed = False
        for record in records:
            self.append(record)
        if self._is_failed:
            os.ftruncate(self.descriptor, start)
            self._end = start
            return
        self._header[0] = start
        self._kept_bytes = self._end - start
        if start > before:
            portable.fallocate(self.descriptor, _KEEP_SIZE_PUNCH_HOLE, before, start - before)


def written_records(descriptor: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the records of a log that a predecessor writes, between two offsets that it has given."""
    pending = b""
    for at in range(start, end, _CHUNK_BYTES):
        pending += os.pread(descriptor, min(_CHUNK_BYTES, end - at), at)
        first = 0
        while first + _LENGTH.size <= len(pending):
            after = first + _LENGTH.size + _LENGTH.unpack_from(pending, first)[0]
            if after > len(pending):
                break
            yield pending[first + _LENGTH.size : after]
            first = after
        pending = pending[first:]
    if pending:
        raise OSError(errno.EBADMSG, "the predecessor's log cannot be read")
