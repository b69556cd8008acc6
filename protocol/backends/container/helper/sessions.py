"""The streams over which vfsd reaches the helper, one after the other.

A helper that holds (`wire.Op.HOLD`) outlives the process that started it: when its stream ends, it waits for another
one.  The next daemon starts a relay there (`main`), in the way in which the first one started the helper.  The relay
connects to the helper's socket, shows the secret of HOLD, and hands its own standard streams over.  So each stream is
new and complete, whatever the daemon before had sent or read, and no request passes through the relay.

Invariants: one stream is served at a time.  A request counts only when it has arrived completely, and before the next
stream is served.  A descriptor is closed when no thread uses it any more (`Handle`).

The socket has an abstract name, in the network namespace of the helper.  Its name is public (/proc/net/unix); the
secret is not, and the peer must have the helper's own user.

Threading: one thread reads from a session; any thread writes.  `Listener.run` has a thread of its own.

The relay prints that the helper runs (or has ended), and waits for GO.  Then it waits until the helper closes the
connection: what started it, such as an exec session of Podman or an ssh, lives as long as it does.
"""

import array
import os
import socket
import struct
import sys
import threading
import traceback
from typing import Callable, Optional

from protocol.backends.container.helper.wire import GO, HEADER, JOIN, KEY, MAX_BODY_BYTES, NO_HELPER, ONCE, RELAY_MAGIC
from protocol.linux.portable import Handle

_READ_BYTES = 256 * 1024
_JOIN_S = 5.0
_STREAMS = 3  # standard input, output and error
_PEER = struct.Struct("3i")  # pid, uid, gid: SO_PEERCRED, socket(7)


class SessionEndError(Exception):
    """The other end has closed the stream."""


class Session:
    """One stream.  `connection`: to the relay, which ends when that is closed."""

    def __init__(self, source: Handle, target: Handle, connection: "Optional[socket.socket]" = None) -> None:
        self._source = source
        self._target = target
        self._connection = connection
        self._buffer = bytearray()
        # One buffer for all reads: allocating this much each time would map and unmap memory each time.
        self._read = memoryview(bytearray(_READ_BYTES))
        self._writing = threading.Lock()
        self._is_over = False

    def request(self) -> "tuple[int, int, int, bytes]":
        """Wait for the next request: number, operation, KEY (0 without ONCE), body.  SessionEndError."""
        self._fill(HEADER.size)
        length, number, op = HEADER.unpack_from(self._buffer)
        if length > MAX_BODY_BYTES:
            os._exit(4)
        start, key = HEADER.size, 0
        if op & ONCE:
            self._fill(start + KEY.size)
            (key,) = KEY.unpack_from(self._buffer, start)
            start += KEY.size
        end = start + length
        self._fill(end)
        body = bytes(memoryview(self._buffer)[start:end])
        del self._buffer[:end]
        return number, op & ~ONCE, key, body

    def _fill(self, length: int) -> None:
        while len(self._buffer) < length:
            try:
                count = os.readv(self._source.fd, [self._read])
            except OSError:  # the connection was reset
                count = 0
            if not count:
                raise SessionEndError
            self._buffer += self._read[:count]

    def write(self, data: bytes) -> None:
        """Send a reply; to no effect if the other end has closed the stream, which `request` reports."""
        with self._writing:
            view = memoryview(data)
            while view and not self._is_over:
                try:
                    view = view[os.write(self._target.fd, view) :]
                except OSError:
                    self._is_over = True

    def close(self) -> None:
        """End the relay.  The streams are closed when no thread uses this object any more."""
        if self._connection is not None:
            self._connection.close()


def first_session() -> Session:
    """The streams that this process was started with; standard input and output are others from now on."""
    source, target = Handle(os.dup(0)), Handle(os.dup(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # printed text must not mix with frames
    return Session(source, target)


def use_stderr(descriptor: "Optional[int]") -> None:
    """Print to this descriptor from now on; None: nowhere."""
    nothing = None if descriptor is not None else os.open(os.devnull, os.O_RDWR)
    for standard in (1, 2):
        os.dup2(nothing if descriptor is None else descriptor, standard)  # type: ignore[arg-type]
    if nothing is not None:
        os.close(nothing)


def address(name: bytes) -> bytes:
    """The abstract name of the socket of a helper."""
    return b"\0vfsd-helper-" + name


class Listener:
    """Waits for relays.  `join` gets the session of each that knows `secret`, and the seconds that it asks for."""

    def __init__(self, name: bytes, secret: bytes, join: "Callable[[Session, int], None]") -> None:
        self._secret = secret
        self._join = join
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address(name))
        self._socket.listen(16)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            try:
                if not self._admit(connection):
                    connection.close()
            except Exception:  # noqa: BLE001 (the failure of one relay)
                traceback.print_exc()
                connection.close()

    def _admit(self, connection: socket.socket) -> bool:
        """Whether a relay has handed its streams over."""
        _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.geteuid():
            return False
        connection.settimeout(_JOIN_S)
        found = array.array("i")
        data, ancillary, _, _ = connection.recvmsg(JOIN.size, socket.CMSG_SPACE(_STREAMS * found.itemsize))
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
        handles = [Handle(descriptor) for descriptor in found]
        if len(data) != JOIN.size or len(handles) != _STREAMS:
            return False  # it only asked whether the helper runs
        secret, seconds = JOIN.unpack(data)
        if secret != self._secret:
            return False
        source, target, errors = handles
        use_stderr(errors.fd)
        connection.settimeout(None)
        self._join(Session(source, target, connection), seconds)
        return True


def main(arguments: "list[str]") -> None:
    """Connect to the helper `arguments[0]`, with the secret [1] and the seconds [2] that it holds; names in hex."""
    name, secret, seconds = bytes.fromhex(arguments[0]), bytes.fromhex(arguments[1]), int(arguments[2])
    try:
        _connected(name).close()
    except OSError:
        os.write(1, NO_HELPER)
        sys.stderr.write("the helper that has the files open has ended\n")
        sys.exit(3)
    os.write(1, RELAY_MAGIC)
    if os.read(0, len(GO)) == GO:
        connection = _connected(name)
        streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]).tobytes())]
        connection.sendmsg([JOIN.pack(secret, seconds)], streams)
        connection.recv(1)
    os._exit(0)  # an interactive Python would go on to read the stream


def _connected(name: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address(name))
    return connection
