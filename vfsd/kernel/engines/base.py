"""The contract of an engine, which serves a volume to the kernel, and what the engines `native` and `pyfuse3` share.

Threading: `mount`, `serve`, `stop`, `drained` and `unmount` run on the trio loop's thread.  `invalidate_inode` and
`invalidate_entry` block until the kernel has dropped its caches, and the kernel may wait for a request that the loop
must answer first.  Call these two from any other thread, never from the loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar, runtime_checkable

import trio

from protocol.errors import NotReadyError
from protocol.linux.syscalls import syncfs
from protocol.values import Value
from protocol.volume import Volume

if TYPE_CHECKING:
    from concurrent.futures import Future

_logger = logging.getLogger(__name__)

_POSITIONS_KEPT: Final = 256
_INVALIDATED_AFTER_S: Final = 0.1
_WRITTEN_BACK_IN_S: Final = 1.0


class EngineSettings(Value):
    """How to mount.  `cache_timeout_s` is how long the kernel may use cached names and attributes.

    Without `xattrs` the mount has no extended attributes and no ACLs (EOPNOTSUPP), and the kernel does not ask for
    any: neither for a file's capabilities before its first write, nor for `ls -l` and `cp -a`.
    `wakeups`: whether the engine keeps idle CPUs awake during bursts of requests ("auto": where that helps).
    """

    mountpoint: str
    name: str  # the mount's source is "vfsd:<name>", its type "fuse.vfsd"
    read_only: bool = False
    allow_other: bool = False
    cache_timeout_s: float = math.inf
    xattrs: bool = True
    wakeups: Literal["auto", "on", "off"] = "auto"
    write_back: bool = False  # the kernel keeps written pages and sends them later (FUSE_WRITEBACK_CACHE)


def mount_options(settings: EngineSettings, *, checked: bool) -> set[str]:
    """Return the options of mount(8) for `settings`.  `checked`: the kernel checks permissions."""
    options = {f"fsname=vfsd:{settings.name}", "subtype=vfsd"}
    chosen = (checked, "default_permissions"), (settings.allow_other, "allow_other"), (settings.read_only, "ro")
    return options | {option for is_set, option in chosen if is_set}


class Impersonator(Protocol):
    """Supplies the volume that answers the requests of one thread (see `vfsd.kernel.inotify`).

    An engine sends a request to `volume` if the request's pid (the kernel passes the thread's id) equals `thread_id`,
    and tells the kernel not to cache the answer.  `thread_id` is 0 while there is no such thread.  An engine calls only
    lookup, getattr, setattr, mknod, mkdir, symlink, link, unlink, rmdir and rename on `volume`.
    """

    @property
    def thread_id(self) -> int: ...

    @property
    def volume(self) -> Volume: ...


class Engine(Protocol):
    """Serves one volume at one mountpoint."""

    @property
    def name(self) -> str:
        """The name that selects this engine: "pyfuse3", "native", or the name of an entry point."""
        ...

    @property
    def fallback_reason(self) -> str | None:
        """Why this engine serves instead of the preferred one; None for the preferred or requested engine."""
        ...

    @property
    def requests(self) -> int:
        """The number of requests answered so far."""
        ...

    @property
    def wakeups(self) -> str | None:
        """Describe in a line for people what the engine does about slow wake-ups of idle CPUs; None: nothing."""
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """Settings that have no effect, and why: each a line for the person who mounts."""
        ...

    def mount(self) -> None:
        """Make the mount.  Requests wait in the kernel until `serve` runs.  OSError with libfuse's message."""
        ...

    async def serve(self) -> None:
        """Answer requests until the file system is unmounted or `stop` is called.

        A failing request becomes an errno and never raises here.  An unexpected exception becomes EIO and is logged
        once with its traceback.
        """
        ...

    def stop(self) -> None:
        """Make `serve` return soon."""
        ...

    def unmount(self) -> None:
        """Release the session, and unmount if the mount still exists.  Idempotent."""
        ...

    async def drained(self) -> None:
        """Wait until every request that the kernel had issued before this call is answered.

        After syncfs(2) has started to write back dirty pages, this ensures that they are in the volume.  With a
        write-back cache a thread of the engine has a file of the mount open meanwhile.
        """
        ...

    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        """Invalidate the kernel's cached attributes of `inode`, and its cached pages if `content`."""
        ...

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Invalidate the kernel's cached entry, or cached absence, of `name` in directory `parent`."""
        ...


@runtime_checkable
class PruningEngine(Protocol):
    """An engine with a write-back cache, which can have the kernel evict inodes."""

    def prune(self, inodes: Sequence[int]) -> bool:
        """Have the kernel evict those of `inodes` that no program uses.  False if this kernel cannot do that.

        Runs in the same threads as the invalidations.
        """
        ...


class ResumedMount(Value):
    """A mount that another daemon made: its descriptor, and what that daemon's engine has `negotiated`.

    With `resend`, the kernel sends the requests again that the daemon read and did not answer.  If it cannot do that,
    they fail with EIO: those that the daemon noted in the memory `memory_fd` (`ResumableEngine.share`).
    """

    descriptor: int
    negotiated: bytes
    resend: bool
    memory_fd: int | None = None


