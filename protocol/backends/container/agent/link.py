"""AgentLink: requests to a helper and its replies, many in flight over one stream.

The helper is not trusted.  The link is lost if a reply belongs to no request, exceeds the size that was asked for, or
does not arrive within `timeout_s`: pending and later requests then fail with EIO.  The memory that replies can take is
bounded by the requests.

If a caller is interrupted, the link still waits a moment for its reply: many programs get signals all the time, and
would see EINTR where no local file system returns it.  After that the caller is cancelled, and a reply that arrives
later is undone.

With `executes_once` a change tells the helper which request of the kernel it belongs to, so that it is executed once
even if another daemon repeats it (`protocol.backends.container.helper.serve`).  The helper keeps its reply until the
kernel has it, which `_answered` notes and a later frame says.

A link to a helper that another daemon has started begins with `join`: the stream is one to a relay, and the helper
serves it from the first request on, or from `begin`.  Until then the other daemon's link is not disturbed.  This daemon
joins its own helper in the same way, if the stream was cut (`is_cut`) and the helper holds.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import trio

from protocol.backends.container.agent.replies import Frame, FrameDecoder
from protocol.backends.container.helper.wire import (
    CHANGES,
    CHUNK_BYTES,
    FORGET,
    GO,
    KEY,
    MAGIC,
    NO_HELPER,
    SLOW,
    Op,
    WireError,
    pack,
    unpack,
)
from protocol.errors import os_error
from protocol.volume_durability import current_request

Reply: TypeAlias = tuple[tuple[int, ...], list[bytes]]

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 60.0
_SLOW_TIMES: Final = 10  # slow operations (`SLOW`) may take this many times longer
_START_S: Final = 30.0
_GRACE_S: Final = 1.0  # for the answer to an interrupted request
_MOST_IN_FLIGHT: Final = 256
_MOST_QUEUED_BYTES: Final = 16 * CHUNK_BYTES
_END_S: Final = 2.0
_REPLY_BYTES: Final = 4096  # for most operations; others pass `most_bytes`
_STDERR_BYTES: Final = 2000
_RECEIVE_BYTES: Final = 256 * 1024
_MOST_FORGETS: Final = CHUNK_BYTES // FORGET.size
_ANSWERED_TOGETHER: Final = 64  # requests whose replies the helper keeps until it is told that the kernel has them
# Errnos with which a kernel does more than fail the request.
_REPLACED_ERRNOS: Final = {errno.ENOSYS: errno.EOPNOTSUPP, errno.EINTR: errno.EIO}


class HelperEndedError(OSError):
    """The helper that a relay was to reach has ended."""


class Pending:
    """A request that was sent."""

    __slots__ = ("code", "deadline_s", "done", "most_bytes", "op", "reply", "undo")

    def __init__(self, op: int, deadline_s: float, most_bytes: int, undo: Callable[[Reply], None] | None) -> None:
        self.op = op
        self.deadline_s = deadline_s
        self.most_bytes = most_bytes
        self.undo = undo
        self.done: trio.Event | None = trio.Event()  # None: the caller was cancelled
        self.code = errno.EIO
        self.reply: Reply = ((), [])


class AgentLink:
    """One helper.  Call `start`, then enter `running`; `call` and `forget` are for tasks of the same loop.

    `executes_once`: see the module.  `holds`: the helper waits for another daemon when its stream ends.  `is_left`
    returns, at the end of `running`, whether another daemon continues with the helper.  `is_cut`: the link was lost
    because the stream ended or nothing came for too long, so the helper may be there still; its replies were valid.
    """

    def __init__(self, stream: HelperStream, *, timeout_s: float = TIMEOUT_S, start_s: float = _START_S) -> None:
        self.lost: Final = trio.Event()
        self.reason = ""
        self.is_cut = self._is_silent = False
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
        self._callers_waiting = trio.lowlevel.ParkingLot()
        self._stderr = b""
        self.executes_once = self.holds = False
        self.is_left: Callable[[], bool] = lambda: False
        self._answered_keys: list[int] = []
        self._go = b""  # to be sent before the first frame
        self._awaited = b""  # of the output, before the first frame
        self._given: trio.Event | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve requests inside the block; the stream is closed after it."""
        try:
            async with trio.open_nursery() as nursery:
                for task in (self._receive, self._send, self._watch):
                    nursery.start_soon(self._until_lost, task)
                yield
                self.lose("closed")
                nursery.cancel_scope.cancel()
        finally:
            is_left = self._given is not None or (not self.lost.is_set() and self.is_left())
            has_to_end = self.holds and not self.lost.is_set()
            self.lose("closed")
            if is_left:
                await self._stream.detach()
            elif self.is_cut and self.holds and not self._is_silent:
                await self._stream.abandon()
            else:
                if has_to_end:
                    await self._end()
                await self._stream.aclose()

    async def _end(self) -> None:
        """Have a helper end that would wait for another daemon."""
        with trio.CancelScope(shield=True), trio.move_on_after(_END_S), suppress(OSError):
            await self._stream.send(self._take_go() + pack(0, Op.END))
            while await self._stream.receive(_RECEIVE_BYTES) is not None:
                pass

    async def start(self, program: bytes, magic: bytes = MAGIC) -> None:
        """Start the helper, or a relay, by sending `program`, whose output begins with `magic`.

        OSError if it does not start, HelperEndedError from a relay; the caller closes the stream.
        """
        printed = b""
        try:
            with trio.fail_after(self._start_s):
                await self._stream.send(program)
                while len(printed) < len(magic):
                    output = await self._stream.receive(len(magic) - len(printed))
                    if output is None:
                        raise OSError(errno.EIO, f"the helper does not start: {self.stderr or 'no output'}")
                    if output.channel == STDERR:
                        self._keep_stderr(output.data)
                    else:
                        printed += output.data
        except trio.TooSlowError:
            raise TimeoutError(errno.ETIMEDOUT, "the helper does not start in time") from None
        except BrokenPipeError:
            raise OSError(errno.EIO, f"the helper does not start: {await self._rest_of_stderr()}") from None
        if printed == NO_HELPER:
            raise HelperEndedError(errno.ESRCH, "the helper that has the files open has ended")
        if printed != magic:
            raise OSError(errno.EPROTO, f"this is not a helper: its output begins with {printed!r}")

    def join(self) -> None:
        """Have the helper serve this stream, to the relay that `start` has started, from the first request on."""
        self._go, self._awaited = GO, MAGIC

    def begin(self) -> None:
        """Have the helper serve this stream now, also if no program sends a request."""
        if self._go and not self.lost.is_set():
            self.post(Op.HELLO)

    # -- another daemon --------------------------------------------------------------------------
    def give(self, *, is_given: bool) -> None:
        """Note that another daemon may have the helper from now on; or that it does not take it."""
        if is_given:
            self._given = trio.Event() if self._given is None else self._given
        elif self._given is not None:
            given, self._given = self._given, None
            given.set()

    async def wait_lost(self) -> None:
        """Wait until the helper is lost.  If another daemon has it, that is for ever."""
        await self.lost.wait()
        while self._given is not None:
            await self._given.wait()

    async def _rest_of_stderr(self) -> str:
        with trio.move_on_after(1):
            while (output := await self._stream.receive(_STDERR_BYTES)) is not None:
                self._keep_stderr(output.data)
        return self.stderr or "no output"

    @property
    def stderr(self) -> str:
        """The end of the helper's standard error, in one line."""
        return " ".join(self._stderr.decode("utf-8", "replace").split())

    def _keep_stderr(self, data: bytes) -> None:
        self._stderr = (self._stderr + data)[-_STDERR_BYTES:]

    # -- requests ------------------------------------------------------------------------------
    async def call(
        self,
        op: int,
        numbers: tuple[int, ...] = (),
        strings: tuple[bytes, ...] = (),
        *,
        most_bytes: int = 0,
        undo: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """Send a request and wait for the reply.  OSError with the helper's errno, or EIO.

        The strings of the reply have at most `most_bytes`.  `undo` gets a reply that arrives after a cancellation.
        """
        while len(self._pending) >= _MOST_IN_FLIGHT or self._queued >= _MOST_QUEUED_BYTES:
            await self._callers_waiting.park()
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
        """Send a request as `call` does; `answer` waits for the reply.  The caller bounds the requests in flight."""
        if self.lost.is_set():
            raise os_error(errno.EIO)
        number = self._last = (self._last + 1) & 0xFFFFFFFF
        timeout_s = self._timeout_s * _SLOW_TIMES if op in SLOW else self._timeout_s
        pending = Pending(op, trio.current_time() + timeout_s, _REPLY_BYTES + most_bytes, undo)
        request = current_request.get() if self.executes_once and op in CHANGES else None
        if request is None:
            frame = pack(number, op, numbers, strings)
        else:
            request.answered = self._answered
            frame = self._confirmations() + pack(number, op, numbers, strings, request.unique)
        if self._go:
            frame = self._take_go() + frame
        self._pending[number] = pending
        if not self._outgoing and not self._is_sending:
            # Usually there is room: a switch of tasks costs more than the system call.
            frame = frame[self._stream.send_nowait(frame) :]
        if frame:
            self._queued += len(frame)
            self._outgoing.append(frame)
            self._work.set()
        return pending

    def _answered(self, key: int) -> None:
        """The kernel has the reply to a request."""
        self._answered_keys.append(key)

    def _confirmations(self) -> bytes:
        """A frame that lets the helper forget replies, if there are enough of them."""
        if len(self._answered_keys) < _ANSWERED_TOGETHER:
            return b""
        keys, self._answered_keys = self._answered_keys, []
        return pack(0, Op.ANSWERED, (), (b"".join(map(KEY.pack, keys)),))

    def _take_go(self) -> bytes:
        go, self._go = self._go, b""
        return go

    async def answer(self, pending: Pending) -> Reply:
        """Wait for the reply to a posted request.  OSErrors as for `call`."""
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
        """Return `count` lookups of `inode` to the helper, together with the next frame."""
        if not self.lost.is_set():
            self._forgets[inode] = self._forgets.get(inode, 0) + count
            self._work.set()

    # -- the three tasks -----------------------------------------------------------------------
    async def _until_lost(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except OSError as error:
            self.lose(str(error), is_cut=True)
        except WireError as error:
            self.lose(str(error))

    def lose(self, reason: str, *, is_cut: bool = False) -> None:
        """Mark the link as lost: pending and later requests fail with EIO."""
        if self.lost.is_set():
            return
        self.reason, self.is_cut = reason, is_cut
        self.lost.set()
        self._outgoing.clear()
        self._forgets.clear()
        self._queued = 0
        for pending in self._pending.values():
            if pending.done is not None:
                pending.done.set()
        self._pending.clear()
        self._callers_waiting.unpark_all()

    async def _send(self) -> None:
        while not self.lost.is_set():
            if self._go or (not self._outgoing and not self._forgets):
                self._work = trio.Event()
                await self._work.wait()
                continue
            frames, self._outgoing = self._outgoing, []
            if self._forgets:
                # Last: the first may be the rest of a frame whose start was sent already.
                frames.append(self._take_forgets())
            self._is_sending = True
            await self._stream.send(b"".join(frames))
            self._is_sending = False
            self._queued = sum(map(len, self._outgoing))
            self._callers_waiting.unpark_all()

    def _take_forgets(self) -> bytes:
        taken = list(self._forgets.items())[:_MOST_FORGETS]
        for inode, _ in taken:
            del self._forgets[inode]
        return pack(0, Op.FORGET, (), (b"".join(FORGET.pack(inode, count) for inode, count in taken),))

    async def _receive(self) -> None:
        while (output := await self._stream.receive(_RECEIVE_BYTES)) is not None:
            if output.channel == STDERR:
                self._keep_stderr(output.data)
                logger.debug("standard error of the helper: %s", output.data.decode("utf-8", "replace").rstrip())
                continue
            data = self._after_magic(output.data) if self._awaited else output.data
            for frame in self._decoder.feed(data):
                self._deliver(frame)
        self.lose(f"it has ended{': ' + self.stderr if self.stderr else ''}", is_cut=True)

    def _after_magic(self, data: bytes) -> bytes:
        """The output after what a helper that was joined begins with."""
        awaited, self._awaited = self._awaited, self._awaited[len(data) :]
        if not data.startswith(awaited[: len(data)]):
            raise WireError(f"its output begins with {data[:20]!r}")
        return data[len(awaited) :]

    def _limit(self, number: int) -> int:
        pending = self._pending.get(number)
        if pending is None:
            raise WireError(f"a reply to the unknown request {number}")
        return pending.most_bytes

    def _deliver(self, frame: Frame) -> None:
        pending = self._pending[frame.number]
        if frame.code:
            code = _REPLACED_ERRNOS.get(frame.code, frame.code)
            pending.code = code if code in errno.errorcode else errno.EIO
        else:
            pending.reply = unpack(frame.body)
            pending.code = 0
        del self._pending[frame.number]
        self._callers_waiting.unpark()
        if pending.done is not None:
            pending.done.set()
        elif pending.undo is not None and not pending.code:
            pending.undo(pending.reply)

    async def _watch(self) -> None:
        """Lose the link if a request times out."""
        while not self.lost.is_set():
            await trio.sleep(self._timeout_s / 8)
            now_s = trio.current_time()
            late = [pending for pending in self._pending.values() if pending.deadline_s < now_s]
            if late:
                self._is_silent = True  # if the helper can be killed, its late changes must not mix with others
                self.lose(f"no answer in {self._timeout_s:g} seconds", is_cut=True)


STDOUT: Final = 1
STDERR: Final = 2


class Output(NamedTuple):
    """A piece of output, from STDOUT or STDERR (with a terminal always STDOUT)."""

    channel: Literal[1, 2]
    data: bytes


class HelperStream(Protocol):
    """The standard streams of a helper, such as `protocol.backends.container.podman.exec_stream.ExecStream`."""

    async def send(self, data: bytes) -> None:
        """Write to standard input.  BrokenPipeError."""
        ...

    def send_nowait(self, data: bytes) -> int:
        """Send what fits without waiting, while no `send` is under way; return the number of bytes."""
        ...

    async def receive(self, max_bytes: int = ...) -> Output | None:
        """The next piece of output; None at the end."""
        ...

    async def aclose(self) -> None:
        """End the helper and close the stream."""
        ...

    async def detach(self) -> None:
        """Close the stream, and leave the process at its other end."""
        ...

    async def abandon(self) -> None:
        """Close a stream that was cut, and leave a helper that may wait for another stream."""
        ...
