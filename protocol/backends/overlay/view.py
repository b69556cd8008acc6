"""OverlayTree: one state of an overlay as a read-only tree that follows changes of the lower files.

A file without changes in the overlay is read in its present state, from its beginning.  If it changes between two
pieces, or the overlay holds parts of it, reading fails with ESTALE and names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from protocol.backends.memory.history.view import SnapshotTree
from protocol.backends.overlay.lower import ChangedBelowError
from protocol.tree import CHUNK_BYTES

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import MemoryState


class OverlayTree(SnapshotTree):
    """See `SnapshotTree`.  `recheck` is `OverlayVolume.recheck`."""

    def __init__(
        self, recheck: Callable[[int, bytes], tuple[bool, bool]], state: MemoryState, epoch: Epoch, pinned: Epoch
    ) -> None:
        super().__init__(state, epoch, pinned)
        self._recheck = recheck

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self.read_node(self._file(path), offset, size)

    def read_node(self, node: Inode, offset: int, size: int) -> bytes:
        try:
            return super().read_node(node, offset, size)
        except ChangedBelowError as error:
            follows, _ = self._recheck(node.inode, error.path)
            if not follows:
                raise
            return super().read_node(node, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        node = self._file(path)
        first = self.read_node(node, 0, size)
        if first:
            yield first
        for offset in range(size, node.size, size):
            yield super().read_node(node, offset, size)
