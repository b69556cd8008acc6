"""The native engine's loop on the descriptor of /dev/fuse.

Threading: everything runs on the trio loop's thread, except `invalidate_inode` and `invalidate_entry`, which run on any
other thread (see `vfsd.kernel.engines.base`).

The loop answers requests until the device is empty, waits up to 1 ms for the next one (a client that got its answer
mostly asks again at once, and a pass through trio's scheduler costs more than an answer), and only then waits in trio.
After 1 ms of requests it lets other tasks run.

A mount outlives its daemon if a keeper, or the daemon of an upgrade, has a duplicate of the descriptor.  The next
daemon's engine continues with `resume`: it takes over what was negotiated, and has the kernel send again the requests
that were read and not answered (`mounting`).  This works because the engine keeps no state about the kernel: handles
are inode numbers, and what was answered with ENOSYS once stays so by negotiation.
"""

from __future__ import annotations

import errno
import functools
import io
import itertools
import logging
import mmap
import os
import select
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import monotonic
from typing import Any, Final

import msgspec
import trio

from protocol.adapters.snapshot_directory import FIRST_INODE
from protocol.compiled import mypyc_attr
from protocol.errors import NotReadyError
from protocol.values import Value
from protocol.volume import Volume, extended
from protocol.volume_durability import current_request
from vfsd.kernel.engines import base, policy
from vfsd.kernel.engines.base import (
    ChangeObserver,
    EngineSettings,
    Impersonator,
    Markers,
    ResumedMount,
    StaleContent,
    repeated,
)
from vfsd.kernel.engines.native import mounting, observation, wire
from vfsd.kernel.engines.native.mounting import (
    MAX_BACKGROUND,
    MAX_REQUEST_BYTES,
    MAX_WRITE_BYTES,
    Agreement,
    Notifications,
    negotiate,
)
from vfsd.kernel.engines.native.operations import Operations
from vfsd.kernel.engines.native.replies import NO_CACHE, Message, Replies, Validity
from vfsd.kernel.engines.native.requests import (
    BufferPool,
    Handler,
    PendingRequest,
    Request,
    error_answer,
    reported,
    send_reply,
)
from vfsd.kernel.engines.native.wakeups import Poller, RunnableThreads, Wakeups, make_wakeups
from vfsd.kernel.engines.native.wire import WRITE_DATA_AT, InitFlag, Opcode
from vfsd.kernel.engines.native.write_back import BARRIER_INODE, Barrier

_logger = logging.getLogger(__name__)

_SLICE_S: Final = 0.001
_LINGER_MS: Final = 1
_SLICES_BEFORE_RETRY: Final = 2
# How often `drained` lets the loop run before it sends markers.  Each marker wakes a worker thread.
_PASSES_BEFORE_MARKERS: Final = 4
_PRUNE_MINOR: Final = 45  # the protocol that has FUSE_NOTIFY_PRUNE
_INIT_TIMEOUT_MS: Final = 10_000
_WRITE: Final = int(Opcode.WRITE)  # comparing with the enum's member takes 7 % of a request for attributes

# The opcodes that an impersonator's volume answers (see `vfsd.kernel.engines.base.Impersonator`).
_IMPERSONATED: Final = frozenset(
    {
        Opcode.LOOKUP, Opcode.GETATTR, Opcode.STATX, Opcode.ACCESS, Opcode.SETATTR, Opcode.MKNOD, Opcode.MKDIR,
        Opcode.SYMLINK, Opcode.LINK, Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2,
    }
)  # fmt: skip


_SAVED_VERSION: Final = 1


class _Saved(Value):
    """The parameters of a mount, for the engine that resumes it."""

    version: int
    minor: int
    flags: int
    mountpoint: str
    device: int


