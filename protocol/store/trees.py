"""Trees of a store: a snapshot, or the scanned live state, as a `MerkleTree`; snapshots that are in use.

A comparison of two such trees skips subtrees whose listings have the same digest.

Threading: as for `protocol.tree`, one thread at a time.

A `MountedSnapshot` stays readable while it is open, whatever is dropped or collected meanwhile: a lease makes garbage
collections keep the contents.  A collection may move them to another pack, so a content that is gone is looked for
again in the packs that exist then.

A lease is a file in leases/, with the digest of the snapshot's root listing, the row of the root, and its inode row if
there is one.  Its owner holds a shared flock(2) on it.  The lock ends with the last process that has the descriptor: a
crashed daemon leaves no lock, a forked one shares it, and a keeper holds it until the next daemon has a lease of its
own.  A garbage collection keeps what the locked leases need, and removes the others.  A lease is made and read under
the store's lock, shared and exclusive, so that a collection sees it complete or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from msgspec.structs import replace

from protocol.errors import os_error, shown
from protocol.linux.regular_file import open_regular, read_regular
from protocol.store.format.blobs import LARGE_BYTES, Blobs
from protocol.store.format.digests import CHUNK_BYTES as DIGEST_CHUNK_BYTES
from protocol.store.format.digests import chunk_ranges
from protocol.store.format.packs import DamagedError
from protocol.store.format.rows import UNREADABLE, Row, decode_listing, encode_listing, entry_of, inodes_lost
from protocol.tree import CHUNK_BYTES, Chunk, LowerTree, Tree, TreeEntry

if TYPE_CHECKING:
    from protocol.store.directory.source import Source
    from protocol.store.format.layout import Layout
    from protocol.store.format.rows import Row
    from protocol.tree import TreeEntry

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

    def entries(self, path: bytes) -> list[TreeEntry]:
        prefix = path + b"/" if path else b""
        return [entry_of(row, prefix + name) for name, row in self.names(path).items()]

    def names(self, path: bytes) -> Mapping[bytes, Row]:
        """The rows in the directory at `path`, by name."""
        row = self.row(path)
        if not row.is_dir:
            raise os_error(errno.ENOTDIR, shown(path))
        return self._names(path, row)

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
        self.inode_failure: str | None = None  # the first damage of the inode listings that was found

    def entry(self, path: bytes) -> TreeEntry:
        return self._numbered(super().entry(path), self._inode_row(path))

    def entries(self, path: bytes) -> list[TreeEntry]:
        found = super().entries(path)
        rows = self._from_inodes(MerkleTree.names, path) or {}
        return [self._numbered(entry, rows.get(entry.name)) for entry in found]

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        return (self._numbered(entry, self._inode_row(entry.path)) for entry in super().walk(path))

    def _inode_row(self, path: bytes) -> Row | None:
        return self._from_inodes(MerkleTree.row, path)

    def _from_inodes(self, read: Callable[[MerkleTree, bytes], T], path: bytes) -> T | None:
        """Read from the inode listings; None without them, or if they are damaged."""
        try:
            return None if self._inodes is None else read(self._inodes, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedError as error:
            self.inode_failure = self.inode_failure or inodes_lost(path, error.damage)
            return None

    @staticmethod
    def _numbered(entry: TreeEntry, row: Row | None) -> TreeEntry:
        # An unknown number (0) must not come with a ctime.  Names of one file keep the number that they share.
        if row is None or (not entry.is_dir and (not row.size or entry.inode not in {0, row.size})):
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


T = TypeVar("T")
_logger = logging.getLogger(__name__)
_CACHES_BYTES: Final = 24 << 20  # listings and chunks that were read last
_INDEX_FACTOR: Final = 4  # memory of the lookup tables, to the size of the packs' indexes


# -- snapshots in use ------------------------------------------------------------------------------
def fingerprint_of(root: Row) -> str:
    """Return the identity of a snapshot's content."""
    return f"snapshot {root.content.hex()}"


def root_of(fingerprint: str) -> bytes | None:
    """Return the digest of the root listing from a `fingerprint_of`; None for that of something else."""
    kind, _, digest = fingerprint.partition(" ")
    return bytes.fromhex(digest) if kind == "snapshot" else None


