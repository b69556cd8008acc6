"""MerkleTree: a snapshot, or the scanned live state, as a tree.

A comparison of two such trees skips subtrees whose listings have the same digest.

Threading: as for `protocol.tree`, one thread at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Final, Protocol

from protocol.errors import os_error
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import UNREADABLE, Row, entry_of
from protocol.tree import CHUNK_BYTES, Tree, TreeEntry

__all__ = ["Contents", "MerkleTree", "ReadRows", "content_key", "merkle_changes", "path_key"]

_LISTINGS_KEPT: Final = 64


class Contents(Protocol):
    """Reads file contents by key: a store's `Blobs` by digest, a `Source` by path."""

    def read(self, key: bytes, /, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a content."""
        ...

    def chunks(self, key: bytes, /, size: int) -> Iterator[bytes]:
        """A content, in chunks."""
        ...


def content_key(path: bytes, row: Row) -> bytes:  # noqa: ARG001
    """The key of a file in `Blobs`."""
    return row.content


def path_key(path: bytes, row: Row) -> bytes:  # noqa: ARG001
    """The key of a file in a `Source`."""
    return path


class MerkleTree:
    """A tree of listings.  `read_listing` decodes a listing; `contents` reads a file by the key that `key` returns."""

    def __init__(
        self,
        root: Row,
        read_listing: Callable[[bytes], list[Row]],
        contents: Contents,
        key: Callable[[bytes, Row], bytes],
    ) -> None:
        self.root = root
        self._read_listing = read_listing
        self._contents = contents
        self._key = key
        self._listings: OrderedDict[bytes, dict[bytes, Row]] = OrderedDict()

    def rows(self, digest: bytes) -> list[Row]:
        """The rows of a listing."""
        return self._read_listing(digest)

    def _listed(self, path: bytes, digest: bytes) -> list[Row]:
        """The rows of the directory at `path`.  DamagedError, which names the directory."""
        try:
            return self._read_listing(digest)
        except DamagedError as error:
            raise error.at(_shown(path)) from None

    def _names(self, path: bytes, digest: bytes) -> dict[bytes, Row]:
        cached = self._listings.get(digest)
        if cached is not None:
            self._listings.move_to_end(digest)
            return cached
        cached = self._listings[digest] = {row.name: row for row in self._listed(path, digest)}
        if len(self._listings) > _LISTINGS_KEPT:
            self._listings.popitem(last=False)
        return cached

    def row(self, path: bytes) -> Row:
        """The row at `path`.  FileNotFoundError, NotADirectoryError."""
        row = self.root
        for name in path.split(b"/") if path else ():
            if not stat.S_ISDIR(row.mode):
                raise os_error(errno.ENOTDIR, _shown(path))
            below = self._names(path, row.content).get(name)
            if below is None:
                raise os_error(errno.ENOENT, _shown(path))
            row = below
        return row

    # -- protocol.tree.Tree ------------------------------------------------------------------
    def entry(self, path: bytes) -> TreeEntry:
        return entry_of(self.row(path), path)

    def children(self, path: bytes) -> list[bytes]:
        row = self.row(path)
        if not row.is_dir:
            raise os_error(errno.ENOTDIR, _shown(path))
        return list(self._names(path, row.content))

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        pending = [(path, self.row(path))]
        while pending:
            at, row = pending.pop()
            yield entry_of(row, at)
            if stat.S_ISDIR(row.mode):
                prefix = at + b"/" if at else b""
                pending += [(prefix + below.name, below) for below in reversed(self._listed(at, row.content))]

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        try:
            return self._contents.read(self._key(path, self._file(path)), offset, size)
        except DamagedError as error:
            raise error.at(_shown(path)) from None

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        return _naming(path, self._contents.chunks(self._key(path, self._file(path)), size))

    def touched(self, other: Tree) -> Collection[bytes] | None:
        if not isinstance(other, MerkleTree):
            return None
        return [path for path, _, _ in merkle_changes(other.root, other.rows, self.root, self.rows)]

    # -- protocol.diff.tree_diff.ComparesContent -------------------------------------------------------
    def same_content(self, path: bytes, other: Tree) -> bool | None:
        if not isinstance(other, MerkleTree):
            return None
        mine, its = self.row(path), other.row(path)
        if mine.more.state or its.more.state:
            return None
        return mine.content == its.content

    def _file(self, path: bytes) -> Row:
        row = self.row(path)
        if not row.is_file:
            raise os_error(errno.EISDIR if row.is_dir else errno.EINVAL, _shown(path))
        if row.more.state & UNREADABLE:
            raise OSError(errno.EACCES, "could not be read when the snapshot was taken", _shown(path))
        return row


def _naming(path: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield `chunks`; a DamagedError names `path`."""
    try:
        yield from chunks
    except DamagedError as error:
        raise error.at(_shown(path)) from None


ReadRows = Callable[[bytes], list[Row]]


def merkle_changes(
    old: Row, old_rows: ReadRows, new: Row, new_rows: ReadRows
) -> Iterator[tuple[bytes, Row | None, Row | None]]:
    """Each path whose row differs, parents first, with both rows (None: not there).

    Of a directory that only one side has, only the directory itself is yielded.  A directory is also yielded if only
    its mtime differs.
    """
    if _own(old) != _own(new):
        yield b"", old, new
    pending: list[tuple[bytes, Row, Row]] = [(b"", old, new)]
    while pending:
        path, left, right = pending.pop()
        if left.content == right.content:
            continue
        prefix = path + b"/" if path else b""
        before = {row.name: row for row in old_rows(left.content)}
        after = new_rows(right.content)
        for row in after:
            was = before.pop(row.name, None)
            if was == row:
                continue
            here = prefix + row.name
            if was is None or was.is_dir != row.is_dir:
                yield here, was, row
                continue
            if not row.is_dir or _own(was) != _own(row):
                yield here, was, row
            if row.is_dir:
                pending.append((here, was, row))
        for name, row in before.items():
            yield prefix + name, row, None


def _own(row: Row) -> tuple[object, ...]:
    """The fields of a directory's row that do not depend on the entries below it."""
    return row.mode, row.uid, row.gid, row.mtime_ns, row.more.xattrs, row.more.state


def _shown(path: bytes) -> str:
    return os.fsdecode(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
