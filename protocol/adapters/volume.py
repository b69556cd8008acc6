"""VolumeFilesystem: the agent's view of any `Volume` that returns results, not awaitables."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from uuid import uuid4

from protocol.adapters.path_filesystem.filesystem import PathFilesystem
from protocol.adapters.path_filesystem.volume_files import VolumeFiles
from protocol.archive import open_archive
from protocol.errors import SnapshotNotFoundError
from protocol.paths import DEFAULT_LIMITS, ROOT, CallLimits
from protocol.tree import Tree
from protocol.types import FilesystemSnapshot, utc_time
from protocol.volume import Caller, Volume
from protocol.volume_extensions import SnapshotInfo, snapshotable

__all__ = ["VolumeFilesystem"]


class VolumeFilesystem(PathFilesystem):
    """Implements `protocol.filesystem.SnapshotableFilesystem` over a volume, on the volume's thread.

    `root` is the mount point, if the volume is mounted: an absolute symlink to a path below it stays inside.  New
    files belong to `caller` (None: this process).  Uses the snapshots and the import of the volume if it has them,
    else archives.

    A volume whose methods return awaitables raises TypeError at the first call.  This class does not invalidate kernel
    caches: that is the task of the code that mounted the volume.
    """

    def __init__(
        self, volume: Volume, *, root: str = "/", caller: Caller | None = None, limits: CallLimits = DEFAULT_LIMITS
    ) -> None:
        self._files = VolumeFiles(volume, root=root, caller=caller)
        super().__init__(self._files, limits=limits)
        self.volume = volume
        self._snapshotable = snapshotable(volume)

    def _use(self, volume: Volume) -> None:
        """Make all later calls, but not those of open streams, on `volume`: another view of the same state."""
        self._files.volume = self.volume = volume
        self._snapshotable = snapshotable(volume)

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        if self._snapshotable is None:
            return super().snapshot(tag=tag)
        return self._record(self._snapshotable.take_snapshot(str(uuid4()), tag=tag))

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        if self._snapshotable is None:
            super().restore(snapshot)
            return
        self._changing(ROOT, root_is_fine=True)
        info = self._snapshotable.snapshot(snapshot.commit_ref)
        if self._record(info) != snapshot:  # a snapshot of another volume, with the same name
            raise SnapshotNotFoundError(snapshot.snapshot_id)
        self._snapshotable.restore_snapshot(info.name)

    def import_archive(self, path: str | os.PathLike[str]) -> None:
        if self._snapshotable is None:
            super().import_archive(path)
            return
        self._changing(ROOT, root_is_fine=True)
        with open_archive(path) as tree:
            self._snapshotable.import_tree(tree, replace=True)

    def _record(self, info: SnapshotInfo) -> FilesystemSnapshot:
        created = utc_time(info.created_ns)
        assert created is not None  # the clock's year when it was taken
        return FilesystemSnapshot(info.name, created, info.name, self.root, info.tag)

    def _state(self) -> AbstractContextManager[Tree]:
        return super()._state() if self._snapshotable is None else self._snapshotable.tree()

    def _search_tree(self) -> AbstractContextManager[Tree]:
        return super()._search_tree() if self._snapshotable is None else self._snapshotable.tree()
