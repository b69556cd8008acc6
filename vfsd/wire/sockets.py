"""Unix sockets by path: bound without a moment of open access, never over a living one, of any path length.

Blocking calls on local files only; no trio, so that the command line starts fast.
Source: unix(7), SO_PEERCRED and the 108 bytes of sun_path; proc(5), /proc/self/fd.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = [
    "BoundSocket",
    "PeerCredentials",
    "bind",
    "connect",
    "is_closed_by_peer",
    "peer_credentials",
    "remove_dead_socket",
]

_SUN_PATH_BYTES: Final = 108  # linux/un.h UNIX_PATH_MAX, the closing NUL included
_UCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
# A burst of clients waits in the kernel rather than being turned away; the kernel caps it at net.core.somaxconn.
_BACKLOG: Final = 4096


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who connected, as the kernel recorded it at connect(2)."""

    pid: int
    uid: int
    gid: int


class _HasOptions(Protocol):
    """A socket of the standard library or of trio."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


def peer_credentials(sock: _HasOptions) -> PeerCredentials:
    """Who is at the other end of a connected socket (unix(7), SO_PEERCRED)."""
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
    """Serialises daemons that start and stop: between the probe of a socket and its removal nobody binds."""
    with _directory(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield  # closing the descriptor gives the lock back


def _connect(sock: socket.socket, path: str) -> None:
    if len(os.fsencode(path)) < _SUN_PATH_BYTES:
        sock.connect(path)
        return
    with _directory(path) as descriptor:
        sock.connect(f"/proc/self/fd/{descriptor}/{os.path.basename(path)}")


def connect(path: str, timeout_s: float | None = None) -> socket.socket:
    """A stream connection to the socket at `path`; OSError as connect(2) gives it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        _connect(sock, path)
    except BaseException:
        sock.close()
        raise
    return sock


def is_closed_by_peer(sock: socket.socket) -> bool:
    """Whether the other end of an idle connection has gone.  Never blocks."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


@dataclass(frozen=True, slots=True)
class BoundSocket:
    """A listening socket and the inode that its path had when it was bound."""

    path: str
    sock: socket.socket
    device: int
    inode: int

    def close(self) -> None:
        """Stop listening, and remove the path if it is still this socket's."""
        # The inode number cannot be given anew while the socket is open: remove first, close after.
        with contextlib.suppress(OSError), _locked_directory(self.path):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                os.unlink(self.path)
        self.sock.close()


def bind(path: str) -> BoundSocket:
    """Listen at `path`, mode 0600 from the first moment it can be seen.

    A socket there whose daemon is dead is replaced.  FileExistsError for a living one, and for a file that
    is no socket.
    """
    with _locked_directory(path):
        _remove_dead(path)
        return _bind_unseen(path)


def remove_dead_socket(path: str) -> None:
    """Remove the socket at `path` where its daemon is dead.  FileExistsError where somebody listens."""
    with _locked_directory(path):
        _remove_dead(path)


def _remove_dead(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(errno.EEXIST, "in the way of the control socket: a file that is no socket", path)
    if _answers(path):
        raise FileExistsError(errno.EEXIST, "a daemon is serving this control socket already", path)
    os.unlink(path)


def _answers(path: str) -> bool:
    """Whether somebody listens at `path`.  Only a refused connection is proof that nobody does."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe:
        # Non-blocking: a living daemon whose backlog is full gives EAGAIN rather than making us wait.
        probe.setblocking(False)
        try:
            _connect(probe, path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _bind_unseen(path: str) -> BoundSocket:
    """Bind in a directory of mode 0700 and link the socket to its place once its mode is right.

    No umask: it belongs to the whole process, and other threads create files.  link(2) rather than
    rename(2): it fails where something else took the place meanwhile.
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
