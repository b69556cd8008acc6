"""PathFiles: the few operations on files that `StoreFilesystem` needs of a backend.

A *node* is a number that stands for a file, directory or symlink and is held until `release`: an inode
number with a lookup, or a file descriptor.  So what a node stands for stays the same whatever is renamed
or deleted meanwhile, and a name is always looked up in a directory that is held: no path is ever handed
to a kernel, which would follow symlinks in it.

Names are bytes without "/".  Errors are OSError with the errno of the system call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol

from protocol.streams import SeekableContent

__all__ = ["OpenFile", "PathFiles", "Status", "held"]


class Status(NamedTuple):
    """What stat(2) says of a node.  `birth_ns` is None where it is not known."""

    mode: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    nlink: int
    inode: int
    rdev: int = 0
    birth_ns: int | None = None


class OpenFile(SeekableContent, Protocol):
    """A regular file open for reading or writing.  `node` stands for it, and is released by `close`."""

    @property
    def node(self) -> int: ...

    def sync(self) -> None:
        """Make the content durable, where the backend has anything durable."""
        ...


class PathFiles(Protocol):
    """A backend's files, by node."""

    @property
    def root(self) -> str:
        """Where the root is, for people and for absolute symlinks: those below it stay inside."""
        ...

    @property
    def read_only(self) -> bool: ...

    # -- nodes -------------------------------------------------------------------------------
    def top(self) -> int:
        """A node of the root directory."""
        ...

    def child(self, node: int, name: bytes) -> int:
        """A node of what `name` in directory `node` stands for, a symlink itself.  ENOENT, ENOTDIR."""
        ...

    def release(self, node: int) -> None: ...

    def status(self, node: int) -> Status: ...

    def status_of(self, node: int, name: bytes) -> Status:
        """The status of `child(node, name)`, which need not be held."""
        ...

    def readlink(self, node: int) -> bytes: ...

    def names(self, node: int) -> list[tuple[bytes, int]]:
        """The entries of a directory, in any order: name and type (the S_IFMT bits of its mode)."""
        ...

    def xattrs(self, node: int) -> Mapping[bytes, bytes]: ...

    # -- content -----------------------------------------------------------------------------
    def open(self, node: int, mode: Literal["read", "append"]) -> OpenFile:
        """Open a regular file; the file holds `node` from now on.  When this raises, the caller still does."""
        ...

    def create(self, node: int, name: bytes, mode: int | None) -> OpenFile:
        """Make a new regular file in directory `node`, open for writing.  EEXIST.

        `mode` None is 0666 less the umask.
        """
        ...

    # -- entries -----------------------------------------------------------------------------
    def mkdir(self, node: int, name: bytes) -> None:
        """Make a directory with mode 0777 less the umask."""
        ...

    def symlink(self, node: int, name: bytes, target: bytes) -> None: ...

    def link(self, source: int, node: int, name: bytes) -> None:
        """Make a further name for the file that `source` stands for."""
        ...

    def mknod(self, node: int, name: bytes, mode: int, rdev: int) -> None: ...

    def unlink(self, node: int, name: bytes) -> None: ...

    def rmdir(self, node: int, name: bytes) -> None: ...

    def rename(self, node: int, name: bytes, new_node: int, new_name: bytes) -> None:
        """Rename, over what `new_name` in directory `new_node` stands for."""
        ...

    # -- attributes --------------------------------------------------------------------------
    def set_mode(self, node: int, mode: int) -> None: ...

    def set_owner(self, node: int, uid: int, gid: int) -> None: ...

    def set_mtime(self, node: int, mtime_ns: int) -> None: ...

    def set_xattrs(self, node: int, xattrs: Mapping[bytes, bytes]) -> None:
        """Make `xattrs` all that there are."""
        ...


@contextmanager
def held(store: PathFiles, node: int) -> Iterator[int]:
    """Release `node` at the end."""
    try:
        yield node
    finally:
        store.release(node)
