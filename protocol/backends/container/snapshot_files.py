"""The files of a container's workspace, or of a remote directory, as a snapshot store reads and writes them.

A restore writes through the mount, in a worker thread: so the kernel and inotify watchers see each change, open files
stay usable, and the same code serves every transport.  A scan reads the helper's bulk listing with the agent transport,
and the mount with the other, after the kernel's caches are invalidated.  If the mount may hide files, the scan reads
the volume instead, so that a snapshot is complete.

If a program in the container changes a file during a restore, and the restore notices it, the file keeps the program's
content.  Only a restore that follows a scan of the mount notices it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any, Final

import trio
from msgspec.structs import replace

from protocol.adapters.path_files import PathFilesTree, Status
from protocol.adapters.volume import VolumeFiles
from protocol.backends.container.agent.helper_transport import HelperTransport
from protocol.backends.container.connection import TransportConnection
from protocol.linux.beneath import DirectoryReference
from protocol.store import DirectorySource, DirectoryTarget, Source, TreeSource
from protocol.store.directory.scan import FileProgress, Scanned, Unreadable
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import Sink
from protocol.tree import CHUNK_BYTES, Chunk, TreeEntry, no_progress, sparse
from protocol.volume import Volume


class ContainerSource:
    """Implements `protocol.store.Source`.  For worker threads that the serving loop started.

    `is_mount_complete`: whether the mount shows all files.
    """

    identity: Final = None

    def __init__(
        self, connection: TransportConnection[Any], mount: DirectoryReference, *, is_mount_complete: bool = True
    ) -> None:
        self._connection = connection
        self._mount = mount
        self._is_mount_complete = is_mount_complete

    def _now(self) -> Source:
        """The source for the present run of the container."""
        transport = self._connection.transport
        if isinstance(transport, HelperTransport):
            return TreeSource(trio.from_thread.run_sync(transport.tree), may_change=True)
        if self._is_mount_complete:
            return DirectorySource(self._mount)
        return TreeSource(_ServedTree(self._connection.volume), may_change=True)

    def scan(
        self, sink: Sink, cache: StatCache, *, unreadable: Unreadable = "fail", progress: FileProgress = no_progress
    ) -> Scanned:
        trio.from_thread.run(self._connection.refresh)
        return self._now().scan(sink, cache, unreadable=unreadable, progress=progress)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._now().read(path, offset, size)

    def chunks(self, path: bytes, size: int) -> Iterator[Chunk]:
        return self._now().chunks(path, size)


class _ServedTree(PathFilesTree):
    """The files of a volume that answers at once, read on the loop that serves it.

    A directory on which something is mounted is not entered; it is empty.
    """

    def __init__(self, volume: Volume) -> None:
        super().__init__(VolumeFiles(volume))

    def _entry(self, path: bytes, node: int, seen: Status) -> TreeEntry:
        return replace(super()._entry(path, node, seen), ctime_ns=seen.ctime_ns)

    def entry(self, path: bytes) -> TreeEntry:
        return trio.from_thread.run_sync(super().entry, path)

    def entries(self, path: bytes) -> list[TreeEntry]:
        try:
            return trio.from_thread.run_sync(super().entries, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return []

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return trio.from_thread.run_sync(super().read, path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        offset = 0
        while chunk := self.read(path, offset, size):
            yield from sparse(chunk)
            offset += len(chunk)


class MountTarget(DirectoryTarget):
    """The root of a mount.  `source` may not know the identity of an entry, which is then replaced without a check."""

    def __init__(self, mount: DirectoryReference, source: Source) -> None:
        super().__init__(mount)
        self.source = source

    def _check(self, directory: int, name: bytes, path: bytes, expected: bytes | None) -> None:
        if expected is not None:
            super()._check(directory, name, path, expected)

    def _place(self, directory: int, temporary: bytes, name: bytes, path: bytes, expected: bytes | None) -> None:
        if expected is not None:
            super()._place(directory, temporary, name, path, expected)
        else:  # not known: something may be there
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
