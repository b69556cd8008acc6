"""Checkpoints: one id for the state of a session and the files of its workspace.

    section.checkpoints.snapshot("turn-5")
    ...
    section.checkpoints.restore("turn-5")  # both, or neither

A checkpoint is WINK's own `CompositeSnapshot`: `weakincentives.runtime.transactions.restore_snapshot` accepts it.  Its
files are a snapshot of the workspace, so it takes milliseconds.  `<id>.checkpoint.json` in the directory has the rest:
a later program can restore it as long as the workspace has its snapshot.

Threading: any thread; checkpoints are restored one after the other by the caller.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid4, uuid5

from weakincentives.errors import RestoreFailedError, SnapshotError, WinkError
from weakincentives.filesystem import Filesystem, FilesystemSnapshot
from weakincentives.runtime import Session
from weakincentives.runtime.session.snapshots import SnapshotRestoreError as SessionRestoreError
from weakincentives.runtime.transactions import CompositeSnapshot, SnapshotMetadata

from protocol.linux.regular_file import write_atomically
from vfsd.client.arguments import FilePath
from vfsd.integrations.weakincentives.filesystem import VfsdFilesystem

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
