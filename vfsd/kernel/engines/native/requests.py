"""The steps of one request: its buffer, its handler, the wait for the volume's answer, and the reply to the kernel.

A message lies in the session's buffer, which the next request overwrites.  So everything that outlives the call is
copied, except the data of WRITE: if the volume's answer is an awaitable, the session gives this buffer up.

If a daemon is killed while the kernel copies a request into a page that does not exist yet, or that has to be copied
first because of a fork(2), the kernel ends that request with EIO (fuse_dev_do_read, fs/fuse/dev.c), and no other daemon
gets it.  So the buffers of a daemon that has a keeper are shared mappings, which fork(2) leaves writable, and all their
pages exist.  Others are private mappings, whose pages exist once they are used: most requests use one.

Threading: the serving loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import trio

from protocol.errors import SnapshotNotFoundError, errno_of
from protocol.volume_durability import UNIQUE_RESEND, KernelRequest
from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.mounting import MAX_REQUEST_BYTES
from vfsd.kernel.engines.native.replies import Message
from vfsd.kernel.engines.native.wire import Opcode

if TYPE_CHECKING:
    from vfsd.kernel.engines.native.operations import Operations

T = TypeVar("T")
Request = bytearray | mmap.mmap  # the session's buffer; the message is its first `length` bytes
Method = Callable[[int, Request, int], Any]
# Takes the inode of the request, its message, the message's length and the volume's answer.
Report = Callable[[int, Request, int, Any], None]

BODY: Final = wire.IN_HEADER_BYTES


class Handler:
    """The handling of one opcode: the minimum length of its message, its method, and the packer of its answer.

    `report`: called with a change that was made, before the reply is sent.
    """

    __slots__ = ("method", "min_length", "reply", "report")

    def __init__(self, min_length: int, method: Method, reply: Callable[[int, Any], Message]) -> None:
        self.min_length = min_length
        self.method = method
        self.reply = reply
        self.report: Report | None = None


# Of a message with names, which have 255 bytes, or for SYMLINK a target of 4,095 after the name.
_HEAD_BYTES: Final = 8192


def reported(
    answer: Awaitable[Any], report: Report | None, node: int, message: Request, length: int
) -> Awaitable[object]:
    """Return `answer`, reported when it is there.  No report reads the data of a write."""
    if report is None:
        return answer
    # The next request overwrites the buffer.
    return _reported(answer, report, node, bytearray(message[: min(length, _HEAD_BYTES)]), length)


async def _reported(answer: Awaitable[Any], report: Report, node: int, message: bytearray, length: int) -> object:
    result = await answer
    report(node, message, length, result)
    return result


def then(answer: T | Awaitable[T], change: Callable[[T], object]) -> object:
    """Return `change(answer)`, or an awaitable of it if `answer` is an awaitable."""
    # isinstance() of an abstract class takes longer than most changes.
    return _after(cast("Awaitable[T]", answer), change) if hasattr(answer, "__await__") else change(answer)


async def _after(answer: Awaitable[T], change: Callable[[T], object]) -> object:
    result = change(await answer)
    return await result if isinstance(result, Awaitable) else result


def tried(work: Callable[[], object], refuse: Callable[[Exception], object]) -> object:
    """Return `work()`, or an awaitable of it; `refuse(error)` if that fails with `error`: OSError, MemoryError."""

    async def finish(answer: Awaitable[object]) -> object:
        try:
            return await answer
        except (OSError, MemoryError) as error:
            result = refuse(error)
        return await result if isinstance(result, Awaitable) else result

    try:
        answer = work()
    except (OSError, MemoryError) as error:
        return refuse(error)
    return finish(cast("Awaitable[object]", answer)) if hasattr(answer, "__await__") else answer


_MOST_SPARE: Final = 4


class BufferPool:
    """Buffers for the largest request.  `is_kept`: the daemon has a keeper."""

    def __init__(self, *, is_kept: bool = False) -> None:
        sharing = mmap.MAP_SHARED | mmap.MAP_POPULATE if is_kept else mmap.MAP_PRIVATE
        self._flags = sharing | mmap.MAP_ANONYMOUS
        self._spare: list[mmap.mmap] = []

    def take(self) -> mmap.mmap:
        """Return a buffer that nothing else uses."""
        return self._spare.pop() if self._spare else mmap.mmap(-1, MAX_REQUEST_BYTES, flags=self._flags)

    def give_back(self, buffer: mmap.mmap) -> None:
        """Offer a buffer of `take` again, which nothing uses any more."""
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(buffer)


def _nothing() -> None:
    pass


class PendingRequest(KernelRequest):
    """A request for which the volume returned an awaitable.

    `has_begun` is False while it waits for the network and has changed nothing.  `give_back`: called when the volume
    does not use the request's buffer any more.
    """

    def __init__(self, unique: int, *, has_begun: bool = True) -> None:
        super().__init__(unique & ~UNIQUE_RESEND)
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.has_begun = has_begun
        self.give_back: Callable[[], None] = _nothing


_logger = logging.getLogger(__name__)

# Errors of a reply whose request, or whose mount, was aborted.
_ABORTED: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ECONNABORTED})


def send_reply(descriptor: int, unique: int, message: Message) -> None:
    """Send `message`, the reply to the request `unique`; an empty one is not sent."""
    try:
        if isinstance(message, bytes):
            if message:
                os.write(descriptor, message)
        else:
            os.writev(descriptor, message)
    except OSError as error:
        if error.errno in _ABORTED:
            return
        # The caller waits until the kernel accepts a reply.
        _logger.exception("the kernel rejected a reply; answered EIO instead")
        with contextlib.suppress(OSError):
            os.write(descriptor, wire.error_reply(unique, errno.EIO))


def error_answer(operations: Operations, opcode: int, unique: int, error: Exception, *, is_own: bool) -> bytes:
    """Return the reply for `error`.  Logs an unexpected exception.  `is_own`: not of an impersonator's volume."""
    code = errno_of(error)
    if code == errno.ENOENT and opcode == Opcode.LOOKUP and not isinstance(error, SnapshotNotFoundError):
        return operations.replies.absent(unique)
    if code == errno.EEXIST and opcode == Opcode.MKNOD and is_own:
        # The kernel's cached absence is out of date.  On ESTALE it looks the name up again, then opens what it
        # finds or fails by itself with O_EXCL (do_filp_open, fs/namei.c).
        code = errno.ESTALE
    if code is None or not 0 < code <= wire.MAX_ERRNO:
        kind = Opcode(opcode).name
        _logger.error("unexpected error in %s, answered with EIO", kind, exc_info=error)
        code = errno.EIO
    return wire.error_reply(unique, code)
