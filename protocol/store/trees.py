"""MerkleTree: a snapshot, or the scanned live state, as a tree.

A comparison of two such trees skips subtrees whose listings have the same digest.

Threading: as for `protocol.tree`, one thread at a time.
"""

from __future__ import annotations

import errno
import stat
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec.structs import replace

from protocol.errors import os_error, shown
from protocol.store.format.blobs import Blobs
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import UNREADABLE, Row, entry_of
from protocol.tree import CHUNK_BYTES, Chunk, Tree, TreeEntry

if TYPE_CHECKING:
    from protocol.store.directory.source import Source

_LISTINGS_KEPT: Final = 64
_ROWS_KEPT: Final = 32_768  # in several listings: some MiB
ReadRows: TypeAlias = Callable[[bytes], list[Row]]


class MerkleTree:
    """A tree of listings.  `read_listing` reads a listing by its digest.

    File contents are read by digest from a store's `Blobs`, or by path from the `Source` of a live state.
    """

    def __init__(self, root: Row, read_listing: ReadRows, contents: Blobs | Source) -> None:
        self.root = root
        self._read_listing = read_listing
        self._contents = contents
        self._listings: OrderedDict[bytes, dict[bytes, Row]] = OrderedDict()

    def listed(self, path: bytes, row: Row) -> list[Row]:
        """The rows in the directory at `path`, sorted by name.  DamagedError, which names the directory."""
        try:
            return self._read_listing(row.content)
        except DamagedError as error:
            raise error.at(shown(path)) from None

    def _names(self, path: bytes, row: Row) -> dict[bytes, Row]:
        cached = self._listings.get(row.content)
        if cached is not None:
            self._listings.move_to_end(row.content)
            return cached
        cached = self._listings[row.content] = {below.name: below for below in self.listed(path, row)}
        while len(self._listings) > 1 and (
            len(self._listings) > _LISTINGS_KEPT or sum(map(len, self._listings.values())) > _ROWS_KEPT
        ):
            self._listings.popitem(last=False)
        return cached

    def row(self, path: bytes) -> Row:
        """The row at `path`.  FileNotFoundError, NotADirectoryError."""
        row = self.root
        for name in path.split(b"/") if path else ():
            if not stat.S_ISDIR(row.mode):
                raise os_error(errno.ENOTDIR, shown(path))
            below = self._names(path, row).get(name)
            if below is None:
                raise os_error(errno.ENOENT, shown(path))
            row = below
        return row

    # -- protocol.tree.Tree ------------------------------------------------------------------
    def entry(self, path: bytes) -> TreeEntry:
        return entry_of(self.row(path), path)

    def children(self, path: bytes) -> list[bytes]:
        return list(self.names(path))

    def names(self, path: bytes) -> Mapping[bytes, Row]:
        """The rows in the directory at `path`, by name."""
        row = self.row(path)
        if not row.is_dir:
            raise os_error(errno.ENOTDIR, shown(path))
        return self._names(path, row)

    def name_rows(self, path: bytes) -> list[tuple[bytes, int, int]]:
        """The name, mode and link number of each entry of a directory: `protocol.backends.overlay.tree_lower`."""
        return [(name, below.mode, below.more.link) for name, below in self.names(path).items()]

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        pending = [(path, self.row(path))]
        while pending:
            at, row = pending.pop()
            yield entry_of(row, at)
            if stat.S_ISDIR(row.mode):
                prefix = at + b"/" if at else b""
                pending += [(prefix + below.name, below) for below in reversed(self.listed(at, row))]

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        try:
            return self._contents.read(self._key(path), offset, size)
        except DamagedError as error:
            raise error.at(shown(path)) from None

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        return _naming(path, self._contents.chunks(self._key(path), size))

    def touched(self, other: Tree) -> Collection[bytes] | None:
        if not isinstance(other, MerkleTree):
            return None
        found = []
        pending: list[tuple[bytes, Row | None, Row | None]] = [(b"", other.root, self.root)]
        while pending:
            path, old, new = pending.pop()
            if old is None or new is None or not (old.is_dir and new.is_dir):
                found.append(path)
                continue
            if _own(old) != _own(new):
                found.append(path)
            pending += differing_rows(other, self, path, old, new)
        return found

    # -- protocol.diff.tree_diff.ComparesContent -------------------------------------------------------
    def same_content(self, path: bytes, other: Tree, other_path: bytes | None = None) -> bool | None:
        if not isinstance(other, MerkleTree):
            return None
        mine, its = self.row(path), other.row(path if other_path is None else other_path)
        if mine.more.state or its.more.state:
            return None
        return mine.content == its.content

    def _key(self, path: bytes) -> bytes:
        """The key of a file's content in `contents`."""
        row = self.row(path)
        if not row.is_file:
            raise os_error(errno.EISDIR if row.is_dir else errno.EINVAL, shown(path))
        if row.more.state & UNREADABLE:
            raise OSError(errno.EACCES, "could not be read when the snapshot was taken", shown(path))
        return row.content if isinstance(self._contents, Blobs) else path


class NumberedTree(MerkleTree):
    """A snapshot whose entries have the inode numbers and ctimes of the state that it was taken of, where it has them.

    `inodes` is the inode row of the root; None if the snapshot has none.
    """

    def __init__(self, root: Row, inodes: Row | None, blobs: Blobs) -> None:
        super().__init__(root, blobs.listing, blobs)
        self._inodes = None if inodes is None else MerkleTree(inodes, blobs.listing, blobs)

    def entry(self, path: bytes) -> TreeEntry:
        return self._numbered(super().entry(path))

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        return map(self._numbered, super().walk(path))

    def _numbered(self, entry: TreeEntry) -> TreeEntry:
        if self._inodes is None:
            return entry
        try:
            row = self._inodes.row(entry.path)
        except (DamagedError, FileNotFoundError, NotADirectoryError):
            return entry
        # An unknown number (0) must not come with a ctime.  Names of one file keep the number that they share.
        if not entry.is_dir and (not row.size or entry.inode not in {0, row.size}):
            return entry
        return replace(entry, inode=row.size, ctime_ns=row.mtime_ns)


def _naming(path: bytes, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yield `chunks`; a DamagedError names `path`."""
    try:
        yield from chunks
    except DamagedError as error:
        raise error.at(shown(path)) from None


def _own(row: Row) -> tuple[object, ...]:
    """The fields of a directory's row that do not depend on the entries below it."""
    return row.mode, row.uid, row.gid, row.mtime_ns, row.more.xattrs, row.more.state


def differing_rows(
    old: MerkleTree, new: MerkleTree, path: bytes, left: Row | None, right: Row | None
) -> list[tuple[bytes, Row | None, Row | None]]:
    """The paths in the directory at `path` whose rows in the two trees differ, sorted, with both rows.

    `left` and `right` are the rows of `path`.  None, or a row that is not a directory, has nothing below it.
    """
    if left is not None and right is not None and left.is_dir and right.is_dir and left.content == right.content:
        return []
    before = {row.name: row for row in old.listed(path, left)} if left is not None and left.is_dir else {}
    after = {row.name: row for row in new.listed(path, right)} if right is not None and right.is_dir else {}
    prefix = path + b"/" if path else b""
    names = sorted({**before, **after})
    return [(prefix + name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]
