"""The engine itself: mounts through libfuse, runs pyfuse3's loop, and sends notifications.

pyfuse3 keeps its session in globals, so a process serves one mount.  The package's docstring has the threads.

Its loop waits until the device is readable, and then reads, without blocking here.  The kernel withdraws a request that
nobody has read yet if its caller is killed (request_wait_answer in fs/fuse/dev.c).  If that happens between the wait
and the read, a blocking read waits for the next request.  pyfuse3 holds the interpreter's lock meanwhile, so all
threads of the daemon stop, also the one that serves the control socket.

A non-blocking read fails with EAGAIN instead, which pyfuse3 raises from the task that read.  Nothing is lost: the task
has no request at that time, and another task waits for the device as soon as this one reads.  But the task's buffer of
1 MiB leaks.  So a second look precedes the read, which then follows within a microsecond or two.  Without it one in
forty programs that were killed in a request cost a buffer; with it 2,500 of them cost none.

libfuse reports why a mount failed only as text on standard error, which is captured.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import select
import stat
import threading
from collections.abc import Iterator
from typing import Any, Final

import pyfuse3
import trio

from protocol.errors import os_error
from protocol.volume import Volume
from vfsd.kernel.engines.base import (
    ChangeObserver,
    EngineSettings,
    Impersonator,
    Markers,
    StaleContent,
    invalidate_attributes,
    mount_options,
    written_back,
)
from vfsd.kernel.engines.pyfuse3.handlers import Handlers
from vfsd.machine.mountinfo import mount_at
from vfsd.machine.mounts import detach

_logger = logging.getLogger(__name__)

_STOP_GRACE_S: Final = 5.0  # how long handlers may run on after the engine is stopped
# So many times `drained` lets the handlers run before it sends markers.
_PASSES_BEFORE_MARKERS: Final = 16
_MAX_BACKGROUND: Final = 12  # FUSE_DEFAULT_MAX_BACKGROUND, fs/fuse/inode.c; libfuse leaves it


class Pyfuse3Engine:
    """Serves `volume` by `settings`; see `vfsd.kernel.engines.base.Engine`."""

    name: Final = "pyfuse3"

    def __init__(
        self,
        volume: Volume,
        settings: EngineSettings,
        impersonator: Impersonator | None = None,
        *,
        fallback_reason: str | None = None,
    ) -> None:
        self.fallback_reason: Final = fallback_reason
        self.wakeups: Final = None
        self.warnings: Final = (
            ("--wakeups on has no effect with the pyfuse3 engine",) if settings.wakeups == "on" else ()
        )
        self._settings = settings
        self._handlers = Handlers(volume, settings, impersonator)
        self._markers = Markers(settings.mountpoint)
        self._handlers.record_statfs = self._markers.record
        self._fd = -1  # pyfuse3's /dev/fuse descriptor while the session lives
        self._device = 0  # the device number of the mount
        self._scope: trio.CancelScope | None = None
        self._lock = threading.Lock()  # guards the two below
        self._notifications = 0  # the threads that are sending one
        self._closed = True

    @property
    def requests(self) -> int:
        return self._handlers.requests

    def mount(self) -> None:
        if not self._closed:
            raise OSError(errno.EBUSY, "this engine is mounted already", self._settings.mountpoint)
        if not stat.S_ISDIR(os.stat(self._settings.mountpoint).st_mode):
            # The kernel would make the mount and then reject a root that is not a directory.
            raise os_error(errno.ENOTDIR, self._settings.mountpoint)
        options = mount_options(self._settings, checked=True)
        before = _fuse_descriptors()
        with capture_standard_error() as output:
            try:
                pyfuse3.init(self._handlers, self._settings.mountpoint, options)
            except RuntimeError as error:
                failure: RuntimeError | None = error
            else:
                failure = None
        if failure is not None:
            if "mount" in str(failure):  # pyfuse3 does not close a session that it could not mount
                pyfuse3.close(unmount=False)
            raise mount_error(failure, output.decode(errors="replace"), self._settings.mountpoint)
        (self._fd,) = _fuse_descriptors() - before
        read_without_blocking(self._fd)
        made = mount_at(self._settings.mountpoint)
        self._device = 0 if made is None else made.device
        self._handlers.is_readable = self._readable
        self._handlers.invalidate_attributes = functools.partial(invalidate_attributes, self)
        self._handlers.written_back = functools.partial(written_back, self, self._settings.mountpoint)
        self._handlers.invalidate_content = StaleContent(self.invalidate_inode, self._settings.cache_timeout_s).add
        self._closed = False

    def observe(self, observer: ChangeObserver) -> None:
        """See `vfsd.kernel.engines.base.ObservableEngine`."""
        self._handlers.observer = observer

    async def serve(self) -> None:
        with trio.CancelScope() as scope:
            self._scope = scope
            try:
                await pyfuse3.main()
            finally:
                self._scope = None

    def stop(self) -> None:
        if self._closed:
            return
        pyfuse3.terminate()
        if self._scope is not None:
            self._scope.deadline = trio.current_time() + _STOP_GRACE_S

    def unmount(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            busy = self._notifications > 0
        self._fd = -1
        if busy:
            # A thread waits in the kernel with this session, perhaps for a request that nobody will answer.  The
            # session must outlive that thread, so it is not closed; the process ends soon.
            _logger.warning("unmounting %s while an invalidation is running", self._settings.mountpoint)
            with contextlib.suppress(OSError):  # it is not mounted any more
                detach(self._settings.mountpoint, lazy=True)
            return
        # libfuse detaches lazily: this does not wait for programs that use the mount.  It detaches whatever is mounted
        # there, so not where this mount is gone, although a copy in another mount namespace keeps the connection.
        pyfuse3.close(unmount=self._is_mounted())

    def _is_mounted(self) -> bool:
        found = mount_at(self._settings.mountpoint)
        return found is not None and found.device == self._device

    async def drained(self) -> None:
        # The kernel makes a request of its background queue readable as soon as an earlier one is answered, so
        # "nothing to read and nothing in progress" covers that queue too.
        passes = 0
        while self._scope is not None and (self._handlers.in_progress or self._readable()):
            passes += 1
            if passes > _PASSES_BEFORE_MARKERS and await self._has_answered_all_before():
                return
            await trio.lowlevel.checkpoint()

    async def _has_answered_all_before(self) -> bool:
        """Answer every request that was issued before this call, although the device may never be empty.

        False: the kernel's background queue may still hold some, or markers do not reach this mount.
        `NativeEngine._has_read_all_before` explains why two markers suffice.
        """
        handlers = self._handlers
        if not await self._markers.pass_one():
            return False
        before = handlers.background_requests - len(handlers.in_progress)
        if not await self._markers.pass_one() or handlers.background_requests - before >= _MAX_BACKGROUND:
            return False
        earlier = set(handlers.in_progress)
        while self._scope is not None and not earlier.isdisjoint(handlers.in_progress):
            await trio.lowlevel.checkpoint()
        return True

    def _readable(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        events = poll.poll(0)
        # The descriptor of a mount that is gone shows only POLLERR.
        return bool(events) and bool(events[0][1] & select.POLLIN) and not events[0][1] & select.POLLERR

    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        with self._notification():
            pyfuse3.invalidate_inode(inode, attr_only=not content)

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        with self._notification():
            pyfuse3.invalidate_entry(parent, name)

    @contextlib.contextmanager
    def _notification(self) -> Iterator[None]:
        """Keep `unmount` from destroying the session while this thread uses it."""
        with self._lock:
            if self._closed:
                raise OSError(errno.ENOTCONN, "not mounted", self._settings.mountpoint)
            self._notifications += 1
        try:
            yield
        finally:
            with self._lock:
                self._notifications -= 1


def _fuse_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                found.add(int(name))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


# pyfuse3 looks these names up in its globals, the first one for each task that it starts, without the wrapper that trio
# needs around a coroutine function in C.
_LOOP: Final = "_session_loop"
_WAIT: Final = "_wait_fuse_readable"
_read_and_answer: Final = vars(pyfuse3)[_LOOP].__wrapped__
_wait: Final = vars(pyfuse3)[_WAIT]


async def _session_loop(*arguments: Any) -> None:
    while True:
        try:
            await _read_and_answer(*arguments)
        except BlockingIOError:
            continue
        return


def read_without_blocking(descriptor: int) -> None:
    """Make `descriptor`, pyfuse3's /dev/fuse, non-blocking.  Call it before `pyfuse3.main`."""
    os.set_blocking(descriptor, False)
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)

    async def wait_readable() -> bool:
        while await _wait():
            if readable.poll(0):
                return True
        return False

    vars(pyfuse3).update({_LOOP: _session_loop, _WAIT: wait_readable})


_MAX_TEXT_BYTES: Final = 4096


@contextlib.contextmanager
def capture_standard_error() -> Iterator[bytearray]:
    """Capture what libfuse, and the fusermount3 that it starts, write to descriptor 2 in the block."""
    captured = bytearray()
    original = os.dup(2)
    sink = os.memfd_create("libfuse")
    try:
        os.dup2(sink, 2)
        try:
            yield captured
        finally:
            os.dup2(original, 2)
            captured += os.pread(sink, _MAX_TEXT_BYTES, 0)
    finally:
        os.close(original)
        os.close(sink)


def mount_error(error: RuntimeError, output: str, mountpoint: str) -> OSError:
    """Convert libfuse's output to the OSError that it names; EIO if it names none."""
    text = "; ".join(line.strip() for line in output.splitlines() if line.strip())
    # The longest message: that of ENXIO begins with that of ENODEV.
    named = (code for code in errno.errorcode if os.strerror(code) in text)
    code = max(named, key=lambda code: len(os.strerror(code)), default=errno.EIO)
    return OSError(code, f"cannot mount: {text or error}", mountpoint)
