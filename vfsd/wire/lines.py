"""Split a byte stream into lines: the framing of the control socket, without I/O."""

from __future__ import annotations

from typing import Final

RECEIVE_BYTES: Final = 64 * 1024


class LineBuffer:
    """Buffers received bytes and returns complete lines.

    The buffer is unbounded; the caller checks `partial_bytes` and stops receiving.
    """

    __slots__ = ("_buffer", "_searched")

    def __init__(self) -> None:
        self._buffer = bytearray()
        # The buffer has no newline before this offset.  Avoids a quadratic search if a line arrives byte by byte.
        self._searched = 0

    @property
    def partial_bytes(self) -> int:
        """The number of buffered bytes."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_line(self) -> bytes | None:
        """Return the next line without its newline, or None if it is incomplete."""
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(memoryview(self._buffer)[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def skip_empty_lines(self) -> None:
        """Drop the empty lines at the start of the buffer."""
        if self._buffer.startswith(b"\n"):
            self._buffer = self._buffer.lstrip(b"\n")
            self._searched = 0

    def take_rest(self) -> bytes:
        """Return and remove the incomplete line at the end of a stream."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest
