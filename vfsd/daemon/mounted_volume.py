"""MountedVolume: a volume that an engine serves, and the changes to it that do not come through the mount.

Each such change (restore, import, `vfsd fs`) takes three steps:

1. hold `change_lock`, so that there is only one at a time;
2. `write_back`, so that dirty pages are in the volume before its state is kept or replaced;
3. make the change with one call on the volume, and `invalidate` the kernel's caches before the answer.

Threading: the serving loop.  The mount shows the change whole or not at all, because step 3 does not await between the
call and the invalidation's start.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol

import trio

from protocol.linux.syscalls import syncfs
from protocol.tree import Tree
from protocol.volume import Volume
from protocol.volume_durability import journaled
from protocol.volume_extensions import CacheInvalidation, OverlaidVolume, overlaid, snapshotable
from vfsd.daemon.audit.log import changed_paths
from vfsd.daemon.audit.service import record
from vfsd.kernel.engines.base import Engine, PruningEngine
from vfsd.kernel.inotify import FileState, Replay
from vfsd.kernel.invalidation import invalidate_kernel_caches, known_inodes, split_moved_directories
from vfsd.machine.logs import log_failure
from vfsd.machine.mountinfo import WorkspaceRoot
from vfsd.operations.declaration import CacheChoice

if TYPE_CHECKING:
    from vfsd.daemon.policy.service import Policy
    from vfsd.daemon.snapshots.directory import SnapshotDirectory

_logger = logging.getLogger(__name__)
_IDLE_TIMEOUT_S: Final = 5.0  # the longest replay takes about one second, but several can wait for their turn


class ContainerStatus(Protocol):
    """The container that holds a volume, or the command that leads to it."""

    @property
    def transport_name(self) -> Literal["rootfs", "agent"]: ...

    @property
    def is_connected(self) -> bool:
        """Whether requests are answered; if not, they fail with EIO."""
        ...

    @property
    def was_restarted(self) -> bool:
        """Whether another daemon could not continue the mount, because the container was restarted since."""
        ...

    async def describe(self) -> str:
        """The state of the container in words."""
        ...

    async def advice(self) -> str:
        """Why requests are not answered, and what to do."""
        ...


class ChangeLock:
    """The lock of one workspace's changes.  It knows which tasks wait for it."""

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._waiting: set[trio.lowlevel.Task] = set()

    async def __aenter__(self) -> None:
        task = trio.lowlevel.current_task()
        self._waiting.add(task)
        try:
            await self._lock.acquire()
        finally:
            self._waiting.discard(task)

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()

    def is_awaited_by(self, task: trio.lowlevel.Task) -> bool:
        """Whether `task` waits for the lock.  Only the holder asks: for others the answer may be out of date."""
        return task in self._waiting


