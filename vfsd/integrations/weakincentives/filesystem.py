"""VfsdFilesystem: WINK's `HostFilesystem` on a mount, with the workspace's snapshots.

WINK's adapters take the agent's working directory only from a `HostFilesystem`; with any other filesystem the agent
edits another directory.  Files are therefore read and written by WINK's own code, through the mount.  Snapshots and
restores are calls to the daemon instead of git commits: they include files that git ignores, and take milliseconds.

Threading: any thread; the object has no state but the workspace's name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from uuid import NAMESPACE_URL, UUID, uuid5

from weakincentives.errors import SnapshotError, SnapshotRestoreError, WinkError
from weakincentives.filesystem import FilesystemSnapshot, HostByteWriter, HostFilesystem, WriteResult, normalize_path

from protocol.errors import NotMountedError
from protocol.tools.base import FileDeleted, FileWritten
from protocol.types import FilesystemSnapshot as WorkspaceSnapshot
from vfsd.client.workspace import Workspace
from vfsd.integrations.files import name_of
from vfsd.machine.runtime import socket_path

Mode: TypeAlias = Literal["create", "overwrite", "append"]


class WorkspaceUnavailableError(WinkError, RuntimeError):
    """The workspace is not mounted any more, or its daemon has died."""


class VfsdFilesystem(HostFilesystem):
    """Implements WINK's `SnapshotableFilesystem` for a workspace: an object, or what `Workspace.attach` takes.

    `read_only` refuses changes through this object.  Each file that is written and each deletion is published to
    `workspace.filesystem.events` after the change.

    FileNotFoundError if there is no such workspace, ConnectionError if its daemon is dead.  After an unmount, methods
    raise WorkspaceUnavailableError, and those of snapshots WINK's SnapshotError and SnapshotRestoreError.
    """

    def __init__(self, workspace: Workspace | str, *, read_only: bool = False) -> None:
        self.workspace: Final = workspace if isinstance(workspace, Workspace) else Workspace.attach(name_of(workspace))
        self.workspace.status()  # ConnectionError without a daemon
        super().__init__(_root=self.workspace.path, _read_only=read_only or self.workspace.filesystem.read_only)

    # -- snapshots ----------------------------------------------------------------------------
    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Take a snapshot of the workspace: O(1) in memory and overlays.  SnapshotError.

        Its name in the workspace, which `vfsd snapshots` lists, is `commit_ref`.  It can be restored by every later
        program, as long as the workspace has it.
        """
        with _raised_as(SnapshotError, f"no snapshot of the workspace {self.workspace.name} could be taken"):
            return self._for_wink(self.workspace.filesystem.snapshot(tag=tag))

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Make the workspace equal to `snapshot`, which any program may have taken.  SnapshotRestoreError.

        Files that do not differ are not touched.  `workspace.undo()` takes the restore back.
        """
        taken = WorkspaceSnapshot(
            snapshot.commit_ref, snapshot.created_at, snapshot.commit_ref, snapshot.root_path, snapshot.tag
        )
        with _raised_as(SnapshotRestoreError, f"the snapshot {snapshot.commit_ref} could not be restored"):
            self.workspace.filesystem.restore(taken)

    def get(self, name: str) -> FilesystemSnapshot:
        """Return the snapshot that is called `name` in the workspace.  SnapshotError if there is none."""
        with _raised_as(SnapshotError, f"the snapshot {name} could not be looked up"):
            return self._for_wink(self.workspace.filesystem.get(name))

    @property
    def git_dir(self) -> str:
        """The path of what holds the snapshots: the workspace's control socket.  There is no git repository."""
        return socket_path(self.workspace.name)

    def cleanup(self) -> None:
        """Do nothing: the snapshots belong to the workspace, and later programs may restore them."""

    def _for_wink(self, taken: WorkspaceSnapshot) -> FilesystemSnapshot:
        return FilesystemSnapshot(
            snapshot_id=_id_of(taken),
            created_at=taken.created_at,
            commit_ref=taken.commit_ref,
            root_path=taken.root_path,
            git_dir=self.git_dir,
            tag=taken.tag,
        )

    # -- changes, published -------------------------------------------------------------------
    def write(self, path: str, content: str, *, mode: Mode = "overwrite", create_parents: bool = True) -> WriteResult:
        return self._written(super().write(path, content, mode=mode, create_parents=create_parents))

    def write_bytes(
        self, path: str, content: bytes, *, mode: Mode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        return self._written(super().write_bytes(path, content, mode=mode, create_parents=create_parents))

    def open_write(self, path: str, *, mode: Mode = "overwrite", create_parents: bool = True) -> HostByteWriter:
        writer = super().open_write(path, mode=mode, create_parents=create_parents)
        return _PublishingWriter(
            _path=writer._path,  # noqa: SLF001 the fields of that dataclass
            _handle=writer._handle,  # noqa: SLF001
            _final_path=writer._final_path,  # noqa: SLF001
            _temp_path=writer._temp_path,  # noqa: SLF001
            publish=self._publish_written,
        )

    def delete(self, path: str, *, recursive: bool = False) -> None:
        entries = _count_entries(self._resolve_path(path)) if recursive else 1
        super().delete(path, recursive=recursive)
        self.workspace.filesystem.events(FileDeleted(normalize_path(path), entries))

    def _written(self, result: WriteResult) -> WriteResult:
        self._publish_written(result.path, result.bytes_written)
        return result

    def _publish_written(self, path: str, bytes_written: int) -> None:
        self.workspace.filesystem.events(FileWritten(path, bytes_written))

    def _resolve_path(self, path: str) -> Path:
        """Resolve as WINK does.  WorkspaceUnavailableError if the root is only a directory of the host by now."""
        try:
            self.workspace.check_mounted()
        except NotMountedError:
            text = f"the workspace {self.workspace.name} is not mounted any more (`vfsd list` lists workspaces)"
            raise WorkspaceUnavailableError(text) from None
        resolved: Path = super()._resolve_path(path)
        return resolved


@dataclass(slots=True)
class _PublishingWriter(HostByteWriter):
    """WINK's writer; calls `publish` with the path and the number of bytes when the content is in the workspace."""

    publish: Callable[[str, int], None] = lambda _path, _bytes: None

    def close(self) -> None:
        if not self._closed:
            HostByteWriter.close(self)
            self.publish(self._path, self._bytes_written)

    def _abort(self) -> None:
        if not self._closed:
            HostByteWriter._abort(self)  # noqa: SLF001 the base class
            if self._final_path is None and self._bytes_written:  # appended data stays
                self.publish(self._path, self._bytes_written)


def _id_of(taken: WorkspaceSnapshot) -> UUID:
    """Return the same id for the same snapshot in every program."""
    return uuid5(NAMESPACE_URL, f"vfsd:{taken.root_path}:{taken.commit_ref}:{taken.created_at.isoformat()}")


def _count_entries(path: Path) -> int:
    """Count a file or directory and all that is below it; 1 for what does not exist."""
    return 1 + sum(len(directories) + len(files) for _, directories, files in os.walk(path))


@contextmanager
def _raised_as(kind: Callable[[str], Exception], failed: str) -> Iterator[Any]:
    """Raise WINK's error `kind` for the block's own errors."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise kind(f"{failed}: {error}") from error
