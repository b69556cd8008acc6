"""statx(2) of all names of a directory at once, as one run of bytes that can be compared with an earlier one.

The walk over a tree of which nothing has changed is the cost of most snapshots, and most of that cost is
os.stat's result: twenty objects for each file, of which none is needed where the bytes are what they were.

Source: statx(2), include/uapi/linux/stat.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Sequence
from itertools import repeat
from typing import Final, NamedTuple

from protocol.errors import os_error

__all__ = [
    "RECORD_BYTES",
    "StatxResult",
    "differing",
    "key_of",
    "links_of",
    "seen_at",
    "seen_of_descriptor",
    "statx_names",
]

RECORD_BYTES: Final = 256
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_NO_AUTOMOUNT: Final = 0x800
_AT_EMPTY_PATH: Final = 0x1000
_STATX_BASIC_STATS: Final = 0x7FF
_FLAGS: Final = _AT_SYMLINK_NOFOLLOW | _AT_NO_AUTOMOUNT
# nlink, uid, gid, mode, inode, size | atime, birth | ctime, mtime | rdev, dev
_FIELDS: Final = struct.Struct("<16xIIIH2xQQ16x32xqI4xqI4xIIII")
_KEY: Final = slice(16, 48)  # nlink to size
_KEY_TIMES: Final = slice(96, 128)  # ctime and mtime
_SECOND: Final = 1_000_000_000

# Neither argtypes nor errno: preparing for both is half of what such a call costs.  Where it fails, os.lstat says why.
_statx = ctypes.CDLL(None).statx
_AT_ONCE: Final = 256


class StatxResult(NamedTuple):
    """What statx showed of one inode."""

    nlink: int
    uid: int
    gid: int
    mode: int
    inode: int
    size: int
    ctime_ns: int
    mtime_ns: int
    rdev: int
    dev: int


class _Scratch(threading.local):
    """Where the kernel puts records: one for each thread."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(RECORD_BYTES * _AT_ONCE)
        self.places = [ctypes.byref(self.buffer, RECORD_BYTES * index) for index in range(_AT_ONCE)]


_scratch: Final = _Scratch()


def statx_names(directory: int, names: Sequence[bytes]) -> tuple[bytes, list[int]]:
    """The records of `names`, RECORD_BYTES each, and the indexes of those that are gone (their records are void)."""
    if len(names) <= _AT_ONCE:
        return _some(directory, names)
    parts: list[bytes] = []
    gone: list[int] = []
    for start in range(0, len(names), _AT_ONCE):
        records, lacking = _some(directory, names[start : start + _AT_ONCE])
        parts.append(records)
        gone += (start + index for index in lacking)
    return b"".join(parts), gone


def _some(directory: int, names: Sequence[bytes]) -> tuple[bytes, list[int]]:
    scratch = _scratch
    # No bytecode between the calls.  Each answers 0 or -1.
    failed = sum(map(_statx, repeat(directory), names, repeat(_FLAGS), repeat(_STATX_BASIC_STATS), scratch.places))
    gone = _lacking(directory, names) if failed else []
    return ctypes.string_at(scratch.buffer, RECORD_BYTES * len(names)), gone


def _lacking(directory: int, names: Sequence[bytes]) -> list[int]:
    gone: list[int] = []
    for index, (name, place) in enumerate(zip(names, _scratch.places, strict=False)):
        if _statx(directory, name, _FLAGS, _STATX_BASIC_STATS, place):
            gone.append(index)
            with contextlib.suppress(FileNotFoundError):
                os.lstat(name, dir_fd=directory)  # else this says what is wrong
    return gone


def seen_at(records: bytes, index: int) -> StatxResult:
    """One record, taken apart."""
    nlink, uid, gid, mode, inode, size, cs, cn, ms, mn, rmajor, rminor, major, minor = _FIELDS.unpack_from(
        records, index * RECORD_BYTES
    )
    rdev = os.makedev(rmajor, rminor) if rmajor or rminor else 0
    return StatxResult(
        nlink, uid, gid, mode, inode, size, cs * _SECOND + cn, ms * _SECOND + mn, rdev, major << 32 | minor
    )  # fmt: skip


def key_of(records: bytes, index: int = 0) -> bytes:
    """What of a record changes whenever the inode does, and with the inode."""
    record = records[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
    return record[_KEY] + record[_KEY_TIMES]


def differing(records: bytes, others: bytes) -> list[int]:
    """The indexes at which two runs of records of one length differ, found by halves: few of many do."""
    found: list[int] = []
    pending = [(0, len(records) // RECORD_BYTES)]
    while pending:
        low, high = pending.pop()
        part = slice(low * RECORD_BYTES, high * RECORD_BYTES)
        if low == high or records[part] == others[part]:
            continue
        if high - low == 1:
            found.append(low)
        else:
            middle = (low + high) // 2
            pending += ((low, middle), (middle, high))
    return found


def links_of(key: bytes) -> int:
    """The link count of a `key_of`."""
    return int.from_bytes(key[:4], "little")


def seen_of_descriptor(descriptor: int) -> bytes:
    """The record of the inode that a descriptor (also an O_PATH one) is open on."""
    if _statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_BASIC_STATS, _scratch.places[0]):
        os.fstat(descriptor)
        raise os_error(errno.EIO)
    return ctypes.string_at(_scratch.buffer, RECORD_BYTES)
