"""Handover of an overlay to another process, in addition to what holds for a memory volume.

The image has the inodes of the lower layer that changed.  The kernel also knows others, which `KnownInodes` describes:
the forked process writes its records after the image, and `Giving.rest` has what was loaded since.  So both processes
give an inode, and a name in a listing, the same numbers.  The new process loads an inode when it is used.

Invariant: `recorded` and `listed` of the state have at least what the image introduces, so that the log introduces no
inode a second time.

Threading: as for memory volumes; in the old process under the state's lock, because views load from other threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.backends.memory.journaling.handover import Giving, Taking, sums_of
from protocol.backends.overlay.inode import OverlayInode
from protocol.backends.overlay.known_inodes import KnownInodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.backends.memory.journaling.replay import Replay
    from protocol.backends.overlay.journaling.introductions import OverlayImage
    from protocol.backends.overlay.state import OverlayState
    from protocol.backends.overlay.volume import OverlayVolume


class OverlayGiving(Giving):
    """See `Giving`."""

    def __init__(self, volume: OverlayVolume, state: OverlayState, new_image: Callable[[], OverlayImage]) -> None:
        super().__init__(volume, state, new_image)
        self.below = volume.lower.fingerprint
        self._overlay_volume = volume
        self._overlay = state
        self._new_overlay_image = new_image
        self._kept_before = state.known
        with state.lock:
            if self._own is None:
                new_image().introduce()
            if state.known is None:
                state.known = KnownInodes(state, None)
            self._known = state.known
            self._known.recent = []

    def image(self) -> OverlayImage:
        self._overlay.known = None  # what this process loads is not for the log of the other one
        image = self._new_overlay_image()
        image.known = self._known
        return image

    def sums(self) -> dict[str, int]:
        return _sums(self._overlay)

    def known(self) -> tuple[list[bytes], list[int]]:
        return self._known.recent or [], list(self._overlay_volume.outdated)

    def end(self) -> None:
        super().end()
        with self._overlay.lock:
            self._known.recent = None
            self._overlay.known = self._kept_before
            if self._own is None:
                self._overlay.recorded.clear()
                self._overlay.listed.clear()


class OverlayTaking(Taking):
    """See `Taking`."""

    def __init__(
        self, volume: OverlayVolume, state: OverlayState, replay: Replay, replayed: Callable[[Replay], None]
    ) -> None:
        super().__init__(volume, state, replay, replayed)
        self.below = volume.lower.fingerprint
        self._overlay_volume = volume
        self._overlay = state
        self._known = state.known = state.known or KnownInodes(state, None)

    def sums(self) -> dict[str, int]:
        return _sums(self._overlay)

    def know(self, known: list[bytes], outdated: list[int]) -> None:
        for record in known:
            self._known.take(record)
        self._overlay_volume.outdated.update(outdated)

    def set_atime(self, number: int, atime_ns: int) -> None:
        inode = self._overlay.table.loaded(number)
        if inode is not None:
            inode.atime_ns = atime_ns
        else:
            self._known.set_atime(number, atime_ns)


def _sums(state: OverlayState) -> dict[str, int]:
    """Return numbers that are equal in both processes, although they have not loaded the same inodes."""
    own = [inode for inode in dict.values(state.table) if not isinstance(inode, OverlayInode)]
    found = sums_of(state)
    found["files"] = sum(not inode.is_dir for inode in own)
    found["directories"] = sum(inode.is_dir for inode in own)
    found["bytes"] = sum(inode.size for inode in own if inode.is_file and inode.nlink)
    return found
