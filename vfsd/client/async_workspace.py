"""The Python API for asyncio and trio: `Workspace` with the same methods, awaited.

    async with AsyncWorkspace.mount("/tmp/work") as ws:
        await ws.snapshot("turn-1")
        await ws.async_filesystem.write("a.txt", "hello")
        await ws.async_executor.run(["make", "test"])
        await ws.restore("turn-1")

No method blocks the loop: file-system work, conversions of large answers and the start of a daemon run in worker
threads.

Cancelling a call cancels it in the daemon.  A restore, and every other call that changes something, either stops and
has changed nothing, or completes if it has begun to change something.  The cancelled call waits for that answer, for up
to 3 s; then `last_cancelled` and a note on the exception say what became of it.  Other calls are left at once.

`AsyncFilesystem` runs each call of a `WorkspaceFilesystem` in a worker thread.  A cancelled call that only reads is
left at once, and its thread ends later.  A cancelled call that changes something is waited for, so that nothing is
changed after it: a transaction that is cancelled restores after the last write.  Several calls may run in parallel;
calls of one stream may not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack

import anyio
from msgspec.structs import replace

from protocol.filesystem import Filesystem
from protocol.streams import STREAM_CHUNK_BYTES, ByteReader, ByteWriter, Data, Stream, TextReader
from protocol.types import FilesystemSnapshot, WriteMode
from vfsd.client.arguments import (
    FilePath,
    MountArguments,
    attach_options,
    fork_target,
    mount_options,
    running_workspace,
)
from vfsd.client.async_connection import AsyncControlClient, AsyncWorkspaceExecutor, CancelledCall, abandon, finish
from vfsd.client.connection import daemon_end
from vfsd.client.requests import RemoteCall, Requests, SnapshotCalls, errors_of_import, errors_of_restore
from vfsd.client.results import Unmounted, Upgraded
from vfsd.client.transaction import BaseTransaction, OpenTransactions, Steps
from vfsd.client.workspace import (
    Workspace,
    WorkspaceBase,
    described,
    end_timeout_s,
    launch_workspace,
    unmounting,
)
from vfsd.machine.runtime import WorkspaceRecord
from vfsd.wire.options import Ready

if TYPE_CHECKING:
    from datetime import datetime

    from vfsd.client.arguments import UserPath
    from vfsd.client.filesystem import WorkspaceFilesystem
    from vfsd.client.log import LoggedChange, Missed

P = ParamSpec("P")
T = TypeVar("T")

# anyio imports its half for the running loop at its first use.  That takes 20 ms, in which the loop would stand still.
for _loop in ("asyncio", "trio"):
    if _loop in sys.modules:
        with contextlib.suppress(ImportError):  # not a public name
            importlib.import_module(f"anyio._backends._{_loop}")


def _awaitable(
    build: Callable[Concatenate[Requests, P], RemoteCall[T]],
) -> Callable[Concatenate[AsyncWorkspace, P], Awaitable[T]]:
    """Make a method of `AsyncWorkspace` that sends the request of a method of `Requests`."""
    takes_paths = "paths" in inspect.signature(build).parameters

    async def method(workspace: AsyncWorkspace, /, *args: P.args, **kwargs: P.kwargs) -> T:
        build_it = functools.partial(build, workspace._requests, *args, **kwargs)  # noqa: SLF001 a method of that class
        # An absolute path is resolved on the file system.
        call = await abandon(build_it) if takes_paths and (args or kwargs) else build_it()
        return await workspace._client.run(call)  # noqa: SLF001 likewise

    return described(method, build)


class Opening:
    """A workspace that is being mounted or attached: use `async with` or `await`."""

    def __init__(self, open_it: Callable[[], Awaitable[AsyncWorkspace]]) -> None:
        self._open_it = open_it
        self._workspace: AsyncWorkspace | None = None

    def __await__(self) -> Generator[Any, Any, AsyncWorkspace]:
        return self._open_it().__await__()

    async def __aenter__(self) -> AsyncWorkspace:
        self._workspace = await self
        return await self._workspace.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._workspace is not None, "entered before it is left"
        await self._workspace.__aexit__(kind, error, at)


class AsyncWorkspace(WorkspaceBase):
    """`Workspace` for asyncio and trio: the same methods, awaited.  See the module's docstring.

    `filesystem` and `executor` are the blocking ones, for code in worker threads.
    """

    def __init__(self, daemon: Ready | WorkspaceRecord, *, unmount_at_exit: bool) -> None:
        """Use `mount` or `attach`."""
        super().__init__(daemon, unmount_at_exit=unmount_at_exit)
        self._client: Final = AsyncControlClient(
            daemon.socket, instance=self.instance, on_cancelled=self._note_cancelled
        )
        self._last_cancelled: CancelledCall | None = None

    @classmethod
    def mount(
        cls,
        path: FilePath,
        backend: str = "memory",
        *,
        create: bool = True,
        fork_server: bool = True,
        **arguments: Unpack[MountArguments],
    ) -> Opening:
        """As `Workspace.mount`.  If it is cancelled, it waits until the mount answers, and unmounts it."""

        def start() -> Ready:
            options = mount_options(path, backend, **arguments)
            return launch_workspace(options, create=create, fork_server=fork_server)

        return cls._started(start)

    @classmethod
    def attach_directory(cls, path: FilePath, *, name: str | None = None, store: FilePath | None = None) -> Opening:
        """As `Workspace.attach_directory`."""

        def start() -> Ready:
            return launch_workspace(attach_options(path, name=name, store=store), create=False, fork_server=False)

        return cls._started(start)

    @classmethod
    def _started(cls, start: Callable[[], Ready]) -> Opening:
        def give_up(ready: Ready) -> None:
            with Workspace(ready, unmount_at_exit=True):
                pass

        async def mounted() -> AsyncWorkspace:
            ready = await finish(start, undo=give_up)
            return cls(ready, unmount_at_exit=True)

        return Opening(mounted)

    @classmethod
    def attach(cls, selector: str | None = None) -> Opening:
        """As `Workspace.attach`."""

        async def found() -> AsyncWorkspace:
            return cls(await abandon(lambda: running_workspace(selector)), unmount_at_exit=False)

        return Opening(found)

    async def __aenter__(self) -> Self:
        self._not_left()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._unmount_at_exit:
            # Shielded: a cancelled block unmounts its workspace, too.
            with unmounting(self), anyio.CancelScope(shield=True):
                await self.unmount(lazy=True)

    @property
    def async_filesystem(self) -> AsyncFilesystem:
        """The async twin of `filesystem`."""
        return AsyncFilesystem(self.path, lambda: self.filesystem, self._client)

    @property
    def async_executor(self) -> AsyncWorkspaceExecutor:
        """The async twin of `executor`: `await ws.async_executor.run(["make", "test"])`."""
        return AsyncWorkspaceExecutor(self._client, self._daemon.socket, self.instance)

    @property
    def last_cancelled(self) -> CancelledCall | None:
        """The call that was cancelled last, and what became of it; None if there is none.

        It has the calls that change something and those of `async_executor`; the others have no effect.
        """
        return self._last_cancelled

    def _note_cancelled(self, call: CancelledCall) -> None:
        self._last_cancelled = call

    def transaction(self, tag: str | None = None) -> AsyncTransaction:
        """As `Workspace.transaction`, for `async with`.  A block that is cancelled is undone, too."""
        return AsyncTransaction(self._requests, self._transactions, tag, self._client.run)

    def fork(self, path: FilePath, *, name: str | None = None, snapshot: str | None = None) -> Opening:
        """As `Workspace.fork`: use `async with` or `await`."""

        async def forked() -> AsyncWorkspace:
            target = fork_target(path, name)
            chosen, mountpoint = await abandon(target.__enter__)
            try:
                ready = await self._client.run(self._requests.fork(chosen, mountpoint, snapshot))
            except BaseException as error:
                with anyio.CancelScope(shield=True):
                    await finish(functools.partial(target.__exit__, type(error), error, None))
                raise
            return type(self)(ready, unmount_at_exit=True)

        return Opening(forked)

    snapshot = _awaitable(Requests.snapshot)
    snapshots = _awaitable(Requests.snapshots)
    drop = _awaitable(Requests.drop)
    restore = _awaitable(Requests.restore)
    undo = _awaitable(Requests.undo)
    redo = _awaitable(Requests.redo)
    apply = _awaitable(Requests.apply)
    discard = _awaitable(Requests.discard)
    merge = _awaitable(Requests.merge)
    adopt = _awaitable(Requests.adopt)
    conflicts = _awaitable(Requests.conflicts)
    revert = _awaitable(Requests.revert)
    diff = _awaitable(Requests.diff)
    patch = _awaitable(Requests.patch)
    export = _awaitable(Requests.export)
    import_archive = _awaitable(Requests.import_archive)
    log = _awaitable(Requests.log)
    policy = _awaitable(Requests.policy)
    status = _awaitable(Requests.status)

    @contextlib.asynccontextmanager
    async def follow(
        self, *paths: UserPath, since: str | datetime | None = None, by: int | str | None = None
    ) -> AsyncGenerator[AsyncIterator[LoggedChange | Missed]]:
        """As `Workspace.follow`, for `async with` and `async for`."""
        # Start-up: few programs follow.
        from vfsd.client.log import Following, watched_change  # noqa: PLC0415

        request = await abandon(lambda: self._requests.watch(paths, since, by))  # resolves absolute paths
        following = Following(self._daemon, request.params)

        async def changes() -> AsyncGenerator[LoggedChange | Missed]:
            while True:
                client = AsyncControlClient(following.socket, instance=self.instance)
                try:
                    async with contextlib.aclosing(client.stream(following.call)) as pieces:
                        async for piece in pieces:
                            for record in following.feed(piece):
                                yield watched_change(record)
                except OSError as error:
                    if not await abandon(functools.partial(following.goes_on_after, error)):
                        raise
                else:
                    return

        async with contextlib.aclosing(changes()) as found:
            await anext(found)  # the watch has begun
            yield found

    @contextlib.asynccontextmanager
    async def label(self, label: str) -> AsyncGenerator[None]:
        """As `Workspace.label`, for `async with`.  It applies to the whole process, so to its other tasks as well."""
        await self._client.run(self._requests.label(label))
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._client.run(self._requests.label(None))

    async def upgrade(self) -> Upgraded:
        """As `Workspace.upgrade`."""
        # Start-up: upgrades are rare.
        from vfsd.client.log import after_lost_upgrade  # noqa: PLC0415

        old = await abandon(self._newest_pid)
        request = self._requests.upgrade(old)
        try:
            upgraded = await self._client.run(request)
        except ConnectionResetError:
            upgraded = request.result(await abandon(lambda: after_lost_upgrade(self.name, self.path, old)))
        self._daemon = replace(self._daemon, pid=upgraded.pid)
        return upgraded

    async def unmount(self, *, lazy: bool = False) -> Unmounted:
        """As `Workspace.unmount`."""
        if self._unmounted is None:
            with daemon_end(self._newest_pid()) as wait_ended:
                self._unmounted = await self._client.run(self._requests.unmount(lazy=lazy))
                self._not_left()
                await finish(functools.partial(wait_ended, end_timeout_s(self._unmounted)))
        return self._unmounted


class AsyncTransaction(BaseTransaction):
    """An async context manager.  A block that is cancelled is undone as well: the restore is shielded."""

    def __init__(
        self,
        requests: Requests,
        others: OpenTransactions,
        tag: str | None,
        run: Callable[[RemoteCall[Any]], Awaitable[Any]],
    ) -> None:
        """Use `AsyncWorkspace.transaction`.  `run` sends a request and returns its answer."""
        super().__init__(requests, others, tag)
        self._run = run

    async def __aenter__(self) -> Self:
        await self._drive(self._begin(), shield=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._drive(self._end(error), shield=True)

    async def _drive(self, steps: Steps, *, shield: bool) -> None:
        """Run `steps`.  The steps after a failed one clean up, and are shielded from cancellation, too."""
        cancelled: list[BaseException] = []
        with anyio.CancelScope(shield=shield) as scope, contextlib.suppress(StopIteration):
            call = next(steps)
            while True:
                try:
                    answer = await (self._run_to_end(call, cancelled) if scope.shield else self._run(call))
                except BaseException as error:  # noqa: BLE001 the steps handle it, or raise it again
                    scope.shield = True
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        if cancelled:
            raise cancelled[0]

    async def _run_to_end(self, call: RemoteCall[Any], cancelled: list[BaseException]) -> Any:
        """Run `call`, and add to `cancelled` what asyncio's `Task.cancel` raised meanwhile.

        A shielded scope alone does not keep that from ending an await of this task; a task group waits for its tasks.
        """
        outcome: list[tuple[Any, BaseException | None]] = []

        async def run() -> None:
            with anyio.CancelScope(shield=True):
                try:
                    outcome.append((await self._run(call), None))
                except BaseException as error:  # noqa: BLE001 raised below
                    outcome.append((None, error))

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(run)
        except BaseException as error:
            if not outcome:
                raise
            cancelled.append(error)
        answer, failure = outcome[0]
        if failure is not None:
            raise failure
        return answer


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
    """Base of the streams.  Use them in `async with`, which closes them even if it is cancelled."""

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
