"""MountedSnapshot: a stored snapshot that stays readable while it is open, whatever is dropped or collected meanwhile.

A lease makes garbage collections keep the contents.  A collection may move them to another pack, so a content that is
gone is looked for again in the packs that exist then.

Threading: one thread at a time.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from protocol.store.format.blobs import LARGE_BYTES
from protocol.store.format.digests import CHUNK_BYTES, chunk_ranges
from protocol.store.format.inode_rows import inodes_lost
from protocol.store.format.packs import DamagedError
from protocol.store.leases import Lease
from protocol.store.trees import MerkleTree

if TYPE_CHECKING:
    from protocol.store.format.blobs import Blobs
    from protocol.store.format.layout import Layout
    from protocol.store.format.rows import Row
    from protocol.tree import TreeEntry

P = ParamSpec("P")
T = TypeVar("T")
_logger = logging.getLogger(__name__)
_ATTEMPTS: Final = 3
_CACHES_BYTES: Final = 24 << 20  # listings and chunks that were read last
_INDEX_FACTOR: Final = 4  # memory of the lookup tables, to the size of the packs' indexes


def fingerprint_of(root: Row) -> str:
    """Return the identity of a snapshot's content."""
    return f"snapshot {root.content.hex()}"


def root_of(fingerprint: str) -> bytes | None:
    """Return the digest of the root listing from a `fingerprint_of`; None for that of something else."""
    kind, _, digest = fingerprint.partition(" ")
    return bytes.fromhex(digest) if kind == "snapshot" else None


class MountedSnapshot:
    """The snapshot whose root is `root`.  Implements `protocol.backends.overlay.tree_lower.LowerTree`.

    `inodes` is the inode row of the root; None if the snapshot has none.  Make it while the store's lock is held
    shared, and close it.
    """

    def __init__(self, layout: Layout, blobs: Blobs, root: Row, inodes: Row | None) -> None:
        self._layout = layout
        self._blobs = blobs
        self._tree = MerkleTree(root, blobs.listing, blobs)
        self._inodes = None if inodes is None else MerkleTree(inodes, blobs.listing, blobs)
        self._lease = Lease(layout, root, inodes)
        self.inode_failure: str | None = None

    @property
    def lease_descriptor(self) -> int:
        """The descriptor that holds the lease: with a duplicate of it, another process keeps the contents."""
        return self._lease.descriptor

    @property
    def fingerprint(self) -> str:
        """The identity of the snapshot's content."""
        return fingerprint_of(self._tree.root)

    @property
    def memory_bytes(self) -> int:
        """The memory that the store's index and the caches take."""
        return _CACHES_BYTES + _INDEX_FACTOR * sum(len(pack.index) for pack in self._blobs.packs.all())

    def entry(self, path: bytes) -> TreeEntry:
        return self._reading(self._tree.entry, path)

    def rows(self, path: bytes) -> list[tuple[bytes, int, int]]:
        return self._reading(self._tree.name_rows, path)

    def inode_row(self, path: bytes) -> Row | None:
        return self._from_inodes(MerkleTree.row, path)

    def inode_rows(self, path: bytes) -> Mapping[bytes, Row]:
        return self._from_inodes(MerkleTree.names, path) or {}

    def _from_inodes(self, read: Callable[[MerkleTree, bytes], T], path: bytes) -> T | None:
        """Read from the inode listings; None without them.  Logs the first damage: the mount does without them."""
        if self._inodes is None:
            return None
        try:
            return self._reading(read, self._inodes, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedError as error:
            if self.inode_failure is None:
                self.inode_failure = inodes_lost(path, error.damage)
                text = "the snapshot below the overlay: %s; `vfsd store check` says how to mend it"
                _logger.warning(text, self.inode_failure)
            return None

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._reading(self._tree.read, path, offset, size)

    def ranges(self, path: bytes, start: int, end: int) -> Iterable[tuple[int, int]]:
        row = self._reading(self._tree.row, path)
        if row.size <= CHUNK_BYTES or not self._blobs.large.is_ready(row.content, row.size):
            return [(start, end)]
        return chunk_ranges(self._reading(self._blobs.large.chunk_digests, row.content), start, end)

    def sectors(self, path: bytes) -> int | None:
        row = self._reading(self._tree.row, path)
        return self._blobs.objects.sectors(row.content) if row.size > LARGE_BYTES else None

    def preparation(self, path: bytes) -> Callable[[], object] | None:
        row = self._reading(self._tree.row, path)
        if self._blobs.large.is_ready(row.content, row.size):
            return None
        return functools.partial(self._blobs.large.prepare, row.content)

    def stop(self) -> None:
        """Nothing: `close` does not affect a preparation."""

    def _reading(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(_ATTEMPTS):
            try:
                return read(*args, **kwargs)
            except DamagedError:
                # A collection may have moved the content; or, during this very call, may be moving it.
                if attempt == _ATTEMPTS - 1 or not os.path.isdir(self._layout.packs):
                    raise
                self._blobs.packs.refresh()
        raise AssertionError

    def close_lease(self) -> None:
        """End the lease only; the store's files are used by another mounted snapshot."""
        self._lease.close()

    def close(self) -> None:
        """End the lease and close the store's files."""
        self._lease.close()
        self._blobs.close()
