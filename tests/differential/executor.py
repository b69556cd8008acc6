"""Executors: processes that make the calls.  Each has one user, one root, its own open files and directory.

`python -m tests.differential.executor SOCKET_FD` is the nursery of them: for every descriptor that it is sent,
with the JSON of a `Role`, it forks an executor that serves that socket.  (Forking the test's own process is
not safe: it has threads.)  An executor ends when its socket is closed, the nursery too.

Messages are marshal's, version 2, by which equal values have equal bytes: four bytes of length, then a list
of (operation, args).  The answer is a list of what `observe.Observer` saw of each.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from typing import Any, Final

from tests.differential.observe import Observer
from tests.differential.operations import Process

__all__ = ["MARSHAL_VERSION", "receive", "send"]

MARSHAL_VERSION: Final = 2  # later ones mark references, which equal values need not share
_LENGTH: Final = struct.Struct("=I")


def send(channel: socket.socket, message: Any) -> None:
    body = marshal.dumps(message, MARSHAL_VERSION)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket) -> bytes:
    """The next message, still marshalled.  EOFError where the other end is gone."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return _exactly(channel, length)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the other end is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _execute(channel: socket.socket, role: dict[str, Any]) -> None:
    os.chroot(role["root"])
    os.chdir("/")
    os.setgroups(role["groups"])
    os.setresgid(role["gid"], role["gid"], role["gid"])
    os.setresuid(role["uid"], role["uid"], role["uid"])
    os.umask(0o022)
    process = Process(write_back=role["write_back"])
    observer = Observer(process)
    try:
        while True:
            calls = marshal.loads(receive(channel))
            send(channel, [observer.observe(operation, args) for operation, args in calls])
    finally:
        process.close()  # before the channel is: what was unlinked is gone when the other end sees that


def _child(channel: socket.socket, role: dict[str, Any]) -> None:
    try:
        _execute(channel, role)
    except (EOFError, ConnectionError):
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _nursery(server: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for executors
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, 65_536, 1)
        if not message:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            _child(socket.socket(fileno=descriptors[0]), json.loads(message))
        os.close(descriptors[0])
        with contextlib.suppress(OSError):
            server.send(b"1")


if __name__ == "__main__":
    _nursery(socket.socket(fileno=int(sys.argv[1])))
