"""Snapshots of a container's workspace: kept in the store on disk, like those of a host directory.

Restored is through the mount itself, by a thread: so the kernel and who watches see each change, what programs have
open they keep, and one way serves every transport.  Looked at is, through the agent transport, what the helper lists in
bulk; through the other the mount, after the kernel has forgotten what it knows, which may be of a moment ago.

What a container changes while its workspace is restored, and that no snapshot has, is left alone where it is noticed;
through the agent transport it is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import trio

from protocol.backends.container.agent.transport import AgentTransport
from protocol.backends.container.connection import ContainerConnection
from protocol.store import DirectorySource, DirectoryTarget, Source, Store, TreeSource
from protocol.store.directory.scan import FileProgress, Scanned, Unreadable, no_progress
from protocol.store.directory.statcache import StatCache
from protocol.store.format.blobs import Sink
from vfsd.daemon.snapshots.stored import Stored

__all__ = ["stored_container"]


def stored_container(store: Store, key: str, connection: ContainerConnection, mountpoint: str) -> Stored:
    """Where the snapshots of the workspace behind `connection`, mounted at `mountpoint`, are kept and taken."""
    source = _ContainerSource(connection, mountpoint)
    return Stored(store, key, source, _MountTarget(mountpoint, source))


class _ContainerSource:
    """Implements `protocol.store.Source`; for worker threads of the serving loop's."""

    identity: Final = None

    def __init__(self, connection: ContainerConnection, mountpoint: str) -> None:
        self._connection = connection
        self._mountpoint = mountpoint

    def _now(self) -> Source:
        """What is looked at: of this run of the container."""
        transport = self._connection.transport
        if isinstance(transport, AgentTransport):
            return TreeSource(trio.from_thread.run_sync(transport.tree))
        return DirectorySource(self._mountpoint)

    def scan(
        self, sink: Sink, cache: StatCache, *, trusted: bool, unreadable: Unreadable = "fail",
        progress: FileProgress = no_progress,
    ) -> Scanned:  # fmt: skip
        trio.from_thread.run(self._connection.refresh)
        return self._now().scan(sink, cache, trusted=trusted, unreadable=unreadable, progress=progress)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._now().read(path, offset, size)

    def chunks(self, path: bytes, size: int) -> Iterator[bytes]:
        return self._now().chunks(path, size)


class _MountTarget(DirectoryTarget):
    """A mountpoint, of which `source` may not know what was seen of an entry."""

    def __init__(self, mountpoint: str, source: Source) -> None:
        super().__init__(os.fsencode(mountpoint))
        self._looked_at = source

    @property
    def source(self) -> Source:
        return self._looked_at

    def _check(self, directory: int, name: bytes, path: bytes, expected: bytes | None) -> None:
        if expected is not None:
            super()._check(directory, name, path, expected)

    def _place(self, directory: int, temporary: bytes, name: bytes, path: bytes, expected: bytes | None) -> None:
        if expected is not None:
            super()._place(directory, temporary, name, path, expected)
        else:  # not known, which does not mean that nothing is there
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
