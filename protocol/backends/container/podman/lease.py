"""Lease: what the processes that own a container hold, so that others know that one of them is alive.

A lease is an abstract Unix socket (unix(7)) that is bound to a random name.  The kernel frees the name when the last
duplicate of the descriptor is closed, however the processes end.  So a name is in use as long as one process, such as
the keeper of a daemon that died, holds the lease.  Names are those of one network namespace.

Threading: any thread.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Final, Self

_PREFIX: Final = b"\0vfsd-container-"


class Lease:
    """A duplicate of the lease of a container.  `close` gives it up."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def make(cls) -> Self:
        """Make a lease with a name of its own."""
        return cls(_bound(os.urandom(16).hex()))

    @classmethod
    def claim(cls, name: str) -> Self | None:
        """Take the lease `name`, which no process holds; None if one does.  Two processes cannot both get it."""
        try:
            return cls(_bound(name))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Duplicate the lease that another process has passed."""
        return cls(socket.socket(fileno=os.dup(descriptor)))

    @property
    def name(self) -> str:
        bound: bytes = self._sock.getsockname()
        return bound.removeprefix(_PREFIX).decode()

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def is_held(name: str) -> bool:
    """Whether a process of this network namespace holds the lease `name`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(_address(name)) != errno.ECONNREFUSED  # no socket has the name


def network_namespace() -> str:
    """The namespace of this process's leases; "" if it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _bound(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.bind(_address(name))
        sock.shutdown(socket.SHUT_RD)  # any process may send to an abstract name
    except BaseException:
        sock.close()
        raise
    return sock


def _address(name: str) -> bytes:
    return _PREFIX + name.encode()
