"""AsyncFilesystem: the methods of `WorkspaceFilesystem`, awaited.  For asyncio and trio.

    files = ws.async_filesystem
    before = await files.snapshot(tag="before the edit")
    await files.write("notes/a.txt", "hello")
    async with await files.open_read("large") as reader:
        async for chunk in reader: ...

Each call runs in a worker thread.  A cancelled call that only reads is left at once, and its thread ends later.  A
cancelled call that changes something is waited for, so that nothing is changed after it: a transaction that is
cancelled restores after the last write.

Several calls may run in parallel; calls of one stream may not.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

import anyio

from protocol.filesystem import Filesystem
from protocol.streams import STREAM_CHUNK_BYTES, ByteReader, ByteWriter, TextReader
from protocol.streams.contract import Data, Stream
from protocol.types import FilesystemSnapshot, WriteMode
from vfsd.client.arguments import FilePath
from vfsd.client.async_connection import AsyncControlClient, abandon, finish
from vfsd.client.requests import RemoteCall, SnapshotCalls, errors_of_import, errors_of_restore

if TYPE_CHECKING:  # its import takes longer than the loop may stop
    from vfsd.client.filesystem import WorkspaceFilesystem

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Stream)


def _reading(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[AsyncFilesystem, P], Awaitable[T]]:
    """Make the async twin of a method that changes nothing."""

    @functools.wraps(method)
    async def twin(self: AsyncFilesystem, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await abandon(lambda: getattr(self.blocking(), method.__name__)(*args, **kwargs))

    return twin


def _changing(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[AsyncFilesystem, P], Awaitable[T]]:
    """Make the async twin of a method that changes something."""

    @functools.wraps(method)
    async def twin(self: AsyncFilesystem, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await finish(lambda: getattr(self.blocking(), method.__name__)(*args, **kwargs))

    return twin


class AsyncFilesystem:
    """The async twin of `WorkspaceFilesystem`: the same methods, arguments, results and errors.

    Cancelling `snapshot`, `restore`, `export_archive` or `import_archive` cancels it in the daemon.
    """

    def __init__(
        self,
        mountpoint: str,
        blocking: Callable[[], WorkspaceFilesystem],
        client: AsyncControlClient,
    ) -> None:
        """Use `AsyncWorkspace.async_filesystem`.

        `blocking` returns the twin; only worker threads call it.  `client` calls the daemon.
        """
        self.root: Final = mountpoint
        self.blocking: Final = blocking
        self._client: Final = client
        self._calls: Final = SnapshotCalls(mountpoint, mountpoint)

    async def is_read_only(self) -> bool:
        """Return whether every changing call fails."""
        return await abandon(lambda: self.blocking().read_only)

    read = _reading(Filesystem.read)
    read_bytes = _reading(Filesystem.read_bytes)
    exists = _reading(Filesystem.exists)
    is_file = _reading(Filesystem.is_file)
    is_dir = _reading(Filesystem.is_dir)
    stat = _reading(Filesystem.stat)
    list = _reading(Filesystem.list)
    glob = _reading(Filesystem.glob)
    grep = _reading(Filesystem.grep)
    write = _changing(Filesystem.write)
    write_bytes = _changing(Filesystem.write_bytes)
    delete = _changing(Filesystem.delete)
    mkdir = _changing(Filesystem.mkdir)

    # -- calls to the daemon -------------------------------------------------------------------
    async def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """See `WorkspaceFilesystem.snapshot`."""
        return await self._send(self._calls.snapshot(tag))

    async def get(self, name: str) -> FilesystemSnapshot:
        """See `WorkspaceFilesystem.get`."""
        return await self._send(self._calls.get(name))

    async def restore(self, snapshot: FilesystemSnapshot) -> None:
        """See `WorkspaceFilesystem.restore`."""
        call = self._calls.restore(snapshot)
        with errors_of_restore(snapshot.commit_ref):
            await self._send(call)

    async def export_archive(self, path: FilePath) -> None:
        """See `WorkspaceFilesystem.export_archive`."""
        await self._send(self._calls.export(path))

    async def import_archive(self, path: FilePath) -> None:
        """See `WorkspaceFilesystem.import_archive`."""
        with errors_of_import():
            await self._send(self._calls.import_archive(path))

    async def _send(self, call: RemoteCall[T]) -> T:
        await abandon(lambda: self.blocking().check_mounted())
        return await self._client.run(call)

    # -- streams -------------------------------------------------------------------------------
    async def open_read(self, path: str) -> AsyncByteReader:
        """See `Filesystem.open_read`."""
        return AsyncByteReader(await finish(lambda: self.blocking().open_read(path), undo=_close))

    async def open_write(
        self, path: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> AsyncByteWriter:
        """See `Filesystem.open_write`."""

        def opened() -> ByteWriter:
            return self.blocking().open_write(path, mode=mode, create_parents=create_parents)

        return AsyncByteWriter(await finish(opened, undo=_discard))

    async def open_text(self, path: str, *, encoding: str = "utf-8") -> AsyncTextReader:
        """See `Filesystem.open_text`."""
        opened = await finish(lambda: self.blocking().open_text(path, encoding=encoding), undo=_close)
        return AsyncTextReader(opened)


class _AsyncStream(Generic[S]):
    """What the streams share.  Use them in `async with`, which closes them even if it is cancelled."""

    def __init__(self, stream: S) -> None:
        self._stream = stream

    @property
    def path(self) -> str:
        return self._stream.path

    @property
    def closed(self) -> bool:
        return self._stream.closed

    async def __aenter__(self) -> Self:
        self._stream.__enter__()  # only checks that it is open
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await finish(lambda: self._stream.__exit__(kind, error, at))

    async def close(self) -> None:
        """See `Stream.close`."""
        with anyio.CancelScope(shield=True):
            await finish(self._stream.close)


class AsyncByteReader(_AsyncStream[ByteReader]):
    """The async twin of `protocol.streams.ByteReader`."""

    @property
    def position(self) -> int:
        return self._stream.position

    async def size(self) -> int:
        """Return the file's present size in bytes."""
        return await finish(lambda: self._stream.size)

    async def read(self, size: int = -1) -> bytes:
        """See `ByteReader.read`."""
        return await finish(lambda: self._stream.read(size))

    async def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See `ByteReader.seek`."""
        return await finish(lambda: self._stream.seek(offset, whence))

    def chunks(self, size: int = STREAM_CHUNK_BYTES) -> AsyncIterator[bytes]:
        """See `ByteReader.chunks`."""
        return _InThread(self._stream.chunks(size))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.chunks()


class AsyncTextReader(_AsyncStream[TextReader]):
    """The async twin of `protocol.streams.TextReader`."""

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    @property
    def line_number(self) -> int:
        return self._stream.line_number

    async def readline(self) -> str:
        """See `TextReader.readline`."""
        return await finish(self._stream.readline)

    async def read(self, size: int = -1) -> str:
        """See `TextReader.read`."""
        return await finish(lambda: self._stream.read(size))

    def lines(self, *, strip: bool = False) -> AsyncIterator[str]:
        """See `TextReader.lines`.  Each line is a call in a worker thread: to read all lines fast, use `read`."""
        return _InThread(self._stream.lines(strip=strip))

    def __aiter__(self) -> AsyncIterator[str]:
        return self.lines()


class AsyncByteWriter(_AsyncStream[ByteWriter]):
    """The async twin of `protocol.streams.ByteWriter`."""

    @property
    def bytes_written(self) -> int:
        return self._stream.bytes_written

    async def write(self, data: Data) -> int:
        """See `ByteWriter.write`."""
        return await finish(lambda: self._stream.write(data))

    async def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See `ByteWriter.seek`."""
        return await finish(lambda: self._stream.seek(offset, whence))

    async def write_all(self, chunks: Iterable[Data]) -> int:
        """See `ByteWriter.write_all`.  `chunks` is iterated in a worker thread."""
        return await finish(lambda: self._stream.write_all(chunks))


class _InThread(Generic[T]):
    """An async iterator over `items`.  A worker thread fetches each item."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        found = await finish(lambda: list(itertools.islice(self._items, 1)))
        if not found:
            raise StopAsyncIteration
        return found[0]


def _close(stream: Stream) -> None:
    stream.close()


def _discard(stream: Stream) -> None:
    """Close a writer that nothing was written to, without replacing the file."""
    error = InterruptedError()
    stream.__exit__(InterruptedError, error, None)
