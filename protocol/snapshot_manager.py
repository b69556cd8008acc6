"""SnapshotManager: snapshots of any Filesystem as archives, which can be restored into any Filesystem.

A directory holds two files for each snapshot: the archive `<id>.fs.zip`, and `<id>.fs.json` with values that the
archive lacks (the tag, the root).  The archive is created last and removed first, both atomically.  So a snapshot
exists exactly while its archive exists, and the archive is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
from datetime import UTC, datetime
from typing import Final
from uuid import UUID, uuid4

import msgspec

from protocol.adapters.path_filesystem import put_archive
from protocol.adapters.trees import FilesystemTree
from protocol.archive import export_archive
from protocol.diff.plan import execute, plan
from protocol.errors import ArchiveError, SnapshotExistsError, SnapshotNotFoundError
from protocol.filesystem import Filesystem, SnapshotableFilesystem
from protocol.linux.regular_file import write_atomically
from protocol.paths import decode
from protocol.tree import Tree, TreeEntry, filled
from protocol.types import FilesystemSnapshot

_ARCHIVE: Final = ".fs.zip"
_RECORD: Final = ".fs.json"
_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class _Record(msgspec.Struct, frozen=True):
    """The JSON file of an archive."""

    created_at: datetime
    root_path: str
    tag: str | None = None


class SnapshotManager:
    """Snapshots of `filesystem` in `directory`, which is created with mode 0700 if it is missing.

    The directory must be outside the filesystem's root.  Several managers may use the same directory.
    """

    def __init__(self, filesystem: Filesystem, directory: str | os.PathLike[str]) -> None:
        self._filesystem = filesystem
        self._directory = os.path.abspath(directory)
        root = os.path.realpath(filesystem.root)
        if root != "/" and os.path.commonpath([root, os.path.realpath(directory)]) == root:
            raise ValueError(f"the snapshot directory {self._directory!r} is inside the filesystem: use one outside")
        os.makedirs(self._directory, mode=0o700, exist_ok=True)

    def snapshot(self, snapshot_id: str | UUID | None = None, *, tag: str | None = None) -> FilesystemSnapshot:
        """Keep the present state as `snapshot_id` (None: a new UUID).

        SnapshotExistsError; ValueError for an id that is not a file name.  After any other error no snapshot with this
        id exists, and the id can be used again.
        """
        name = _checked(uuid4() if snapshot_id is None else snapshot_id)
        path = self._path(name, _ARCHIVE)
        if os.path.lexists(path):
            raise SnapshotExistsError(name)
        record = _Record(datetime.now(UTC), self._filesystem.root, tag)
        write_atomically(self._path(name, _RECORD), msgspec.json.encode(record), durable=True)
        try:
            export_state(self._filesystem, path)
        except FileExistsError:
            raise SnapshotExistsError(name) from None  # another manager was faster and wrote its own record
        except BaseException:
            self._delete_record(name)
            raise
        return self._snapshot(name, record)

    def rollback(self, snapshot_id: str | UUID) -> FilesystemSnapshot:
        """Make the state equal to the snapshot, completely or not at all.  SnapshotNotFoundError."""
        snapshot = self.get(snapshot_id)
        self.restore(snapshot.commit_ref)
        return snapshot

    def restore(self, archive_path: str | os.PathLike[str]) -> None:
        """Make the state equal to any archive, for example another filesystem's snapshot, completely or not at all.

        ArchiveError if the archive is refused; FileNotFoundError.
        """
        import_state(self._filesystem, archive_path)

    def get(self, snapshot_id: str | UUID) -> FilesystemSnapshot:
        """Return one snapshot.  SnapshotNotFoundError."""
        name = _checked(snapshot_id)
        try:
            made_ns = os.stat(self._path(name, _ARCHIVE)).st_mtime_ns
        except FileNotFoundError:
            raise SnapshotNotFoundError(name) from None
        return self._snapshot(name, self._read_record(name, made_ns))

    def list_snapshots(self) -> list[FilesystemSnapshot]:
        """Return all snapshots, oldest first."""
        names = [name.removesuffix(_ARCHIVE) for name in os.listdir(self._directory) if name.endswith(_ARCHIVE)]
        found = []
        for name in names:
            # Skip files that are not snapshots, and snapshots that another manager deletes meanwhile.
            with contextlib.suppress(SnapshotNotFoundError, ValueError):
                found.append(self.get(name))
        return sorted(found, key=lambda each: (each.created_at, each.snapshot_id))

    def delete(self, snapshot_id: str | UUID) -> None:
        """Delete a snapshot.  SnapshotNotFoundError."""
        name = _checked(snapshot_id)
        try:
            os.unlink(self._path(name, _ARCHIVE))
        except FileNotFoundError:
            raise SnapshotNotFoundError(name) from None
        self._delete_record(name)

    # -- files -------------------------------------------------------------------------------
    def _path(self, name: str, suffix: str) -> str:
        return os.path.join(self._directory, name + suffix)

    def _snapshot(self, name: str, record: _Record) -> FilesystemSnapshot:
        path = self._path(name, _ARCHIVE)
        return FilesystemSnapshot(name, record.created_at, path, record.root_path, record.tag)

    def _read_record(self, name: str, made_ns: int) -> _Record:
        """Return the record of an archive, or a default for an archive without one, which a user copied there."""
        try:
            with open(self._path(name, _RECORD), "rb") as file:
                return msgspec.json.decode(file.read(), type=_Record)
        except (OSError, msgspec.DecodeError):
            return _Record(datetime.fromtimestamp(made_ns / 1e9, UTC), self._filesystem.root)

    def _delete_record(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name, _RECORD))


def _checked(snapshot_id: str | UUID) -> str:
    name = str(snapshot_id)
    if not _ID.fullmatch(name):
        raise ValueError(f"a snapshot's id has letters, digits, '.', '_' and '-' only, at most 128: {name!r}")
    return name


def export_state(filesystem: Filesystem, path: str | os.PathLike[str]) -> None:
    """Write the state of `filesystem` as a new archive at `path`.  FileExistsError."""
    if isinstance(filesystem, SnapshotableFilesystem):
        filesystem.export_archive(path)
    else:
        export_archive(FilesystemTree(filesystem), path)


def import_state(filesystem: Filesystem, path: str | os.PathLike[str]) -> None:
    """Replace the state of `filesystem` by the archive at `path`.  If that fails, the state before is put back.

    Raises ArchiveError, before anything changes, if the archive is refused.  An archive with symlinks or special files
    is refused if `filesystem` has no import of its own.
    """
    if isinstance(filesystem, SnapshotableFilesystem):
        filesystem.import_archive(path)
        return
    put_archive(FilesystemTree(filesystem), path, lambda tree: _make_equal(filesystem, tree), _check_types)


def _check_types(tree: Tree) -> None:
    for entry in tree.walk():
        if not (entry.is_dir or entry.is_file):
            raise ArchiveError("this filesystem cannot have symlinks and special files", decode(entry.path))


def _make_equal(filesystem: Filesystem, tree: Tree) -> None:
    # Directories are removed whole: with a step for each entry, removals would follow symlinks to directories.
    steps = plan(FilesystemTree(filesystem), tree, whole_directories=True, links=False)
    execute(steps, _FilesystemTarget(filesystem, tree))


class _FilesystemTarget:
    """Implements `protocol.diff.plan.Target`."""

    def __init__(self, filesystem: Filesystem, tree: Tree) -> None:
        self._filesystem = filesystem
        self._tree = tree

    def remove(self, old: TreeEntry) -> None:
        self._filesystem.delete(decode(old.path), recursive=old.is_dir)

    def make_directory(self, new: TreeEntry, old: TreeEntry | None) -> None:
        if old is not None:
            self.remove(old)
        self._filesystem.mkdir(decode(new.path))

    def put(self, new: TreeEntry, old: TreeEntry | None) -> None:
        if old is not None and old.is_dir:
            self.remove(old)
        with self._filesystem.open_write(decode(new.path)) as writer:
            writer.write_all(filled(self._tree.chunks(new.path)))

    def link(self, new: TreeEntry, other: bytes, old: TreeEntry | None) -> None:  # noqa: ARG002 -- the contract's
        raise AssertionError("planned without links")

    def set_metadata(self, new: TreeEntry) -> None:
        """A `Filesystem` has no call for this."""
