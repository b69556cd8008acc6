"""FrameDecoder: the replies of a helper, out of whatever pieces its stream comes in.

What a frame announces is believed only as far as `limit` says: for a request that nobody made, or for more than was
asked for, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from protocol.backends.container.helper.wire import HEADER, WireError

__all__ = ["Frame", "FrameDecoder"]


class Frame(NamedTuple):
    """One reply: to request `number`, `code` 0 or an errno, and what `wire.unpack` reads."""

    number: int
    code: int
    body: bytes


class FrameDecoder:
    """`limit` gives the most bytes that the reply to a request may have; WireError where there is no such request."""

    def __init__(self, limit: Callable[[int], int]) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._needed = HEADER.size
        self._header: tuple[int, int, int] | None = None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with `data`, in order; to be read to the end.  WireError."""
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
