"""MountedVolume: a volume that an engine serves, and how it is changed beside the mount.

Every change that comes another way than through the mount (restore, import) goes through here, so that

- what programs have written to shared mappings is in the volume before a state is kept, replaced or
  exported (`settle`);
- the kernel has forgotten the old state when the caller is answered (`changed`);
- only one such change is made at a time (`changing`), and none begins before the kernel was told of the last.

Threading: the serving loop.  `settle` and `changed` await; the change itself is one call on the volume
between them, so the mount sees it whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import trio

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.linux.syscalls import syncfs
from protocol.volume import CacheInvalidation, Volume
from vfsd.kernel.engines.base import Engine
from vfsd.kernel.inotify_replay import Replay
from vfsd.kernel.invalidation import apart_moved_directories, invalidate_kernel_caches
from vfsd.machine.logs import log_failure

if TYPE_CHECKING:
    from protocol.backends.container.connection import ContainerConnection

__all__ = ["MountedVolume"]

_logger = logging.getLogger(__name__)
_LEAVING_S: Final = 5.0  # the longest replay takes about one


class MountedVolume:
    """One volume, its engine and its mountpoint.  `nursery` outlives every call on it.

    `container` is the connection to the container that the volume is in.
    """

    def __init__(
        self,
        volume: Volume,
        engine: Engine,
        replay: Replay,
        mountpoint: str,
        nursery: trio.Nursery,
        container: ContainerConnection | None = None,
    ) -> None:
        self.volume = volume
        self.container = container
        self.engine = engine
        self.mountpoint = mountpoint
        self.changing = trio.Lock()
        self._replay = replay
        self._nursery = nursery
        self._visits = 0  # threads of ours that have something open on the mount
        self._left = trio.Event()
        if isinstance(volume, OverlayVolume):
            token = trio.lowlevel.current_trio_token()

            def follow(coherence: CacheInvalidation) -> None:
                with contextlib.suppress(trio.RunFinishedError):
                    token.run_sync_soon(nursery.start_soon, self._follow, volume, coherence)

            volume.on_change = follow

    async def _follow(self, volume: OverlayVolume, coherence: CacheInvalidation) -> None:
        """A file changed below: the kernel forgets what it has of it, then it is served anew."""
        try:
            await invalidate_kernel_caches(self.engine, coherence)
        finally:
            volume.invalidation_done(coherence)

    async def settle(self) -> None:
        """Have the dirty pages of shared mappings written to the volume, as far as they were dirty at the call."""
        try:
            with self.visiting():
                await trio.to_thread.run_sync(_syncfs, self.mountpoint, abandon_on_cancel=True)
        except OSError as error:
            # Detached lazily, or a root directory that the daemon's own user may not open.
            log_failure(_logger, "syncfs", error, path=self.mountpoint, level=logging.WARNING)
        await self.engine.drained()

    async def changed(self, coherence: CacheInvalidation) -> None:
        """Return when no program can see the state before the change; inotify watchers are told after that.

        The change is committed, so the answer to its caller must say so: this raises nothing but Cancelled, and that
        only after the kernel knows.  A step that fails is logged, and the ones after it are done.
        """
        # Of this moment: by the time that the kernel knows, programs may have removed some of these inodes.
        known = self._known_paths(coherence)
        await self.finish(functools.partial(self._tell, coherence, known))

    async def _tell(self, coherence: CacheInvalidation, known: list[bytes]) -> None:
        await _logged("invalidation", functools.partial(invalidate_kernel_caches, self.engine, coherence))
        moved, rest = apart_moved_directories(coherence)
        # What has moved is looked at once more, and then stays: no replay makes its name again after the answer.
        await _logged("replay", functools.partial(self._tell_watchers, moved))
        known += [
            b"/".join(filter(None, (coherence.paths[change.parent], change.name)))
            for change in moved.entries
            if change.parent in coherence.paths
        ]
        if known:
            await _logged("stat", functools.partial(self._look_at, known))
        self._nursery.start_soon(_logged, "replay", functools.partial(self._tell_watchers, rest))

    async def _look_at(self, paths: Sequence[bytes]) -> None:
        with self.visiting():
            await trio.to_thread.run_sync(_look_at, self.mountpoint, paths, abandon_on_cancel=True)

    async def finish(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` to its end, even where the caller is cancelled meanwhile; only the daemon's end cuts it short.

        For what has to follow a commit.  An exception of `work` is logged, not raised.
        """
        done = trio.Event()

        async def run() -> None:
            try:
                await _logged("finish", work)
            finally:
                done.set()

        # Not a shield: at the daemon's end a thread may wait for the kernel, which waits for this loop.
        self._nursery.start_soon(run)
        with trio.CancelScope(shield=True):
            await done.wait()

    def in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have `work` done meanwhile; it ends with the daemon, and must not fail."""
        self._nursery.start_soon(work)

    async def left(self) -> None:
        """Return when no thread of ours keeps the mount busy, or in some seconds: before an unmount."""
        with trio.move_on_after(_LEAVING_S):
            while self._visits:
                await self._left.wait()

    async def _tell_watchers(self, coherence: CacheInvalidation) -> None:
        with self.visiting():
            await self._replay.run(coherence)

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        """While a thread of ours works on the mount: an unmount waits for it."""
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            self._left.set()
            self._left = trio.Event()

    def _known_paths(self, coherence: CacheInvalidation) -> list[bytes]:
        """The paths of the files with new content that the kernel may have open."""
        return [
            coherence.paths[inode]
            for inode, content in coherence.inodes
            if content and inode in coherence.paths and self._may_be_open(inode)
        ]

    def _may_be_open(self, inode: int) -> bool:
        if not isinstance(self.volume, MemoryVolume):
            return True
        try:
            return self.volume.getattr(inode).lookups > 0
        except FileNotFoundError:  # freed since the change
            return False


async def _logged(operation: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`; what it raises is logged, since what it belongs to has been done already."""
    try:
        await work()
    except Exception as error:  # noqa: BLE001 -- with its traceback, where it is no OSError
        log_failure(_logger, operation, error, level=logging.WARNING)


def _look_at(mountpoint: str, paths: Sequence[bytes]) -> None:
    """Have the kernel ask for the sizes of changed files, and find directories at their new places.

    FUSE_NOTIFY_INVAL_INODE leaves an inode's size as the kernel knew it until the next GETATTR, and O_APPEND and
    page faults go by that without asking (generic_write_checks in fs/read_write.c, filemap_fault in mm/filemap.c).
    A directory that was moved has no place from FUSE_NOTIFY_INVAL_ENTRY to the next LOOKUP: getcwd(2) of who stands
    in it fails (d_invalidate in fs/dcache.c).
    """
    try:
        root = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # detached meanwhile
    try:
        for path in paths:
            # Changed again meanwhile, or in a directory that the daemon's user may not enter.
            with contextlib.suppress(OSError):
                os.stat(path, dir_fd=root, follow_symlinks=False)
    finally:
        os.close(root)


def _syncfs(mountpoint: str) -> None:
    """syncfs(2)."""
    descriptor = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syncfs(descriptor)
    finally:
        os.close(descriptor)
