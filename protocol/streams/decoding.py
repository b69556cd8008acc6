"""Incremental decoding of text, with errors that give offsets in the file."""

from __future__ import annotations

import codecs

__all__ = ["PositionedDecoder", "check_encoding"]


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
        kept = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            base = self._position - kept
            bad = error.object[error.start : error.end]
            raise UnicodeDecodeError(error.encoding, bad, base + error.start, base + error.end, error.reason) from None
        self._position += len(chunk)
        return text
