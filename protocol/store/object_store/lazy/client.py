"""FetchClient: the daemon's connection to its helper process.

The helper starts when something has to be fetched, again if it died, and in a forked daemon anew.  A request that is
not answered within the timeout fails with EIO; when the helper can fetch again, later requests succeed.

Invariant: each request's future is done once, by the thread that removed it from `_pending`.

Threading: any thread; a thread of its own receives.  `forking` holds the lock that a forked process would find held.

The messages are MessagePack with a length in front.  The first message of the daemon is `Start`, and the helper answers
`Opened` or `Failed` with number 0.  After that the daemon sends `Fetch`, and gets one `Blobs` or `Failed` for each, in
any order; and `Progress` now and then.  The helper ends with the connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from protocol.linux import credentials
from protocol.store.format.packs import DamagedError

_logger = logging.getLogger(__name__)
_COMMAND: Final = (sys.executable, "-P", "-m", "protocol.store.object_store.lazy.helper")
_TICK_S: Final = 0.2
_LEAST_START_S: Final = 60.0  # how long opening may take: the store may be far away and the machine busy
_RESTARTS: Final = 5
_RESTARTS_WITHIN_S: Final = 60.0
_END_S: Final = 5.0


@dataclass(slots=True)
class _Pending:
    request: Fetch
    future: Future[list[bytes]]
    until: float


@dataclass(slots=True)
class _Helper:
    """A running helper, and the thread that receives from it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    receiver: threading.Thread | None = None


