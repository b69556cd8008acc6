"""Read a file at a path where another program may have put something else: a record, a journal, a lock, a log.

The path may be a FIFO, a device, a socket, a symlink or terabytes of zeros.  These functions do not wait for a writer,
follow no symlink, and read no more than the caller expects.  `write_atomically` writes such a file.

`read_xattrs` is for callers that copy or compare whole files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from typing import Final

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
        is_larger = os.fstat(file.fileno()).st_size > most_bytes  # else it may grow meanwhile
        while not is_larger and (chunk := file.read(min(_CHUNK_BYTES, most_bytes + 1 - len(data)))):
            data += chunk
            is_larger = len(data) > most_bytes
        if is_larger:
            raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", os.fsdecode(path))
    return bytes(data)


def read_prefix(path: str) -> bytes:
    """The first 100 bytes of a regular file.  EINVAL as `open_regular`."""
    with open(open_regular(path), "rb", buffering=0) as file:
        return file.read(100)


def sync_directory(path: str) -> None:
    """Make the entries of a directory durable, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP}:  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: str, data: bytes, *, durable: bool) -> None:
    """Replace or create a file in one step: readers see the old or the new content.  OSError names `path`."""
    temporary = f"{path}.{os.getpid():x}-{time.monotonic_ns():x}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # write(2) has only a descriptor
            error.filename = path
        raise
    if durable:
        sync_directory(os.path.dirname(path))


def _not_regular(path: str | bytes) -> OSError:
    return OSError(errno.EINVAL, "not a regular file: remove it", os.fsdecode(path))


# The file system has no attributes, or its names may not be listed.
_NONE_TO_LIST: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODATA, errno.EACCES, errno.EPERM})


def read_xattrs(at: int | bytes) -> dict[bytes, bytes]:
    """Read all extended attributes of a descriptor or path that can be read.  OSError if they cannot be listed."""
    try:
        names = os.listxattr(at)
    except OSError as error:
        if error.errno in _NONE_TO_LIST:
            return {}
        raise
    found: dict[bytes, bytes] = {}
    for name in names:
        with contextlib.suppress(OSError):  # removed since, or not readable for this user (trusted., security.)
            found[os.fsencode(name)] = os.getxattr(at, name)
    return found
