"""What a stream is: ByteReader, ByteWriter, TextReader, TextWriter."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias, runtime_checkable

__all__ = ["STREAM_CHUNK_BYTES", "ByteReader", "ByteWriter", "Data", "TextReader", "TextWriter"]

STREAM_CHUNK_BYTES: Final = 64 * 1024
Data: TypeAlias = bytes | bytearray | memoryview


@runtime_checkable
class ByteReader(Protocol):
    """A file being read.  Iteration gives chunks of 64 KiB from `position` on."""

    @property
    def path(self) -> str:
        """The file's path, normalised."""
        ...

    @property
    def size(self) -> int:
        """The file's size in bytes, as it is now; once closed, as it was then."""
        ...

    @property
    def position(self) -> int:
        """The offset in bytes that the next read begins at.  ValueError when closed."""
        ...

    @property
    def closed(self) -> bool: ...

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes (-1: all that is left); fewer only at the end.  ValueError when closed or `size` < -1."""
        ...

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, which may lie past the end, and return it.

        `whence` is SEEK_SET, SEEK_CUR or SEEK_END.  ValueError when closed, for another `whence` and for a
        position before the start.
        """
        ...

    def chunks(self, size: int = STREAM_CHUNK_BYTES) -> Iterator[bytes]:
        """What is left, in chunks of `size` bytes, the last one shorter.  ValueError when closed or `size` < 1."""
        ...

    def __iter__(self) -> Iterator[bytes]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def close(self) -> None:
        """Let go of the file.  Closing twice does nothing."""
        ...


@runtime_checkable
class ByteWriter(Protocol):
    """A file being written.

    With mode "overwrite" nothing is seen of it until `close`, which puts it in the old one's place.  An
    exception inside the `with` block discards what was written, except what was appended.
    """

    @property
    def path(self) -> str: ...

    @property
    def bytes_written(self) -> int:
        """The bytes written through this writer so far."""
        ...

    @property
    def closed(self) -> bool: ...

    def write(self, data: Data) -> int:
        """Write all of `data`; its size.  ValueError when closed; OSError (ENOSPC, EFBIG)."""
        ...

    def write_all(self, chunks: Iterable[Data]) -> int:
        """Write every chunk; the sum of their sizes.  Errors as `write`."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def close(self) -> None:
        """Finish the file.  Closing twice does nothing."""
        ...


@runtime_checkable
class TextReader(Protocol):
    """A text file being read.  Iteration gives lines with their endings; only "\\n" ends one.

    What cannot be decoded raises UnicodeDecodeError: its `start` and `end` are offsets in the file, its
    `object` the offending bytes.
    """

    @property
    def path(self) -> str: ...

    @property
    def encoding(self) -> str: ...

    @property
    def line_number(self) -> int:
        """The lines read so far: 0 at first, and the number, from 0, of the next line."""
        ...

    @property
    def closed(self) -> bool: ...

    def readline(self) -> str:
        """The next line with its ending; "" at the end.  ValueError when closed."""
        ...

    def read(self, size: int = -1) -> str:
        """Up to `size` characters (-1: all that is left).  ValueError when closed or `size` < -1."""
        ...

    def lines(self, *, strip: bool = False) -> Iterator[str]:
        """What is left, line by line; with `strip`, without the whitespace at their ends."""
        ...

    def __iter__(self) -> Iterator[str]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class TextWriter(Protocol):
    """A text file being written; as `ByteWriter`."""

    @property
    def path(self) -> str: ...

    @property
    def encoding(self) -> str: ...

    @property
    def bytes_written(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def write(self, text: str) -> int:
        """Write all of `text`; its size in bytes.  ValueError when closed or when it cannot be encoded."""
        ...

    def write_all(self, texts: Iterable[str]) -> int: ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def close(self) -> None: ...
