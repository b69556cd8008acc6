"""OverlayInode: an inode that came from below, in one of its versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.backends.memory.inode import Inode
from protocol.backends.overlay.content import LowerContent

if TYPE_CHECKING:
    from protocol.backends.overlay.lower import LowerFile

__all__ = ["OverlayInode"]


class OverlayInode(Inode):
    """`lower` is what it was below.

    `nlink` of a file is what it is below: more than `links` has while names were not met yet, or are not in DIR.
    """

    __slots__ = ("lower",)

    lower: LowerFile

    def clone(self, epoch: int) -> OverlayInode:
        """See `Inode.clone`."""
        twin = super().clone(epoch)
        assert isinstance(twin, OverlayInode)
        twin.lower = self.lower
        return twin

    @property
    def blocks(self) -> int:
        """See `Inode.blocks`."""
        content = self.content
        return content.sectors if isinstance(content, LowerContent) else super().blocks
