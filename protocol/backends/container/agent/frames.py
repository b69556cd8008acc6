"""FrameDecoder: decodes the replies of a helper from a stream of bytes.

The length in a frame's header is checked against `limit`.  So a frame that belongs to no request, or is longer than
the request allows, is refused before it takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from protocol.backends.container.helper.wire import HEADER, WireError


class Frame(NamedTuple):
    """One reply: the `number` of its request, the `code` 0 or an errno, and the `body` that `wire.unpack` decodes."""

    number: int
    code: int
    body: bytes


class FrameDecoder:
    """Decodes frames.  `limit` returns the largest size of the reply to a request; WireError for an unknown request."""

    def __init__(self, limit: Callable[[int], int]) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._needed = HEADER.size
        self._header: tuple[int, int, int] | None = None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add `data`; yield the frames that are complete now.  The caller must exhaust the iterator.  WireError."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= self._needed:
            if self._header is None:
                self._header = length, number, code = HEADER.unpack_from(self._buffer, at)
                if length > self._limit(number):
                    raise WireError(f"a reply of {length} bytes to request {number}")
                at += HEADER.size
                self._needed = length
            else:
                length, number, code = self._header
                body = bytes(memoryview(self._buffer)[at : at + length])
                at += length
                self._header, self._needed = None, HEADER.size
                yield Frame(number, code, body)
        if at:
            del self._buffer[:at]
