"""streams: read and write files in chunks, with bounded memory.

Byte streams come first; text streams decode them.  A stream is used by one thread at a time and must be closed: it is a
context manager.  A file that is deleted while it is read can be read to its end.

`FileReader` and `FileWriter` are the streams over any content that can be read and written by offset.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias, runtime_checkable

from protocol.paths import located

STREAM_CHUNK_BYTES: Final = 64 * 1024
_WRITE_BYTES: Final = 1 << 20
Data: TypeAlias = bytes | bytearray | memoryview


class Stream(Protocol):
    """The common part of all streams: a path, and closing.  A stream is a context manager, which closes it."""

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


# -- over content by offset ------------------------------------------------------------------------
class SeekableContent(Protocol):
    """An open file of a backend, accessed by offset."""

    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Read up to `size` bytes; fewer only at the end."""
        ...

    def write(self, offset: int, data: Data) -> int:
        """Write a part of `data`, at least one byte, at `offset`; return the number of bytes written."""
        ...

    def close(self) -> None: ...


class ClosingStream(ABC):
    """Implements `Stream`, except for `close`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._closed = False

    @property
    def path(self) -> str:
        return self._path

    @property
    def closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("I/O operation on closed file")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_details: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...


class FileReader(ClosingStream):
    """Implements `ByteReader` over an open file, which it closes."""

    def __init__(self, path: str, content: SeekableContent) -> None:
        super().__init__(path)
        self._content = content
        self._position = 0
        self._last_size = 0

    @property
    def size(self) -> int:
        if not self._closed:
            with located(self._path):
                self._last_size = self._content.size()
        return self._last_size

    @property
    def position(self) -> int:
        self._check_open()
        return self._position

    def read(self, size: int = -1) -> bytes:
        self._check_open()
        if size < -1:
            raise ValueError(f"size must be -1 or more, not {size}")
        if size == -1:
            # One read if the size is known; a file that grows meanwhile is read on.
            return b"".join(self._left(max(STREAM_CHUNK_BYTES, self.size - self._position)))
        with located(self._path):
            data = self._content.read(self._position, size)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check_open()
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            offset += self.size
        elif whence != os.SEEK_SET:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
        if offset < 0:
            raise ValueError(f"cannot seek to {offset}, before the start")
        self._position = offset
        return offset

    def chunks(self, size: int = STREAM_CHUNK_BYTES) -> Iterator[bytes]:
        self._check_open()
        if size < 1:
            raise ValueError(f"size must be 1 or more, not {size}")
        return self._left(size)

    def _left(self, size: int) -> Iterator[bytes]:
        while chunk := self.read(size):
            yield chunk

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks()

    def close(self) -> None:
        if not self._closed:
            try:
                _ = self.size
            finally:
                self._closed = True
                self._content.close()


class FileWriter(ClosingStream):
    """Implements `ByteWriter` over an open file, which it closes.

    `position` is the offset to begin at.  `commit` is called after everything is written and before the file is closed;
    `abort` is called instead if that or the `with` block fails.
    """

    def __init__(
        self,
        path: str,
        content: SeekableContent,
        *,
        position: int = 0,
        commit: Callable[[], None] = lambda: None,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(path)
        self._content = content
        self._position = position
        self._start = position
        self._commit = commit
        self._abort = abort

    @property
    def bytes_written(self) -> int:
        return self._position - self._start

    def write(self, data: Data) -> int:
        self._check_open()
        view = memoryview(data).cast("B")
        done = 0
        with located(self._path):
            # In pieces: bounds each call to a remote backend, and copies no gigabytes.
            while done < len(view):
                written = self._content.write(self._position, view[done : done + _WRITE_BYTES])
                done += written
                self._position += written
        return done

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:  # noqa: ARG002 it refuses each
        self._check_open()
        raise io.UnsupportedOperation(errno.ESPIPE, "a writer cannot seek", self._path)

    def write_all(self, chunks: Iterable[Data]) -> int:
        self._check_open()
        return sum(self.write(chunk) for chunk in chunks)

    def __exit__(self, kind: type[BaseException] | None, *_details: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with located(self._path):
            try:
                self._commit()
            except BaseException:
                self._abort()
                raise
            finally:
                self._content.close()

    def discard(self) -> None:
        """Close without committing: the old state remains, except for appended data."""
        if not self._closed:
            self._closed = True
            with located(self._path):
                try:
                    self._abort()
                finally:
                    self._content.close()


# -- text ------------------------------------------------------------------------------------------
def check_encoding(encoding: str) -> None:
    """Raise ValueError if Python does not know the text encoding `encoding`."""
    try:
        "".encode(encoding)
    except LookupError as error:
        raise ValueError(str(error)) from None


class PositionedDecoder:
    """Decode one file in chunks, with errors that give offsets in the file.  ValueError for an unknown encoding."""

    def __init__(self, encoding: str) -> None:
        check_encoding(encoding)
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._position = 0  # of the next byte

    def decode(self, chunk: bytes) -> str:
        """Decode the next chunk; b"" is the end, at which no incomplete character may remain."""
        text, failure = self.decode_good(chunk)
        if failure is not None:
            raise failure
        return text

    def decode_good(self, chunk: bytes) -> tuple[str, UnicodeDecodeError | None]:
        """As `decode`, but return the text before the first invalid byte, and the error.  Decode nothing after it."""
        before = self._decoder.getstate()
        kept = len(before[0])
        try:
            text = self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            self._decoder.setstate(before)
            good = self._decoder.decode(chunk[: max(0, error.start - kept)])
            base = self._position - kept
            bad = error.object[error.start : error.end]
            return good, UnicodeDecodeError(error.encoding, bad, base + error.start, base + error.end, error.reason)
        self._position += len(chunk)
        return text, None


class FileTextReader(ClosingStream):
    """Implements `TextReader` over a `ByteReader`, which it closes.  ValueError for an unknown encoding."""

    def __init__(self, reader: ByteReader, encoding: str = "utf-8") -> None:
        super().__init__(reader.path)
        self._reader = reader
        self._encoding = encoding
        self._decoder = PositionedDecoder(encoding)
        self._text = ""  # decoded text, not yet returned from `_at` on
        self._at = 0
        self._line_number = 0
        self._failure: UnicodeDecodeError | None = None  # at the end of the text that was decoded

    @property
    def encoding(self) -> str:
        return self._encoding

    @property
    def line_number(self) -> int:
        return self._line_number

    def readline(self) -> str:
        self._check_open()
        parts: list[str] = []
        while True:
            end = self._text.find("\n", self._at) + 1
            parts.append(self._text[self._at : end or None])
            self._at = end or len(self._text)
            if end or not self._fill():
                break
        line = "".join(parts)
        self._line_number += bool(line)
        return line

    def read(self, size: int = -1) -> str:
        self._check_open()
        if size < -1:
            raise ValueError(f"size must be -1 or more, not {size}")
        parts: list[str] = []
        left = size
        while left and (self._at < len(self._text) or self._fill()):
            part = self._text[self._at : None if size == -1 else self._at + left]
            self._at += len(part)
            left -= len(part) if size != -1 else 0
            parts.append(part)
        text = "".join(parts)
        self._line_number += text.count("\n")
        return text

    def lines(self, *, strip: bool = False) -> Iterator[str]:
        self._check_open()
        return self._lines(strip=strip)

    def _lines(self, *, strip: bool) -> Iterator[str]:
        while line := self.readline():
            yield line.rstrip() if strip else line

    def _fill(self) -> bool:
        """Decode chunks until there is text; False at the end.  UnicodeDecodeError at the first invalid byte."""
        self._text, self._at = "", 0
        while not self._text:
            if self._failure is not None:
                raise self._failure
            chunk = self._reader.read(STREAM_CHUNK_BYTES)
            self._text, self._failure = self._decoder.decode_good(chunk)
            if not chunk and self._failure is None:
                break
        return bool(self._text)

    def __iter__(self) -> Iterator[str]:
        return self.lines()

    def close(self) -> None:
        self._closed = True
        self._reader.close()
