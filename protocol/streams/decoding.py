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
