"""The files of a container's workspace, or of a remote directory, as a snapshot store reads and writes them.

A restore writes through the mount, in a worker thread: so the kernel and inotify watchers see each change, open files
stay usable, and the same code serves every transport.  A scan reads the helper's bulk listing with the agent transport,
and the mount with the other, after the kernel's caches are invalidated.

If a program in the container changes a file during a restore, and the restore notices it, the file keeps the program's
content.  Through the agent transport a restore does not notice it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import trio

from protocol.backends.container.agent.helper_transport import HelperTransport
from protocol.backends.container.connection import TransportConnection
from protocol.store import DirectorySource, DirectoryTarget, Source, TreeSource
from protocol.store.directory.scan import FileProgress, Scanned, Unreadable
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import Sink
from protocol.tree import no_progress


class ContainerSource:
    """Implements `protocol.store.Source`.  For worker threads that the serving loop started."""

    identity: Final = None

    def __init__(self, connection: TransportConnection[Any], mountpoint: str) -> None:
        self._connection = connection
        self._mountpoint = mountpoint

    def _now(self) -> Source:
        """The source for the present run of the container."""
        transport = self._connection.transport
        if isinstance(transport, HelperTransport):
            return TreeSource(trio.from_thread.run_sync(transport.tree))
        return DirectorySource(self._mountpoint)

    def scan(
        self, sink: Sink, cache: StatCache, *, unreadable: Unreadable = "fail", progress: FileProgress = no_progress
    ) -> Scanned:
        trio.from_thread.run(self._connection.refresh)
        return self._now().scan(sink, cache, unreadable=unreadable, progress=progress)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._now().read(path, offset, size)

    def chunks(self, path: bytes, size: int) -> Iterator[bytes]:
        return self._now().chunks(path, size)


class MountTarget(DirectoryTarget):
    """A mountpoint.  `source` may not know the identity of an entry; then the entry is replaced without a check."""

    def __init__(self, mountpoint: str, source: Source) -> None:
        super().__init__(os.fsencode(mountpoint))
        self.source = source

    def _check(self, directory: int, name: bytes, path: bytes, expected: bytes | None) -> None:
        if expected is not None:
            super()._check(directory, name, path, expected)

    def _place(self, directory: int, temporary: bytes, name: bytes, path: bytes, expected: bytes | None) -> None:
        if expected is not None:
            super()._place(directory, temporary, name, path, expected)
        else:  # not known: something may be there
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
