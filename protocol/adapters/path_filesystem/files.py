"""PathFiles: the few operations on files that `PathFilesystem` needs of a backend.

A *node* is a number for a file, directory or symlink, held until `release`: an inode number with a lookup, or a file
descriptor.  It stays the same file whatever is renamed or deleted meanwhile, and names are always looked up in a
directory that is held: no path is passed to a kernel, which would follow symlinks in it.

Names are bytes without "/".  Errors are OSError with the errno of the system call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple, Protocol

from protocol.streams import SeekableContent


class Status(NamedTuple):
    """The stat(2) data of a node.  `birth_ns` is None if unknown, and `ctime_ns` 0."""

    mode: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    nlink: int
    inode: int
    rdev: int = 0
    birth_ns: int | None = None
    ctime_ns: int = 0


class OpenFile(SeekableContent, Protocol):
    """A regular file open for reading or writing.  `close` releases `node`."""

    @property
    def node(self) -> int: ...

    def sync(self) -> None:
        """Make the content durable, if the backend has durable storage and is asked to make every write durable."""
        ...


class PathFiles(Protocol):
    """A backend's files, by node."""

    @property
    def root(self) -> str:
        """The path of the root, for messages and for absolute symlinks: those below it stay inside."""
        ...

    @property
    def read_only(self) -> bool: ...

    # -- nodes -------------------------------------------------------------------------------
    def top(self, *, begins: bool = False) -> int:
        """A node of the root directory.  NotMountedError if something else is at its path now.

        With `begins`, for the first step of a call, it is also checked that the files are still served.
        """
        ...

    def child(self, node: int, name: bytes) -> int:
        """A node of `name` in directory `node`; of a symlink itself.  ENOENT, ENOTDIR."""
        ...

    def release(self, node: int) -> None: ...

    def status(self, node: int) -> Status: ...

    def status_of(self, node: int, name: bytes) -> Status:
        """The status of `child(node, name)`, without holding a node."""
        ...

    def readlink(self, node: int) -> bytes: ...

    def names(self, node: int) -> list[tuple[bytes, int]]:
        """The entries of a directory, in any order: name and type (the S_IFMT bits of its mode)."""
        ...

    def xattrs(self, node: int) -> Mapping[bytes, bytes]: ...

    # -- content -----------------------------------------------------------------------------
    def open(self, node: int, mode: Literal["read", "append"]) -> OpenFile:
        """Open a regular file.  The file takes over `node`; if this raises, the caller keeps it."""
        ...

    def create(self, node: int, name: bytes, mode: int | None) -> OpenFile:
        """Make a new regular file in directory `node`, open for writing.  EEXIST.

        `mode` None means 0666 less the caller's umask.
        """
        ...

    # -- entries -----------------------------------------------------------------------------
    def mkdir(self, node: int, name: bytes) -> None:
        """Make a directory with mode 0777 less the caller's umask."""
        ...

    def symlink(self, node: int, name: bytes, target: bytes) -> None: ...

    def link(self, source: int, node: int, name: bytes) -> None:
        """Make a further name for the file of node `source`."""
        ...

    def mknod(self, node: int, name: bytes, mode: int, rdev: int) -> None: ...

    def unlink(self, node: int, name: bytes) -> None: ...

    def rmdir(self, node: int, name: bytes) -> None: ...

    def rename(self, node: int, name: bytes, new_node: int, new_name: bytes) -> None:
        """Rename, replacing `new_name` in directory `new_node`."""
        ...

    def locked(self, node: int) -> AbstractContextManager[None]:
        """Exclude other calls that replace files in directory `node`, in any process, for the block."""
        ...

    def sync_names(self, node: int) -> None:
        """Make the entries of directory `node` durable, under the same condition as `OpenFile.sync`."""
        ...

    # -- attributes --------------------------------------------------------------------------
    def set_mode(self, node: int, mode: int) -> None: ...

    def set_owner(self, node: int, uid: int, gid: int) -> None: ...

    def set_mtime(self, node: int, mtime_ns: int) -> None: ...

    def set_xattrs(self, node: int, xattrs: Mapping[bytes, bytes]) -> None:
        """Make `xattrs` the only attributes."""
        ...


@contextmanager
def held(store: PathFiles, node: int) -> Iterator[int]:
    """Release `node` at the end."""
    try:
        yield node
    finally:
        store.release(node)
