"""Binary hunks of git's patches: "GIT binary patch" with the whole content of both sides, deflated, in base 85.

A hunk has the content after the change and then the content before it, so `git apply -R` works too.  git's other
form, a delta against the old content, is not written: it would need both contents in memory.

Source: git's apply.c (parse_binary, parse_binary_hunk), diff.c (emit_binary_diff_body) and base85.c.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterable
from typing import Final

LINE_BYTES: Final = 52  # max_bytes of git's diff.c: the most that a line carries
_BLOCK_BYTES: Final = LINE_BYTES * 4096  # encoded in one call, which is faster than line by line


def blob_name(size: int, chunks: Iterable[bytes]) -> str:
    """The name that git gives a blob with this content, as `git hash-object` prints it."""
    blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for chunk in chunks:
        blob.update(chunk)
    return blob.hexdigest()


def write_literal(size: int, chunks: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Write one direction of a binary hunk: `size` bytes of content, which `chunks` yields."""
    write(b"literal %d\n" % size)
    deflate = zlib.compressobj()
    pending = bytearray()
    for chunk in chunks:
        pending += deflate.compress(chunk)
        whole = len(pending) - len(pending) % _BLOCK_BYTES
        for start in range(0, whole, _BLOCK_BYTES):
            write(_lines(bytes(pending[start : start + _BLOCK_BYTES])))
        del pending[:whole]
    pending += deflate.flush()
    for start in range(0, len(pending), _BLOCK_BYTES):
        write(_lines(bytes(pending[start : start + _BLOCK_BYTES])))
    write(b"\n")


def _lines(data: bytes) -> bytes:
    """Lines of a length letter (A to Z for 1 to 26 bytes, a to z for 27 to 52) and base 85, 5 characters a word."""
    # The alphabet of `b85encode` is git's; `pad` fills the last 4 bytes, as git does.
    text = base64.b85encode(data, pad=True)
    columns = LINE_BYTES // 4 * 5
    lines = [b"z" + text[start : start + columns] for start in range(0, len(text), columns)]
    last = len(data) % LINE_BYTES
    if last:
        letter = b"%c" % (ord("A") + last - 1 if last <= 26 else ord("a") + last - 27)
        lines[-1] = letter + lines[-1][1:]
    return b"\n".join(lines) + b"\n"
