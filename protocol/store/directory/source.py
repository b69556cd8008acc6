"""Sources of snapshots: a host directory, or any tree."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from protocol.diff.tree_diff import is_below
from protocol.errors import os_error
from protocol.linux.beneath import DirectoryReference, RootDirectory
from protocol.store.directory.scan import FileProgress, Scanned, Unreadable, scan
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import LARGE_BYTES, Sink
from protocol.store.format.objects import data_ranges
from protocol.store.format.rows import More, Row, TreeCounts, counts_of, encode_listing, inode_row, sum_counts
from protocol.tree import Chunk, Hole, no_progress

if TYPE_CHECKING:
    from protocol.tree import Tree, TreeEntry

_O_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_NUMBERS_END: Final = 1 << 63  # listings hold numbers of 64 bits
_Seen: TypeAlias = dict[bytes, tuple[int, int, int]]  # mode, inode number and ctime, by path


class Source(Protocol):
    """A live state that can be scanned."""

    @property
    def identity(self) -> tuple[int, int] | None:
        """(st_dev, st_ino) of the host directory; None if the source is not one."""
        ...

    def scan(
        self, sink: Sink, cache: StatCache, *, unreadable: Unreadable = "fail", progress: FileProgress = no_progress
    ) -> Scanned:
        """Give the state to `sink`, as `protocol.store.directory.scan.scan` does."""
        ...

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """Up to `size` bytes of the present content of the regular file at `path`."""
        ...

    def chunks(self, path: bytes, size: int) -> Iterator[Chunk]:
        """The present content of the regular file at `path`."""
        ...


class DirectorySource:
    """A host directory; a descriptor (also an O_PATH one) stays the caller's."""

    def __init__(self, place: DirectoryReference) -> None:
        self._place = place

    def opened(self) -> RootDirectory:
        """The directory, opened anew."""
        return RootDirectory(self._place)

    @property
    def identity(self) -> tuple[int, int] | None:
        if callable(self._place):
            with self.opened() as root:
                seen = os.fstat(root.fd)
        else:
            seen = os.fstat(self._place) if isinstance(self._place, int) else os.stat(self._place)
        if not stat.S_ISDIR(seen.st_mode):
            raise os_error(errno.ENOTDIR, os.fsdecode(self._place) if isinstance(self._place, (str, bytes)) else None)
        return seen.st_dev, seen.st_ino

    def scan(
        self, sink: Sink, cache: StatCache, *, unreadable: Unreadable = "fail", progress: FileProgress = no_progress
    ) -> Scanned:
        with self.opened() as root:
            return scan(root.fd, sink, cache, unreadable=unreadable, progress=progress)

    @contextmanager
    def _file(self, path: bytes) -> Iterator[int]:
        with self.opened() as root:
            descriptor = root.open(path, _O_READ)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise os_error(errno.EINVAL, os.fsdecode(path))
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        with self._file(path) as descriptor:
            return os.pread(descriptor, size, offset)

    def chunks(self, path: bytes, size: int) -> Iterator[Chunk]:
        with self._file(path) as descriptor:
            done, end = 0, os.fstat(descriptor).st_size
            for start, after in data_ranges(descriptor, end):
                if start > done:
                    yield Hole(start - done)
                done = start
                while done < after and (data := os.pread(descriptor, min(size, after - done), done)):
                    yield data
                    done += len(data)
            if done < (end := min(end, os.fstat(descriptor).st_size)):
                yield Hole(end - done)


class TreeSource:
    """Any tree: of a container, an archive or another volume.  Every scan reads all of it.

    `may_change`: programs may change the tree during the scan.  Then a second walk looks which entries have the inode
    number and ctime that they had before their content was read; the snapshot has those of no other.
    """

    def __init__(self, tree: Tree, *, may_change: bool = False) -> None:
        self._tree = tree
        self._may_change = may_change

    @property
    def identity(self) -> tuple[int, int] | None:
        return None

    def scan(
        self, sink: Sink, cache: StatCache, *, unreadable: Unreadable = "fail", progress: FileProgress = no_progress
    ) -> Scanned:
        del cache, unreadable  # a tree's entries have no stat data that shows what is unchanged
        seen: _Seen | None = {} if self._may_change else None
        scanned = _TreeScan(self._tree, sink, progress, seen).run()
        if seen is None or not sink.stores:
            return scanned
        return replace(scanned, inodes=_unchanged(self._tree, sink, seen))

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int) -> Iterator[Chunk]:
        return self._tree.chunks(path, size)


