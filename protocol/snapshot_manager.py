"""SnapshotManager: snapshots of any Filesystem as archives, restored into that one or any other.

A directory of its own holds, for each snapshot, `<id>.fs.zip`, which is the snapshot, and `<id>.fs.json`,
which says what the archive does not (the tag, the root).  The archive comes last and goes first, both
atomically: there is a snapshot exactly when its archive is there, and the archive is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from datetime import UTC, datetime
from typing import Final
from uuid import UUID, uuid4

import msgspec

from protocol.adapters.filesystem_tree import FilesystemTree, put_archive_into
from protocol.archive import export_archive
from protocol.errors import SnapshotExistsError, SnapshotNotFoundError
from protocol.filesystem import Filesystem, SnapshotableFilesystem
from protocol.types import FilesystemSnapshot

__all__ = ["SnapshotManager"]

_ARCHIVE: Final = ".fs.zip"
_RECORD: Final = ".fs.json"
_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class _Record(msgspec.Struct, frozen=True):
    """What stands beside an archive."""

    created_at: datetime
    root_path: str
    tag: str | None = None


class SnapshotManager:
    """Snapshots of `filesystem` in `directory`, which is made where it is missing, private to its owner.

    The directory must lie outside of what the filesystem shows.  A second manager may use the same one.
    """

    def __init__(self, filesystem: Filesystem, directory: str | os.PathLike[str]) -> None:
        self._filesystem = filesystem
        self._directory = os.path.abspath(directory)
        root = os.path.realpath(filesystem.root)
        if root != "/" and os.path.commonpath([root, os.path.realpath(directory)]) == root:
            raise ValueError(f"snapshots in {self._directory!r} would be part of what they are snapshots of")
        os.makedirs(self._directory, mode=0o700, exist_ok=True)

    def snapshot(self, snapshot_id: str | UUID | None = None, *, tag: str | None = None) -> FilesystemSnapshot:
        """Keep the state as it is now, as `snapshot_id` (None: one that is given).

        SnapshotExistsError; ValueError for an id that is no file name.  Whatever fails, there is no snapshot of
        that id then, and the id can be used again.
        """
        name = _checked(uuid4() if snapshot_id is None else snapshot_id)
        path = self._path(name, _ARCHIVE)
        if os.path.lexists(path):
            raise SnapshotExistsError(name)
        record = _Record(datetime.now(UTC), self._filesystem.root, tag)
        self._write_record(name, record)
        try:
            self._export(path)
        except FileExistsError:
            raise SnapshotExistsError(name) from None  # somebody was faster, and has written their own record
        except BaseException:
            self._forget_record(name)
            raise
        return self._snapshot(name, record)

    def rollback(self, snapshot_id: str | UUID) -> FilesystemSnapshot:
        """Make the state as it was at the snapshot: all of it, or nothing changes.  SnapshotNotFoundError."""
        snapshot = self.get(snapshot_id)
        self.restore(snapshot.commit_ref)
        return snapshot

    def restore(self, archive_path: str | os.PathLike[str]) -> None:
        """Make the state that of any archive, another filesystem's snapshot among them.

        ArchiveError where it is refused; FileNotFoundError.  All of it, or nothing changes.
        """
        if isinstance(self._filesystem, SnapshotableFilesystem):
            self._filesystem.import_archive(archive_path)
        else:
            put_archive_into(self._filesystem, archive_path)

    def get(self, snapshot_id: str | UUID) -> FilesystemSnapshot:
        """One snapshot.  SnapshotNotFoundError."""
        name = _checked(snapshot_id)
        try:
            made_ns = os.stat(self._path(name, _ARCHIVE)).st_mtime_ns
        except FileNotFoundError:
            raise SnapshotNotFoundError(name) from None
        return self._snapshot(name, self._read_record(name, made_ns))

    def list_snapshots(self) -> list[FilesystemSnapshot]:
        """All snapshots, oldest first."""
        names = [name.removesuffix(_ARCHIVE) for name in os.listdir(self._directory) if name.endswith(_ARCHIVE)]
        found = []
        for name in names:
            # Not what is no snapshot of ours, nor what another manager deletes meanwhile.
            with contextlib.suppress(SnapshotNotFoundError, ValueError):
                found.append(self.get(name))
        return sorted(found, key=lambda each: (each.created_at, each.snapshot_id))

    def delete(self, snapshot_id: str | UUID) -> None:
        """Forget a snapshot.  SnapshotNotFoundError."""
        name = _checked(snapshot_id)
        try:
            os.unlink(self._path(name, _ARCHIVE))
        except FileNotFoundError:
            raise SnapshotNotFoundError(name) from None
        self._forget_record(name)

    # -- files -------------------------------------------------------------------------------
    def _path(self, name: str, suffix: str) -> str:
        return os.path.join(self._directory, name + suffix)

    def _snapshot(self, name: str, record: _Record) -> FilesystemSnapshot:
        path = self._path(name, _ARCHIVE)
        return FilesystemSnapshot(name, record.created_at, path, record.root_path, record.tag)

    def _export(self, path: str) -> None:
        if isinstance(self._filesystem, SnapshotableFilesystem):
            self._filesystem.export_archive(path)
        else:
            export_archive(FilesystemTree(self._filesystem), path)

    def _write_record(self, name: str, record: _Record) -> None:
        temporary = self._path(f".{name}-{secrets.token_hex(8)}", ".tmp")
        try:
            with open(temporary, "xb") as file:
                file.write(msgspec.json.encode(record))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path(name, _RECORD))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def _read_record(self, name: str, made_ns: int) -> _Record:
        """The record of an archive; what can be told without one, for an archive that was put there by hand."""
        try:
            with open(self._path(name, _RECORD), "rb") as file:
                return msgspec.json.decode(file.read(), type=_Record)
        except (OSError, msgspec.DecodeError):
            return _Record(datetime.fromtimestamp(made_ns / 1e9, UTC), self._filesystem.root)

    def _forget_record(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name, _RECORD))


def _checked(snapshot_id: str | UUID) -> str:
    name = str(snapshot_id)
    if not _ID.fullmatch(name):
        raise ValueError(f"a snapshot's id has letters, digits, '.', '_' and '-' only, at most 128: {name!r}")
    return name
