"""Paths as agents write them: normalised, validated, and named by the errors that concern them.

A path is relative to the root.  "/x" means "x", "." and empty parts mean nothing, ".." goes up and stays
at the root ("../x" means "x").  This is done on the text, before any symlink is looked at.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

__all__ = ["DEFAULT_LIMITS", "ROOT", "CallLimits", "decode", "encode", "located", "normalise"]

ROOT: Final = "."


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds on what an agent's call may create or hold in memory.  They never bind a mount.

    `depth` (parts) and `segment` (characters of a part) bind paths that a call creates: what was created by
    another way can be read, overwritten and deleted.
    """

    depth: int = 16
    segment: int = 80
    read_bytes: int = 32 << 20  # of one `read` or `read_bytes`; streams have no limit
    write_bytes: int = 32 << 20
    grep_matches: int = 1_000

    def check_new(self, path: str) -> None:
        """ValueError when `path`, normalised, is too deep or has too long a part to be created."""
        parts = path.split("/")
        if len(parts) > self.depth:
            raise ValueError(f"path is {len(parts)} deep, the limit is {self.depth}: {path!r}")
        longest = max(parts, key=len)
        if len(longest) > self.segment:
            raise ValueError(f"{longest!r} in a path has {len(longest)} characters, the limit is {self.segment}")


DEFAULT_LIMITS: Final = CallLimits()


def normalise(path: str) -> str:
    """The path without empty, "." and ".." parts; "." for the root.

    TypeError when it is no `str`; ValueError when it has a NUL or cannot be encoded.
    """
    if not isinstance(path, str):
        raise TypeError(f"a path must be a str, not {type(path).__name__}")
    if "\0" in path:
        raise ValueError(f"a path cannot have a NUL: {path!r}")
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in {"", "."}:
            parts.append(part)
    normal = "/".join(parts) or ROOT
    encode(normal)
    return normal


def encode(path: str) -> bytes:
    """A normalised path as the bytes that trees and volumes use; b"" for the root."""
    if path == ROOT:
        return b""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ValueError(f"a path cannot be encoded: {path!r}") from None


def decode(path: bytes) -> str:
    """The inverse of `encode`, for any bytes."""
    return path.decode("utf-8", "surrogateescape") or ROOT


@contextmanager
def located(path: str) -> Iterator[None]:
    """Make every OSError from within name `path`, with its errno kept.

    EROFS becomes a PermissionError, which a caller of built-in exceptions looks for; its errno says more.
    """
    try:
        yield
    except OSError as error:
        if type(error).__module__ != "builtins":  # one of the contract's own (ArchiveError) says what it is about
            raise
        code = error.errno or errno.EIO
        message = error.strerror or os.strerror(code)
        if code == errno.EROFS:
            raise PermissionError(code, message, path) from error
        # Of the class that was raised where that says more than errno's own ("Directory not empty").
        if error.filename == path and error.errno:
            raise
        raise OSError(code, message, path) from error
