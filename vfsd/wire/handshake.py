"""The start-up handshake: the options that a daemon receives, and its report that it is ready or failed.

Each is one JSON document in a pipe.  Encoded with the standard library instead of msgspec, because paths are decoded
with `os.fsdecode` and only `json` keeps the lone surrogates that represent bytes that are not UTF-8.
"""

from __future__ import annotations

import errno as errnos
import json
import os

import msgspec

from protocol.errors import errno_of
from protocol.values import Value
from vfsd.wire.options import MountOptions


class Ready(msgspec.Struct, frozen=True):
    """The mount answers.

    `recovered`: a sentence about a dead workspace that this one replaced, if any.  `warnings`: options that have no
    effect, and why.
    """

    name: str
    mountpoint: str
    socket: str
    pid: int
    engine: str
    recovered: str | None = None
    warnings: tuple[str, ...] = ()


class Failed(Value):
    """The start failed.  `message` is one line; `errno` is EIO for an exception without an errno."""

    message: str
    errno: int
    path: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Describe `error` for the process that started the daemon."""
        if isinstance(error, ValueError):
            return cls(_line(str(error)), errnos.EINVAL)
        code = errno_of(error)
        path = getattr(error, "filename", None)
        if code is None:  # includes OSError("text")
            reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            return cls(_line(reason), errnos.EIO)
        reason = getattr(error, "strerror", None) or str(error) or os.strerror(code)
        return cls(_line(reason), code, os.fsdecode(path) if isinstance(path, str | bytes) else None)

    def error(self) -> OSError:
        """Return the failure as an OSError, of the subclass for its errno."""
        return OSError(self.errno, self.message, self.path) if self.path else OSError(self.errno, self.message)


def _line(text: str) -> str:
    return " ".join(text.split())


def encode_options(options: MountOptions) -> bytes:
    """Encode the options of a mount for the daemon."""
    return json.dumps(msgspec.to_builtins(options)).encode()


def decode_options(data: bytes) -> MountOptions:
    """Decode the result of `encode_options`.  ValueError for anything else."""
    return msgspec.convert(json.loads(data), MountOptions)


def encode_report(report: Ready | Failed) -> bytes:
    """Encode a report as one line."""
    kind = "ready" if isinstance(report, Ready) else "failed"
    return json.dumps({kind: msgspec.to_builtins(report)}).encode() + b"\n"


def decode_report(line: bytes) -> Ready | Failed:
    """Decode the result of `encode_report`.  ValueError for anything else."""
    content = json.loads(line)
    if "ready" in content:
        return msgspec.convert(content["ready"], Ready)
    return msgspec.convert(content["failed"], Failed)
