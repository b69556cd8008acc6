"""The native engine: our own loop on the descriptor of /dev/fuse.

Threading: everything runs on the trio loop's thread but `invalidate_inode` and `invalidate_entry`, which
run on any other (see `vfsd.kernel.engines.base`).

The loop reads and answers until the device is empty, lingers for a moment (a client that got its answer
mostly asks again at once, and a trip through trio's scheduler costs more than the answer), and only then
waits in trio.  After `_SLICE_S` at the latest it lets other tasks run.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import select
import threading
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, Final

import trio

from protocol.errors import errno_of
from protocol.volume import Volume
from vfsd.kernel.engines.base import EngineSettings, Impersonator
from vfsd.kernel.engines.native import mounting, permissions, wire
from vfsd.kernel.engines.native.negotiation import MAX_REQUEST_BYTES, MAX_WRITE_BYTES, Agreement, negotiate
from vfsd.kernel.engines.native.operations import Handler, Operations
from vfsd.kernel.engines.native.polling import Poller, RunnableThreads
from vfsd.kernel.engines.native.replies import NO_CACHE, Message, Replies, Validity
from vfsd.kernel.engines.native.wire import InitFlag, Opcode

__all__ = ["NativeEngine"]

logger = logging.getLogger(__name__)

_SLICE_S: Final = 0.001
_LINGER_MS: Final = 1
_SLICES_FOR_ROOM: Final = 2
_WRITE: Final = int(Opcode.WRITE)  # an IntEnum's member takes longer to compare
_WRITE_HEAD_BYTES: Final = wire.IN_HEADER_BYTES + wire.FUSE_WRITE_IN.size
_INIT_TIMEOUT_MS: Final = 10_000

# Replying: the request was aborted, or the whole mount was.
_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ECONNABORTED})
_NOTHING_TO_FORGET: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENOTCONN, errno.ENODEV})
# What is asked of an impersonator's volume (see `vfsd.kernel.engines.base.Impersonator`).
_IMPERSONATED: Final = frozenset(
    {
        Opcode.LOOKUP, Opcode.GETATTR, Opcode.STATX, Opcode.ACCESS, Opcode.SETATTR, Opcode.MKNOD, Opcode.MKDIR,
        Opcode.SYMLINK, Opcode.LINK, Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2,
    }
)  # fmt: skip


class _Waiting:
    """A request whose answer takes time."""

    __slots__ = ("done", "scope")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.done = trio.Event()


class NativeEngine:
    """Serves a volume over the kernel's own wire protocol.  See `vfsd.kernel.engines.base.Engine`."""

    name: Final = "native"
    fallback_reason: Final = None  # nothing is preferred to it

    def __init__(self, volume: Volume, settings: EngineSettings, impersonator: Impersonator | None = None) -> None:
        self._volume = volume
        self._settings = settings
        self._impersonator = impersonator
        self._impersonated: tuple[Volume, Operations] | None = None
        self._replies = Replies(Validity(settings.cache_timeout_s))
        self._operations = Operations(volume, self._replies, drop=self._interrupt)
        self._buffer = bytearray(MAX_REQUEST_BYTES)
        self._requests = 0
        self._emptied = 0  # how often the device was found empty
        self._postponed: list[bytes] = []  # requests for which there was no room, to be tried once more
        self._is_last_try = False
        self._waiting: dict[int, _Waiting] = {}
        self._nursery: trio.Nursery | None = None
        self._stopped = trio.CancelScope()
        self._device: io.FileIO | None = None
        self._mount: mounting.Mount | None = None
        self._agreement: Agreement | None = None
        # Guards what other threads use: the device is closed by `unmount` or by the last notification under way.
        self._notify_lock = threading.Lock()
        self._notifying = 0
        self._closing = False

    @property
    def requests(self) -> int:
        return self._requests

    # -- mount and unmount -------------------------------------------------------------------
    def mount(self) -> None:
        """Make the mount and agree with the kernel on the protocol.

        OSError: fusermount3 refused, or (EPROTONOSUPPORT) the kernel lacks what this engine is built on.
        """
        checked = permissions.needs_checks(self._settings)
        descriptor, self._mount = mounting.mount(self._settings, checked=checked)
        os.set_blocking(descriptor, False)
        # FileIO says "nothing there" with None, which costs less than an exception.
        self._device = io.FileIO(descriptor, "r+")
        try:
            self._agree(self._device, checked)
        except BaseException:
            self.unmount()
            raise

    def _agree(self, device: io.FileIO, checked: bool) -> None:
        poll = select.poll()
        poll.register(device, select.POLLIN)
        if not poll.poll(_INIT_TIMEOUT_MS):
            raise OSError(errno.ETIMEDOUT, "the kernel did not ask for the protocol")
        length = device.readinto(self._buffer) or 0
        acl = self._volume.capabilities.acls
        self._agreement = agreed = negotiate(
            self._buffer,
            length,
            cache_timeout_s=self._settings.cache_timeout_s,
            acl=acl,
            # Without extended attributes there is nothing for the kernel to check by.
            checked=checked and self._settings.xattrs,
        )
        self._operations = self._operations_over(self._volume, self._replies)
        os.write(device.fileno(), agreed.reply)
        if self._mount:
            mounting.set_readahead(self._mount, MAX_WRITE_BYTES)
        logger.debug("FUSE 7.%d, %r", agreed.minor, agreed.flags)

    def _operations_over(self, volume: Volume, replies: Replies) -> Operations:
        flags = self._agreement.flags if self._agreement else InitFlag(0)
        return Operations(
            volume,
            replies,
            umask_is_ours=InitFlag.DONT_MASK in flags,
            long_setxattr=InitFlag.SETXATTR_EXT in flags,
            kernel_knows_acls=InitFlag.POSIX_ACL in flags,
            xattrs=self._settings.xattrs,
            drop=self._interrupt,
            forget_attributes=self._forget_attributes,
        )

    def unmount(self) -> None:
        """Release the device, and unmount where that has not happened yet.  Idempotent."""
        made, self._mount = self._mount, None
        if made is None:
            return
        mounted = mounting.is_mounted(made)
        if mounted:
            mounting.abort(made)
        with self._notify_lock:
            self._closing = True
            self._close_when_unused()
        if mounted:
            try:
                mounting.unmount(made)
            except OSError as error:
                logger.warning("not unmounted: %s", error)

    def _close_when_unused(self) -> None:
        """Close the device, unless a notification is under way: the last one then closes it."""
        if self._closing and not self._notifying and self._device:
            self._device.close()
            self._device = None

    # -- the loop ----------------------------------------------------------------------------
    async def serve(self) -> None:
        """Answer requests until the file system is unmounted or `stop` is called."""
        device = self._device
        if device is None:
            raise OSError(errno.ENOTCONN, "not mounted")
        readable = select.poll()
        readable.register(device, select.POLLIN)
        try:
            with self._stopped, RunnableThreads() as runnable:
                async with trio.open_nursery() as self._nursery:
                    await self._serve(device, Poller(readable.poll, runnable=runnable))
                    self._nursery.cancel_scope.cancel()
        finally:
            self._nursery = None

    async def _serve(self, device: io.FileIO, poller: Poller) -> None:
        descriptor = device.fileno()
        slices_waited = 0

        while True:
            try:
                empty = self._answer_some(device.readinto, descriptor, poller)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                # ENOENT: the request was taken back while it was handed out.  EINTR is FileIO's to retry.
                if error.errno != errno.ENOENT:
                    raise
                empty = False
            if self._postponed:
                slices_waited += 1
                # The kernel hands out eight requests at most before the FORGETs that wait (fs/fuse/dev.c): a
                # device that is never empty has given them in a slice or two.
                if empty or slices_waited > _SLICES_FOR_ROOM:
                    self._try_again(descriptor)
                    slices_waited = 0
            if empty:
                self._emptied += 1
                await trio.lowlevel.wait_readable(device)
            else:
                await trio.lowlevel.checkpoint()

    def _answer_some(self, read: Callable[[bytearray], int | None], descriptor: int, poller: Poller) -> bool:
        """Answer requests until there is none (True) or the slice is over (False).  OSError of reading only."""
        respond, buffer, wait = self._respond, self._buffer, poller.wait
        answered = monotonic()
        deadline = answered + _SLICE_S
        # Asked first, because asking costs less than being refused (EAGAIN is an exception made and thrown away); but
        # not where the last request was there at once: then the next one is, too.
        # Lingering would keep tasks that wait for a volume from going on.
        eager = False
        while eager or (poller.ready() if self._waiting else wait(answered, _LINGER_MS)):
            length = read(buffer)
            if length:
                respond(descriptor, length)
                buffer = self._buffer  # another one where a volume keeps the data
                answered = monotonic()
                if answered > deadline:
                    return False
                eager = poller.at_once
            else:
                eager = False
        return True

    def _respond(self, descriptor: int, length: int) -> None:
        """Answer the request in the buffer; never raises."""
        buffer = self._buffer
        opcode, unique, node, pid = wire.IN_HEADER_ROUTE.unpack_from(buffer, 0)
        self._requests += 1
        operations = self._operations
        impersonator = self._impersonator
        try:
            # Requests of the kernel itself have pid 0, as has an impersonator without a thread.
            if impersonator is not None and pid and pid == impersonator.thread_id and opcode in _IMPERSONATED:
                operations = self._impersonate(impersonator.volume)
            handler = operations.table.get(opcode)
            if handler is None or length < handler.least:
                self._refuse(descriptor, unique, handler, length)
                return
            _, method, reply = handler
            answer = method(node, buffer, length)
            if hasattr(answer, "__await__"):
                self._answer_later(descriptor, operations, opcode, unique, answer)
                return
            if opcode == _WRITE and answer < length - _WRITE_HEAD_BYTES and not self._is_last_try:
                self._postponed.append(bytes(buffer[:length]))
                return
            message = reply(unique, answer)
        except Exception as error:  # noqa: BLE001  (logged there)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC and not self._is_last_try:
                self._postponed.append(bytes(buffer[:length]))
                return
            message = self._failure(operations, opcode, unique, error)
        try:  # `_send`, of which the call would be a tenth of the rest
            if isinstance(message, bytes):
                if message:
                    os.write(descriptor, message)
            else:
                os.writev(descriptor, message)
        except OSError as error:
            self._refused(descriptor, unique, error)

    def _try_again(self, descriptor: int) -> None:
        """Answer the requests that were postponed.

        A file whose unlink was answered takes room until the kernel's FORGET of it is read, which may come after
        the next request of the same program: on a local file system that one would find the room.  A write that
        found room for its first part only is repeated as a whole.
        """
        postponed, self._postponed = self._postponed, []
        self._is_last_try = True
        for request in postponed:
            self._buffer[: len(request)] = request
            self._requests -= 1
            self._respond(descriptor, len(request))
        self._is_last_try = False

    def _refuse(self, descriptor: int, unique: int, handler: Handler | None, length: int) -> None:
        """Answer what we do not serve (ENOSYS), and what no kernel sends: a request cut short (EINVAL)."""
        if length >= wire.IN_HEADER_BYTES and (handler is None or handler.reply is not Replies.nothing):
            self._send(descriptor, unique, wire.error_reply(unique, errno.EINVAL if handler else errno.ENOSYS))

    def _send(self, descriptor: int, unique: int, message: Message) -> None:
        try:
            if isinstance(message, bytes):
                if message:
                    os.write(descriptor, message)
            else:
                os.writev(descriptor, message)
        except OSError as error:
            self._refused(descriptor, unique, error)

    def _refused(self, descriptor: int, unique: int, error: OSError) -> None:
        """The kernel did not take a reply."""
        if error.errno in _GONE:
            return
        # A reply that the kernel refuses leaves its caller waiting, unless another one comes.
        logger.error("the kernel refused a reply", exc_info=error)
        with contextlib.suppress(OSError):
            os.write(descriptor, wire.error_reply(unique, errno.EIO))

    def _failure(self, operations: Operations, opcode: int, unique: int, error: Exception) -> bytes:
        """The reply for `error`; what nobody expected is logged here, once."""
        code = errno_of(error)
        if code == errno.ENOENT and opcode == Opcode.LOOKUP:
            return operations.replies.absent(unique)
        if code == errno.EEXIST and opcode == Opcode.MKNOD and operations is self._operations:
            # The kernel believed the name absent.  An open with O_CREAT that ended here must open what is there:
            # on ESTALE the kernel looks the name up anew, and then fails by itself where it must (fs/namei.c).
            code = errno.ESTALE
        if code is None or not 0 < code <= wire.MAX_ERRNO:
            kind = Opcode(opcode).name
            logger.error("unexpected error in %s, answered with EIO", kind, exc_info=error)
            code = errno.EIO
        return wire.error_reply(unique, code)

    def _impersonate(self, volume: Volume) -> Operations:
        """The operations over an impersonator's volume, of which the kernel is to keep nothing."""
        if self._impersonated is None or self._impersonated[0] is not volume:
            self._impersonated = (volume, self._operations_over(volume, Replies(NO_CACHE)))
        return self._impersonated[1]

    # -- answers that take time --------------------------------------------------------------
    def _answer_later(
        self, descriptor: int, operations: Operations, opcode: int, unique: int, answer: Awaitable[Any]
    ) -> None:
        assert self._nursery is not None
        if opcode == Opcode.WRITE:
            # The data lies in the buffer until the volume has taken it: give the buffer away.
            self._buffer = bytearray(MAX_REQUEST_BYTES)
        self._waiting[unique] = waiting = _Waiting()
        self._nursery.start_soon(self._finish, waiting, descriptor, operations, opcode, unique, answer)

    async def _finish(
        self,
        waiting: _Waiting,
        descriptor: int,
        operations: Operations,
        opcode: int,
        unique: int,
        answer: Awaitable[Any],
    ) -> None:
        message: Message = wire.error_reply(unique, errno.EINTR)
        try:
            with waiting.scope:
                message = operations.table[opcode].reply(unique, await answer)
        except Exception as error:  # noqa: BLE001  (logged there)
            message = self._failure(operations, opcode, unique, error)
        finally:
            # Also when `serve` is being stopped: nobody is left waiting.
            self._send(descriptor, unique, message)
            self._waiting.pop(unique, None)
            waiting.done.set()

    def _interrupt(self, unique: int) -> None:
        """End the wait of a request whose caller was interrupted; answers that took no time are long given."""
        if unique in self._waiting:
            self._waiting[unique].scope.cancel()

    def stop(self) -> None:
        """Make `serve` return soon."""
        self._stopped.cancel()

    async def drained(self) -> None:
        """Return when all requests that the kernel had handed out at the time of the call are answered."""
        device = self._device
        if device is None or self._nursery is None:
            return
        poll = select.poll()
        poll.register(device, select.POLLIN)
        emptied = self._emptied
        # Answers are given in the order of requests, so once empty is enough, however many came since.
        while self._nursery is not None and self._emptied == emptied and poll.poll(0):
            await trio.lowlevel.checkpoint()
        for waiting in tuple(self._waiting.values()):
            await waiting.done.wait()

    # -- notifications -----------------------------------------------------------------------
    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        """Make the kernel forget the attributes of `inode`, and with `content` its pages."""
        # A negative offset stands for attributes only; length 0 for up to the end (fs/fuse/inode.c).
        body = wire.FUSE_NOTIFY_INVAL_INODE_OUT.pack(inode, 0 if content else -1, 0)
        self._notify(wire.notification(wire.FUSE_NOTIFY_INVAL_INODE, body))

    def _forget_attributes(self, inode: int) -> None:
        """The same for attributes alone, of an inode that the current request holds.

        Without pages to drop this takes no lock in the kernel (fuse_reverse_inval_inode, fs/fuse/inode.c), so it is
        the one notification that may be sent from the loop.
        """
        try:
            self.invalidate_inode(inode, content=False)
        except OSError as error:
            logger.warning("cannot make the kernel forget the mode of inode %d: %s", inode, error)

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Make the kernel forget what it knows of `name` in `parent`, presence or absence."""
        body = wire.FUSE_NOTIFY_INVAL_ENTRY_OUT.pack(parent, len(name), 0) + name + b"\0"
        self._notify(wire.notification(wire.FUSE_NOTIFY_INVAL_ENTRY, body))

    def _notify(self, message: bytes) -> None:
        with self._notify_lock:
            if self._closing or self._device is None:
                return
            descriptor = self._device.fileno()
            self._notifying += 1
        try:
            os.write(descriptor, message)
        except OSError as error:
            # ENOENT: the kernel does not know the inode or the name, so there is nothing to forget.
            if error.errno not in _NOTHING_TO_FORGET:
                raise
        finally:
            with self._notify_lock:
                self._notifying -= 1
                self._close_when_unused()
