"""The messages between a mount and the fork server: one JSON document in each packet of a SOCK_SEQPACKET socket.

1. The mount sends `Hello`, the properties that a forked process cannot take over.  The server answers `Accepted`, or
   `Refused` with the property that differs.
2. The mount sends `Start` with the descriptors of the report and of the log.  The new process answers `Forked`, with
   its pidfd, or `Refused`.
3. The mount sends `Go`.  Without it the new process ends, so a mount that has stopped waiting gets no second daemon.
4. When the process ends, the server sends `Ended`, unless the mount has closed the connection.

JSON of the standard library keeps the lone surrogates that represent bytes that are not UTF-8.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

MAX_BYTES: Final = 192 * 1024  # below the send buffer of a Unix socket, 208 KiB (net.core.wmem_default)
DESCRIPTORS: Final = 2  # of the report and of the log
SOCKET_PREFIX: Final = ".fork-server-"  # before `process_properties.interpreter_key`
LOCK_SUFFIX: Final = ".lock"  # after the name of the socket
SWITCH: Final = "VFSD_FORK_SERVER"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The properties of the mounting process, by name (`vfsd.machine.process_properties`)."""

    properties: dict[str, str]


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The server can start this daemon."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The server cannot start this daemon."""

    reason: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """A daemon to start.  `options` is the result of `handshake.encode_options`."""

    options: str
    environment: dict[str, str]
    umask: int
    soft_limits: dict[int, int]  # by the number of the resource (getrlimit(2))
    cpus: list[int]
    blocked_signals: list[int]
    oom_score_adj: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The new process waits for `Go`."""

    pid: int


class Go(msgspec.Struct, frozen=True, tag=True):
    """The new process may start the daemon."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process ended.  `status` is negative for a signal, as in `subprocess`."""

    status: int


Message = Hello | Accepted | Refused | Start | Forked | Go | Ended


def encode(message: Message) -> bytes:
    """Encode a message as one packet.  ValueError if it is too long."""
    data = json.dumps(msgspec.to_builtins(message, str_keys=True)).encode()
    if len(data) > MAX_BYTES:
        raise ValueError("the environment and the options are too long for the fork server")
    return data


def decode(data: bytes) -> Message:
    """Decode the result of `encode`.  ValueError for anything else."""
    message: Message = msgspec.convert(json.loads(data), Message, str_keys=True)
    return message
