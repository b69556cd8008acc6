"""Pages of text and bytes for `PathFilesystem.read` and `read_bytes`."""

from __future__ import annotations

from protocol.paths import CallLimitError, CallLimits
from protocol.streams import ByteReader, PositionedDecoder
from protocol.types import DEFAULT_READ_LINES, READ_ENTIRE_FILE, ReadBytesResult, ReadResult


def check_line_page(offset: int, limit: int | None) -> None:
    """Raise ValueError for an invalid page of lines."""
    if offset < 0:
        raise ValueError(f"offset must be 0 or more, not {offset}")
    if limit is not None and limit < 0 and limit != READ_ENTIRE_FILE:
        raise ValueError(f"limit must be 0 or more, or READ_ENTIRE_FILE, not {limit}")


def check_byte_page(offset: int, limit: int | None) -> None:
    """Raise ValueError for an invalid page of bytes."""
    for name, value in (("offset", offset), ("limit", limit)):
        if value is not None and value < 0:
            raise ValueError(f"{name} must be 0 or more, not {value}")


def text_page(reader: ByteReader, offset: int, limit: int | None, encoding: str, limits: CallLimits) -> ReadResult:
    """Read a page of a text file; see `Filesystem.read`.  Bounds the size of the page, not of the file."""
    if limit is None:
        limit = DEFAULT_READ_LINES
    page = _Page(offset, None if limit == READ_ENTIRE_FILE else offset + limit, limits.read_bytes)
    decoder = PositionedDecoder(encoding)
    try:
        for chunk in reader:
            page.add(decoder.decode(chunk), reader.path)
        page.add(decoder.decode(b""), reader.path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{reader.path!r} is not text in {encoding} ({error}): use read_bytes") from error
    total = page.lines + page.has_rest
    start = min(offset, total)
    end = total if page.end is None else min(page.end, total)
    return ReadResult("".join(page.parts), reader.path, total, start, end - start, end < total)


class _Page:
    """Collects the lines from `start` up to `end` (None: the last one), and counts all."""

    def __init__(self, start: int, end: int | None, limit_bytes: int) -> None:
        self.start = start
        self.end = end
        self.lines = 0  # lines complete so far
        self.has_rest = False  # whether text follows the last line end
        self.parts: list[str] = []
        self._size = 0
        self._limit_bytes = limit_bytes

    def add(self, text: str, path: str) -> None:
        if not text:
            return
        ends = text.count("\n")
        if self.lines + ends >= self.start and (self.end is None or self.lines < self.end):
            begin = _after_line_ends(text, self.start - self.lines)
            stop = len(text) if self.end is None else _after_line_ends(text, self.end - self.lines)
            part = text[begin:stop]
            self._size += len(part) if part.isascii() else len(part.encode("utf-8", "surrogatepass"))
            if self._size > self._limit_bytes:
                raise CallLimitError(
                    f"a read is limited to {self._limit_bytes} bytes: use open_text, or pages of {path!r}"
                )
            self.parts.append(part)
        self.lines += ends
        self.has_rest = not text.endswith("\n")


def _after_line_ends(text: str, count: int) -> int:
    """Return the index after the `count`-th "\\n" of `text`, or its length if it has fewer."""
    at = 0
    for _ in range(count):
        at = text.find("\n", at) + 1
        if not at:
            return len(text)
    return at


def bytes_page(reader: ByteReader, offset: int, limit: int | None, limits: CallLimits) -> ReadBytesResult:
    """Read a page of a file; see `Filesystem.read_bytes`."""
    size = reader.size
    wanted = max(0, size - offset)
    if limit is not None:
        wanted = min(wanted, limit)
    if wanted > limits.read_bytes:
        raise CallLimitError(
            f"a read is limited to {limits.read_bytes} bytes: use open_read, or pages of {reader.path!r}"
        )
    start = min(offset, size)
    reader.seek(start)
    content = reader.read(wanted)
    return ReadBytesResult(content, reader.path, size, start, len(content), start + len(content) < size)
