"""FilesystemSnapshotManager and Checkpoints: snapshots as archives, and those of a session together with its files.

    manager = FilesystemSnapshotManager(section.filesystem)
    info = manager.snapshot("before-refactor")  # writes info.archive_path
    manager.rollback("before-refactor")  # the number of files
    section.checkpoints.snapshot("turn-5")
    section.checkpoints.restore("turn-5")  # the session's state and the files, or neither

An archive holds every file, so it is written in time proportional to the files, and outlives the workspace:
`restore` reads it into any other filesystem.  It has the semantics that WINK specifies.

A checkpoint is WINK's own `CompositeSnapshot`: `weakincentives.runtime.transactions.restore_snapshot` accepts it.  Its
files are a snapshot of the workspace, so it takes milliseconds.  `<id>.checkpoint.json` in the directory has the rest:
a later program can restore it as long as the workspace has its snapshot.

Threading: any thread; checkpoints are restored one after the other by the caller.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid4, uuid5

from weakincentives.errors import RestoreFailedError, SnapshotError, SnapshotRestoreError, WinkError
from weakincentives.filesystem import Filesystem, FilesystemSnapshot, HostFilesystem
from weakincentives.runtime import Session
from weakincentives.runtime.session.snapshots import SnapshotRestoreError as SessionRestoreError
from weakincentives.runtime.transactions import CompositeSnapshot, SnapshotMetadata

from protocol.adapters.host import HostFilesystem as DirectoryFilesystem
from protocol.drafts import FilesystemSnapshotManager as DraftManager
from protocol.drafts import SnapshotInfo
from protocol.errors import ArchiveError, SnapshotExistsError
from protocol.filesystem import SnapshotableFilesystem
from protocol.linux.regular_file import write_atomically
from protocol.types import FilesystemSnapshot as WorkspaceSnapshot
from vfsd.client.arguments import FilePath
from vfsd.integrations.weakincentives.filesystem import VfsdFilesystem


class FilesystemSnapshotManager(DraftManager):
    """`protocol.drafts.FilesystemSnapshotManager` with WINK's errors.

    `filesystem` is a `VfsdFilesystem` or any other `HostFilesystem` of WINK.  SnapshotRestoreError if the archive of a
    snapshot is damaged: it names the archive.
    """

    def __init__(self, filesystem: HostFilesystem, snapshot_dir: FilePath | None = None) -> None:
        super().__init__(_with_archives(filesystem), snapshot_dir)
        self.filesystem: HostFilesystem = filesystem

    def snapshot(self, snapshot_id: str) -> SnapshotInfo:
        """Write the present state to an archive.

        SnapshotError if it cannot be written, or if the id is in use: nothing is replaced.  ValueError for an id that
        is not a file name.
        """
        try:
            return super().snapshot(snapshot_id)
        except SnapshotExistsError as error:
            advice = "delete it first, or choose another id or another snapshot_dir"
            raise SnapshotError(f"the snapshot {snapshot_id!r} exists: {advice}") from error
        except OSError as error:
            raise SnapshotError(f"the snapshot {snapshot_id!r} could not be written: {error}") from error

    def restore(self, archive_path: FilePath) -> int:
        """Make the files equal to an archive, such as that of another session, and return how many files it has.

        SnapshotRestoreError if the archive is refused; nothing has changed then.  FileNotFoundError.
        """
        try:
            return super().restore(archive_path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SnapshotRestoreError(f"{os.fspath(archive_path)} could not be restored: {error}") from error

    def _info(self, taken: WorkspaceSnapshot) -> SnapshotInfo:
        try:
            return super()._info(taken)
        except ArchiveError as error:
            raise SnapshotRestoreError(str(error)) from error


def _with_archives(filesystem: HostFilesystem) -> SnapshotableFilesystem:
    if isinstance(filesystem, VfsdFilesystem):
        return filesystem.workspace.filesystem
    if isinstance(filesystem, HostFilesystem):
        return DirectoryFilesystem(filesystem.root, read_only=filesystem.read_only)
    raise TypeError(f"filesystem must be a HostFilesystem, not {type(filesystem).__name__}")


# -- checkpoints -----------------------------------------------------------------------------------
CHECKPOINT_SUFFIX: Final = ".checkpoint.json"
_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Checkpoints:
    """Checkpoints of `session` and `filesystem` in `directory`, which is made with mode 0700 if it is missing."""

    def __init__(self, session: Session, filesystem: VfsdFilesystem, directory: FilePath) -> None:
        self._session: Final = session
        self._filesystem: Final = filesystem
        self._directory: Final = Path(directory).absolute()

    def snapshot(self, checkpoint_id: str | None = None) -> CompositeSnapshot:
        """Keep the files and then the session's state as `checkpoint_id` (None: a new UUID).

        The tag of both is the id, which is also `metadata.tag` of the result.  SnapshotError if the id is in use or
        something cannot be kept; nothing is kept then.  ValueError for an id that is not a file name.
        """
        chosen = str(uuid4()) if checkpoint_id is None else checkpoint_id
        path = self._path(chosen)
        if path is None:
            allowed = "letters, digits, '.', '_' and '-', at most 128"
            raise ValueError(f"the id of a checkpoint has {allowed}: {chosen!r}")
        if path.exists():
            raise SnapshotError(f"the checkpoint {chosen!r} exists: delete it first, or choose another id")
        files = self._filesystem.snapshot(tag=chosen)
        try:
            kept = CompositeSnapshot(
                snapshot_id=uuid5(NAMESPACE_URL, f"vfsd-checkpoint:{chosen}:{files.snapshot_id}"),
                created_at=files.created_at,
                session=self._session.snapshot(tag=chosen),
                resources={Filesystem: files},
                metadata=SnapshotMetadata(tag=chosen),
            )
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(str(path), kept.to_json().encode(), durable=True)
        except (OSError, WinkError) as error:
            self._drop(files)
            raise SnapshotError(f"the checkpoint {chosen!r} could not be kept: {error}") from error
        return kept

    def restore(self, checkpoint_id: str) -> CompositeSnapshot:
        """Restore the session's state and the files.  Slices with WINK's policy LOG stay as they are.

        KeyError if there is no such checkpoint.  RestoreFailedError if one of the two cannot be restored: both are then
        as before, and the message says why.
        """
        kept = self.get(checkpoint_id)
        if kept is None:
            raise KeyError(f"no such checkpoint: {checkpoint_id!r}")
        before = self._session.snapshot()
        try:
            self._session.restore(kept.session)
        except SessionRestoreError as error:
            raise RestoreFailedError(f"the session's state of {checkpoint_id!r} cannot be restored: {error}") from error
        try:
            self._filesystem.restore(_files_of(kept))
        except BaseException as error:
            self._session.restore(before)
            if isinstance(error, WinkError):
                raise RestoreFailedError(f"the files of {checkpoint_id!r} cannot be restored: {error}") from error
            raise
        return kept

    def get(self, checkpoint_id: str) -> CompositeSnapshot | None:
        """Return a checkpoint, or None if there is none with this id.  RestoreFailedError if its file is damaged."""
        path = self._path(checkpoint_id)
        if path is None:
            return None
        try:
            return CompositeSnapshot.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, WinkError) as error:
            raise RestoreFailedError(f"the checkpoint {path} cannot be read: {error}") from error

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all checkpoints, oldest first."""
        found = [(path.stat().st_mtime_ns, path.name) for path in self._directory.glob(f"*{CHECKPOINT_SUFFIX}")]
        return tuple(name.removesuffix(CHECKPOINT_SUFFIX) for _, name in sorted(found))

    def delete(self, checkpoint_id: str) -> bool:
        """Delete a checkpoint and drop its snapshot.  False if there is none with this id."""
        kept = self.get(checkpoint_id)
        path = self._path(checkpoint_id)
        if kept is None or path is None:
            return False
        path.unlink(missing_ok=True)
        self._drop(_files_of(kept))
        return True

    def _path(self, checkpoint_id: str) -> Path | None:
        return self._directory / f"{checkpoint_id}{CHECKPOINT_SUFFIX}" if _ID.fullmatch(checkpoint_id) else None

    def _drop(self, files: FilesystemSnapshot) -> None:
        """Drop the snapshot of the workspace, unless it is gone or its name belongs to another one now."""
        with contextlib.suppress(SnapshotError, OSError):
            if self._filesystem.get(files.commit_ref).snapshot_id == files.snapshot_id:
                self._filesystem.workspace.drop(files.commit_ref)


def _files_of(kept: CompositeSnapshot) -> Any:
    try:
        return kept.resources[Filesystem]
    except KeyError:
        raise RestoreFailedError("the checkpoint has no files") from None
