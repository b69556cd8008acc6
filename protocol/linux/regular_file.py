"""Open a file that somebody else may have put there: a record, a journal, a lock, a log.

Such a place may hold a FIFO, a device, a socket, a symlink or terabytes of zeros.  Nothing here waits for a writer,
follows a symlink, or reads more than the caller expects.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

__all__ = ["open_regular", "read_regular"]

# Without O_NONBLOCK the open of a FIFO waits for the other end for ever (fifo(7)); regular files ignore it.
_FLAGS: Final = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
# What open(2) answers for a symlink; a socket, or a FIFO to write to that nobody reads; a directory to write to.
_NOT_REGULAR: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR})
_CHUNK_BYTES: Final = 1 << 20


def open_regular(path: str | bytes, flags: int = os.O_RDONLY, *, mode: int = 0o600, dir_fd: int | None = None) -> int:
    """A descriptor of the regular file at `path`, as os.open gives it.  EINVAL for what is no regular file; OSError."""
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


def read_regular(path: str | bytes, most_bytes: int, *, dir_fd: int | None = None) -> bytes:
    """The content of the regular file at `path`.  EINVAL as `open_regular`; EFBIG beyond `most_bytes`; OSError."""
    with open(open_regular(path, dir_fd=dir_fd), "rb", buffering=0) as file:
        data = bytearray()
        while chunk := file.read(min(_CHUNK_BYTES, most_bytes + 1 - len(data))):
            data += chunk
            if len(data) > most_bytes:
                raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", os.fsdecode(path))
    return bytes(data)


def _not_regular(path: str | bytes) -> OSError:
    return OSError(errno.EINVAL, "not a regular file: remove it", os.fsdecode(path))
