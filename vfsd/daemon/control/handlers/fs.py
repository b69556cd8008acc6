"""The `fs.` methods of the control socket: the agent's tools, on the state that the mount shows or, for `fs.ls`,
`fs.stat`, `fs.read`, `fs.glob` and `fs.grep`, on that of a snapshot.

Threading: a method that reads runs in a worker thread, on an immutable tree of the live state, so the mount stays
responsive.  Clients take turns (`vfsd.daemon.control.handlers.fs`); long answers are encoded in slices, and between two
slices a cancelled call ends.
A method that writes is one step on the serving loop: the tool's function on the volume, inside
`SnapshotableVolume.changes`.  It is answered after the kernel's caches are invalidated.
If the volume has no immutable trees, the methods work on the mount itself, in a worker thread.

The methods see everything that programs wrote with write(2), but not the dirty pages of shared mappings: that would
take a syncfs(2) of the whole mount for each call (`MountedVolume.write_back`).  A snapshot does see them.  With a
write-back cache each call does take it, because the kernel may hold what write(2) wrote.

Turns: a worker thread that computes holds the interpreter lock, and each further thread delays the loop that serves the
mount.  So only a few run at a time, and clients take turns in rotation, however much each has queued.  A client is a
process (its pid), because one program may open many connections.  Unread answers are bounded too: while they hold
`held_bytes`, no work starts.  If work waits for that, the client whose answer is unread for longest is dropped.
Invariants, on the serving loop, where `Turns` runs:

- at most `at_once` turns are taken, and each is given back, however the work ends;
- `_queues` holds exactly the clients with waiting work, the next one first;
- while work waits, either all turns are taken or the unread answers reach the limit.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

import msgspec
import trio

from protocol.adapters.host_files import HostFiles, wait_for_lock
from protocol.adapters.path_files import PathFilesTree
from protocol.adapters.path_filesystem import PathFilesystem
from protocol.adapters.trees import TreeFiles
from protocol.adapters.volume import VolumeFilesystem
from protocol.execution.executor import Command
from protocol.execution.runner import CommandLimits, OutputBuffer, feed_bytes
from protocol.search.walk import CancelCheck, never_cancelled
from protocol.tool_messages import (
    EditFileParams,
    EditFileResult,
    GlobParams,
    GrepParams,
    RmParams,
    RmResult,
)
from protocol.tools import ToolContext
from protocol.tree import Tree
from protocol.types import WriteResult
from protocol.volume import USUAL_UMASK, Caller, extended
from protocol.volume_durability import journaled
from protocol.volume_extensions import CacheInvalidation, snapshotable
from vfsd.daemon.audit.service import acting_through_mount
from vfsd.daemon.control.calls import (
    CallContext,
    Encoded,
    host_environment,
    host_text,
    working_directory,
)
from vfsd.daemon.control.handlers import fs_calls
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import SnapshotService, required
from vfsd.kernel.engines.base import repeated
from vfsd.operations.fs import (
    FsEntry,
    FsExecParams,
    FsExecResult,
    FsLsParams,
    FsReadParams,
    FsReadResult,
    FsStatParams,
    FsWriteParams,
)
from vfsd.wire.messages import InvalidParamsError
from vfsd.wire.options import WorkspaceOptions

COMMANDS_AT_ONCE: Final = 16  # of all clients together; further ones wait
_SHORT_LISTING: Final = 1_000  # entries; a longer listing takes turns with searches
_SLICE: Final = 256  # entries of an answer that are encoded in one step: less than a millisecond
_INLINE_BYTES: Final = 64 << 10  # of a command's output; more is sent before the answer, if the client asks for that
_RECORDED_AHEAD_BYTES: Final = 1 << 20  # a smaller change takes a millisecond or two
_ANSWER_BYTES: Final = 16 << 20  # of an encoded list; a longer one is "truncated"

P = TypeVar("P", EditFileParams, GlobParams, GrepParams, RmParams)
T = TypeVar("T")


class FsMethods:
    """The `fs.` verbs of one workspace."""

    def __init__(
        self,
        mounted: MountedVolume,
        options: WorkspaceOptions,
        commands: Commands,
        snapshots: SnapshotService | None = None,
    ) -> None:
        """`snapshots` is None if the backend has none."""
        self._mounted = mounted
        self._snapshots = snapshots
        self._volume = snapshotable(mounted.volume)
        self._options = options
        self._commands = commands
        self._at_once = trio.Semaphore(COMMANDS_AT_ONCE)
        # Separate, so that reading a file does not wait for searches.
        self._quick = Turns(2)
        self._searches = Turns(2)
        self._slices = Slices()

    # -- reading: in a thread, on a tree -------------------------------------------------------------
    async def fs_ls(self, params: FsLsParams, call: CallContext) -> Encoded:
        turns = self._quick if params.limit <= _SHORT_LISTING else self._searches
        return await self._read_in_turn(fs_calls.list_directory, params, call, turns)

    async def fs_stat(self, params: FsStatParams, call: CallContext) -> FsEntry:
        return await self._read_in_turn(fs_calls.stat_path, params, call, self._quick)

    async def fs_read(self, params: FsReadParams, call: CallContext) -> FsReadResult:
        content, page = await self._read_in_turn(fs_calls.read_file, params, call, self._quick)
        self._quick.hold(call, len(content))
        await call.output(content)
        return page

    async def fs_glob(self, params: GlobParams, call: CallContext) -> Encoded:
        return await self._read_in_turn(fs_calls.find_files, params, call, self._searches)

    async def fs_grep(self, params: GrepParams, call: CallContext) -> Encoded:
        return await self._read_in_turn(fs_calls.find_lines, params, call, self._searches)

    async def _read_in_turn(
        self, read: Callable[[Any, ToolContext], T], params: Any, call: CallContext, turns: Turns
    ) -> T:
        """Call `read` in a worker thread when it is the client's turn, on the state of that moment or a snapshot."""
        name: str | None = getattr(params, "snapshot", None)
        with _failing_with_errno():
            async with turns.turn(call):
                bound = functools.partial(read, params)
                if name is None:
                    found = await self._read_tree(bound, call, turns.threads)
                else:
                    async with required(self._snapshots).tree(name, call) as tree:
                        found = await self._in_thread(bound, tree, call, turns.threads)
        if isinstance(found, Encoded):
            turns.hold(call, sum(map(len, found)))
        return found

    async def _read_tree(self, read: Callable[[ToolContext], T], call: CallContext, threads: trio.CapacityLimiter) -> T:
        volume = self._volume
        if volume is None:
            return await self._on_mount(read, call.raise_if_cancelled, threads)
        await self._mounted.write_back_cached()
        with volume.tree() as tree:
            return await self._in_thread(read, self._mounted.shown(tree), call, threads)

    async def _in_thread(
        self, read: Callable[[ToolContext], T], tree: Tree, call: CallContext, threads: trio.CapacityLimiter
    ) -> T:
        """Call `read` on `tree` in a worker thread.  A cancelled call waits for the thread, which uses the tree."""
        root = self._options.mountpoint

        def run() -> T:
            with self._slices.computing(call.raise_if_cancelled) as keep_going:
                files = PathFilesystem(TreeFiles(tree, root=root, keep_going=keep_going))
                return read(ToolContext(files, tree=lambda: nullcontext(tree), keep_going=keep_going))

        return await trio.to_thread.run_sync(run, limiter=threads)

    # -- changing: one step on the loop --------------------------------------------------------------
    async def fs_write(self, params: FsWriteParams, call: CallContext) -> WriteResult:
        content = params.content
        if content is None or params.source is not None:  # read a file, or refuse
            with _failing_with_errno():
                content = await trio.to_thread.run_sync(fs_calls.content_of, params)
        ahead = b"" if params.mode == "append" else content  # blocks of an appended file begin elsewhere
        return await self._change(functools.partial(fs_calls.write_file, params, content), call, ahead, params.umask)

    async def fs_edit(self, params: EditFileParams, call: CallContext) -> EditFileResult:
        return await self._change(functools.partial(fs_calls.edit_file, params), call)

    async def fs_rm(self, params: RmParams, call: CallContext) -> RmResult:
        return await self._change(functools.partial(fs_calls.remove, params), call)

    async def _change(
        self, change: Callable[[ToolContext], T], call: CallContext, content: bytes = b"", umask: int = USUAL_UMASK
    ) -> T:
        """Make `change`, all or nothing, and invalidate the kernel's caches.

        `content`: what it writes to a file; `umask` is the client's.
        """
        volume = self._volume
        if volume is None:
            async with self._mounted.change_lock:
                call.commit()
                with _failing_with_errno():
                    return await self._on_mount(change, never_cancelled, umask=umask)
        caller = Caller(os.getuid(), os.getgid(), umask)
        files = VolumeFilesystem(self._mounted.enforced, root=self._options.mountpoint, caller=caller)
        context = ToolContext(filesystem=files)
        async with self._mounted.change_lock, self._recorded_ahead(content):
            await self._mounted.write_back_cached()
            call.commit()

            def run() -> tuple[T, CacheInvalidation]:
                with volume.changes() as made:
                    result = change(context)
                return result, made.invalidation

            with _failing_with_errno():
                result, invalidation = await repeated(run)
            await self._mounted.invalidate(invalidation)
        return result

    @asynccontextmanager
    async def _recorded_ahead(self, content: bytes) -> AsyncIterator[None]:
        """Write `content`, if it is large, to the journal before the block, so that the block takes less time."""
        journal = journaled(self._mounted.volume)
        if journal is None or len(content) < _RECORDED_AHEAD_BYTES:
            yield
            return
        try:
            for _ in journal.store_content(content):
                await trio.sleep(0)
            yield
        finally:
            journal.drop_stored()

    async def _on_mount(
        self,
        work: Callable[[ToolContext], T],
        keep_going: CancelCheck,
        threads: trio.CapacityLimiter | None = None,
        umask: int | None = None,
    ) -> T:
        """Call `work` on the mount in a worker thread, as any program would.  `umask`: of a client that changes it.

        Each system call is a step of its own, so other programs may make changes in between.
        """
        root, read_only, mounted = self._options.mountpoint, self._options.read_only, self._mounted

        def run() -> T:
            with acting_through_mount():
                if umask is None:
                    files = HostFiles(root, read_only=read_only, mount=mounted.root.mount)
                else:
                    files = _ServedFiles(mounted, read_only=read_only, umask=umask)
                tree = PathFilesTree(files, with_xattrs=False)
                return work(ToolContext(PathFilesystem(files), tree=lambda: nullcontext(tree), keep_going=keep_going))

        with self._mounted.using_mount():
            return await trio.to_thread.run_sync(run, limiter=threads)

    # -- commands --------------------------------------------------------------------------------------
    async def fs_exec(self, params: FsExecParams, call: CallContext) -> FsExecResult:
        command = Command(
            list(map(host_text, params.argv)),
            cwd=working_directory(params.cwd),
            env=params.env,
            environment=host_environment(params.environment),
            has_input=bool(params.stdin),
        )
        output = OutputBuffer()
        async with self._at_once:
            done = await self._commands.run(
                command,
                CommandLimits(params.timeout_s, params.output_limit_bytes),
                on_output=output,
                feed=feed_bytes(params.stdin),
            )
        stdout, stderr = output.stdout, output.stderr
        streamed: int | msgspec.UnsetType = msgspec.UNSET
        if params.stream and len(stdout) + len(stderr) > _INLINE_BYTES:
            await call.output(stdout)
            await call.output(stderr)
            stdout, stderr, streamed = b"", b"", len(stdout)
        return FsExecResult(
            done.exit_status,
            stdout,
            stderr,
            done.timed_out,
            done.truncated,
            done.snapshot,
            done.snapshot_error,
            streamed,
        )


