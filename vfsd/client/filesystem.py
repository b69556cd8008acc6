"""WorkspaceFilesystem: the files of a running workspace, with the workspace's own snapshots.

    files = workspace.filesystem
    before = files.snapshot(tag="before the edit")
    files.write("notes/a.txt", "hello")  # every program in the mount sees it
    files.restore(before)  # so does the restore: the kernel's caches are invalidated before it returns

Files are read and written through the mount, as `protocol.HostFilesystem` does.  Snapshots, restores and archives are
calls to the daemon: a snapshot has a name, which `vfsd snapshots` lists and every later program can restore.

`files.events.subscribe(print)` calls `print` with a `FileWritten` for each file that is written through this object,
and with a `FileDeleted` for each deletion, after the change.

Threading: any thread, several at a time.  Two restores are made one after the other, by the daemon.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self, TypeVar

from protocol.adapters.host import HostFilesystem
from protocol.linux.syscalls import MountId
from protocol.paths import normalise
from protocol.streams import ByteWriter, Data
from protocol.tools.base import EventHook, FileDeleted, FileWritten
from protocol.types import FilesystemSnapshot, WriteMode, WriteResult
from vfsd.client.arguments import FilePath
from vfsd.client.connection import ControlClient
from vfsd.client.requests import RemoteCall, SnapshotCalls, errors_of_import, errors_of_restore

T = TypeVar("T")


class WorkspaceFilesystem(HostFilesystem):
    """Implements `protocol.filesystem.SnapshotableFilesystem` for the workspace mounted at `mountpoint`.

    No path leads outside the mount; symlinks are followed within it.  Errors besides the contract's: OSError
    (EOPNOTSUPP) if the backend has no snapshots, ConnectionError if the daemon is gone or the workspace is not mounted
    any more, whatever is at its path now.
    """

    def __init__(self, mountpoint: str, socket_path: str, mount: MountId) -> None:
        super().__init__(mountpoint, mount=mount)
        # Called with the changes that are made through this object, and with no others.
        self.events: Final = EventHook()
        self._calls: Final = SnapshotCalls(mountpoint, self.root)
        self._socket_path = socket_path

    def open_write(self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True) -> ByteWriter:
        """See `Filesystem`.  `write` and `write_bytes` come here, too."""
        return _PublishingWriter(super().open_write(path, mode=mode, create_parents=create_parents), mode, self.events)

    def replace_bytes(self, path: str, old: bytes, new: bytes) -> WriteResult | None:
        """See `ComparingFilesystem`."""
        written = super().replace_bytes(path, old, new)
        if written is not None:
            self.events(FileWritten(written.path, written.bytes_written))
        return written

    def delete(self, path: str, *, recursive: bool = False) -> int:
        """See `Filesystem`."""
        entries = super().delete(path, recursive=recursive)
        self.events(FileDeleted(normalise(path), entries))
        return entries

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Take a snapshot of the workspace.  Its name, which the daemon chooses, is `commit_ref`.

        The snapshot lives as long as the workspace's others do, not only as long as this object.  RuntimeWarning if
        there are files that the daemon could not read, or that changed while it read them ("host:DIR" and containers).
        """
        return self._send(self._calls.snapshot(tag))

    def get(self, name: str) -> FilesystemSnapshot:
        """Return the snapshot `name`, which another program may have taken.  SnapshotNotFoundError."""
        return self._send(self._calls.get(name))

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Make the workspace equal to `snapshot`.  Files that do not differ are not touched; `undo` takes it back.

        SnapshotNotFoundError also if the name now belongs to a snapshot that was taken at another time.  OSError (EIO)
        if single paths could not be restored ("host:DIR" and containers): the message names them, and the others were
        restored.
        """
        call = self._calls.restore(snapshot)
        with errors_of_restore(snapshot.commit_ref):
            self._send(call)

    def export_archive(self, path: FilePath) -> None:
        """See `SnapshotableFilesystem`.  ValueError for the file name of another kind of archive, such as "a.tar".

        The daemon writes the archive, as its user.
        """
        self._send(self._calls.export(path))

    def import_archive(self, path: FilePath) -> None:
        """See `SnapshotableFilesystem`.  The daemon reads the archive, as its user; `undo` takes the import back."""
        with errors_of_import():
            self._send(self._calls.import_archive(path))

    def check_mounted(self) -> None:
        """Raise NotMountedError if the workspace is not mounted any more, or its daemon has died."""
        self._store.release(self._store.top(begins=True))

    def _send(self, call: RemoteCall[T]) -> T:
        self.check_mounted()  # a workspace of the same name may have the socket by now
        with ControlClient(self._socket_path) as client:
            return client.run(call)


class _PublishingWriter:
    """Implements `ByteWriter` over `writer`; publishes a `FileWritten` when the content is in the workspace."""

    def __init__(self, writer: ByteWriter, mode: WriteMode, events: EventHook) -> None:
        self._writer: Final = writer
        self._mode: Final = mode
        self._events: Final = events

    @property
    def path(self) -> str:
        return self._writer.path

    @property
    def closed(self) -> bool:
        return self._writer.closed

    @property
    def bytes_written(self) -> int:
        return self._writer.bytes_written

    def write(self, data: Data) -> int:
        return self._writer.write(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._writer.seek(offset, whence)

    def write_all(self, chunks: Iterable[Data]) -> int:
        return self._writer.write_all(chunks)

    def close(self) -> None:
        if not self._writer.closed:
            self._writer.close()
            self._publish()

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._writer.closed:
            self._writer.__exit__(kind, error, traceback)
            if self._mode == "append" and self._writer.bytes_written:  # appended data stays
                self._publish()

    def _publish(self) -> None:
        self._events(FileWritten(self._writer.path, self._writer.bytes_written))
