"""Checks of an overlay's invariants, for what is loaded: a check reads nothing from the lower directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.backends.memory.invariants import Invariants
from protocol.backends.overlay.inode import OverlayInode, UnfilledChildren

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.overlay.state import OverlayState


class OverlayInvariants(Invariants):
    """See `Invariants`."""

    def __init__(self, state: OverlayState) -> None:
        super().__init__(state)
        self._overlay = state

    def check(self) -> None:
        super().check()
        below = sum(isinstance(inode, OverlayInode) for inode in self._inodes.values()) - 1
        assert self._overlay.table.below == below, "inodes from below"

    def check_inode(self, inode: Inode) -> None:
        """Check also that all versions of an inode without changes of their own have one lower identity.

        They follow the lower file together.  A changed version keeps the identity that the file had when the workspace
        first changed it, which `apply` compares.
        """
        super().check_inode(inode)
        if isinstance(inode, OverlayInode):
            versions = [each for each in self._overlay.versions(inode.inode) if isinstance(each, OverlayInode)]
            unchanged = {each.lower.identity for each in versions if each.follows(each.lower.identity)}
            assert len(unchanged) <= 1, f"inode {inode.inode}: identities below"

    def entries(self, directory: Inode) -> dict[bytes, int] | None:
        return None if isinstance(directory.children, UnfilledChildren) else directory.children

    def named(self, directory: Inode) -> dict[bytes, int]:
        if isinstance(directory.children, UnfilledChildren):
            return self._overlay.recorded_names(directory.inode)
        return super().named(directory)

    def may_miss_links(self, file: Inode) -> bool:
        return isinstance(file, OverlayInode)

    def unloaded(self) -> set[int]:
        known = self._overlay.known
        return set() if known is None else set(known.expected_numbers)

    def sizes(self, directory: Inode, count: int) -> tuple[int, ...]:
        computed = super().sizes(directory, count)
        return (*computed, directory.lower.size) if isinstance(directory, OverlayInode) else computed
