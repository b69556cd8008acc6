"""The messages of libfuse, which reports why a mount failed only as text on standard error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["mount_error", "standard_error"]

_TEXT_BYTES: Final = 4096  # the most that is kept of the text
# What mount(2) and opening /dev/fuse fail with.
_MOUNT_ERRORS: Final = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EBUSY,
    errno.ENODEV,
    errno.ENXIO,
    errno.EINVAL,
    errno.ENOTCONN,
    errno.ENOMEM,
)


@contextmanager
def standard_error() -> Iterator[bytearray]:
    """Collect what libfuse, and the fusermount3 that it starts, write to descriptor 2 in the block."""
    said = bytearray()
    kept = os.dup(2)
    sink = os.memfd_create("libfuse")
    try:
        os.dup2(sink, 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            said += os.pread(sink, _TEXT_BYTES, 0)
    finally:
        os.close(kept)
        os.close(sink)


def mount_error(error: RuntimeError, said: str, mountpoint: str) -> OSError:
    """Convert the text that libfuse printed to the OSError that it names; EIO where it names none."""
    text = "; ".join(line.strip() for line in said.splitlines() if line.strip())
    code = next((code for code in _MOUNT_ERRORS if os.strerror(code) in text), errno.EIO)
    return OSError(code, f"cannot mount: {text or error}", mountpoint)