class MountedVolume:
    """One volume, its engine and its mountpoint.  `nursery` outlives every call.

    `container`: the container that holds the volume, or the command that leads to it, if there is one.
    `policy`: what programs may not change or see; the daemon's own changes and answers have to respect it.
    """

    def __init__(
        self,
        volume: Volume,
        engine: Engine,
        replay: Replay,
        mountpoint: str,
        nursery: trio.Nursery,
        container: ContainerStatus | None = None,
        *,
        cache: CacheChoice = "writethrough",
        snapshot_directory: SnapshotDirectory | None = None,
        policy: Policy | None = None,
        name: str = "",
        is_attached: bool = False,
    ) -> None:
        """`name` is that of the workspace.  `is_attached`: there is no mount, and `mountpoint` is the directory."""
        self.policy = policy
        self.is_attached = is_attached
        self.root = WorkspaceRoot(mountpoint, name, is_attached=is_attached)
        self._snapshot_directory = snapshot_directory
        self.volume = volume
        self.container = container
        self.cache = cache
        self.engine = engine
        self.mountpoint = mountpoint
        self.change_lock = ChangeLock()
        self.uncompacted: str | None = None  # why the journal was not compacted, although it is large
        self.compaction_lock = trio.Lock()  # taken before `change_lock`: one compaction of the journal at a time
        self._snapshotable = snapshotable(volume)
        self._replay = replay
        self.nursery = nursery
        self._threads = 0  # threads of this process that have files open on the mount
        self._thread_ended = trio.Event()
        lower = overlaid(volume)
        if lower is not None:
            self._follow_lower_layer(lower)

    def _follow_lower_layer(self, volume: OverlaidVolume) -> None:
        token = trio.lowlevel.current_trio_token()

        async def follow(invalidation: CacheInvalidation) -> None:
            try:
                files = self._known_files(invalidation)
                await invalidate_kernel_caches(self.engine, invalidation)
                if files:
                    await _logged("refresh", functools.partial(self._refresh, files))
            finally:
                volume.invalidation_done(invalidation)

        def on_change(invalidation: CacheInvalidation) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(self.nursery.start_soon, follow, invalidation)

        volume.on_change = on_change
        volume.serve_here()
        # One at a time: several reads of a file wait for one preparation, and must not take all of trio's threads.
        limiter = trio.CapacityLimiter(1)
        volume.in_thread = functools.partial(trio.to_thread.run_sync, abandon_on_cancel=True, limiter=limiter)

    @property
    def enforced(self) -> Volume:
        """The volume under the policy, for calls on behalf of a client."""
        return self.volume if self.policy is None else self.policy.volume

    def shown(self, tree: Tree) -> Tree:
        """Return `tree` without what the policy hides."""
        return tree if self.policy is None else self.policy.shown(tree)

    def left_out_of(self, tree: Tree) -> int:
        """Return how many hidden names a walk of a result of `shown` has left out."""
        return 0 if self.policy is None else self.policy.left_out_of(tree)

    async def write_back(self) -> None:
        """Write to the volume the pages that are dirty now: of shared mappings, or all with `cache` writeback.

        Raises as `check_attached` does.
        """
        if self.is_attached:
            self.check_attached()
            return  # the directory's pages are what every program reads
        with self.using_mount():
            await self._sync()
            await self.engine.drained()

    def check_attached(self) -> None:
        """Raise NotMountedError if the directory that was attached is not at its path any more.

        The volume still refers to that directory.  Without this check, a snapshot would save the old directory, and a
        restore would change it, while programs use the new one at its path.
        """
        if self.is_attached:
            os.close(self.root.open())

    async def write_back_cached(self) -> None:
        """Write back what programs wrote with write(2), where the kernel may still hold it."""
        if self.cache == "writeback":
            await self.write_back()

    async def _sync(self) -> None:
        try:
            await trio.to_thread.run_sync(_syncfs, self.root.open, abandon_on_cancel=True)
        except OSError as error:
            # The mount is detached, or the daemon's user may not open its root directory.  ENOSPC: everything was
            # written back as far as there was space, and fsync(2) and close(2) tell the programs.  EPERM: so was
            # everything but the pages that a program changed and must not change (`vfsd.daemon.policy`).
            is_policy = error.errno == errno.EPERM and self.policy is not None
            level = logging.INFO if is_policy or error.errno == errno.ENOSPC else logging.WARNING
            log_failure(_logger, "syncfs", error, path=self.mountpoint, level=level)

    async def snapshots_dropped(self) -> None:
        """Return when no program can find dropped snapshots in `.snapshots`, and what they held is free."""
        if self._snapshot_directory is not None:
            await self._snapshot_directory.refresh(self.engine)

    async def snapshots_taken(self) -> None:
        """Return when programs that list `.snapshots` see new snapshots.  Raises as `invalidate` does."""
        if self._snapshot_directory is not None and self._snapshot_directory.is_entered:
            await self._finish(self._list_snapshots_again)

    async def _list_snapshots_again(self) -> None:
        if self._snapshot_directory is not None:
            await self._snapshot_directory.list_again(self.engine)

    async def snapshots_hidden(self) -> None:
        """Return when programs see in `.snapshots` only what the policy shows now."""
        if self._snapshot_directory is not None:
            await self._snapshot_directory.invalidate(self.engine)

    async def invalidate(self, invalidation: CacheInvalidation, changed: Sequence[bytes] | None = None) -> None:
        """Return when no program can see the state before the change; inotify events follow in the background.

        `changed`: the paths that were changed, for the log; None if `invalidation` has all of them.

        The change is committed and the answer must say so, so this raises only Cancelled, and only after the
        invalidation, which only the daemon's end interrupts.  A step that fails is logged, and the next ones are done.
        """
        record(changed_paths(invalidation) if changed is None else changed)
        if self.is_attached:
            return  # nothing is cached of it, and a replay would make real changes
        # Computed now: by the end of the invalidation, programs may have removed some of these inodes.
        open_paths = self._open_paths(invalidation)
        files = self._known_files(invalidation)
        await self._finish(functools.partial(self._invalidate, invalidation, open_paths, files))

    async def _finish(self, work: Callable[[], Awaitable[None]]) -> None:
        """Await `work`, which only the daemon's end interrupts; raises only Cancelled, and only after it."""
        done = trio.Event()

        async def run() -> None:
            try:
                await work()
            finally:
                done.set()

        # In the nursery rather than shielded: at the daemon's end a thread may wait for the kernel, which waits for
        # this loop.
        self.nursery.start_soon(_logged, "finish", run)
        with trio.CancelScope(shield=True):
            await done.wait()

    async def _invalidate(self, invalidation: CacheInvalidation, paths: list[bytes], files: list[FileState]) -> None:
        await _logged("invalidation", functools.partial(self.invalidate_caches, invalidation))
        await self._list_snapshots_again()  # the state before a restore, for example
        if files:
            await _logged("refresh", functools.partial(self._refresh, files))
        moved, rest = split_moved_directories(invalidation)
        # A replay makes the names of moved directories again, so it ends before the stat below looks them up.
        await _logged("replay", functools.partial(self._run_replay, moved))
        paths += [
            b"/".join(filter(None, (invalidation.paths[change.parent], change.name)))
            for change in moved.entries
            if change.parent in invalidation.paths
        ]
        if paths:
            await _logged("stat", functools.partial(self._stat_all, paths))
        self.nursery.start_soon(_logged, "replay", functools.partial(self._run_replay, rest))

    async def invalidate_caches(self, invalidation: CacheInvalidation) -> None:
        """Invalidate the kernel's caches, without inotify events."""
        await invalidate_kernel_caches(self.engine, invalidation, known_inodes(self.volume, invalidation))
        journal = journaled(self.volume)
        if journal is not None:
            journal.invalidated()

    async def _refresh(self, files: list[FileState]) -> None:
        """Have the kernel forget or correct the sizes and times of `files`, which it keeps with a write-back cache."""
        inodes = [file.inode for file in files]
        if isinstance(self.engine, PruningEngine):
            await trio.to_thread.run_sync(self.engine.prune, inodes, abandon_on_cancel=True)
        volume = self._snapshotable
        # Those that the kernel has evicted by now cost no further request.
        left = [file for file in files if volume is None or volume.has_lookups(file.inode)]
        with self.using_mount():
            await self._replay.refresh(left, self.root.open)

    async def _stat_all(self, paths: Sequence[bytes]) -> None:
        with self.using_mount():
            await trio.to_thread.run_sync(_stat_all, self.root.open, paths, abandon_on_cancel=True)

    def in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start `work`, which must not fail; the daemon's end cancels it."""
        self.nursery.start_soon(work)

    async def wait_unused(self) -> None:
        """Return when no thread of this process has files open on the mount, or after some seconds.

        inotify replays that have not ended by then are given up: they keep the mount busy for as long as they take.
        """
        if not await self._becomes_unused():
            self._replay.drop()
            await self._becomes_unused()

    async def _becomes_unused(self) -> bool:
        with trio.move_on_after(_IDLE_TIMEOUT_S):
            while self._threads:
                await self._thread_ended.wait()
        return not self._threads

    async def _run_replay(self, invalidation: CacheInvalidation) -> None:
        with self.using_mount():
            await self._replay.run(invalidation)

    @contextlib.contextmanager
    def using_mount(self) -> Iterator[None]:
        """Have an unmount wait: inside the block, a thread of this process has files open on the mount."""
        self._threads += 1
        try:
            yield
        finally:
            self._threads -= 1
            self._thread_ended.set()
            self._thread_ended = trio.Event()

    def _open_paths(self, invalidation: CacheInvalidation) -> list[bytes]:
        """The paths of the files with new content that programs may have open."""
        volume = self._snapshotable
        return [
            invalidation.paths[inode]
            for inode, content in invalidation.inodes
            if content and inode in invalidation.paths and (volume is None or volume.has_lookups(inode))
        ]

    def _known_files(self, invalidation: CacheInvalidation) -> list[FileState]:
        """The changed regular files whose sizes and times the kernel may keep; none without a write-back cache."""
        volume = self._snapshotable
        if self.cache != "writeback" or volume is None:
            return []
        paths = {change.inode: invalidation.paths.get(change.inode) for change in invalidation.inodes}
        for change in invalidation.entries:
            parent = invalidation.paths.get(change.parent)
            if change.new and parent is not None:
                paths[change.new] = b"/".join(filter(None, (parent, change.name)))
        files = []
        for inode, path in paths.items():
            if path is None or not volume.has_lookups(inode):
                continue
            found = self.volume.getattr(inode)
            # A volume with snapshots returns results, never awaitables.
            if not isinstance(found, Awaitable) and stat.S_ISREG(found.mode):
                files.append(FileState(inode, path, found.size, found.mtime_ns))
        return files