@runtime_checkable
class ResumableEngine(Protocol):
    """An engine whose mount can outlive the process that serves it, and be handed over while that pauses."""

    @property
    def descriptor(self) -> int | None:
        """The descriptor that the kernel sends requests to; while a process has a duplicate, the mount exists."""
        ...

    def negotiated(self) -> bytes | None:
        """Return what `resume` needs besides the descriptor; None if there is no mount."""
        ...

    def resume(self, mount: ResumedMount) -> None:
        """Take the place of `mount`: continue to serve a mount of another daemon.

        OSError: EPROTONOSUPPORT if a later version of the engine made the mount.
        """
        ...

    def share(self, memory: memoryview, memory_fd: int) -> None:
        """Share `memory`, words of 64 bits with the descriptor `memory_fd`, with the process that keeps the mount.

        Requests that are answered are added to the first word.  What follows the first page is the engine's.
        """
        ...

    async def pause(self) -> None:
        """Answer every request that was read, and read no other one until `go_on`.

        If this is cancelled, the engine pauses all the same.
        """
        ...

    def go_on(self) -> None:
        """End the pause, if there is one."""
        ...


class ListingPositions:
    """Where the last replies to listings ended: tells a reader that goes on from one that has moved with seekdir(3).

    Such a reader often wants one entry, so the engine answers with a few, and with as many as fit if it goes on.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], None] = {}

    def is_new(self, directory: int, cookie: int) -> bool:
        """Return whether a reader that begins at `cookie` comes neither from the start nor from a reply."""
        return cookie != 0 and (directory, cookie) not in self._ends

    def ended(self, directory: int, cookie: int) -> None:
        """Note that a reply ends at `cookie`."""
        self._ends[directory, cookie] = None
        if len(self._ends) > _POSITIONS_KEPT:
            del self._ends[next(iter(self._ends))]


def invalidate_attributes(engine: Engine, inode: int) -> None:
    """Invalidate the cached attributes of the inode of the request that the loop is answering.

    An invalidation without pages takes no lock in the kernel (fuse_reverse_inval_inode, fs/fuse/inode.c), so it is the
    only notification that may be sent from the loop.
    """
    try:
        engine.invalidate_inode(inode, content=False)
    except OSError as error:
        if error.errno != errno.ENOENT:  # not cached
            _logger.warning("cannot invalidate the kernel's cached mode of inode %d: %s", inode, error)


class StaleContent:
    """Invalidates inodes whose cached pages a write has made wrong, soon after its answer.

    In a worker thread, because the kernel waits for pages of requests that the loop has to answer.

    With a cache timeout, the kernel requests the attributes before the next read(2), and drops the pages itself.  An
    invalidation at that moment would make it ignore the answer (the attribute version, fuse_change_attributes), so a
    reader would not see the end of the file.  The invalidation is for mappings then, and comes later.
    """

    def __init__(self, invalidate_inode: Callable[..., None], cache_timeout_s: float) -> None:
        self._invalidate_inode = invalidate_inode
        self._delay_s = 0.0 if math.isinf(cache_timeout_s) else _INVALIDATED_AFTER_S
        self._inodes: set[int] = set()
        self._is_running = False

    def add(self, inode: int) -> None:
        """Invalidate `inode`.  Call it on the loop."""
        self._inodes.add(inode)
        if not self._is_running:
            self._is_running = True
            trio.lowlevel.spawn_system_task(self._run)

    async def _run(self) -> None:
        try:
            while self._inodes:
                await trio.sleep(self._delay_s)
                inodes, self._inodes = self._inodes, set()
                await trio.to_thread.run_sync(self._invalidate, inodes, abandon_on_cancel=True)
        finally:
            self._is_running = False

    def _invalidate(self, inodes: set[int]) -> None:
        for inode in inodes:
            try:
                self._invalidate_inode(inode, content=True)
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ENOTCONN}:  # not cached; unmounted
                    _logger.warning("cannot invalidate the kernel's cached pages of inode %d: %s", inode, error)


def written_back(engine: Engine, mountpoint: str) -> NotReadyError:
    """Return what a request raises to be repeated when the pages that are dirty now are in the volume.

    Without a write-back cache these are pages of shared mappings.  Writing one back moves mtime, so that has to precede
    a utime(2), which came after the stores.  The kernel does it only with a write-back cache (fuse_do_setattr).
    """
    arrival: Future[object] = Future()

    def write_out() -> None:
        descriptor = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            syncfs(descriptor)
        finally:
            os.close(descriptor)

    async def run() -> None:
        try:
            # The time runs out if the engine pauses, to be replaced.
            with suppress(OSError), trio.move_on_after(_WRITTEN_BACK_IN_S):
                await trio.to_thread.run_sync(write_out, abandon_on_cancel=True)
                await engine.drained()
        finally:
            arrival.set_result(None)

    trio.lowlevel.spawn_system_task(run)
    return NotReadyError(arrival)


class EngineFactory(Protocol):
    """Creates an engine.  An entry point in the group `vfsd.engines` names an engine factory.

    The class of an engine is a factory if its constructor takes these arguments.
    """

    def __call__(self, volume: Volume, settings: EngineSettings, impersonator: Impersonator | None, /) -> Engine:
        """Return an engine that serves `volume` by `settings`; do not mount yet.

        `impersonator` answers the requests of one thread, or is None.  Runs in the daemon's main thread, on the trio
        loop or before it starts.
        """
        ...


class ChangeObserver(Protocol):
    """Is called on the loop with each change that the mount has made, in order, before the program gets its answer.

    `thread` is the id of the calling thread, in the daemon's pid namespace: 0 if the kernel itself sends the request
    (pages that it writes back) or the thread is not visible from there.  A method must neither raise nor wait for long.
    """

    def identify(self, thread: int) -> object:
        """Return the process of `thread` as it is now, to be given back as `opener`."""
        ...

    def entry_changed(self, change: str, thread: int, parent: int, name: bytes, inode: int = 0) -> None:
        """`name` in directory `parent` was made or removed: create, mknod, mkdir, symlink, tmpfile, unlink, rmdir.

        `inode`: that of a file that was made and is not a directory.
        """
        ...

    def linked(self, thread: int, inode: int, parent: int, name: bytes) -> None:
        """`inode` got another name."""
        ...

    def renamed(
        self, thread: int, parent: int, name: bytes, new_parent: int, new_name: bytes, *, exchange: bool
    ) -> None:
        """An entry was renamed, or two were exchanged."""
        ...

    def inode_changed(self, change: str, thread: int, inode: int) -> None:
        """An inode was changed: truncate, chmod, chown, utime, allocate, setxattr, removexattr."""
        ...

    def written(self, thread: int, inode: int, size_bytes: int, opener: object = None) -> None:
        """Content was written.  `opener`: the process that opened the file, if requests do not tell who writes."""
        ...

    def denied(self, attempt: str, thread: int, path: bytes | None) -> None:
        """The volume's policy refused `attempt` at `path`: a change as above, or "open" for writing."""
        ...