class FetchClient:
    """Fetches blobs of the snapshot that `start` describes.  `open` first."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._lock = threading.RLock()
        self._helper: _Helper | None = None
        self._pending: dict[int, _Pending] = {}
        self._number = 0
        self._starts: list[float] = []
        self._failing: str | None = None
        self._is_closed = False
        self.progress = Progress(0, 0, 0, "")

    @property
    def failing(self) -> str | None:
        """Why the last fetch failed; None if it succeeded."""
        return self._failing

    def open(self) -> Opened:
        """Start the helper and open the snapshot.  OSError, DamagedError."""
        helper = self._started()
        helper.connection.settimeout(max(_LEAST_START_S, 2 * self._start.timeout_s))
        try:
            reply = replies.decode(next(received(helper.connection), b""))
        except (OSError, ValueError) as error:
            self._end(helper)
            raise OSError(
                errno.EIO, "the process that fetches from the store did not start", self._start.url
            ) from error
        if isinstance(reply, Failed):
            self._end(helper)
            raise (
                DamagedError(reply.text, url=self._start.url)
                if reply.is_damage
                else OSError(reply.code, reply.text, self._start.url)
            )
        assert isinstance(reply, Opened)
        helper.connection.settimeout(None)
        self._start = replace(self._start, name=reply.name, record=reply.record, created_s=reply.created_s)
        with self._lock:
            self._receive_from(helper)
        return reply

    def fetch(self, kind: BlobKind, digests: Sequence[bytes], ahead: Sequence[bytes] = ()) -> Future[list[bytes]]:
        """Fetch blobs, and have the helper fetch those in `ahead` after them.

        The future raises DamagedError, or OSError (EIO) if they did not arrive within the timeout.
        """
        with self._lock:
            self._number += 1
            request = Fetch(self._number, kind, list(digests), list(ahead))
            pending = _Pending(request, Future(), time.monotonic() + self._start.timeout_s)
            if self._is_closed:
                pending.future.set_exception(OSError(errno.EIO, "the workspace is being unmounted"))
                return pending.future
            self._pending[request.number] = pending
            try:
                self._send(request)
            except OSError as error:
                self._fail(pending, OSError(errno.EIO, f"the process that fetches does not start: {error}"))
        return pending.future

    def _send(self, request: Fetch) -> None:
        helper = self._helper
        if helper is None:
            self._restart()
            return  # sends what is pending
        # If the helper died, the receiver starts another one, which gets everything that is pending.
        with contextlib.suppress(OSError):
            send(helper.connection, request)

    # -- the process -------------------------------------------------------------------------------
    def _started(self) -> _Helper:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    _COMMAND,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                    env=credentials.environment(),
                )
            except BaseException:
                ours.close()
                raise
        send(ours, self._start)
        return _Helper(process, ours)

    def _restart(self) -> None:
        """Start a helper that gets all pending requests.  OSError.  With the lock."""
        now = time.monotonic()
        self._starts = [each for each in self._starts if now - each < _RESTARTS_WITHIN_S]
        if len(self._starts) >= _RESTARTS:
            raise OSError(errno.EIO, f"it died {_RESTARTS} times in a minute")
        self._starts.append(now)
        helper = self._started()
        for pending in self._pending.values():
            send(helper.connection, pending.request)
        self._receive_from(helper)

    def _receive_from(self, helper: _Helper) -> None:
        self._helper = helper
        helper.receiver = threading.Thread(target=self._receive, args=(helper,), name="vfsd-fetched", daemon=True)
        helper.receiver.start()

    def _receive(self, helper: _Helper) -> None:
        """Receive until the helper ends; then start another one if requests are pending."""
        arriving = received(helper.connection)
        poll = select.poll()
        poll.register(helper.connection, select.POLLIN)
        with contextlib.suppress(OSError, ValueError):
            while True:
                if not poll.poll(_TICK_S * 1000):
                    self._expire()
                    continue
                data = next(arriving, None)
                if data is None:
                    break
                self._take(replies.decode(data))
                self._expire()
        self._end(helper)
        with self._lock:
            if self._helper is not helper:
                return
            self._helper = None
            if self._is_closed:
                return
            _logger.warning("the process that fetches from %s ended; the next read starts another one", self._start.url)
            if self._pending:
                try:
                    self._restart()
                except OSError as error:
                    for pending in list(self._pending.values()):
                        self._fail(pending, OSError(errno.EIO, f"the process that fetches ended: {error}"))

    @staticmethod
    def _end(helper: _Helper) -> None:
        """End a helper, and wait for it."""
        with contextlib.suppress(OSError):
            helper.connection.shutdown(socket.SHUT_RDWR)  # unlike close(2), this wakes the receiver
        if helper.receiver is not None and helper.receiver is not threading.current_thread():
            helper.receiver.join()
        helper.connection.close()
        try:
            helper.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            helper.process.kill()
            helper.process.wait()

    # -- answers -----------------------------------------------------------------------------------
    def _take(self, reply: Reply) -> None:
        if isinstance(reply, Progress):
            if reply.cache_failure and not self.progress.cache_failure:
                self.report_cache(reply.cache_failure)
            self.progress = reply
        elif isinstance(reply, Blobs):
            with self._lock:
                pending = self._pending.pop(reply.number, None)
                if self._failing is not None:
                    self._failing = None
                    _logger.info("reads from %s succeed again", self._start.url)
            if pending is not None:
                pending.future.set_result(reply.blobs)
        elif isinstance(reply, Failed):
            with self._lock:
                pending = self._pending.get(reply.number)
            if pending is not None and reply.is_damage:
                self._fail(pending, DamagedError(reply.text, url=self._start.url))
            elif pending is not None:
                self._fail(pending, self._failure(reply.text))

    def report_cache(self, failure: str) -> str:
        """Log that the cache cannot be written; return the sentence."""
        text = (
            f"the cache {self._start.cache_directory} cannot be written ({failure}), so what is read is fetched again"
            " each time: make room, or set XDG_CACHE_HOME to a directory that you may write"
        )
        _logger.warning("%s", text)
        self.progress = replace(self.progress, cache_failure=failure)
        return text

    def _expire(self) -> None:
        """Fail the requests that waited for too long."""
        now = time.monotonic()
        with self._lock:
            late = [pending for pending in self._pending.values() if pending.until < now]
        for pending in late:
            self._fail(pending, self._failure("no answer within --remote-timeout"))

    def _failure(self, reason: str) -> OSError:
        """The error of a request, because the store cannot be reached; log the first one in a row."""
        with self._lock:
            is_new, self._failing = self._failing is None, reason
        if is_new:
            text = "cannot fetch from %s: %s; reads of what is not in the cache fail with EIO until it answers"
            _logger.error(text, self._start.url, reason)
        return OSError(errno.EIO, reason, self._start.url)

    def _fail(self, pending: _Pending, error: OSError) -> None:
        with self._lock:
            if self._pending.pop(pending.request.number, None) is None:
                return
        pending.future.set_exception(error)

    # -- fork and end --------------------------------------------------------------------------------
    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """A block in which no other thread holds the client's lock."""
        with self._lock:
            yield

    def forked(self) -> None:
        """Drop, in a forked process, what belongs to the source: it has the helper and the requests."""
        with self._lock:
            helper, self._helper = self._helper, None
            if helper is not None:
                helper.connection.close()
                helper.process.returncode = 0  # it is no child of this process, which must not wait for it
            self._pending.clear()
            self.progress = Progress(0, 0, 0, "")
            self._start = replace(self._start, prefetch=False)

    def close(self) -> None:
        """End the helper; pending requests fail."""
        with self._lock:
            self._is_closed = True
            helper, self._helper = self._helper, None
            pending = list(self._pending.values())
        for each in pending:
            self._fail(each, OSError(errno.EIO, "the workspace is being unmounted"))
        if helper is not None:
            self._end(helper)


