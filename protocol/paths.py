"""Paths as agents write them: normalisation, validation, and error messages that name the path.

A path is relative to the root.  "/x" means "x", "." and empty parts are ignored, and ".." goes up but not above the
root ("../x" means "x").  Normalisation works on the text only, before any symlink is resolved.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from protocol.errors import check_type, shortened

ROOT: Final = "."
_NAME_MAX_BYTES: Final = 255  # NAME_MAX, linux/limits.h


class CallLimitError(ValueError):
    """One call would hold more bytes in memory than its limit."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of what one call of an agent may create or hold in memory.  They do not apply to a mount.

    `depth` (parts) and `segment` (characters of a part) apply only to paths that a call creates; existing longer paths
    can be read, overwritten and deleted.
    """

    depth: int = 16
    segment: int = 80
    read_bytes: int = 32 << 20  # for one `read` or `read_bytes`; streams have no limit
    write_bytes: int = 32 << 20
    grep_matches: int = 1_000

    def check_new(self, path: str) -> None:
        """Raise ValueError if the normalised `path` is too deep, or has too long a part, to be created."""
        parts = path.split("/")
        if len(parts) > self.depth:
            raise ValueError(f"path is {len(parts)} deep, the limit is {self.depth}: {path!r}")
        longest = max(parts, key=len)
        if len(longest) > self.segment:
            raise ValueError(f"{longest!r} in a path has {len(longest)} characters, the limit is {self.segment}")


DEFAULT_LIMITS: Final = CallLimits()


def normalise(path: str) -> str:
    """Return the path without empty, "." and ".." parts; "." for the root.

    TypeError if it is not a `str`; ValueError if it has a NUL or a name of more than 255 bytes, or cannot be encoded.
    """
    check_type(path, str, "a path must be a str")
    if "\0" in path:
        raise ValueError(f"a path cannot have a NUL: {path!r}")
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in {"", "."}:
            parts.append(part)
    normal = "/".join(parts) or ROOT
    longest = max(map(len, encode(normal).split(b"/")))
    if longest > _NAME_MAX_BYTES:
        limit = f"the limit is {_NAME_MAX_BYTES}: use a shorter name"
        raise ValueError(f"a name in a path has {longest} bytes ({shortened(normal)!r}), {limit}")
    return normal


def encode(path: str) -> bytes:
    """Return a normalised path as the bytes that trees and volumes use; b"" for the root.  ValueError."""
    if path == ROOT:
        return b""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ValueError(f"a path cannot be encoded: {path!r}") from None


def decode(path: bytes) -> str:
    """Return the inverse of `encode`, for any bytes."""
    return path.decode("utf-8", "surrogateescape") or ROOT


@contextmanager
def located(path: str) -> Iterator[None]:
    """Add `path` to every OSError raised in this context; the errno stays.

    EROFS becomes a PermissionError, which callers catch; its errno stays EROFS.
    """
    try:
        yield
    except OSError as error:
        if type(error).__module__ != "builtins":  # the contract's own errors (ArchiveError) name their subject
            raise
        code = error.errno or errno.EIO
        message = error.strerror or os.strerror(code)
        if code == errno.EROFS:
            raise PermissionError(code, message, path) from error
        # Keep the class that was raised: it may be more specific than that of the errno ("Directory not empty").
        if error.filename == path and error.errno:
            raise
        raise OSError(code, message, path) from error


def encoded(content: str) -> bytes:
    """Return the text that `Filesystem.write` got, as UTF-8.  TypeError for bytes."""
    check_type(content, str, "write takes text (str)", "use write_bytes for bytes")
    return content.encode("utf-8")


def check_bytes(content: bytes) -> None:
    """Raise TypeError unless `content` is what `Filesystem.write_bytes` takes."""
    check_type(content, (bytes, bytearray, memoryview), "write_bytes takes bytes", "use write for text")
