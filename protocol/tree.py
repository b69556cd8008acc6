"""Tree: a read-only walk over one state, live or snapshot.

The common currency of archive, diff and copy.  Paths are bytes, relative to the root, without a
leading or trailing slash; b"" is the root.  Names are whatever a kernel allows: any bytes but "/" and
NUL, valid UTF-8 or not.

Threading: a tree is immutable and may be read from any one thread at a time.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

__all__ = ["CHUNK_BYTES", "Filtered", "Tree", "TreeEntry", "unfiltered"]

CHUNK_BYTES: Final = 64 * 1024  # what streams move at once


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One file, directory, symlink or special file of a tree.

    `inode` tells hard links apart: entries of one tree with the same non-zero `inode` are one file.
    `size` is in bytes (a symlink's is its target's length, a directory's 0).  `rdev` is for device nodes.
    """

    path: bytes
    mode: int
    size: int = 0
    mtime_ns: int = 0
    uid: int = 0
    gid: int = 0
    nlink: int = 1
    inode: int = 0
    rdev: int = 0
    target: bytes = b""
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)

    @property
    def name(self) -> bytes:
        return self.path.rpartition(b"/")[2]

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)


@runtime_checkable
class Tree(Protocol):
    """A state that can be walked and read."""

    def entry(self, path: bytes) -> TreeEntry:
        """The entry at `path` (no symlink is followed).  FileNotFoundError, NotADirectoryError."""
        ...

    def children(self, path: bytes) -> list[bytes]:
        """The names in directory `path`, sorted as bytes.  FileNotFoundError, NotADirectoryError."""
        ...

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        """`path` itself and all below it: parents before children, siblings sorted as bytes, depth first."""
        ...

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """Up to `size` bytes of the regular file at `path`; short only at its end."""
        ...

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The content of the regular file at `path`, in chunks of at most `size` bytes."""
        ...

    def touched(self, other: Tree) -> Collection[bytes] | None:
        """Paths that may differ from `other`, where that is known without a walk; else None.

        Whatever differs is named, or lies below a named path whose entry is missing on one side or has
        another inode number there.  A path named may turn out equal.
        """
        ...


@runtime_checkable
class Filtered(Protocol):
    """A tree that hides some paths of another one."""

    @property
    def unfiltered(self) -> Tree:
        """The other one."""
        ...


def unfiltered(tree: Tree) -> Tree:
    """`tree`, or the one that it hides paths of."""
    return tree.unfiltered if isinstance(tree, Filtered) else tree