class _ServedFiles(HostFiles):
    """The files of a mount whose directory below other programs change, too: what the kernel has cached does not count.

    For a worker thread.
    """

    def __init__(self, mounted: MountedVolume, *, read_only: bool, umask: int) -> None:
        super().__init__(mounted.mountpoint, read_only=read_only, umask=umask, mount=mounted.root.mount)
        self._engine = mounted.engine
        self._volume = mounted.volume

    def child(self, node: int, name: bytes) -> int:
        with suppress(OSError):  # not cached
            cached = self.status_of(node, name)
            if not stat.S_ISDIR(cached.mode):  # one that a program stands in would have no path for a moment
                self._engine.invalidate_inode(cached.inode, content=True)
                self._engine.invalidate_entry(self.status(node).inode, name)
        return super().child(node, name)

    @contextmanager
    def locked(self, node: int) -> Iterator[None]:
        """Lock the directory below as well, for calls on other mounts of it."""
        with super().locked(node):
            if not self._volume.capabilities.locks:
                yield
                return
            volume = extended(self._volume)
            inode = self.status(node).inode  # here: the serving loop, which answers, must not ask
            try:
                with suppress(OSError):  # the directory may not be readable, or its file system has no locks
                    wait_for_lock(lambda: trio.from_thread.run(repeated, lambda: volume.lock(inode)))
                yield
            finally:
                with suppress(OSError):  # the connection was lost, and the lock with it
                    trio.from_thread.run(repeated, volume.unlock)


