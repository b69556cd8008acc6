"""Capture of libfuse's messages: it reports why a mount failed only as text on standard error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MAX_TEXT_BYTES: Final = 4096


@contextmanager
def capture_standard_error() -> Iterator[bytearray]:
    """Capture what libfuse, and the fusermount3 that it starts, write to descriptor 2 in the block."""
    captured = bytearray()
    original = os.dup(2)
    sink = os.memfd_create("libfuse")
    try:
        os.dup2(sink, 2)
        try:
            yield captured
        finally:
            os.dup2(original, 2)
            captured += os.pread(sink, _MAX_TEXT_BYTES, 0)
    finally:
        os.close(original)
        os.close(sink)


def mount_error(error: RuntimeError, output: str, mountpoint: str) -> OSError:
    """Convert libfuse's output to the OSError that it names; EIO if it names none."""
    text = "; ".join(line.strip() for line in output.splitlines() if line.strip())
    # The longest message: that of ENXIO begins with that of ENODEV.
    named = (code for code in errno.errorcode if os.strerror(code) in text)
    code = max(named, key=lambda code: len(os.strerror(code)), default=errno.EIO)
    return OSError(code, f"cannot mount: {text or error}", mountpoint)