@mypyc_attr(allow_interpreted_subclasses=True)
class NativeEngine:
    """Serves a volume over the kernel's own protocol.  See `vfsd.kernel.engines.base.Engine` for its methods."""

    name: Final = "native"
    fallback_reason: Final = None  # this is the preferred engine

    def __init__(self, volume: Volume, settings: EngineSettings, impersonator: Impersonator | None = None) -> None:
        self._volume = volume
        self._settings = settings
        self._impersonator = impersonator
        self._impersonated: tuple[Volume, Operations] | None = None
        self._replies = Replies(Validity(settings.cache_timeout_s))
        self._agreement: Agreement | None = None
        self._markers = Markers(settings.mountpoint)
        is_cached = settings.write_back and not settings.read_only
        write_out = functools.partial(self.invalidate_inode, content=True)
        self._barrier = Barrier(settings.mountpoint, write_out) if is_cached else None
        self._stale = StaleContent(self.invalidate_inode, settings.cache_timeout_s)
        self._operations = self._operations_over(volume, self._replies)
        self._buffers = BufferPool()
        self._buffer: mmap.mmap = self._buffers.take()
        self._requests = 0
        self._wakeups = Wakeups(None, why_off="the workspace is not served")
        self._warning: str | None = None
        self._empty_count = 0  # how often the loop found the device empty
        self._postponed: list[bytes] = []  # requests that failed with ENOSPC, to be tried once more
        self._pending: dict[int, PendingRequest] = {}  # by `unique`
        self._nursery: trio.Nursery | None = None
        self._stopped = trio.CancelScope()
        self._device: io.FileIO | None = None
        self._mount: mounting.FuseMount | None = None
        self._notifications = Notifications()
        self._counter: memoryview | None = None
        self._counted = 0
        # The numbers of requests that wait for an answer, for a kernel that does not send them again (`mounting`).
        self._ring: memoryview | None = None
        self._noted: Iterator[int] = iter(())
        self._going_on: trio.Event | None = None  # while the engine pauses

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def wakeups(self) -> str:
        return self._wakeups.state

    @property
    def warnings(self) -> Sequence[str]:
        return () if self._warning is None else (self._warning,)

    # -- mount and unmount -------------------------------------------------------------------
    def mount(self) -> None:
        """Make the mount and negotiate the protocol.

        OSError: fusermount3 refused, or (EPROTONOSUPPORT) the kernel lacks a feature that this engine requires.
        """
        checked = policy.needs_checks(self._settings)
        self._wakeups, self._warning = make_wakeups(self._settings.wakeups)
        try:
            descriptor, self._mount = mounting.mount(self._settings, checked=checked)
        except BaseException:
            self._wakeups.close()
            raise
        os.set_blocking(descriptor, False)
        device = self._open(descriptor)
        try:
            self._negotiate(device, checked)
        except BaseException:
            self.unmount()
            raise

    def _open(self, descriptor: int) -> io.FileIO:
        # FileIO reports an empty device as None, which costs less than an exception.
        self._device = device = io.FileIO(descriptor, "r+")
        self._notifications.open(device)
        return device

    def _negotiate(self, device: io.FileIO, checked: bool) -> None:
        poll = select.poll()
        poll.register(device, select.POLLIN)
        if not poll.poll(_INIT_TIMEOUT_MS):
            raise OSError(errno.ETIMEDOUT, "the kernel did not send INIT")
        length = device.readinto(self._buffer) or 0
        self._agreement = agreed = negotiate(
            self._buffer,
            length,
            cache_timeout_s=self._settings.cache_timeout_s,
            acl=self._volume.capabilities.acls,
            # Without extended attributes there are no ACLs for the kernel to check.
            checked=checked and self._settings.xattrs,
            write_back=self._settings.write_back,
        )
        self._operations = self._operations_over(self._volume, self._replies)
        os.write(device.fileno(), agreed.reply)
        if self._mount:
            mounting.set_readahead(self._mount, MAX_WRITE_BYTES)
        _logger.debug("FUSE 7.%d, %r", agreed.minor, agreed.flags)

    # -- a mount that outlives this process ----------------------------------------------------
    @property
    def descriptor(self) -> int | None:
        """The descriptor of /dev/fuse, while there is a mount."""
        return None if self._device is None else self._device.fileno()

    def negotiated(self) -> bytes | None:
        """See `vfsd.kernel.engines.base.ResumableEngine` for this method, `pause` and `go_on`."""
        agreed = self._agreement
        if agreed is None or self._mount is None:
            return None
        return msgspec.json.encode(
            _Saved(_SAVED_VERSION, agreed.minor, int(agreed.flags), self._mount.mountpoint, self._mount.device)
        )

    async def pause(self) -> None:
        # The loop is at one of its awaits, and checks this before it reads the next request.
        self._going_on = trio.Event()
        while self._postponed or self._pending:
            if self._postponed and self._device is not None:
                self._retry_postponed(self._device.fileno())
            for pending in tuple(self._pending.values()):
                await pending.done.wait()

    def go_on(self) -> None:
        going_on, self._going_on = self._going_on, None
        if going_on is not None:
            going_on.set()

    def resume(self, mount: ResumedMount) -> None:
        """See `vfsd.kernel.engines.base.ResumableEngine`."""
        descriptor, memory_fd = mount.descriptor, mount.memory_fd
        found = msgspec.json.decode(mount.negotiated, type=_Saved)
        if found.version != _SAVED_VERSION:
            raise OSError(errno.EPROTONOSUPPORT, f"the mount was made by another vfsd (format {found.version})")
        self._agreement = agreed = Agreement(found.minor, InitFlag(found.flags), b"")
        if mount.resend and InitFlag.HAS_RESEND in agreed.flags:
            mounting.resend_unanswered(descriptor)
        elif mount.resend and memory_fd is not None and (failed := mounting.fail_noted(descriptor, memory_fd)):
            _logger.warning("%d requests that the dead daemon had read failed with EIO (before Linux 6.9)", failed)
        self._mount = mounting.FuseMount(found.mountpoint, found.device)
        self._wakeups, self._warning = make_wakeups(self._settings.wakeups)
        self._open(descriptor)
        self._operations = self._operations_over(self._volume, self._replies)

    def share(self, memory: memoryview, memory_fd: int) -> None:
        """See `vfsd.kernel.engines.base.ResumableEngine`."""
        self._counter = memory
        if self._agreement is not None and InitFlag.HAS_RESEND not in self._agreement.flags:
            self._noted = itertools.cycle(range(mounting.RING_WORDS))
            ring = mmap.mmap(memory_fd, 8 * mounting.RING_WORDS, offset=mounting.RING_AT)
            self._ring = memoryview(ring).cast("Q")
            self._buffer = mmap.mmap(memory_fd, MAX_REQUEST_BYTES, offset=mounting.BUFFER_AT)
            return  # which the next daemon reads: see `mounting.fail_noted`
        self._buffers = BufferPool(is_kept=True)
        self._buffer = self._buffers.take()

    def _operations_over(self, volume: Volume, replies: Replies) -> Operations:
        if not volume.capabilities.snapshot_directory:
            return self._plain_operations(volume, replies)
        snapshots = self._plain_operations(volume, replies)
        return self._plain_operations(extended(volume).below, replies, snapshots)

    def _plain_operations(self, volume: Volume, replies: Replies, snapshots: Operations | None = None) -> Operations:
        operations = Operations(
            volume,
            replies,
            self._agreement.flags if self._agreement else InitFlag(0),
            xattrs=self._settings.xattrs,
            cancel=self._cancel,
            invalidate_attributes=functools.partial(base.invalidate_attributes, self),
            invalidate_content=self._stale.add,
            written_back=functools.partial(base.written_back, self, self._settings.mountpoint),
            record_statfs=self._markers.record,
            snapshots=snapshots,
        )
        if self._barrier is not None:
            self._barrier.add_to(operations)
        return operations

    def observe(self, observer: ChangeObserver) -> None:
        """See `vfsd.kernel.engines.base.ObservableEngine`."""
        observation.observe(self._operations, observer)

    def unmount(self) -> None:
        self._wakeups.close()
        made, self._mount = self._mount, None
        if made is None:
            return
        mounted = mounting.is_mounted(made)
        if mounted:
            mounting.abort(made)
        self._device = None
        self._notifications.close()
        if mounted:
            try:
                mounting.unmount(made)
            except OSError as error:
                _logger.warning("cannot unmount: %s", error)

    # -- the loop ----------------------------------------------------------------------------
    async def serve(self) -> None:
        device = self._device
        if device is None:
            raise OSError(errno.ENOTCONN, "not mounted")
        readable = select.poll()
        readable.register(device, select.POLLIN)
        if self._volume.capabilities.journal:
            self._operations.waits_for_syncs = extended(self._volume).defer_syncs()
        try:
            with self._stopped, RunnableThreads() as runnable:
                self._wakeups.runnable = runnable
                async with trio.open_nursery() as self._nursery:
                    await self._serve(device, Poller(readable.poll, runnable=runnable), self._wakeups)
                    self._nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._wakeups.close()

    async def _serve(self, device: io.FileIO, poller: Poller, wakeups: Wakeups) -> None:
        descriptor = device.fileno()
        slices = 0  # since a request was postponed
        seen = self._requests

        while True:
            if self._going_on is not None:
                await self._going_on.wait()
                continue
            try:
                empty = self._answer_slice(device.readinto, descriptor, poller)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                # ENOENT: the request was withdrawn while it was read.  FileIO retries after EINTR.
                if error.errno != errno.ENOENT:
                    raise
                empty = False
            if self._postponed:
                slices += 1
                # The kernel delivers at most eight requests before the FORGETs that wait (fs/fuse/dev.c), so even a
                # device that is never empty has delivered them after a slice or two.
                if empty or slices > _SLICES_BEFORE_RETRY:
                    self._retry_postponed(descriptor)
                    slices = 0
            patience_s = wakeups.answered(self._requests - seen)
            self._count_answered()
            seen = self._requests
            if empty:
                self._empty_count += 1
                if patience_s:
                    with trio.move_on_after(patience_s) as waiting:
                        await trio.lowlevel.wait_readable(device)
                    if not waiting.cancelled_caught:
                        continue
                    wakeups.rest()
                await trio.lowlevel.wait_readable(device)
            else:
                await trio.lowlevel.checkpoint()

    def _count_answered(self) -> None:
        """Count in the shared memory what was answered; not what the volume has yet to answer."""
        answered = self._requests - len(self._pending)
        if self._counter is not None and answered > self._counted:
            self._counter[0] += answered - self._counted
            self._counted = answered

    def _answer_slice(self, read: Callable[[Request], int | None], descriptor: int, poller: Poller) -> bool:
        """Answer requests until the device is empty (True) or the slice is over (False).  OSError only from reading."""
        answered = monotonic()
        # The keeper learns at once that this daemon answers.
        is_first = self._counter is not None and not self._counter[0]
        deadline = answered if is_first else answered + _SLICE_S
        # A poll costs less than a read of an empty device.  But if a poll found a request at once, the next request
        # is mostly there as well, and is read without a poll.  While requests are pending, waiting here would keep
        # the tasks that answer them from running.
        while poller.at_once or poller.wait(answered, 0 if self._pending else _LINGER_MS):
            length = read(self._buffer)
            if not length:
                poller.at_once = False
                continue
            self._respond(descriptor, length)
            answered = monotonic()
            if answered > deadline:
                return False
        return True

    def _respond(self, descriptor: int, length: int, may_postpone: bool = True) -> None:
        """Answer the request in the buffer; never raises."""
        opcode, unique, node, pid = wire.IN_HEADER_ROUTE.unpack_from(self._buffer, 0)
        self._requests += 1
        # With a ring the loop goes on with its buffer, also if the answer comes later.
        is_copied = self._ring is not None and opcode == _WRITE
        buffer: Request = bytearray(self._buffer[:length]) if is_copied else self._buffer
        operations = self._operations
        impersonator = self._impersonator
        try:
            # Requests of the kernel itself have pid 0, and so has an impersonator without a thread.
            if impersonator is not None and pid and pid == impersonator.thread_id and opcode in _IMPERSONATED:
                operations = self._impersonate(impersonator.volume)
            if node >= FIRST_INODE and operations.snapshots is not None:
                operations = operations.snapshots
            handler = operations.table.get(opcode)
            if handler is None or length < handler.min_length:
                self._refuse(descriptor, unique, handler, length)
                return
            method, report = handler.method, handler.report
            if self._postponed and node == BARRIER_INODE:
                # Answered after them: see `write_back`.
                self._postpone(unique, length)
                return
            answer = method(node, buffer, length)
            if hasattr(answer, "__await__"):
                answer = reported(answer, report, node, buffer, length)
                self._answer_later(descriptor, operations, opcode, unique, answer)
                return
            if (
                opcode == _WRITE
                and answer < length - WRITE_DATA_AT
                and may_postpone
                and not wire.FUSE_WRITE_IN.unpack_from(buffer, wire.IN_HEADER_BYTES)[5] & os.O_APPEND  # would repeat it
            ):
                self._postpone(unique, length)
                return
            message = handler.reply(unique, answer)
            if report is not None:
                report(node, buffer, length, answer)
        except NotReadyError as error:
            request = bytearray(buffer[:length])
            answer = repeated(functools.partial(method, node, request, length), error)
            answer = reported(answer, report, node, request, length)
            self._answer_later(descriptor, operations, opcode, unique, answer, has_begun=False)
            return
        except Exception as error:  # noqa: BLE001  (logged there)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC and may_postpone:
                self._postpone(unique, length)
                return
            message = error_answer(operations, opcode, unique, error, is_own=operations is self._operations)
        if operations.unsynced is not None:
            self._send_synced(descriptor, operations, opcode, unique, message)
            return
        send_reply(descriptor, unique, message)

    def _postpone(self, unique: int, length: int) -> None:
        """Answer the request in the buffer later: see `_retry_postponed`."""
        self._note(unique)
        self._operations.unsynced = None  # the answer comes after that of the next attempt
        self._postponed.append(bytes(self._buffer[:length]))

    def _note(self, unique: int) -> None:
        if self._ring is not None:
            self._ring[next(self._noted)] = unique

    def _retry_postponed(self, descriptor: int) -> None:
        """Answer the postponed requests.

        An unlinked file takes space until the kernel's FORGET of it is read, which may come after the next request of
        the same program.  On a local file system that request would have the space.  A write that had space only for
        its first part is repeated as a whole.
        """
        postponed, self._postponed = self._postponed, []
        for request in postponed:
            self._buffer[: len(request)] = request
            self._requests -= 1
            self._respond(descriptor, len(request), False)

    def _refuse(self, descriptor: int, unique: int, handler: Handler | None, length: int) -> None:
        """Answer ENOSYS to an opcode that has no handler, EINVAL to a message that is too short."""
        if length >= wire.IN_HEADER_BYTES and (handler is None or handler.reply is not Replies.nothing):
            send_reply(descriptor, unique, wire.error_reply(unique, errno.EINVAL if handler else errno.ENOSYS))

    def _impersonate(self, volume: Volume) -> Operations:
        """Return the operations over an impersonator's volume; the kernel must not cache their replies."""
        if self._impersonated is None or self._impersonated[0] is not volume:
            operations = self._operations_over(volume, Replies(NO_CACHE))
            operations.waits_for_syncs = self._operations.waits_for_syncs
            self._impersonated = (volume, operations)
        return self._impersonated[1]

    # -- pending requests --------------------------------------------------------------------
    def _answer_later(
        self,
        descriptor: int,
        operations: Operations,
        opcode: int,
        unique: int,
        answer: Awaitable[Any],
        *,
        has_begun: bool = True,
    ) -> None:
        assert self._nursery is not None
        pending = PendingRequest(unique, has_begun=has_begun)
        if opcode == Opcode.WRITE and has_begun and self._ring is None:
            # The data stays in this buffer until the volume has stored it, so the loop gets another buffer.
            pending.give_back = functools.partial(self._buffers.give_back, self._buffer)
            self._buffer = self._buffers.take()
        self._note(unique)
        self._pending[unique] = pending
        self._nursery.start_soon(self._finish, pending, descriptor, operations, opcode, unique, answer)

    async def _finish(
        self,
        pending: PendingRequest,
        descriptor: int,
        operations: Operations,
        opcode: int,
        unique: int,
        answer: Awaitable[Any],
    ) -> None:
        message: Message = wire.error_reply(unique, errno.EINTR)
        current_request.set(pending)
        try:
            with pending.scope:
                result = await answer
                pending.give_back()  # after a failure something may use the data still
                operations.unsynced = None  # part of everything
                message = operations.table[opcode].reply(unique, result)
                wait = operations.everything_unsynced(opcode)
                if wait is not None:
                    await wait()
        except Exception as error:  # noqa: BLE001  (logged there)
            message = error_answer(operations, opcode, unique, error, is_own=operations is self._operations)
        finally:
            # Also if `serve` is being stopped, so that no caller is left waiting.
            send_reply(descriptor, unique, message)
            if pending.answered is not None:
                pending.answered(pending.unique)
            self._pending.pop(unique, None)
            pending.done.set()
            self._count_answered()

    def _send_synced(self, descriptor: int, operations: Operations, opcode: int, unique: int, message: Message) -> None:
        """Send `message` when what the request changed is on disk.  Nothing cancels that: the change is made."""
        wait, operations.unsynced = operations.unsynced, None
        if wait is None or not message:
            return
        assert self._nursery is not None
        self._note(unique)
        self._pending[unique] = pending = PendingRequest(unique)

        async def send() -> None:
            sent = message
            try:
                with trio.CancelScope(shield=True):
                    await wait()
            except Exception as error:  # noqa: BLE001  (logged there)
                sent = error_answer(operations, opcode, unique, error, is_own=operations is self._operations)
            finally:
                send_reply(descriptor, unique, sent)
                self._pending.pop(unique, None)
                pending.done.set()

        self._nursery.start_soon(send)

    def _cancel(self, unique: int) -> None:
        """Cancel a request whose caller was interrupted; does nothing if it was answered already."""
        if unique in self._pending:
            self._pending[unique].scope.cancel()

    def stop(self) -> None:
        self._stopped.cancel()

    async def drained(self) -> None:
        device = self._device
        if device is None or self._nursery is None:
            return
        if self._barrier is None or not await self._barrier.passed():
            await self._found_empty(device)
        for pending in tuple(self._pending.values()):
            if pending.has_begun:
                await pending.done.wait()

    async def _found_empty(self, device: io.FileIO) -> None:
        """Wait until the loop finds the device empty."""
        poll = select.poll()
        poll.register(device, select.POLLIN)
        empty_count = self._empty_count

        def was_empty() -> bool:
            # Requests are read in order, so it suffices that the loop finds the device empty once.
            return self._nursery is None or self._empty_count != empty_count or not poll.poll(0)

        passes = 0
        while not was_empty():
            passes += 1
            if passes > _PASSES_BEFORE_MARKERS and await self._has_read_all_before():
                break
            await trio.lowlevel.checkpoint()

    async def _has_read_all_before(self) -> bool:
        """Read every request that was issued before this call, although the device may never be empty.

        False: the kernel's background queue may still hold some, or markers do not reach this mount.

        Dirty pages and readahead wait in that queue while MAX_BACKGROUND of its requests are unanswered
        (`flush_bg_queue`, fs/fuse/dev.c).  If it is not empty when the second marker is sent, that many were queued
        after the first marker was queued and before the second one, or are pending.
        """
        if not await self._markers.pass_one():
            return False
        before = self._operations.sent_in_background - len(self._pending)
        if not await self._markers.pass_one() or self._operations.sent_in_background - before >= MAX_BACKGROUND:
            return False
        postponed = self._postponed
        while postponed and self._postponed is postponed and self._nursery is not None:
            await trio.lowlevel.checkpoint()  # a retry replaces the list
        return True

    # -- notifications -----------------------------------------------------------------------
    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        self._notifications.invalidate_inode(inode, content=content)

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self._notifications.invalidate_entry(parent, name)

    def prune(self, inodes: Sequence[int]) -> bool:
        """Have the kernel evict the inodes that no program uses.  False if this kernel cannot (before Linux 6.18)."""
        if self._agreement is None or self._agreement.minor < _PRUNE_MINOR:
            return False
        self._notifications.prune(inodes)
        return True
