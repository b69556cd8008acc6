"""What a daemon says when its mount answers, or that it could not start: one JSON line to whoever started it.

The standard library's JSON, not msgspec's: paths are text as `os.fsdecode` makes it, and only the former
carries the lone surrogates that stand for bytes which are no UTF-8.
"""

from __future__ import annotations

import errno as errnos
import json
import os
from dataclasses import asdict, dataclass

import msgspec

from protocol.errors import errno_of
from vfsd.wire.options import MountOptions

__all__ = ["Failed", "Ready", "decode_options", "decode_report", "encode_options", "encode_report"]


class Ready(msgspec.Struct, frozen=True):
    """The mount answers.  `recovered`: a sentence on the dead workspace that this one replaced, if any."""

    name: str
    mountpoint: str
    socket: str
    pid: int
    engine: str
    recovered: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A start that failed, `message` in one line.  EIO for an exception that no errno stands for."""

    message: str
    errno: int
    path: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """What to say of `error`."""
        if isinstance(error, ValueError):
            return cls(_line(str(error)), errnos.EINVAL)
        code = errno_of(error)
        path = getattr(error, "filename", None)
        if code is None:  # OSError("text") too: it is for people, and has no number
            reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            return cls(_line(reason), errnos.EIO)
        reason = getattr(error, "strerror", None) or str(error) or os.strerror(code)
        return cls(_line(reason), code, os.fsdecode(path) if isinstance(path, str | bytes) else None)

    def error(self) -> OSError:
        """The exception for it, of Python's own subclass for the errno."""
        return OSError(self.errno, self.message, self.path) if self.path else OSError(self.errno, self.message)


def _line(text: str) -> str:
    return " ".join(text.split())


def encode_options(options: MountOptions) -> bytes:
    """`options` for `decode_options`."""
    return json.dumps(asdict(options)).encode()


def decode_options(data: bytes) -> MountOptions:
    """The options.  ValueError where they are none."""
    return msgspec.convert(json.loads(data), MountOptions)


def encode_report(report: Ready | Failed) -> bytes:
    """`report` as one line for `decode_report`."""
    kind = "ready" if isinstance(report, Ready) else "failed"
    return json.dumps({kind: msgspec.to_builtins(report)}).encode() + b"\n"


def decode_report(line: bytes) -> Ready | Failed:
    """The report.  ValueError where it is none."""
    content = json.loads(line)
    if "ready" in content:
        return msgspec.convert(content["ready"], Ready)
    return msgspec.convert(content["failed"], Failed)