@runtime_checkable
class ObservableEngine(Protocol):
    """An engine that reports the changes that it makes."""

    def observe(self, observer: ChangeObserver) -> None:
        """Report every change from now on.  Call it after `mount` and before `serve`."""
        ...


def attribute_change(
    *, size: bool = False, owner: bool = False, mode: bool = False, times: bool = False, kill: bool = False
) -> str | None:
    """Name the change that a SETATTR of these attributes is; None for one that changes nothing a user sees."""
    if size:
        return "truncate"
    if owner:
        return "chown"
    if mode or kill:
        return "chmod"
    return "utime" if times else None


# -- calls that needed something from the network (`protocol.errors.NotReadyError`) -----------------------------
T = TypeVar("T")


async def arrived(error: NotReadyError) -> object:
    """Wait for what the call needs; return what keeps it in memory.  OSError if it cannot be fetched."""
    event = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def notify(_arrival: Future[object]) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(event.set)

    error.arrival.add_done_callback(notify)
    await event.wait()
    return error.arrival.result()


async def repeated(call: Callable[[], T | Awaitable[T]], error: NotReadyError | None = None) -> T:
    """Call `call` until it has all that it needs; `error` is from its first attempt."""
    held: list[object] = []
    while True:
        try:
            if error is not None:
                held.append(await arrived(error))
            answer = call()
            return await answer if isinstance(answer, Awaitable) else answer
        except NotReadyError as again:
            error = again


class Markers:
    """The markers of one mount at `mountpoint`: requests that show that the loop has read every earlier request.

    The kernel queues requests in order, and the loop reads them in order.  So when the loop reads a marker, it has read
    every request that was queued before the marker, even if the device is never empty.

    A marker is a statfs(2) of the mount, which the kernel always forwards.  A worker thread makes it, because the loop
    has to answer it, and the loop recognizes it by the thread's id in the request's header.
    """

    def __init__(self, mountpoint: str) -> None:
        self._mountpoint = mountpoint
        self._was_read: dict[int, bool] = {}  # by the id of the thread that waits

    def record(self, thread_id: int) -> None:
        """Record that the loop has read a statfs request of the thread `thread_id`."""
        if thread_id in self._was_read:
            self._was_read[thread_id] = True

    async def pass_one(self) -> bool:
        """Send a marker and wait for its answer.  Return whether the loop has read it.

        False: the path leads to another mount now, or the mount is gone.
        """
        # Abandoned on cancellation: a loop that is ending does not answer.
        return await trio.to_thread.run_sync(self._send, abandon_on_cancel=True)

    def _send(self) -> bool:
        thread_id = threading.get_native_id()
        self._was_read[thread_id] = False
        with contextlib.suppress(OSError):
            os.statvfs(self._mountpoint)
        return self._was_read.pop(thread_id)
