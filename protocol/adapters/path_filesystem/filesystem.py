"""PathFilesystem: a `PlainPathFilesystem` with snapshots and archives."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

from protocol.adapters.path_filesystem.archives import ArchiveSnapshots, put_archive
from protocol.adapters.path_filesystem.converge import converge
from protocol.adapters.path_filesystem.files import PathFiles
from protocol.adapters.path_filesystem.plain import PlainPathFilesystem
from protocol.adapters.tree import PathFilesTree
from protocol.archive import export_archive
from protocol.paths import DEFAULT_LIMITS, ROOT, CallLimits
from protocol.tree import Tree
from protocol.types import FilesystemSnapshot


class PathFilesystem(PlainPathFilesystem):
    """Implements `protocol.filesystem.SnapshotableFilesystem`.

    Snapshots are archives; a subclass whose backend has its own overrides `snapshot`, `restore`, `import_archive` and
    `_state`.
    """

    def __init__(self, store: PathFiles, *, limits: CallLimits = DEFAULT_LIMITS) -> None:
        super().__init__(store, limits=limits)
        self._snapshots = ArchiveSnapshots(store.root)

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """See `protocol.filesystem.SnapshotableFilesystem`, as for all that follow."""
        with self._state() as state:
            return self._snapshots.take(state, tag)

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        self.import_archive(self._snapshots.path(snapshot))

    def export_archive(self, path: str | os.PathLike[str]) -> None:
        with self._state() as state:
            export_archive(state, path)

    def import_archive(self, path: str | os.PathLike[str]) -> None:
        self._changing(ROOT, root_is_fine=True)
        with self._state() as state:
            put_archive(state, path, lambda tree: converge(self._store, tree))

    def _state(self) -> AbstractContextManager[Tree]:
        """Open the state as a tree."""
        return nullcontext(PathFilesTree(self._store))
