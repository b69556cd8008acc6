"""Tree: a read-only walk over one state, live or snapshot.

Archive, diff, search and copy work on trees.  Paths are bytes, relative to the root, without a leading or trailing
slash; b"" is the root.  A name may have any bytes that the kernel allows: all except "/" and NUL, valid UTF-8 or not.

Threading: a tree is immutable; one thread at a time may read it.
"""

from __future__ import annotations

import contextlib
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgspec

from protocol.values import Value

CHUNK_BYTES: Final = 64 * 1024  # of a stream
# The file type in a mode.  A call of stat.S_IFMT takes longer than most of the checks that need it.
TYPE_MASK: Final = 0o170000

_PAGE_BYTES: Final = 4096
_ZEROS: Final = bytes(1 << 20)
_ZERO_PAGE: Final = bytes(_PAGE_BYTES)


class Hole(Value):
    """A run of zeros in the content of a sparse file, in place of a chunk; len() is its length."""

    size: int

    def __len__(self) -> int:
        return self.size


Chunk: TypeAlias = bytes | Hole


def filled(chunks: Iterable[Chunk]) -> Iterator[bytes]:
    """Yield `chunks` with zeros in place of holes, for a reader that cannot skip them."""
    for chunk in chunks:
        if isinstance(chunk, Hole):
            for start in range(0, chunk.size, CHUNK_BYTES):
                yield bytes(min(CHUNK_BYTES, chunk.size - start))
        else:
            yield chunk


