"""WorkspaceFilesystem: the files of a running workspace, with the workspace's own snapshots.

    files = workspace.filesystem
    before = files.snapshot(tag="before the edit")
    files.write("notes/a.txt", "hello")  # every program in the mount sees it
    files.restore(before)  # so does the restore: the kernel's caches are invalidated before it returns

Files are read and written through the mount, as `protocol.HostFilesystem` does.  Snapshots, restores and archives are
calls to the daemon: a snapshot has a name, which `vfsd snapshots` lists and every later program can restore.

Threading: any thread, several at a time.  Two restores are made one after the other, by the daemon.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path
from typing import Final, TypeVar

from protocol.adapters.host import HostFilesystem
from protocol.errors import ArchiveError, SnapshotNotFoundError
from protocol.paths import ROOT
from protocol.types import FilesystemSnapshot
from vfsd.client.connection import ControlClient, ControlError
from vfsd.client.requests import RemoteCall, Requests
from vfsd.client.results import Restored, Snapshot

T = TypeVar("T")
_PATHS_SHOWN: Final = 3


class WorkspaceFilesystem(HostFilesystem):
    """Implements `protocol.filesystem.SnapshotableFilesystem` for the workspace mounted at `mountpoint`.

    No path leads outside the mount; symlinks are followed within it.  Errors besides the contract's: OSError
    (EOPNOTSUPP) if the backend has no snapshots, ConnectionError if the daemon is gone.
    """

    def __init__(self, mountpoint: str, socket_path: str) -> None:
        super().__init__(mountpoint)
        self._requests = Requests(mountpoint)
        self._socket_path = socket_path

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Take a snapshot of the workspace.  Its name, which the daemon chooses, is `commit_ref`.

        The snapshot lives as long as the workspace's others do, not only as long as this object.  RuntimeWarning if
        there are files that the daemon could not read, or that changed while it read them ("host:DIR" and containers).
        """
        taken = self._call(self._requests.snapshot(tag=tag))
        _warn_of(taken.name, "lacks files that could not be read", taken.unreadable)
        _warn_of(taken.name, "may mix old and new data of files that changed while they were read", taken.unstable)
        return self._record(taken)

    def get(self, name: str) -> FilesystemSnapshot:
        """Return the snapshot `name`, whoever took it.  SnapshotNotFoundError."""
        for snapshot in self._call(self._requests.snapshots(changes=False)):
            if snapshot.name == name:
                return self._record(snapshot)
        raise SnapshotNotFoundError(name)

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Make the workspace equal to `snapshot`.  Files that do not differ are not touched; `undo` takes it back.

        SnapshotNotFoundError also if the name now belongs to a snapshot that was taken at another time.  OSError (EIO)
        if single paths could not be restored ("host:DIR" and containers): the message names them, and the others were
        restored.
        """
        self._changing(ROOT, root_is_fine=True)
        call = self._requests.restore(snapshot.commit_ref)
        created_at = snapshot.created_at.astimezone(UTC)
        call.params.created_at = created_at.isoformat(timespec="milliseconds")
        try:
            restored = self._call(call)
        except FileNotFoundError as error:
            raise SnapshotNotFoundError(snapshot.commit_ref) from error
        _check_complete(restored, self.root)

    def export_archive(self, path: str | os.PathLike[str]) -> None:
        """See `SnapshotableFilesystem`.  ValueError for the file name of another kind of archive, such as "a.tar".

        The daemon writes the archive, as its user.
        """
        self._call(self._requests.export(path))

    def import_archive(self, path: str | os.PathLike[str]) -> None:
        """See `SnapshotableFilesystem`.  The daemon reads the archive, as its user; `undo` takes the import back."""
        self._changing(ROOT, root_is_fine=True)
        # Not the method `import`, which adds the content and removes nothing.
        call = self._requests.restore(Path(path))
        try:
            restored = self._call(call)
        except ControlError as error:
            if error.errno != errno.EINVAL:
                raise
            raise ArchiveError(str(error), error.filename) from error
        _check_complete(restored, self.root)

    def _call(self, call: RemoteCall[T]) -> T:
        with ControlClient(self._socket_path) as client:
            return client.run(call)

    def _record(self, taken: Snapshot) -> FilesystemSnapshot:
        return FilesystemSnapshot(taken.name, taken.created_at, taken.name, self.root, taken.tag)


def _warn_of(snapshot: str, what: str, paths: Sequence[str]) -> None:
    if paths:
        warnings.warn(f"snapshot {snapshot} {what}: {_shown(paths)}", RuntimeWarning, stacklevel=3)


def _check_complete(restored: Restored, root: str) -> None:
    """Raise OSError (EIO) if `restored` has paths that could not be restored."""
    if restored.problems:
        count = len(restored.problems)
        reasons = [f"{path} ({reason})" for path, reason in restored.problems.items()]
        text = f"{count} path{'s'[: count > 1]} could not be restored from {restored.source}: {_shown(reasons)}"
        raise OSError(errno.EIO, f"{text}; the method `undo` of the workspace restores the state before", root)


def _shown(items: Sequence[str]) -> str:
    more = len(items) - _PATHS_SHOWN
    return ", ".join(items[:_PATHS_SHOWN]) + (f" and {more} more" if more > 0 else "")