@contextmanager
def _failing_with_errno() -> Iterator[None]:
    """Report the ValueErrors of a tool to the client as EINVAL."""
    try:
        yield
    except InvalidParamsError:
        raise
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from None


_SLICE_S: Final = 0.01
_PATIENCE_S: Final = 2.0  # for which an unread answer may delay other clients


class Turns:
    """Work of one kind: `at_once` pieces run at a time, each in a worker thread."""

    def __init__(self, at_once: int, *, held_bytes: int = 64 << 20) -> None:
        """`held_bytes` bounds all unread answers."""
        self.threads = trio.CapacityLimiter(at_once)  # not trio's own limiter, whose threads the mount itself needs
        self._free = at_once
        self._queues: OrderedDict[Hashable, deque[trio.Event]] = OrderedDict()
        self._limit_bytes = held_bytes
        self._held_bytes = 0
        self._unread: dict[CallContext, tuple[float, int]] = {}  # start of the wait and size in bytes; the oldest first

    @asynccontextmanager
    async def turn(self, call: CallContext) -> AsyncIterator[None]:
        """Wait for a turn, and hold it for the length of the block, which works in one thread of `threads`."""
        granted = trio.Event()
        self._queues.setdefault(call.client, deque()).append(granted)
        self._grant()
        try:
            while not granted.is_set():
                with trio.move_on_after(_PATIENCE_S):
                    await granted.wait()
                self._drop_slowest_reader()
        except BaseException:
            if not self._dequeue(call.client, granted):
                self._give_back()
            raise
        try:
            yield
        finally:
            self._give_back()

    def hold(self, call: CallContext, size_bytes: int) -> None:
        """Count an answer of `size_bytes` until the client has read it or disconnects."""
        self._unread[call] = trio.current_time(), size_bytes
        self._held_bytes += size_bytes
        call.after_answer(partial(self._let_go, call))

    def _let_go(self, call: CallContext) -> None:
        self._held_bytes -= self._unread.pop(call)[1]
        self._grant()

    # -- the queue ------------------------------------------------------------------------------------
    def _dequeue(self, client: Hashable, granted: trio.Event) -> bool:
        """Remove cancelled work from the queue; False if it has its turn already."""
        if granted.is_set():
            return False
        queue = self._queues[client]
        queue.remove(granted)
        if not queue:
            del self._queues[client]
        return True

    def _grant(self) -> None:
        while self._free and self._queues and self._held_bytes < self._limit_bytes:
            client, queue = self._queues.popitem(last=False)
            queue.popleft().set()
            self._free -= 1
            if queue:
                self._queues[client] = queue  # at the end, after all other clients

    def _give_back(self) -> None:
        self._free += 1
        self._grant()

    def _drop_slowest_reader(self) -> None:
        """If unread answers delay other clients for too long, drop the client of the oldest one."""
        if self._held_bytes < self._limit_bytes or not self._unread:
            return
        call, (since, _) = next(iter(self._unread.items()))
        if trio.current_time() - since >= _PATIENCE_S:
            call.drop_client(f"its answer waited to be read for {_PATIENCE_S:g} s while others waited for their turn")


class Slices:
    """Lets several worker threads compute in rotation, one at a time, for some milliseconds each.

    If they computed in parallel, passing the interpreter lock would cost more than half of the time, because
    `vfsd.machine.interpreter` makes the switches frequent for the mount.  In rotation a short search does not wait for
    the end of a long one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def computing(self, keep_going: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Compute inside the block, which calls the returned function regularly instead of `keep_going`."""
        self._take()
        until_s = monotonic() + _SLICE_S

        def checkpoint() -> None:
            nonlocal until_s
            keep_going()
            if self._waiting and monotonic() >= until_s:
                self._pass_on()
                self._take()
                until_s = monotonic() + _SLICE_S

        try:
            yield checkpoint
        finally:
            self._pass_on()

    def _take(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            handed_over = threading.Lock()
            handed_over.acquire()
            self._waiting.append(handed_over)
        handed_over.acquire()

    def _pass_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
