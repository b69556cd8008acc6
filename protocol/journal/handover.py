"""Handover: a state that one process writes and another one reads, as an image and the log of what changed since.

The image is a stream of records in a pipe.  The log is a file to which the first process appends; the second process
reads it as far as the first one says that it is written.

Threading: one thread in each process.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final

from msgspec.structs import replace

from protocol.journal.log import Log
from protocol.journal.records import (
    FORMAT_VERSION,
    Buffer,
    Extent,
    FileHeader,
    JournalDamagedError,
    Kind,
    read_header,
    read_record,
    read_records,
)

_IMAGE: Final = "the image"
_MAGIC: Final = 0x56465344
_BUFFER_BYTES: Final = 1 << 20


class _Pipe:
    """A `LogFile` that is a pipe: records go out in their order."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:  # noqa: ARG002
        return os.writev(self._descriptor, buffers)

    def allocate(self, offset: int, length: int) -> None:
        pass

    def truncate(self, length: int) -> None:
        pass

    def overwrites_in_place(self) -> bool:
        return False

    def sync(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._descriptor)


def image_writer(descriptor: int) -> Log:
    """Begin an image in the pipe `descriptor`; closing the log completes it.  OSError."""
    # Nobody else writes to the pipe, so the magic need not be a secret.
    header = FileHeader(FORMAT_VERSION, "image", "", {}, 1, 1, _MAGIC)
    encoded = header.encoded()
    pipe = _Pipe(descriptor)
    written = 0
    while written < len(encoded):
        written += pipe.write([encoded[written:]], written)
    return Log(pipe, header, Extent(len(encoded), header.first, False, 0), "no")


def read_image(descriptor: int) -> Iterator[bytes]:
    """Yield the payloads of an image, in order, until it is complete; closes `descriptor`.

    JournalDamagedError if it is not complete; OSError (EPROTONOSUPPORT) if it has another format.
    """
    with open(descriptor, "rb", buffering=_BUFFER_BYTES) as file:
        header = read_header(_Stream(file), _IMAGE)  # type: ignore[arg-type]
        sequence, offset, kind = header.first, 0, 0
        while (record := read_record(file, header.magic, offset)) is not None and record.sequence == sequence:
            sequence, offset, kind = sequence + 1, record.end, record.kind
            if record.payload:
                yield record.payload
    if kind != Kind.MARK:
        raise JournalDamagedError(_IMAGE, "the image ends too early")


class _Stream:
    """A file without positions, which is read from its beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self.read = file.read

    def seek(self, _offset: int) -> None:
        pass


class LogFollower:
    """Reads the log behind `descriptor` from the record `sequence` at `offset` on.  Closes `descriptor` at the end.

    OSError (EPROTONOSUPPORT) if it has another format.
    """

    def __init__(self, descriptor: int, offset: int, sequence: int) -> None:
        self._file = open(descriptor, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115 (closed by `close`)
        self._header = read_header(self._file, "the log")
        self._offset = offset
        self._sequence = sequence
        self._parts: list[bytes] = []  # of a batch that is not complete

    def batches(self, end: int) -> Iterator[list[bytes]]:
        """Yield the batches up to the offset `end`, to which the other process has written complete records."""
        # What was read ahead may have been written since.
        self._file.seek(0, io.SEEK_END)
        for record in read_records(self._file, replace(self._header, first=self._sequence), self._offset, end):
            self._offset, self._sequence = record.end, record.sequence + 1
            if record.kind == Kind.ABORT:
                self._parts = []
            elif record.kind != Kind.MARK:
                self._parts.append(record.payload)
                if record.kind == Kind.COMMIT:
                    parts, self._parts = self._parts, []
                    yield parts
        if self._offset != end:
            raise OSError(errno.EBADMSG, f"the log cannot be read at offset {self._offset}")

    def close(self) -> None:
        self._file.close()