class _InodeListings:
    """Gives the inode listings of a tree to `sink`, from its entries in the order of `Tree.walk`.

    Entries without a ctime have no inode row.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._open: list[tuple[TreeEntry, int, list[Row]]] = []  # with number and inode rows
        self._root: Row | None = None

    def add(self, entry: TreeEntry, number: int) -> None:
        """Add an entry with an inode number; 0: number and ctime are unknown."""
        while self._open and not is_below(entry.path, self._open[-1][0].path):
            self._close()
        if entry.is_dir:
            self._open.append((entry, number, []))
        elif entry.ctime_ns:
            self._open[-1][2].append(inode_row(entry.name, entry.mode, number, entry.ctime_ns))

    def finish(self) -> Row | None:
        """The inode row of the root; None if it has no ctime."""
        while self._open:
            self._close()
        return self._root

    def _close(self) -> None:
        entry, number, rows = self._open.pop()
        if not entry.ctime_ns:
            return
        rows.sort(key=lambda each: each.name)
        listing = self._sink.listing(encode_listing(rows))
        row = inode_row(entry.name, entry.mode, number, entry.ctime_ns, listing)
        if self._open:
            self._open[-1][2].append(row)
        else:
            self._root = row


def _unchanged(tree: Tree, sink: Sink, seen: _Seen) -> Row | None:
    """Give the inode listings of a tree to `sink`, without numbers of what is not as in `seen`."""
    listings = _InodeListings(sink)
    for entry in tree.walk():
        before = seen.get(entry.path)
        if before is not None:  # else it was made since
            listings.add(entry, entry.inode if before == _identity(entry) else 0)
    return listings.finish()


def _identity(entry: TreeEntry) -> tuple[int, int, int]:
    return entry.mode, entry.inode, entry.ctime_ns


class _TreeScan:
    """The scan of a tree in the order of `Tree.walk`, in which a directory ends at the first path outside it.

    With `seen` it adds the identity of each entry to that, and makes no inode listings.
    """

    def __init__(self, tree: Tree, sink: Sink, progress: FileProgress, seen: _Seen | None) -> None:
        self._tree = tree
        self._sink = sink
        self._progress = progress
        self._seen = seen
        self._inodes = _InodeListings(sink)
        self._open: list[tuple[TreeEntry, list[Row]]] = []
        self._links: dict[int, tuple[bytes, int]] = {}
        self._large_links: dict[int, int] = {}
        self._files = 0
        self._read_bytes = 0

    def run(self) -> Scanned:
        root: Row | None = None
        for entry in self._tree.walk():
            while self._open and not is_below(entry.path, self._open[-1][0].path):
                self._close()
            if self._seen is None:
                self._inodes.add(entry, entry.inode)
            else:
                self._seen[entry.path] = _identity(entry)
            if entry.is_dir:
                self._open.append((entry, []))
            else:
                self._open[-1][1].append(self._leaf(entry))
        while self._open:
            root = self._close()
        assert root is not None
        below = root.more.counts or TreeCounts()
        self._progress(self._files, self._read_bytes)
        counts = below.with_links([size for _, size in self._links.values()])
        return Scanned(root, counts, inodes=self._inodes.finish())

    def _close(self) -> Row:
        entry, rows = self._open.pop()
        rows.sort(key=lambda row: row.name)
        counts = sum_counts(map(counts_of, rows))
        digest = self._sink.listing(encode_listing(rows))
        more = More(nlink=entry.nlink, xattrs=tuple(sorted(entry.xattrs.items())), counts=counts)
        row = Row(entry.name, entry.mode, entry.uid, entry.gid, entry.mtime_ns, 0, digest, more)
        if self._open:
            self._open[-1][1].append(row)
        return row

    def _leaf(self, entry: TreeEntry) -> Row:
        self._files += 1
        self._progress(self._files, self._read_bytes)
        # A snapshot needs the inode number only to tell which names are hard links of one file.
        link = entry.inode if entry.nlink > 1 else 0
        content, size = entry.target, entry.size
        if entry.is_file:
            content, size = self._content(entry, link)
        if link:
            self._links.setdefault(link, (content, size if entry.is_file else 0))
        xattrs = tuple(sorted(entry.xattrs.items()))
        rare = None
        if link or entry.rdev or xattrs or entry.nlink != 1:
            rare = More(link=self._stored_number(link), nlink=entry.nlink, rdev=entry.rdev, xattrs=xattrs)
        return Row(entry.name, entry.mode, entry.uid, entry.gid, entry.mtime_ns, size, content, rare)

    def _stored_number(self, link: int) -> int:
        """Return `link`, or a number of 64 bits in its place: a merged tree has larger ones."""
        if link < _NUMBERS_END:
            return link
        return self._large_links.setdefault(link, _NUMBERS_END + len(self._large_links))

    def _content(self, entry: TreeEntry, link: int) -> tuple[bytes, int]:
        if link in self._links:
            return self._links[link]
        if not entry.size:
            return b"", 0
        return self._sink.stream(self._tree.chunks(entry.path, LARGE_BYTES), self._done)

    def _done(self, count: int) -> None:
        self._read_bytes += count
        self._progress(self._files, self._read_bytes)
