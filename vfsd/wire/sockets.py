"""Unix sockets: bind and connect at paths of any length, replace the sockets of dead daemons, receive descriptors.

A bound socket has mode 0600 from the moment its path exists, and never replaces the socket of a running daemon.

Threading: blocking calls on local files only.  Does not import trio, so that the command line starts fast.

Source: unix(7) for SO_PEERCRED and the 108 bytes of sun_path; proc(5) for /proc/self/fd.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

_SUN_PATH_BYTES: Final = 108  # linux/un.h UNIX_PATH_MAX, the closing NUL included
_UCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
# Long enough that a burst of clients is not refused; the kernel limits it to net.core.somaxconn.
_BACKLOG: Final = 4096


class PeerCredentials(NamedTuple):
    """The peer's process and user at the time of connect(2)."""

    pid: int
    uid: int
    gid: int


class _HasOptions(Protocol):
    """A socket of the standard library or of trio."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


def peer_credentials(sock: _HasOptions) -> PeerCredentials:
    """Return the credentials of the peer of a connected socket (unix(7), SO_PEERCRED)."""
    return PeerCredentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


@contextlib.contextmanager
def _directory(path: str) -> Iterator[int]:
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked_directory(path: str) -> Iterator[None]:
    """Lock the directory of `path`, so that no other daemon binds between the probe of a socket and its removal."""
    with _directory(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield  # closing the descriptor releases the lock


def _connect(sock: socket.socket, path: str) -> None:
    if len(os.fsencode(path)) < _SUN_PATH_BYTES:
        sock.connect(path)
        return
    with _directory(path) as descriptor:
        sock.connect(f"/proc/self/fd/{descriptor}/{os.path.basename(path)}")


def connect(path: str, timeout_s: float | None = None) -> socket.socket:
    """Connect to the stream socket at `path`.  OSError from connect(2)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        _connect(sock, path)
    except BaseException:
        sock.close()
        raise
    return sock


def is_closed_by_peer(sock: socket.socket) -> bool:
    """Whether the peer has closed the connection.  Never blocks."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def receive_descriptors(sock: socket.socket, size_bytes: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a message and its descriptors, which no program that is started meanwhile inherits.

    (socket.recv_fds of Python 3.11 ignores the flag for that.)
    """
    found = array.array("i")
    space = socket.CMSG_SPACE(most * found.itemsize)
    data, ancillary, _, _ = sock.recvmsg(size_bytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return data, list(found)


class BoundSocket(NamedTuple):
    """A listening socket, and the inode of its path."""

    path: str
    sock: socket.socket
    device: int
    inode: int

    def close(self) -> None:
        """Stop listening, and remove the path if it still belongs to this socket."""
        # The inode number cannot be reused while the socket is open, so remove the path before closing the socket.
        with contextlib.suppress(OSError), _locked_directory(self.path):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                os.unlink(self.path)
        self.sock.close()


def bind(path: str) -> BoundSocket:
    """Listen at `path` with mode 0600.  Replaces the socket of a dead daemon.

    FileExistsError if a daemon is listening there, or if the file is not a socket.
    """
    with _locked_directory(path):
        _remove_dead(path)
        return _bind_unseen(path)


def remove_dead_socket(path: str) -> None:
    """Remove the socket at `path` if its daemon is dead.  FileExistsError if a daemon is listening there."""
    with _locked_directory(path):
        _remove_dead(path)


def _remove_dead(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(
            errno.EEXIST, "a file that is not a socket has the control socket's name; remove it", path
        )
    if _answers(path):
        raise FileExistsError(errno.EEXIST, "another daemon is listening on this control socket", path)
    os.unlink(path)


def _answers(path: str) -> bool:
    """Whether a daemon is listening at `path`.  Only a refused connection proves that none is."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe:
        # Non-blocking: if the backlog of a running daemon is full, connect fails with EAGAIN instead of waiting.
        probe.setblocking(False)
        try:
            _connect(probe, path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _bind_unseen(path: str) -> BoundSocket:
    """Bind in a new directory of mode 0700, set the socket's mode, and link the socket to `path`.

    Does not use umask(2), because that affects files that other threads create.  Uses link(2) instead of rename(2),
    because it fails if `path` was created meanwhile.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    hidden = tempfile.mkdtemp(prefix=".bind-", dir=os.path.dirname(path) or ".")
    unseen = os.path.join(hidden, "s")
    try:
        with _directory(unseen) as descriptor:
            sock.bind(f"/proc/self/fd/{descriptor}/s")
        os.chmod(unseen, 0o600)
        sock.listen(_BACKLOG)
        found = os.lstat(unseen)
        os.link(unseen, path)
    except BaseException:
        sock.close()
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unseen)
        os.rmdir(hidden)
    return BoundSocket(path, sock, found.st_dev, found.st_ino)


def listen_at_loopback(host: str, port: int) -> socket.socket:
    """Listen at the loopback address `host`; port 0 is any free port.  OSError, whose message names the address."""
    is_ipv6 = ":" in host
    sock = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        address = f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"
        raise OSError(error.errno, f"cannot listen at {address}: {error.strerror}") from None
    return sock
