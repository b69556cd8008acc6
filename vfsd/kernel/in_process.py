"""A mount of a Filesystem object of this process, served by a thread of this process.

Threading: the object's methods are called on the serving thread, one at a time.  Code that uses the object itself while
it is mounted runs in another thread, so the object must allow that.  The serving thread needs the interpreter's lock
(GIL) for each request.  A C extension that waits for the mount without releasing the GIL therefore waits forever.  So
would `subprocess` when it starts a program on the mount or in a directory of it: see `_make_subprocess_release_gil`.

An object with the method `serving_volume` (`protocol.filesystem.MountableFilesystem`) lends its volume, which the
thread serves; a lock keeps the object's calls and the thread apart.  Other objects are served through their methods.

The kernel caches no names and attributes beyond a request, because the object may change without notice, and drops the
pages of a file whose size or mtime changed.

The kernel keeps the connection of an unmounted file system while another mount namespace has a copy of the mount.  Each
start of a container copies all mounts, so after an unmount that found no user the thread ends by itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from contextlib import AbstractContextManager, ExitStack, suppress
from types import TracebackType
from typing import Any, Final, Self

import trio

from protocol.adapters.filesystem_volume import FilesystemVolume
from protocol.filesystem import Filesystem
from protocol.volume import Volume
from protocol.volume_extensions import CacheInvalidation
from vfsd.kernel.engines.base import Engine, EngineSettings
from vfsd.kernel.engines.choice import mount_engine
from vfsd.kernel.invalidation import invalidate_from_thread
from vfsd.machine import mountinfo, mounts
from vfsd.machine.processes import holders

_logger = logging.getLogger(__name__)
_JOIN_S: Final = 10.0  # how long programs that use a detached mount are waited for
_END_S: Final = 30.0  # how long the end of the serving thread may take once no program uses the mount
_COPIES_S: Final = 1.0  # how long the kernel may take to close the connection after an unmount
_DRAIN_S: Final = 5.0  # how long requests that were sent before the unmount may take
_VFORK_RELEASES_GIL: Final = (3, 11, 4)  # python/cpython#104372


class MountedFilesystem:
    """A mounted Filesystem object.  As a context manager it unmounts at the end of the block."""

    def __init__(self, filesystem: Filesystem, path: str, *, name: str, engine: str, allow_other: bool) -> None:
        """Mount `filesystem` at the empty directory `path`.  OSError as from `vfsd.machine.mounts.check_mountpoint`."""
        _make_subprocess_release_gil()
        if mounts.check_mountpoint(path) is not None:
            mounts.clear_dead_mount(path)
        self.filesystem = filesystem
        self.path: Final = path  # the mountpoint
        self.name: Final = name  # of the workspace; the mount's source is "vfsd:<name>"
        settings = EngineSettings(
            path, name, read_only=filesystem.read_only, allow_other=allow_other, cache_timeout_s=0.0
        )
        self._lock = threading.RLock()  # a collected reader forgets its inode during another call
        self._engine: Engine | None = None
        self._adapter: FilesystemVolume | None = None  # None while the object lends its own volume
        self._loop: trio.lowlevel.TrioToken | None = None  # once the thread serves
        self._unused = trio.Event()  # unmounted, and no program used the mount
        serving = threading.Event()
        with ExitStack() as stack:
            # Of the class: an object that forwards unknown names to another one must see the calls itself.
            lend = getattr(type(filesystem), "serving_volume", None)
            if lend is None:
                volume: Volume = (adapter := FilesystemVolume(filesystem))
                self._adapter = adapter
            else:
                volume = stack.enter_context(lend(filesystem, self._lock, self._invalidate))
            self._engine = mount_engine(engine, volume, settings, None)
            self._end_of_loan = stack.pop_all()
        self._thread = threading.Thread(target=self._serve, args=(serving,), name=f"vfsd {name}", daemon=True)
        self._thread.start()
        serving.wait()

    @property
    def mounted(self) -> bool:
        """Whether the object is still mounted and served."""
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.unmount(lazy=True)

    def unmount(self, *, lazy: bool = False) -> None:
        """Unmount.  Everything that programs have written is in the object when this returns.

        OSError(EBUSY) names the processes that have files open, those in other mount namespaces too.  `lazy` detaches
        the mount anyway, and serves those processes until they close their files.
        """
        is_unused = False
        if self._thread.is_alive() and mountinfo.mount_at(self.path) is not None:
            try:
                is_unused = self._detach(lazy=lazy)
            except OSError:
                if mountinfo.mount_at(self.path) is not None:
                    raise  # otherwise the mount has just ended in another way
        if is_unused and self._loop is not None:
            with suppress(trio.RunFinishedError):
                self._loop.run_sync_soon(self._unused.set)
        self._thread.join(_END_S if is_unused else _JOIN_S)

    def _detach(self, *, lazy: bool) -> bool:
        """Unmount; return whether no program uses the file system any more."""
        if holders(self.path, unseen_by_umount=True):
            if not lazy:
                raise mounts.busy_error(self.path)
        elif not lazy:
            mounts.unmount(self.path)
            return True
        elif mounts.unmount_unused(self.path):
            return True
        mounts.unmount(self.path, lazy=True)
        return False

    def _invalidate(self, invalidation: CacheInvalidation) -> None:
        if self._engine is not None and threading.current_thread() is not self._thread:
            invalidate_from_thread(self._engine, invalidation)

    def _serve(self, serving: threading.Event) -> None:
        engine = self._engine
        assert engine is not None
        try:
            trio.run(self._serve_until_unmounted, engine, serving, instruments=[_Holding(self._lock)])
        except Exception:
            _logger.exception("serving %s ended", os.fsencode(self.path))
        finally:
            serving.set()
            engine.unmount()
            with suppress(OSError):  # libfuse leaves a mount behind whose connection was aborted
                mounts.clear_dead_mount(self.path)
            self._end_of_loan.close()
            for path, error in self._adapter.write_back_all() if self._adapter else ():
                _logger.error("%s could not be written back, its changes are lost: %s", os.fsencode(path), error)

    async def _serve_until_unmounted(self, engine: Engine, serving: threading.Event) -> None:
        self._loop = trio.lowlevel.current_trio_token()
        serving.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_unused, engine)
            await engine.serve()
            nursery.cancel_scope.cancel()

    async def _end_unused(self, engine: Engine) -> None:
        """End the engine if the kernel keeps the connection after the unmount, for a copy of the mount."""
        await self._unused.wait()
        await trio.sleep(_COPIES_S)  # cancelled when the engine ends by itself
        with trio.move_on_after(_DRAIN_S):
            await engine.drained()
        engine.stop()


class _Holding(trio.abc.Instrument):
    """Holds a lock during each step of a task, and so while the engine answers requests, but not while it waits."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self._lock.__enter__()

    def after_task_step(self, _task: trio.lowlevel.Task) -> None:
        self._lock.__exit__(None, None, None)


def _make_subprocess_release_gil() -> None:
    """Make `subprocess` start programs in ways that let other threads of this process run meanwhile.

    posix_spawn holds the GIL until the program runs, and so does vfork in older versions: Debian 12 has 3.11.2.  Both
    switches are documented ("Disabling use of vfork() or posix_spawn()").
    """
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[misc]  # noqa: SLF001
    if sys.version_info < _VFORK_RELEASES_GIL:
        subprocess._USE_VFORK = False  # type: ignore[misc]  # noqa: SLF001
