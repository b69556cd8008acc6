"""Lines out of a byte stream: the framing that server and clients share, without any I/O."""

from __future__ import annotations

from typing import Final

__all__ = ["RECEIVE_BYTES", "LineBuffer"]

RECEIVE_BYTES: Final = 64 * 1024


class LineBuffer:
    """Collects what was received and gives back whole lines.

    It sets no limit of its own: who feeds it looks at `partial_bytes` and stops.
    """

    __slots__ = ("_buffer", "_searched")

    def __init__(self) -> None:
        self._buffer = bytearray()
        # Up to here there is no newline: a line that comes byte by byte is not searched again from its start.
        self._searched = 0

    @property
    def partial_bytes(self) -> int:
        """The bytes held that `next_line` has not given back."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_line(self) -> bytes | None:
        """The next line without its newline, or None until more is fed."""
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(memoryview(self._buffer)[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def take_rest(self) -> bytes:
        """What is left of a stream that ended without a newline; the buffer is empty after it."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest
