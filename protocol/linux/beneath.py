"""Safe access below a host directory: no symlink is followed, and no ".." or concurrent rename leads outside.

`open_beneath` has the kernel resolve the whole path below a directory descriptor (openat2(2)).  `RootDirectory` adds
a cache of the descriptors of subdirectories.

A directory descriptor follows a directory that another program moves out of the tree.  So code that keeps one uses
it for RECHECK_S at most, and then opens or checks its path again.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, TypeAlias

from protocol.errors import os_error
from protocol.linux.portable import RECHECK_S, Handle
from protocol.linux.syscalls import (
    RESOLVE_BENEATH,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS,
    RESOLVE_NO_XDEV,
    openat2,
)

# A descriptor, a path, or a function that opens the directory (O_PATH).
DirectoryReference: TypeAlias = int | str | bytes | Callable[[], int]

# The names of the files that a restore writes before it renames them into place.  They are never part of a state.
TEMPORARY_PREFIX: Final = b".vfsd-restore-"
_PATH_MAX: Final = 4096  # with its NUL, linux/limits.h
_RESOLVE: Final = RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH
# Kernels before 5.6 have no openat2, and some sandboxes refuse system calls that they do not know.  EAGAIN: another
# process renamed something meanwhile, which the kernel cannot tell from an escape by "..".
_FALLBACK: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EAGAIN})
_O_SAFE: Final = os.O_NOFOLLOW | os.O_CLOEXEC
_O_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_O_STEP: Final = os.O_PATH | os.O_DIRECTORY
# The file may have become a FIFO or a device: opening it must neither wait nor take a terminal.
_O_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | _O_SAFE


class HandleCache:
    """The `most` handles used last, by key, each with the time when it was put.  Any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._handles: OrderedDict[object, tuple[Handle, float]] = OrderedDict()

    def get(self, key: object, newest_s: float | None = None) -> Handle | None:
        """The handle of `key`, unless it was put before `newest_s` (of time.monotonic())."""
        with self._lock:
            found = self._handles.get(key)
            if found is None or (newest_s is not None and found[1] < newest_s):
                return None
            self._handles.move_to_end(key)
            return found[0]

    def put(self, key: object, handle: Handle) -> None:
        """Keep `handle`; drop the one used longest ago if there are too many."""
        with self._lock:
            dropped = [self._handles.pop(key, None)]
            self._handles[key] = (handle, time.monotonic())
            if len(self._handles) > self._most:
                dropped.append(self._handles.popitem(last=False)[1])
        del dropped  # closes them, outside the lock

    def forking(self) -> AbstractContextManager[object]:
        """A block in which no other thread uses the cache: for fork(2)."""
        return self._lock

    def drop(self, key: object) -> None:
        """Forget the handle of `key`."""
        with self._lock:
            dropped = self._handles.pop(key, None)
        del dropped

    def clear(self) -> None:
        """Forget all handles."""
        with self._lock:
            dropped, self._handles = self._handles, OrderedDict()
        del dropped


class RootDirectory:
    """A host directory and what lies below it.  Paths are bytes relative to it; b"" is the directory itself.

    `same_mount` refuses other mounts below it (EXDEV).  `kept` is how many descriptors of subdirectories are cached.
    Code that removes or renames a directory calls `close_directories` afterwards.
    """

    def __init__(self, directory: DirectoryReference, *, same_mount: bool = False, kept: int = 1) -> None:
        """Open the directory.  A descriptor (also an O_PATH one) stays the caller's.  OSError."""
        self._root = Handle(open_directory(directory, _O_DIRECTORY))
        self._same_mount = same_mount
        self._directories = HandleCache(kept)

    @property
    def fd(self) -> int:
        """A readable descriptor of the directory itself."""
        return self._root.fd

    def __enter__(self) -> RootDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._directories.clear()
        self._root.close()

    def close_directories(self) -> None:
        """Close the cached descriptors of subdirectories."""
        self._directories.clear()

    def open(self, path: bytes, flags: int) -> int:
        """Open `path` from the root; as `open_beneath`."""
        return open_beneath(self._root.fd, path or b".", flags, same_mount=self._same_mount)

    def directory(self, path: bytes) -> Handle:
        """Return an O_PATH descriptor of a directory: an earlier one, if it was opened at most RECHECK_S ago."""
        if not path:
            return self._root
        handle = self._directories.get(path, time.monotonic() - RECHECK_S)
        if handle is None:
            handle = Handle(self.open(path, _O_STEP))
            self._directories.put(path, handle)
        return handle

    def parent(self, path: bytes) -> tuple[Handle, bytes]:
        """The directory that `path` is in, and its name there (b"." for the root)."""
        above, _, name = path.rpartition(b"/")
        return self.directory(above), name or b"."


def open_directory(directory: DirectoryReference, flags: int) -> int:
    """Open a directory.  A descriptor (also an O_PATH one) stays the caller's.  OSError."""
    if callable(directory):
        top = Handle(directory())  # closed with its last reference
        return os.open(".", flags, dir_fd=top.fd)
    if isinstance(directory, int):
        return os.open(".", flags, dir_fd=directory)
    return os.open(directory, flags)


def open_to_read(directory: int, name: bytes) -> int:
    """Open the file `name` of a directory to read it, without moving its atime where that is allowed."""
    try:
        return os.open(name, _O_READ | os.O_NOATIME, dir_fd=directory)
    except PermissionError:  # O_NOATIME is for the owner and for root
        return os.open(name, _O_READ, dir_fd=directory)


def open_beneath(directory: int, path: bytes, flags: int, *, same_mount: bool = False) -> int:
    """Open `path` relative to the directory descriptor `directory`.  ELOOP, EXDEV, and as open(2).

    `path` has no ".." and no empty component.  No component may be a symlink, except the last one with O_PATH: then
    the descriptor is of the symlink itself.  `same_mount` refuses another mount (EXDEV) where the kernel has openat2.
    """
    flags |= _O_SAFE
    if len(path) >= _PATH_MAX:
        return _open_in_steps(directory, list(_pieces(path)), flags, partial(open_beneath, same_mount=same_mount))
    try:
        return openat2(directory, path, flags, _RESOLVE | RESOLVE_NO_XDEV if same_mount else _RESOLVE)
    except OSError as error:
        if error.errno not in _FALLBACK:
            raise
    return _open_in_steps(directory, path.split(b"/"), flags, _open_name)


def _open_name(directory: int, name: bytes, flags: int) -> int:
    return os.open(name, flags | _O_SAFE, dir_fd=directory)


def _pieces(path: bytes) -> Iterator[bytes]:
    """Cut a path into relative paths that are short enough for one system call.  ENAMETOOLONG."""
    while len(path) >= _PATH_MAX:
        cut = path.rfind(b"/", 0, _PATH_MAX - 1)
        if cut <= 0:
            raise os_error(errno.ENAMETOOLONG, path.decode("utf-8", "backslashreplace"))
        yield path[:cut]
        path = path[cut + 1 :]
    yield path


def _open_in_steps(
    directory: int, steps: Sequence[bytes], flags: int, open_step: Callable[[int, bytes, int], int]
) -> int:
    """Open each step in the directory of the step before; the last one with `flags`."""
    at = directory
    try:
        for step in steps[:-1]:
            below = open_step(at, step, _O_STEP)
            if at != directory:
                os.close(at)
            at = below
        return open_step(at, steps[-1], flags)
    finally:
        if at != directory:
            os.close(at)