class MountedSnapshot(NumberedTree, LowerTree):
    """The snapshot whose root is `root`.

    `inodes` is the inode row of the root; None if the snapshot has none.  Make it while the store's lock is held
    shared, and close it.
    """

    def __init__(self, layout: Layout, blobs: Blobs, root: Row, inodes: Row | None) -> None:
        super().__init__(root, inodes, blobs)
        self._blobs = blobs
        self._lease = Lease(layout, root, inodes)

    @property
    def lease_descriptor(self) -> int:
        """The descriptor that holds the lease: a process with a duplicate of it keeps the contents."""
        return self._lease.descriptor

    @property
    def fingerprint(self) -> str:
        """The identity of the snapshot's content."""
        return fingerprint_of(self.root)

    @property
    def memory_bytes(self) -> int:
        """The memory that the store's index and the caches take."""
        return _CACHES_BYTES + _INDEX_FACTOR * sum(len(pack.index) for pack in self._blobs.packs.all())

    def _from_inodes(self, read: Callable[[MerkleTree, bytes], T], path: bytes) -> T | None:
        """Logs the first damage: the mount does without them."""
        before = self.inode_failure
        found = super()._from_inodes(read, path)
        if self.inode_failure != before:
            text = "the snapshot below the overlay: %s; `vfsd store check` says how to mend it"
            _logger.warning(text, self.inode_failure)
        return found

    def ranges(self, path: bytes, start: int, end: int) -> Iterable[tuple[int, int]]:
        row = self.row(path)
        if row.size <= DIGEST_CHUNK_BYTES or not self._blobs.large.is_ready(row.content, row.size):
            return [(start, end)]
        return chunk_ranges(self._blobs.large.chunk_digests(row.content), start, end)

    def sectors(self, path: bytes) -> int | None:
        row = self.row(path)
        return self._blobs.objects.sectors(row.content) if row.size > LARGE_BYTES else None

    def preparation(self, path: bytes) -> Callable[[], object] | None:
        row = self.row(path)
        if self._blobs.large.is_ready(row.content, row.size):
            return None
        return functools.partial(self._blobs.large.prepare, row.content)

    def close_lease(self) -> None:
        """End the lease only; the store's files are used by another mounted snapshot."""
        self._lease.close()

    def close(self) -> None:
        """End the lease and close the store's files."""
        self._lease.close()
        self._blobs.close()


# -- leases ----------------------------------------------------------------------------------------
_LEASES: Final = "leases"
_LEASE_MAX_BYTES: Final = 1 << 20
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL


class Lease:
    """A lease on the snapshot with this root: no collection removes its contents.

    Whoever makes one holds the store's lock in shared mode.  OSError if it cannot be made.

    Each process that has a duplicate of `descriptor` holds the lease.
    """

    def __init__(self, layout: Layout, root: Row, inodes: Row | None) -> None:
        directory = os.path.join(layout.directory, _LEASES)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._path = os.path.join(directory, secrets.token_hex(12))
        self._fd = open_regular(self._path, _NEW)
        rows = [root] if inodes is None else [root, inodes]
        content = f"{root.content.hex()}\n{encode_listing(rows).hex()}\n".encode()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.write(self._fd, content)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """The descriptor that holds the lease."""
        return self._fd

    def close(self) -> None:
        """End the lease, unless a forked process still has it."""
        if self._fd < 0:
            return
        os.close(self._fd)  # not LOCK_UN, which would end it for a forked process, too
        self._fd = -1
        with contextlib.suppress(OSError):
            _remove_if_dead(self._path)


def leased(layout: Layout) -> Iterator[bytes]:
    """Yield the digests of the root listings with a live lease; remove dead leases.

    Call it with the store's lock held exclusively.  DamagedError if a live lease cannot be read.
    """
    for path in _live(layout):
        try:
            digest, rows = _read_lease(path)
            yield digest
            yield from (row.content for row in rows[1:])
        except FileNotFoundError:
            continue  # it ended meanwhile
        except ValueError:
            raise DamagedError("the lease of a mounted snapshot is damaged: unmount the workspaces", path) from None


def leased_roots(layout: Layout, digest: bytes) -> tuple[Row, Row | None] | None:
    """Return the root of the snapshot with the listing `digest`, and its inode row, if a live lease has them.

    Its name may be dropped.

    Call it with the store's lock held shared.
    """
    for path in _live(layout):
        with contextlib.suppress(FileNotFoundError, ValueError):  # it ended meanwhile, or is damaged
            found, (root, *inodes) = _read_lease(path)
            if found == digest:
                return root, inodes[0] if inodes else None
    return None


def _live(layout: Layout) -> Iterator[str]:
    """Yield the paths of the live leases; remove dead ones."""
    directory = os.path.join(layout.directory, _LEASES)
    with contextlib.suppress(FileNotFoundError):
        paths = [os.path.join(directory, name) for name in os.listdir(directory)]
        yield from (path for path in paths if not _remove_if_dead(path))


def _read_lease(path: str) -> tuple[bytes, list[Row]]:
    """The digest of the root listing, and the root's rows, which older versions did not write.  ValueError."""
    first, *rest = read_regular(path, _LEASE_MAX_BYTES).split(b"\n")
    rows = decode_listing(bytes.fromhex(rest[0].decode("ascii"))) if len(rest) > 1 else []
    return bytes.fromhex(first.decode("ascii")), rows


def _remove_if_dead(path: str) -> bool:
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
