"""OverlayApply: one apply of an overlay, returned by `protocol.volume.OverlaidVolume.applying`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from protocol.backends.overlay.apply import Applied, apply

if TYPE_CHECKING:
    from protocol.backends.memory.history.view import SnapshotTree
    from protocol.backends.overlay.volume import OverlayVolume

__all__ = ["OverlayApply"]


class OverlayApply:
    """Implements `protocol.volume.ApplyRun`.  `base` and `live` stay open as long as the run is used."""

    def __init__(
        self,
        volume: OverlayVolume,
        base: SnapshotTree,
        live: SnapshotTree,
        paths: Sequence[bytes],
        *,
        force: bool,
        dry_run: bool,
    ) -> None:
        self._volume = volume
        self._base = base
        self._live = live
        self._paths = paths
        self._force = force
        self._dry_run = dry_run
        self._identities = dict(volume.identities)

    def write(self, keep_going: Callable[[], None]) -> Applied:
        """See `protocol.volume.ApplyRun`, as for `finish`."""
        return apply(
            self._volume.lower,
            self._base,
            self._live,
            self._paths,
            identities=self._identities,
            force=self._force,
            dry_run=self._dry_run,
            keep_going=keep_going,
        )

    def finish(self, result: Applied) -> None:
        self._volume.applied(self._live, result)
        if not (self._paths or result.error):
            self._volume.mark_saved(self._live)
