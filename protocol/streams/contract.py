"""The contracts of streams: ByteReader, ByteWriter, TextReader."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias, runtime_checkable

__all__ = ["STREAM_CHUNK_BYTES", "ByteReader", "ByteWriter", "Data", "Stream", "TextReader"]

STREAM_CHUNK_BYTES: Final = 64 * 1024
Data: TypeAlias = bytes | bytearray | memoryview


class Stream(Protocol):
    """What every stream has: a path, and closing.  It is a context manager, which closes it."""

    @property
    def path(self) -> str:
        """The file's path, normalised."""
        ...

    @property
    def closed(self) -> bool: ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def close(self) -> None:
        """Close the file; a writer finishes it first.  Closing twice does nothing."""
        ...


@runtime_checkable
class ByteReader(Stream, Protocol):
    """A file open for reading.  Iteration gives chunks of 64 KiB from `position` on."""

    @property
    def size(self) -> int:
        """The file's present size in bytes; after `close`, the size at that time."""
        ...

    @property
    def position(self) -> int:
        """The byte offset of the next read.  ValueError when closed."""
        ...

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes (-1: all remaining); fewer only at the end.  ValueError if closed or `size` < -1."""
        ...

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, which may lie past the end, and return it.

        `whence` is SEEK_SET, SEEK_CUR or SEEK_END.  ValueError when closed, for another `whence` and for a
        position before the start.
        """
        ...

    def chunks(self, size: int = STREAM_CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the remaining bytes in chunks of `size`, the last one shorter.  ValueError if closed or `size` < 1."""
        ...

    def __iter__(self) -> Iterator[bytes]: ...


@runtime_checkable
class ByteWriter(Stream, Protocol):
    """A file open for writing.

    With mode "overwrite" the new content becomes visible at `close`, which replaces the old file.  An exception
    inside the `with` block discards what was written, except appended data.
    """

    @property
    def bytes_written(self) -> int:
        """The number of bytes written through this writer."""
        ...

    def write(self, data: Data) -> int:
        """Write all of `data`; return its size.  ValueError when closed; OSError (ENOSPC, EFBIG)."""
        ...

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Raise io.UnsupportedOperation, an OSError: a writer only writes on.  ValueError when closed."""
        ...

    def write_all(self, chunks: Iterable[Data]) -> int:
        """Write every chunk; return the total size.  Errors as for `write`."""
        ...


@runtime_checkable
class TextReader(Stream, Protocol):
    """A text file open for reading.  Iteration gives lines with their endings; only "\n" ends a line.

    Undecodable bytes raise UnicodeDecodeError: its `start` and `end` are offsets in the file, its `object` the bytes.
    """

    @property
    def encoding(self) -> str: ...

    @property
    def line_number(self) -> int:
        """The number of lines read so far, which is the number of the next line, counted from 0."""
        ...

    def readline(self) -> str:
        """Read the next line with its ending; "" at the end.  ValueError when closed."""
        ...

    def read(self, size: int = -1) -> str:
        """Read up to `size` characters (-1: all remaining).  ValueError when closed or `size` < -1."""
        ...

    def lines(self, *, strip: bool = False) -> Iterator[str]:
        """Yield the remaining lines; with `strip`, without white space at their ends."""
        ...

    def __iter__(self) -> Iterator[str]: ...
