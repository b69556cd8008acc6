"""Sources: what the page shows, which is the workspaces of the user and the archives that `vfsd web` was given.

Paths are wire paths (`vfsd.wire.messages`): text for any name, which fits into a URL and a page.

Threading: the event loop.  The files of an archive are read in worker threads, one at a time (`ArchiveSource._turn`).
Nothing else is shared between requests: each call to a daemon has a connection of its own.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final, NamedTuple, Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec

from protocol.adapters.path_filesystem import PathFilesystem
from protocol.adapters.trees import TreeFiles
from protocol.archive.mounted import MountedArchive
from protocol.tools import ToolContext
from vfsd.client.async_connection import AsyncControlClient, finish
from vfsd.client.requests import RemoteCall, Requests
from vfsd.client.results import Policy, Snapshot, Status
from vfsd.daemon.control.handlers import fs_calls
from vfsd.machine.runtime import WorkspaceRecord, read_record, read_records
from vfsd.operations.fs import FsEntry, FsLsParams, FsLsResult, FsReadParams, FsReadResult, FsStatParams
from vfsd.wire.messages import wire_path

T = TypeVar("T")
_SILENCE_S: Final = 60  # a daemon that sends nothing for so long is reported
_INDEX_BYTES: Final = 1 << 30  # of memory, for reading the index of an archive


class ArchiveFile(NamedTuple):
    """`hidden`: how many names the archive lacks because the policy of the workspace hides them."""

    path: str
    hidden: int = 0


class Manifest(msgspec.Struct):
    """As in an archive of the state; null where it is not known."""

    version: str
    created_at: str | None
    file_count: int | None
    total_bytes: int | None


class Source(Protocol):
    """A workspace or an archive.  `key` names it in URLs, `title` on the page.

    Every method raises FileNotFoundError for a path or a snapshot that does not exist, and ConnectionError if the
    workspace has ended.  `snapshot` is None for the live state.
    """

    key: str
    title: str

    async def listing(self, path: str, snapshot: str | None, after: str | None, limit: int) -> FsLsResult:
        """List up to `limit` entries of a directory whose names follow `after`, sorted by their bytes."""
        ...

    async def stat(self, path: str, snapshot: str | None) -> FsEntry:
        """Describe the file at `path`."""
        ...

    async def read(self, path: str, snapshot: str | None, offset: int, limit: int) -> tuple[bytes, int]:
        """Return up to `limit` bytes of a file from `offset`, and the size of the file."""
        ...

    async def summary(self, snapshot: str | None) -> tuple[Manifest, dict[str, object]]:
        """Return the manifest that an archive of the state has (unknown values are None), and other facts."""
        ...

    def archive(self, snapshot: str | None) -> AbstractAsyncContextManager[ArchiveFile]:
        """Provide a ZIP archive of the state; the file goes with the context if it was made for it."""
        ...


class WorkspaceSource:
    """A running workspace."""

    def __init__(self, record: WorkspaceRecord) -> None:
        self.record: Final = record
        self.key = self.title = record.name
        self.requests: Final = Requests(record.mountpoint)
        self._reading = AsyncControlClient(record.socket, timeout_s=_SILENCE_S)
        self._changing = AsyncControlClient(record.socket)  # a change is waited for, however long it takes

    async def run(self, call: RemoteCall[T]) -> T:
        """Send a request that only reads."""
        return await self._reading.run(call)

    async def change(self, call: RemoteCall[T]) -> T:
        """Send a request that changes something."""
        return await self._changing.run(call)

    async def snapshots(self, *, changes: bool) -> list[Snapshot]:
        """List the snapshots, oldest first; an empty list if the backend has none."""
        try:
            return await self.run(self.requests.snapshots(changes=changes))
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            return []

    async def snapshot(self, name: str) -> Snapshot:
        """Return the snapshot `name`."""
        for each in await self.snapshots(changes=False):
            if each.name == name:
                return each
        raise FileNotFoundError(errno.ENOENT, f"there is no snapshot {name} (any more)")

    async def status(self) -> Status:
        return await self.run(self.requests.status())

    async def listing(self, path: str, snapshot: str | None, after: str | None, limit: int) -> FsLsResult:
        call: RemoteCall[FsLsResult] = RemoteCall("fs.ls", FsLsParams(path, limit, after, snapshot))
        return await self.run(call)

    async def stat(self, path: str, snapshot: str | None) -> FsEntry:
        call: RemoteCall[FsEntry] = RemoteCall("fs.stat", FsStatParams(path, snapshot))
        return await self.run(call)

    async def read(self, path: str, snapshot: str | None, offset: int, limit: int) -> tuple[bytes, int]:
        pieces: list[bytes] = []
        params = FsReadParams(path, offset, limit, as_bytes=True, snapshot=snapshot)
        call: RemoteCall[FsReadResult] = RemoteCall("fs.read", params, on_output=pieces.append)
        page = await self.run(call)
        return b"".join(pieces), page.total

    async def summary(self, snapshot: str | None) -> tuple[Manifest, dict[str, object]]:
        status = await self.status()
        facts: dict[str, object] = {
            "backend": status.backend,
            "mountpoint": wire_path(os.fsencode(status.mountpoint)),
            "read_only": status.read_only,
            "forked_from": status.forked_from,
            "snapshots": status.snapshots,
        }
        if snapshot is None:
            return Manifest("1", None, status.files, status.size_bytes), facts
        found = await self.snapshot(snapshot)
        facts |= {"kind": found.kind, "tag": found.tag}
        return Manifest("1", found.created_at.isoformat(), found.files, found.size_bytes), facts

    async def policy(self) -> Policy:
        return await self.run(self.requests.policy())

    @asynccontextmanager
    async def archive(self, snapshot: str | None) -> AsyncIterator[ArchiveFile]:
        directory = tempfile.TemporaryDirectory(prefix="vfsd-web-")
        try:
            path = os.path.join(directory.name, "archive.zip")
            made = await self.change(self.requests.export(path, snapshot=snapshot))
            yield ArchiveFile(path, made.hidden)
        finally:
            with anyio.CancelScope(shield=True):
                await finish(directory.cleanup)


class ArchiveSource:
    """A ZIP archive on this host, which is read where it is."""

    def __init__(self, key: str, path: str) -> None:
        """ArchiveError if `path` is no archive of vfsd; OSError."""
        self.key = key
        self.title = os.path.basename(path)
        self.path: Final = path
        self._mounted: Final = MountedArchive(path, reserve=functools.partial(_check_index, path))
        tree = self._mounted
        self._context: Final = ToolContext(PathFilesystem(TreeFiles(tree)), tree=lambda: nullcontext(tree))
        self._turn: Final = anyio.CapacityLimiter(1)

    async def _read(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._turn)

    async def listing(self, path: str, snapshot: str | None, after: str | None, limit: int) -> FsLsResult:
        _no_snapshots(snapshot)
        params = FsLsParams(path, limit, after)
        encoded = await self._read(lambda: fs_calls.list_directory(params, self._context))
        return msgspec.json.decode(b"".join(encoded), type=FsLsResult)

    async def stat(self, path: str, snapshot: str | None) -> FsEntry:
        _no_snapshots(snapshot)
        return await self._read(lambda: fs_calls.stat_path(FsStatParams(path), self._context))

    async def read(self, path: str, snapshot: str | None, offset: int, limit: int) -> tuple[bytes, int]:
        _no_snapshots(snapshot)
        params = FsReadParams(path, offset, limit, as_bytes=True)
        content, page = await self._read(lambda: fs_calls.read_file(params, self._context))
        return content, page.total

    async def summary(self, snapshot: str | None) -> tuple[Manifest, dict[str, object]]:
        _no_snapshots(snapshot)
        mounted = self._mounted
        return Manifest("1", mounted.created_at, mounted.file_count, mounted.total_bytes), {
            "archive": wire_path(os.fsencode(self.path))
        }

    @asynccontextmanager
    async def archive(self, snapshot: str | None) -> AsyncIterator[ArchiveFile]:
        _no_snapshots(snapshot)
        yield ArchiveFile(self.path)

    def close(self) -> None:
        self._mounted.close()


class Sources:
    """All sources.  Use it in a `with` block, which closes the archives."""

    def __init__(self, archives: Sequence[str] = ()) -> None:
        """`archives`: paths of ZIP archives, or of the JSONL files of session dumps, which have one next to them.

        ArchiveError, OSError.
        """
        self.archives: Final[list[ArchiveSource]] = []
        with contextlib.ExitStack() as stack:
            for number, path in enumerate(archives, 1):
                source = ArchiveSource(f"archive:{number}", archive_path(path))  # no workspace has a colon in its name
                stack.callback(source.close)
                self.archives.append(source)
            self._stack = stack.pop_all()

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def records(self) -> list[WorkspaceRecord]:
        """Return the workspaces of the user, those with a dead daemon included."""
        return read_records()

    def find(self, key: str) -> Source:
        """Return the source `key`.  FileNotFoundError if there is none, ConnectionError if its daemon is dead."""
        for source in self.archives:
            if source.key == key:
                return source
        return self.workspace(key)

    def workspace(self, key: str) -> WorkspaceSource:
        """Return the workspace `key`.  Errors as for `find`; FileNotFoundError for an archive."""
        try:
            record = read_record(key)
        except ValueError:
            record = None
        if record is None:
            raise _ended(key)
        record.check_alive()
        return WorkspaceSource(record)

    def only(self) -> str:
        """Return the key of the only source.  FileNotFoundError if there are more, or none."""
        keys = [source.key for source in self.archives]
        keys += [record.name for record in self.records() if record.alive]
        if len(keys) != 1:
            raise FileNotFoundError(errno.ENOENT, f"name a workspace: there are {len(keys)}")
        return keys[0]


def archive_path(path: str) -> str:
    """Return the archive that `path` means: `<id>.fs.zip` for the `<id>.jsonl` of a session dump, else `path`."""
    stem, ending = os.path.splitext(path)
    return os.path.abspath(stem + ".fs.zip" if ending == ".jsonl" else path)


def _no_snapshots(snapshot: str | None) -> None:
    if snapshot is not None:
        raise FileNotFoundError(errno.ENOENT, "an archive has no snapshots")


def _check_index(path: str, count: int) -> None:
    if count > _INDEX_BYTES:
        raise OSError(errno.ENOMEM, f"its index would take {count >> 20} MiB of memory", path)


def _ended(name: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, f"there is no workspace {name}: it was unmounted, or has another name")