async def _logged(operation: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` after a commit: log its exceptions."""
    try:
        await work()
    except Exception as error:  # noqa: BLE001 -- an unexpected one is logged with its traceback
        log_failure(_logger, operation, error, level=logging.WARNING)


def _stat_all(open_root: Callable[[], int], paths: Sequence[bytes]) -> None:
    """Make the kernel ask for the sizes of changed files, and look up directories at their new places.

    FUSE_NOTIFY_INVAL_INODE leaves an inode's size as the kernel knew it until the next GETATTR, and O_APPEND and
    page faults go by that without asking (generic_write_checks in fs/read_write.c, filemap_fault in mm/filemap.c).
    A directory that was moved has no dentry from FUSE_NOTIFY_INVAL_ENTRY to the next LOOKUP: getcwd(2) of a process in
    it fails (d_invalidate in fs/dcache.c).
    """
    try:
        root = open_root()
    except OSError:
        return  # detached meanwhile
    try:
        for path in paths:
            # It may be gone, or in a directory that the daemon's user may not enter.
            with contextlib.suppress(OSError):
                os.stat(path, dir_fd=root, follow_symlinks=False)
    finally:
        os.close(root)


def _syncfs(open_root: Callable[[int], int]) -> None:
    descriptor = open_root(os.O_RDONLY)
    try:
        syncfs(descriptor)
    finally:
        os.close(descriptor)
