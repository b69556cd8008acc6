"""OverlayTree: one state of an overlay as a read-only tree that follows files changed below.

A file with no changes in memory is read as it now is below, from its beginning.  If it changes between two pieces, or
parts of it are held in memory, reading fails with ESTALE, naming the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from protocol.backends.memory.history.view import SnapshotTree
from protocol.backends.overlay.lower import ChangedBelowError
from protocol.tree import CHUNK_BYTES

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import MemoryState

__all__ = ["OverlayTree"]


class _LooksAgain(Protocol):
    def look_again(self, inode: int, path: bytes) -> tuple[bool, bool]:
        """See `OverlayVolume.look_again`."""
        ...


class OverlayTree(SnapshotTree):
    """See `SnapshotTree`."""

    def __init__(self, volume: _LooksAgain, state: MemoryState, epoch: Epoch, pinned: Epoch) -> None:
        super().__init__(state, epoch, pinned)
        self._volume = volume

    def _followed(self, node: Inode, error: ChangedBelowError) -> None:
        follows, _ = self._volume.look_again(node.inode, error.path)
        if not follows:
            raise error

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        """See `SnapshotTree.read`."""
        return self.read_node(self._file(path), offset, size)

    def read_node(self, node: Inode, offset: int, size: int) -> bytes:
        """See `SnapshotTree.read_node`."""
        try:
            return super().read_node(node, offset, size)
        except ChangedBelowError as error:
            self._followed(node, error)
            return super().read_node(node, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """See `SnapshotTree.chunks`."""
        node = self._file(path)
        first = self.read_node(node, 0, size)
        if first:
            yield first
        for offset in range(size, node.size, size):
            yield super().read_node(node, offset, size)
