"""OverlayInode: one version of an inode that came from the lower layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.backends.memory.inode import Inode

if TYPE_CHECKING:
    from protocol.backends.overlay.lower import FileRecord, LowerFile


class OverlayInode(Inode):
    """`lower` is the file of the lower layer.

    A file's `nlink` is that of the lower file: larger than `links` while names are not loaded yet or lie outside DIR.
    """

    __slots__ = ("lower",)

    lower: LowerFile

    @property
    def followed(self) -> FileRecord:
        return self.lower.record

    def clone(self, epoch: int) -> OverlayInode:
        twin = super().clone(epoch)
        assert isinstance(twin, OverlayInode)
        twin.lower = self.lower
        return twin
