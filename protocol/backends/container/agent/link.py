"""AgentLink: requests to a helper and its replies, many at a time over one stream.

The helper is not believed.  A reply to nothing that was asked, or larger than what was asked for, or none in
`timeout_s`, and the link is lost: whoever waits gets EIO, and so does whoever asks from then on.  What it can make
us keep is bounded by what we asked it for.

An answer is waited for also when its caller is interrupted, for a moment: many programs are interrupted by signals of
their own all the time, and would see EINTR where no local file system has it.  After that it goes without, and what the
answer says is undone when it comes.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeAlias

import trio

from protocol.backends.container.agent.frames import Frame, FrameDecoder
from protocol.backends.container.helper.wire import (
    CHUNK_BYTES,
    FORGET,
    MAGIC,
    SLOW,
    Op,
    WireError,
    pack,
    unpack,
)
from protocol.backends.container.podman.exec_stream import STDERR, Output
from protocol.errors import os_error

__all__ = ["AgentLink", "HelperStream", "Pending", "Reply"]

Reply: TypeAlias = tuple[tuple[int, ...], list[bytes]]

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 60.0
_SLOW_TIMES: Final = 10  # what waits for a disk, or moves much, may take so many times as long
_START_S: Final = 30.0
_GRACE_S: Final = 1.0  # for the answer to an interrupted request
_MOST_IN_FLIGHT: Final = 256
_MOST_QUEUED_BYTES: Final = 16 * CHUNK_BYTES
_REPLY_BYTES: Final = 4096  # of most operations; others say how much they want
_SAID_BYTES: Final = 2000
_RECEIVE_BYTES: Final = 256 * 1024
_MOST_FORGETS: Final = CHUNK_BYTES // FORGET.size
# What a kernel would take for more than the failure of one request.
_OTHERWISE: Final = {errno.ENOSYS: errno.EOPNOTSUPP, errno.EINTR: errno.EIO}


class HelperStream(Protocol):
    """The two-way stream to a helper: `protocol.backends.container.podman.exec_stream.ExecStream`, or one like it."""

    async def send(self, data: bytes) -> None: ...
    def send_nowait(self, data: bytes) -> int:
        """Send what can be sent at once, while no `send` is under way: how many bytes that were."""
        ...

    async def receive(self, max_bytes: int = ...) -> Output | None: ...
    async def aclose(self) -> None: ...


class Pending:
    """A request that was sent."""

    __slots__ = ("code", "deadline_s", "done", "most_bytes", "op", "reply", "undo")

    def __init__(self, op: int, deadline_s: float, most_bytes: int, undo: Callable[[Reply], None] | None) -> None:
        self.op = op
        self.deadline_s = deadline_s
        self.most_bytes = most_bytes
        self.undo = undo
        self.done: trio.Event | None = trio.Event()  # None: nobody waits any more
        self.code = errno.EIO
        self.reply: Reply = ((), [])


class AgentLink:
    """One helper.  `start`, then `running` serves it; `call` and `forget` are for the same loop's tasks."""

    def __init__(self, stream: HelperStream, *, timeout_s: float = TIMEOUT_S, start_s: float = _START_S) -> None:
        self.lost: Final = trio.Event()
        self.reason = ""
        self._stream = stream
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._decoder = FrameDecoder(self._limit)
        self._pending: dict[int, Pending] = {}
        self._last = 0
        self._outgoing: list[bytes] = []
        self._queued = 0
        self._is_sending = False
        self._forgets: dict[int, int] = {}
        self._work = trio.Event()
        self._room = trio.lowlevel.ParkingLot()
        self._said = b""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The helper, once started, serves inside the block; the stream is closed with it."""
        try:
            async with trio.open_nursery() as nursery:
                for task in (self._receive, self._send, self._watch):
                    nursery.start_soon(self._until_lost, task)
                yield
                self.lose("closed")
                nursery.cancel_scope.cancel()
        finally:
            self.lose("closed")
            await self._stream.aclose()

    async def start(self, program: bytes) -> None:
        """Start the helper by sending it `program`.  OSError: it does not start; closing the stream is the caller's."""
        heard = b""
        try:
            with trio.fail_after(self._start_s):
                await self._stream.send(program)
                while len(heard) < len(MAGIC):
                    output = await self._stream.receive(len(MAGIC) - len(heard))
                    if output is None:
                        raise OSError(errno.EIO, f"the helper does not start: {self.said or 'it says nothing'}")
                    if output.channel == STDERR:
                        self._note(output.data)
                    else:
                        heard += output.data
        except trio.TooSlowError:
            raise TimeoutError(errno.ETIMEDOUT, "the helper does not start in time") from None
        except BrokenPipeError:
            raise OSError(errno.EIO, f"the helper does not start: {await self._last_words()}") from None
        if heard != MAGIC:
            raise OSError(errno.EPROTO, f"this is no helper: it begins with {heard!r}")

    async def _last_words(self) -> str:
        with trio.move_on_after(1):
            while (output := await self._stream.receive(_SAID_BYTES)) is not None:
                self._note(output.data)
        return self.said or "it says nothing"

    @property
    def said(self) -> str:
        """The end of what it said on standard error, in one line."""
        return " ".join(self._said.decode("utf-8", "replace").split())

    def _note(self, data: bytes) -> None:
        self._said = (self._said + data)[-_SAID_BYTES:]

    # -- asking --------------------------------------------------------------------------------
    async def call(
        self,
        op: int,
        numbers: tuple[int, ...] = (),
        strings: tuple[bytes, ...] = (),
        *,
        most_bytes: int = 0,
        undo: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """What the helper replies.  OSError: what it says, or EIO.

        `most_bytes` of strings are to be expected.  `undo` gets the reply when it comes after its caller is gone.
        """
        while len(self._pending) >= _MOST_IN_FLIGHT or self._queued >= _MOST_QUEUED_BYTES:
            await self._room.park()
        return await self.answer(self.post(op, numbers, strings, most_bytes=most_bytes, undo=undo))

    def post(
        self,
        op: int,
        numbers: tuple[int, ...] = (),
        strings: tuple[bytes, ...] = (),
        *,
        most_bytes: int = 0,
        undo: Callable[[Reply], None] | None = None,
    ) -> Pending:
        """Ask, as `call` does, and wait later, by `answer`.  Who asks so bounds by himself how much is under way."""
        if self.lost.is_set():
            raise os_error(errno.EIO)
        number = self._last = (self._last + 1) & 0xFFFFFFFF
        timeout_s = self._timeout_s * _SLOW_TIMES if op in SLOW else self._timeout_s
        pending = Pending(op, trio.current_time() + timeout_s, _REPLY_BYTES + most_bytes, undo)
        frame = pack(number, op, numbers, strings)
        self._pending[number] = pending
        if not self._outgoing and not self._is_sending:
            # Mostly there is room: a trip through the scheduler costs more than the call.
            frame = frame[self._stream.send_nowait(frame) :]
        if frame:
            self._queued += len(frame)
            self._outgoing.append(frame)
            self._work.set()
        return pending

    async def answer(self, pending: Pending) -> Reply:
        """What the helper replies to a request that was posted.  OSError, as `call`."""
        done = pending.done
        assert done is not None
        try:
            await done.wait()
        except trio.Cancelled:
            with trio.move_on_after(_GRACE_S, shield=True):
                await done.wait()
            if not done.is_set():
                pending.done = None
                raise
        if pending.code:
            raise os_error(pending.code)
        return pending.reply

    def forget(self, inode: int, count: int) -> None:
        """Tell the helper, with what is told next, that `count` lookups of `inode` are given back."""
        if not self.lost.is_set():
            self._forgets[inode] = self._forgets.get(inode, 0) + count
            self._work.set()

    # -- the three tasks -----------------------------------------------------------------------
    async def _until_lost(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except (OSError, WireError) as error:
            self.lose(str(error))

    def lose(self, reason: str) -> None:
        """Use it no more: whoever waits gets EIO."""
        if self.lost.is_set():
            return
        self.reason = reason
        self.lost.set()
        self._outgoing.clear()
        self._forgets.clear()
        self._queued = 0
        for pending in self._pending.values():
            if pending.done is not None:
                pending.done.set()
        self._pending.clear()
        self._room.unpark_all()

    async def _send(self) -> None:
        while not self.lost.is_set():
            if not self._outgoing and not self._forgets:
                self._work = trio.Event()
                await self._work.wait()
            frames, self._outgoing = self._outgoing, []
            if self._forgets:
                # Behind them: the first may be the rest of a frame whose begin was sent at once.
                frames.append(self._take_forgets())
            self._is_sending = True
            await self._stream.send(b"".join(frames))
            self._is_sending = False
            self._queued = sum(map(len, self._outgoing))
            self._room.unpark_all()

    def _take_forgets(self) -> bytes:
        taken = list(self._forgets.items())[:_MOST_FORGETS]
        for inode, _ in taken:
            del self._forgets[inode]
        return pack(0, Op.FORGET, (), (b"".join(FORGET.pack(inode, count) for inode, count in taken),))

    async def _receive(self) -> None:
        while (output := await self._stream.receive(_RECEIVE_BYTES)) is not None:
            if output.channel == STDERR:
                self._note(output.data)
                logger.debug("the helper says: %s", output.data.decode("utf-8", "replace").rstrip())
                continue
            for frame in self._decoder.feed(output.data):
                self._deliver(frame)
        self.lose(f"it has ended{': ' + self.said if self.said else ''}")

    def _limit(self, number: int) -> int:
        pending = self._pending.get(number)
        if pending is None:
            raise WireError(f"a reply to request {number}, which was not made")
        return pending.most_bytes

    def _deliver(self, frame: Frame) -> None:
        pending = self._pending[frame.number]
        if frame.code:
            code = _OTHERWISE.get(frame.code, frame.code)
            pending.code = code if code in errno.errorcode else errno.EIO
        else:
            pending.reply = unpack(frame.body)
            pending.code = 0
        del self._pending[frame.number]
        self._room.unpark()
        if pending.done is not None:
            pending.done.set()
        elif pending.undo is not None and not pending.code:
            pending.undo(pending.reply)

    async def _watch(self) -> None:
        """Lose what does not answer."""
        while not self.lost.is_set():
            await trio.sleep(self._timeout_s / 8)
            now_s = trio.current_time()
            late = [pending for pending in self._pending.values() if pending.deadline_s < now_s]
            if late:
                self.lose(f"no answer in {self._timeout_s:g} seconds")