# -- messages --------------------------------------------------------------------------------------
_LENGTH: Final = struct.Struct("<I")
_MOST_BYTES: Final = 1 << 30
BlobKind = Literal["tree", "data"]


class Start(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Open the snapshot `name` of the store at `url`; None: the only one.

    With `root`, the digest of a root listing, an older generation of `name` that has it is preferred.  `record` is that
    of the snapshot if it was opened before: then `name` is not looked up again.
    """

    url: str
    options: dict[str, str]
    name: str | None
    root: bytes | None
    record: bytes | None
    created_s: float  # the store's time of the record, or 0.0
    timeout_s: float
    cache_directory: str | None
    index_directory: str | None
    cache_bytes: int
    prefetch: bool


class Opened(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The snapshot: its name, its record as it is stored, and the store's time of that."""

    name: str
    record: bytes
    created_s: float


class Fetch(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Fetch blobs, and then those in `ahead`, which the daemon will probably need next."""

    number: int
    kind: BlobKind
    digests: list[bytes]
    ahead: list[bytes]


class Blobs(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The blobs of a `Fetch`. Each has been compared with its digest."""

    number: int
    blobs: list[bytes]


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The error of a `Fetch`, or of `Start`.  `is_damage`: the store answered, and what it has is wrong or gone."""

    number: int
    code: int
    text: str
    is_damage: bool


class Progress(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The bytes transferred so far, and the progress of the prefetch.

    `prefetch`: its state.  `cache_failure`: why the cache cannot be written, or "".
    """

    transferred_bytes: int
    done_bytes: int
    total_bytes: int
    prefetch: str
    cache_failure: str = ""


Request: TypeAlias = Start | Fetch
Reply: TypeAlias = Opened | Blobs | Failed | Progress
_encoder: Final = msgspec.msgpack.Encoder()
requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
replies: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)


def send(connection: socket.socket, message: Request | Reply) -> None:
    """Send a message.  OSError."""
    data = _encoder.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def received(connection: socket.socket) -> Iterator[bytes]:
    """Yield the encoded messages that arrive, until the other end closes the connection.  OSError."""
    while True:
        head = _exactly(connection, _LENGTH.size)
        if head is None:
            return
        (length,) = _LENGTH.unpack(head)
        body = _exactly(connection, length) if length <= _MOST_BYTES else None
        if body is None:
            return
        yield body


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    """Receive `length` bytes; None if the connection ends before."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)
