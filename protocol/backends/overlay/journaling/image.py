"""OverlayImage: the image of an overlay.

It begins with the inodes of the lower layer that changed, as they were in the oldest state, and records which state is
the base.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from protocol.backends.memory.journaling.changes import inode_details
from protocol.backends.memory.journaling.image import Image
from protocol.backends.overlay.content import LowerContent
from protocol.backends.overlay.inode import OverlayInode
from protocol.backends.overlay.journaling.introductions import Introductions, identities_effect, kept, kept_files
from protocol.journal import effects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.backends.memory.history.undo import Epoch, PreInodes, PreNames
    from protocol.backends.overlay.known_inodes import KnownInodes
    from protocol.backends.overlay.lower import Identity
    from protocol.backends.overlay.state import OverlayState


class OverlayImage(Image):
    """The image of one state, whose base is the beginning of `base`.

    `known`: in an image for another process, its records follow.
    """

    def __init__(
        self,
        state: OverlayState,
        notes: Mapping[str, bytes],
        base: Epoch,
        identities: Mapping[bytes, Identity | None],
    ) -> None:
        super().__init__(state, notes)
        self._overlay = state
        self._base = base
        self._identities = identities
        self.known: KnownInodes | None = None

    def cookies(self) -> Iterator[bytes]:
        """Yield the cookies of directories whose names the image has."""
        for number, live in self._overlay.table.items():
            is_listed = not isinstance(live, OverlayInode) or number in self._overlay.listed
            if live.cookies is not None and is_listed:
                yield effects.cookies(number, live.cookies)

    def effects(self) -> Iterator[bytes]:
        yield effects.of_overlay(effects.DEVICE, self._overlay.device, None)
        for file in kept_files(self._overlay):
            yield from kept(file)
        yield from super().effects()
        yield identities_effect(self._identities)
        for record in () if self.known is None else self.known.records():
            yield effects.of_overlay(effects.KNOWN, 0, record)

    def checked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield `pieces` unchecked: an entry may lead to an inode that is only below."""
        return pieces

    def begin_step(self, epoch: Epoch) -> Iterator[bytes]:
        if epoch is self._base:
            yield effects.of_overlay(effects.BASE, epoch.serial, None)

    def beginning(self, inodes: PreInodes, names: PreNames) -> Iterator[bytes]:
        state = self._overlay
        changed = self._changed()
        recorded, listed = [*state.recorded], state.listed.copy()
        # The image replaces what the journal has, so it introduces everything again.
        state.recorded.clear()
        state.listed.clear()
        introductions = Introductions(state, inodes, names)
        for number in dict.fromkeys((*recorded, *changed)):
            if inodes.get(number) is not None:
                yield from introductions.of(number, listing=False)
        own = {number: None if isinstance(inode, OverlayInode) else inode for number, inode in inodes.items()}
        yield from self.first_inodes(own)  # before the listings, which refer to them
        for number in dict.fromkeys((*listed, *changed)):
            if inodes.get(number) is not None:
                yield from introductions.listing(number)
        for number in list(state.recorded):
            inode = inodes.get(number)
            if isinstance(inode, OverlayInode):
                yield from _content(inode)
        yield from self.first_names(own, names)

    def introduce(self) -> None:
        """Have the state note what `effects` will introduce, in this process, which does not write the image."""
        inodes, names = self.oldest()
        introductions = Introductions(self._overlay, inodes, names)
        changed = [number for number in self._changed() if inodes.get(number) is not None]
        for number in changed:
            deque(introductions.of(number, listing=False), maxlen=0)
        for number in changed:
            deque(introductions.listing(number), maxlen=0)

    def _changed(self) -> list[int]:
        """Return the inodes of the lower layer that were ever changed."""
        state = self._overlay
        numbers = {number for number, inode in dict.items(state.table) if inode.epoch}
        numbers = numbers.union(*(epoch.inodes for epoch in state.log.epochs()))
        found = []
        for number in sorted(numbers):
            versions = [each for each in state.versions(number) if isinstance(each, OverlayInode)]
            if any(each.epoch for each in versions):
                found.append(number)
        return found


def _content(inode: OverlayInode) -> Iterator[bytes]:
    """Yield how the content of the oldest version differs from its lower file."""
    content = inode.content
    if not inode.is_file:
        return
    if isinstance(content, LowerContent) and content.is_pristine and content.lower is inode.lower:
        return
    before = OverlayInode(inode.inode, inode.mode, 0, 0, 0, 0)
    before.lower, before.xattrs, before.target = inode.lower, inode.xattrs, inode.target
    before.content = LowerContent(inode.lower)
    yield from inode_details(before, inode, {})
