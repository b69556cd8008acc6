"""FilesystemSnapshotManager: snapshots as archives in a directory, with the semantics that WINK specifies for them.

    manager = FilesystemSnapshotManager(section.filesystem)
    info = manager.snapshot("before-refactor")  # writes info.archive_path
    manager.rollback("before-refactor")  # the number of files

An archive holds every file, so it is written in time proportional to the files, and outlives the workspace:
`restore` reads it into any other filesystem.  `VfsdFilesystem.snapshot` and `Checkpoints` are the fast ones.

Threading: any thread.
"""

from __future__ import annotations

import os
import stat
import tempfile
import zipfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from weakincentives.errors import SnapshotError, SnapshotRestoreError
from weakincentives.filesystem import HostFilesystem

from protocol.adapters.host import HostFilesystem as DirectoryFilesystem
from protocol.archive.manifest import Manifest, decode_manifest
from protocol.errors import ArchiveError, SnapshotExistsError, SnapshotNotFoundError
from protocol.filesystem import Filesystem
from protocol.snapshot_manager import SnapshotManager
from protocol.types import FilesystemSnapshot
from vfsd.client.arguments import FilePath
from vfsd.integrations.weakincentives.filesystem import VfsdFilesystem

DEFAULT_DIRECTORY: Final = "wink-fs-snapshots"  # in the directory for temporary files
_MANIFEST: Final = "manifest.json"
_MANIFEST_BYTES: Final = 256 << 20  # more is refused: the archive may be anybody's


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One archive.  `file_count` counts its regular files; `total_bytes` is the size of the archive in bytes."""

    snapshot_id: str
    archive_path: Path
    file_count: int
    total_bytes: int
    created_at: datetime


class FilesystemSnapshotManager:
    """Snapshots of `filesystem` as `<id>.fs.zip` in `snapshot_dir`, which is made with mode 0700 if it is missing.

    `snapshot_dir` is None for "wink-fs-snapshots" in the directory for temporary files, which must belong to the user
    (PermissionError).  It must be outside the filesystem (ValueError).  Other programs' snapshots in the directory are
    found as well.  `filesystem` is a `VfsdFilesystem` or any other `HostFilesystem` of WINK.
    """

    def __init__(self, filesystem: HostFilesystem, snapshot_dir: FilePath | None = None) -> None:
        self._filesystem: Final = filesystem
        directory = default_directory() if snapshot_dir is None else snapshot_dir
        self._manager: Final = SnapshotManager(_with_archives(filesystem), directory)

    @property
    def filesystem(self) -> HostFilesystem:
        """The filesystem that is kept and restored."""
        return self._filesystem

    def snapshot(self, snapshot_id: str) -> SnapshotInfo:
        """Write the present state to an archive.

        SnapshotError if it cannot be written, or if the id is in use: nothing is replaced.  ValueError for an id that
        is not a file name.
        """
        try:
            return _info(self._manager.snapshot(snapshot_id))
        except SnapshotExistsError as error:
            advice = "delete it first, or choose another id or another snapshot_dir"
            raise SnapshotError(f"the snapshot {snapshot_id!r} exists: {advice}") from error
        except OSError as error:
            raise SnapshotError(f"the snapshot {snapshot_id!r} could not be written: {error}") from error

    def rollback(self, snapshot_id: str) -> int:
        """Make the files equal to a snapshot, and return how many files it has.

        KeyError if there is no such snapshot; SnapshotRestoreError if it cannot be restored.
        """
        found = self.get(snapshot_id)
        if found is None:
            raise KeyError(f"no such snapshot: {snapshot_id!r}")
        return self.restore(found.archive_path)

    def restore(self, archive_path: FilePath) -> int:
        """Make the files equal to an archive, such as that of another session, and return how many files it has.

        SnapshotRestoreError if the archive is refused; nothing has changed then.  FileNotFoundError.
        """
        count = _manifest(archive_path).file_count
        try:
            self._manager.restore(archive_path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SnapshotRestoreError(f"{os.fspath(archive_path)} could not be restored: {error}") from error
        return count

    def get(self, snapshot_id: str) -> SnapshotInfo | None:
        """Return a snapshot, or None if there is none with this id.  SnapshotRestoreError if its archive is damaged."""
        try:
            return _info(self._manager.get(snapshot_id))
        except (SnapshotNotFoundError, ValueError):
            return None

    def list_snapshots(self) -> tuple[SnapshotInfo, ...]:
        """Return all snapshots, oldest first.  SnapshotRestoreError if an archive is damaged: it names the archive."""
        return tuple(_info(found) for found in self._manager.list_snapshots())

    def delete(self, snapshot_id: str) -> bool:
        """Delete a snapshot and its archive.  False if there is none with this id."""
        try:
            self._manager.delete(snapshot_id)
        except (SnapshotNotFoundError, ValueError):
            return False
        return True


def default_directory() -> str:
    """Return the default directory for snapshots, made if it is missing.

    PermissionError if it belongs to another user, who could replace the archives.
    """
    directory = os.path.join(tempfile.gettempdir(), DEFAULT_DIRECTORY)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to another user: pass a snapshot_dir")
    return directory


def file_count(archive_path: FilePath) -> int:
    """Return the number of files in an archive.  SnapshotRestoreError if it is none; FileNotFoundError."""
    return _manifest(archive_path).file_count


def _with_archives(filesystem: HostFilesystem) -> Filesystem:
    if isinstance(filesystem, VfsdFilesystem):
        return filesystem.workspace.filesystem
    if isinstance(filesystem, HostFilesystem):
        return DirectoryFilesystem(filesystem.root, read_only=filesystem.read_only)
    raise TypeError(f"filesystem must be a HostFilesystem, not {type(filesystem).__name__}")


def _info(taken: FilesystemSnapshot) -> SnapshotInfo:
    path = Path(taken.commit_ref)
    count = _manifest(path).file_count
    return SnapshotInfo(str(taken.snapshot_id), path, count, path.stat().st_size, taken.created_at)


def _manifest(archive_path: FilePath) -> Manifest:
    name = os.fspath(archive_path)
    try:
        with zipfile.ZipFile(name) as archive:
            if archive.getinfo(_MANIFEST).file_size > _MANIFEST_BYTES:
                raise ArchiveError("the manifest is too long", _MANIFEST)
            return decode_manifest(archive.read(_MANIFEST), _MANIFEST)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise SnapshotRestoreError(f"{name} is not an archive of a workspace: {error}") from error