def sparse(data: bytes) -> Iterator[Chunk]:
    """Yield `data`, which begins at a page of its file, with a hole for each run of whole pages that are zeros."""
    if data == _ZEROS[: len(data)]:
        if data:
            yield Hole(len(data))
        return
    at = start = 0
    while (found := data.find(_ZERO_PAGE, at)) >= 0:
        first = -(-found // _PAGE_BYTES) * _PAGE_BYTES
        after = first
        while data.startswith(_ZERO_PAGE, after):
            after += _PAGE_BYTES
        if after > first:
            if first > start:
                yield data[start:first]
            yield Hole(after - first)
            start = after
        at = max(after, found + 1)
    if start < len(data):
        yield data[start:] if start else data


# Called with (bytes of content done, all bytes).  An exception that it raises ends the work.
ByteProgress: TypeAlias = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Ignore progress."""


class HasMode:
    """The file type in `mode`, for classes that have one."""

    __slots__ = ()
    mode: int

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)


class TreeEntry(HasMode, Value):
    """One file, directory, symlink or special file of a tree.

    `inode` identifies hard links: entries of one tree with the same non-zero `inode` are one file.  `size` is in bytes
    (for a symlink the length of its target, for a directory 0).  `rdev` is the device number of a device node.
    `ctime_ns`, in nanoseconds as `mtime_ns`, is 0 if the tree has none.
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
    xattrs: Mapping[bytes, bytes] = msgspec.field(default_factory=dict)
    ctime_ns: int = 0

    @property
    def name(self) -> bytes:
        return self.path.rpartition(b"/")[2]


@runtime_checkable
class Tree(Protocol):
    """A state that can be walked and read."""

    def entry(self, path: bytes) -> TreeEntry:
        """Return the entry at `path`, without following symlinks.  FileNotFoundError, NotADirectoryError."""
        ...

    def entries(self, path: bytes) -> Iterable[TreeEntry]:
        """Return the entries in directory `path`, sorted by name as bytes.  FileNotFoundError, NotADirectoryError.

        They may be made one by one, as the caller reads them.
        """
        ...

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        """Yield `path` and everything below it, depth first: parents before children, siblings sorted as bytes."""
        ...

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """Return `size` bytes of the regular file at `path` from `offset`; fewer only at its end."""
        ...

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Yield the content of the regular file at `path` in chunks of at most `size` bytes, and holes of any length.

        A tree that does not know where its files have holes yields zeros.
        """
        ...

    def touched(self, other: Tree) -> Collection[bytes] | None:
        """Return the paths that may differ from `other` if they are known without a walk, else None.

        Every difference is at a returned path, or below one whose entry is missing on one side or has another inode
        number there.  A returned path may be equal.
        """
        ...


class LookupTree(ABC):
    """Base of a tree that knows its entries only through `entry`, and `children` or `entries`."""

    @abstractmethod
    def entry(self, path: bytes) -> TreeEntry:
        """See `Tree`."""

    def children(self, path: bytes) -> Iterable[bytes]:
        """Return the names in directory `path`, sorted as bytes; errors as for `entries`, which this is for."""
        raise NotImplementedError

    def entries(self, path: bytes) -> Iterable[TreeEntry]:
        prefix = path + b"/" if path else b""
        return self._existing(prefix + name for name in self.children(path))

    def _existing(self, paths: Iterable[bytes]) -> Iterator[TreeEntry]:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # of a live tree: removed meanwhile
                yield self.entry(path)

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        waiting: list[Iterator[TreeEntry]] = [iter((self.entry(path),))]
        while waiting:
            entry = next(waiting[-1], None)
            if entry is None:
                waiting.pop()
                continue
            yield entry
            if entry.is_dir:
                try:
                    waiting.append(iter(self.entries(entry.path)))
                except (FileNotFoundError, NotADirectoryError):  # as above
                    if entry.path == path:
                        raise

    def touched(self, other: Tree) -> Collection[bytes] | None:  # noqa: ARG002
        return None


class LowerTree(LookupTree):
    """A tree over which an overlay can be mounted.  Each method reads what it needs, when it is called.

    `entries` may give symlinks without their target, which `entry` reads.  The inode number of an entry that has no
    ctime only tells which names are names of one file.
    """

    inode_failure: str | None = None
    """The first damage of inode numbers and ctimes that was found; None if none was."""

    def ranges(self, path: bytes, start: int, end: int) -> Iterable[tuple[int, int]]:  # noqa: ARG002
        """Return (start, end) of each run of data in a file between two offsets; the rest is zeros.

        The whole if that is not known, or not verified yet.
        """
        return [(start, end)]

    def same_content(self, path: bytes, other: Tree, other_path: bytes | None = None) -> bool | None:  # noqa: ARG002
        """See `protocol.diff.tree_diff.ComparesContent`."""
        return None

    def sectors(self, path: bytes) -> int | None:  # noqa: ARG002
        """Return the size on disk of a sparse file in units of 512 bytes; None if it is not known."""
        return None

    def preparation(self, path: bytes) -> Callable[[], object] | None:  # noqa: ARG002
        """Return a function that does what makes the first read of a large file slow; None if nothing does.

        The function may be called in any thread, in parallel with all methods.
        """
        return None

    def stop(self) -> None:
        """End preparations that are running, or let them run without the tree: it is about to be closed."""

    @abstractmethod
    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """See `Tree.read`.  The bytes are verified."""


def names_in(tree: Tree, path: bytes) -> list[bytes]:
    """Return the names in directory `path`, sorted as bytes."""
    return [entry.name for entry in tree.entries(path)]


@runtime_checkable
class Filtered(Protocol):
    """A tree that hides some paths of another tree."""

    @property
    def unfiltered(self) -> Tree:
        """The complete tree."""
        ...


@runtime_checkable
class LosingTree(Protocol):
    """A tree of an earlier state whose files partly lie in a directory that other programs may change."""

    def is_lost(self, path: bytes) -> bool:
        """Return whether the file at `path` was changed by another program since, so that reading it fails (ESTALE)."""
        ...

    def lost_paths(self, other: Tree) -> list[bytes]:
        """Return the paths of the files that are lost in this tree and not in `other`, sorted."""
        ...


LOST: Final = "another program changed it below the overlay since, so its content in the snapshot is lost"
"""The reason why a path is lost, for users."""


def losing(tree: Tree) -> LosingTree | None:
    """Return the complete tree of `tree` if files in it can be lost."""
    complete = unfiltered(tree)
    return complete if isinstance(complete, LosingTree) else None


def unfiltered(tree: Tree) -> Tree:
    """Return the complete tree of a filtered tree, or `tree` itself."""
    return tree.unfiltered if isinstance(tree, Filtered) else tree
