"""Text streams over byte streams: FileTextReader and FileTextWriter."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

from protocol.streams.contract import STREAM_CHUNK_BYTES, ByteReader, ByteWriter
from protocol.streams.decoding import PositionedDecoder, check_encoding
from protocol.streams.files import ClosingStream

__all__ = ["FileTextReader", "FileTextWriter"]


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


class FileTextWriter(ClosingStream):
    """Implements `TextWriter` over a `ByteWriter`, which it closes."""

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

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        self._closed = True
        self._writer.__exit__(kind, *details)

    def close(self) -> None:
        self._closed = True
        self._writer.close()
