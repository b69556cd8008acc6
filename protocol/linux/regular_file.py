"""Open a file at a path where another program may have put something else: a record, a journal, a lock, a log.

The path may be a FIFO, a device, a socket, a symlink or terabytes of zeros.  These functions do not wait for a writer,
follow no symlink, and read no more than the caller expects.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

__all__ = ["open_regular", "read_regular"]

# Without O_NONBLOCK, opening a FIFO waits forever for the other end (fifo(7)); regular files ignore the flag.
_FLAGS: Final = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
# open(2) fails so for a symlink; for a socket, or for writing a FIFO without a reader; for writing a directory.
_NOT_REGULAR: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR})
_CHUNK_BYTES: Final = 1 << 20


def open_regular(path: str | bytes, flags: int = os.O_RDONLY, *, mode: int = 0o600, dir_fd: int | None = None) -> int:
    """Open the regular file at `path` as os.open does.  EINVAL if it is not a regular file; OSError."""
    try:
        descriptor = os.open(path, flags | _FLAGS, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def read_regular(path: str | bytes, most_bytes: int | None = None, *, dir_fd: int | None = None) -> bytes:
    """Read the regular file at `path`.  EINVAL as `open_regular`; EFBIG beyond `most_bytes`; OSError."""
    with open(open_regular(path, dir_fd=dir_fd), "rb", buffering=0) as file:
        if most_bytes is None:
            return file.readall()
        data = bytearray()
        while chunk := file.read(min(_CHUNK_BYTES, most_bytes + 1 - len(data))):
            data += chunk
            if len(data) > most_bytes:
                raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", os.fsdecode(path))
    return bytes(data)


def _not_regular(path: str | bytes) -> OSError:
    return OSError(errno.EINVAL, "not a regular file: remove it", os.fsdecode(path))
