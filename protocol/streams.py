"""Streams: files read and written in chunks, in fixed memory.

Bytes first; text is decoded as it is read.  A stream is for one thread at a time, and must be closed: it
is a context manager.  A file that is deleted while a stream reads it can be read to its end.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias, runtime_checkable

from protocol.paths import located

__all__ = [
    "STREAM_CHUNK_BYTES",
    "ByteReader",
    "ByteWriter",
    "Content",
    "FileReader",
    "FileTextReader",
    "FileTextWriter",
    "FileWriter",
    "TextReader",
    "TextWriter",
]

STREAM_CHUNK_BYTES: Final = 64 * 1024
_Data: TypeAlias = bytes | bytearray | memoryview


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

    def write(self, data: _Data) -> int:
        """Write all of `data`; its size.  ValueError when closed; OSError (ENOSPC, EFBIG)."""
        ...

    def write_all(self, chunks: Iterable[_Data]) -> int:
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


# -- implementations, over whatever has content ------------------------------------------------------


class Content(Protocol):
    """An open file of a backend, by offset.  What a stream needs and no more."""

    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes; short only at the end."""
        ...

    def write(self, offset: int, data: _Data) -> int:
        """Write some of `data`, at least one byte, at `offset`; the count written."""
        ...

    def close(self) -> None: ...


class _Closing:
    """What all streams share: a path, and an end."""

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


class FileReader(_Closing):
    """`ByteReader` over an open file, which it closes."""

    def __init__(self, path: str, content: Content) -> None:
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
            # As one read where the size is known; a file that grows meanwhile is read on.
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

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            try:
                _ = self.size
            finally:
                self._closed = True
                self._content.close()


class FileWriter(_Closing):
    """`ByteWriter` over an open file, which it closes.

    `position` is the offset to begin at.  `commit` is called when all is written and before the file is
    closed; `abort` instead of it, when that or the `with` block fails.
    """

    def __init__(
        self,
        path: str,
        content: Content,
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

    def write(self, data: _Data) -> int:
        self._check_open()
        view = memoryview(data).cast("B")
        done = 0
        with located(self._path):
            # In pieces: one call to a backend far away is bounded, and none copies a gigabyte.
            while done < len(view):
                written = self._content.write(self._position, view[done : done + _WRITE_BYTES])
                done += written
                self._position += written
        return done

    def write_all(self, chunks: Iterable[_Data]) -> int:
        self._check_open()
        return sum(self.write(chunk) for chunk in chunks)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        """Close without finishing: the state before, except for what was appended."""
        if not self._closed:
            self._closed = True
            with located(self._path):
                try:
                    self._abort()
                finally:
                    self._content.close()


_WRITE_BYTES: Final = 1 << 20


class FileTextReader(_Closing):
    """`TextReader` over a `ByteReader`, which it closes.  ValueError for an unknown encoding."""

    def __init__(self, reader: ByteReader, encoding: str = "utf-8") -> None:
        super().__init__(reader.path)
        self._reader = reader
        self._encoding = encoding
        self._decoder = text_decoder(encoding)
        self._text = ""  # decoded and not yet given away, from `_at` on
        self._at = 0
        self._line_number = 0

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
        """Decode the next chunk that gives any text; whether there was one."""
        self._text, self._at = "", 0
        while not self._text:
            chunk = self._reader.read(STREAM_CHUNK_BYTES)
            self._text = self._decoder.decode(chunk)
            if not chunk:
                break
        return bool(self._text)

    def __iter__(self) -> Iterator[str]:
        return self.lines()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        self._reader.close()


class FileTextWriter(_Closing):
    """`TextWriter` over a `ByteWriter`, which it closes."""

    def __init__(self, writer: ByteWriter, encoding: str = "utf-8") -> None:
        super().__init__(writer.path)
        check_encoding(encoding)
        self._writer = writer
        self._encoding = encoding
        self._encoder = codecs.getincrementalencoder(encoding)()

    @property
    def encoding(self) -> str:
        return self._encoding

    @property
    def bytes_written(self) -> int:
        return self._writer.bytes_written

    def write(self, text: str) -> int:
        self._check_open()
        return self._writer.write(self._encoder.encode(text))

    def write_all(self, texts: Iterable[str]) -> int:
        self._check_open()
        return sum(self.write(text) for text in texts)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self._writer.__exit__(kind, error, traceback)

    def close(self) -> None:
        self._closed = True
        self._writer.close()


# -- decoding ----------------------------------------------------------------------------------------


def check_encoding(encoding: str) -> None:
    """ValueError when `encoding` is no text encoding that Python knows."""
    try:
        "".encode(encoding)
    except LookupError as error:
        raise ValueError(str(error)) from None


def text_decoder(encoding: str) -> PositionedDecoder:
    """A decoder for the content of one file, from its start.  ValueError for an unknown encoding."""
    check_encoding(encoding)
    return PositionedDecoder(encoding)


class PositionedDecoder:
    """An incremental decoder whose errors say where in the file they are."""

    def __init__(self, encoding: str) -> None:
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._position = 0  # of the next byte to come

    def decode(self, chunk: bytes) -> str:
        """The text of the next chunk; b"" is the end, at which nothing may be left over."""
        kept = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            base = self._position - kept
            bad = error.object[error.start : error.end]
            raise UnicodeDecodeError(error.encoding, bad, base + error.start, base + error.end, error.reason) from None
        self._position += len(chunk)
        return text
