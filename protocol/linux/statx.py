"""statx(2) of all names of a directory in one call, as one run of bytes that can be compared with an earlier one.

The walk over an unchanged tree is the cost of most snapshots, and most of the walk's cost is os.stat's result: twenty
objects for each file, and none is needed if the bytes are the same as before.

The clock from which the kernel takes the timestamps of files advances by a tick at a time (`file_clock_ns`).

Source: statx(2), include/uapi/linux/stat.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from protocol.errors import os_error

RECORD_BYTES: Final = 256
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_NO_AUTOMOUNT: Final = 0x800
_AT_EMPTY_PATH: Final = 0x1000
_STATX_BASIC_STATS: Final = 0x7FF
_FLAGS: Final = _AT_SYMLINK_NOFOLLOW | _AT_NO_AUTOMOUNT
# nlink, uid, gid, mode, inode, size | atime, birth | ctime, mtime | rdev, dev
_FIELDS: Final = struct.Struct("<16xIIIH2xQQ16x32xqI4xqI4xIIII")
_NUMBERS: Final = struct.Struct("<28xH2xQ56xqI148x")  # mode, inode | ctime
_KEY: Final = slice(16, 48)  # nlink to size
_KEY_TIMES: Final = slice(96, 128)  # ctime and mtime
_SECOND: Final = 1_000_000_000
_TICK_NS: Final = 20_000_000  # twice the longest tick of a kernel's clock (HZ=100), whose time it gives to inodes
_COARSE_NS: Final = 2_000_000_000  # for file systems that store whole seconds, or FAT's two seconds

# No argtypes and no use_errno: preparing for both is half of the cost of a call.  After a failure, os.lstat raises.
_statx = ctypes.CDLL(None).statx
_BATCH: Final = 256


class StatxResult(NamedTuple):
    """The stat data of one inode."""

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
    """A buffer per thread, in which the kernel puts the records."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(RECORD_BYTES * _BATCH)
        self.records = [ctypes.byref(self.buffer, RECORD_BYTES * index) for index in range(_BATCH)]


_scratch: Final = _Scratch()


def statx_names(directory: int, names: Sequence[bytes]) -> tuple[bytes, list[int]]:
    """The records of `names`, RECORD_BYTES each, and the indexes of missing names (whose records are void)."""
    if len(names) <= _BATCH:
        return _statx_batch(directory, names)
    parts: list[bytes] = []
    missing: list[int] = []
    for start in range(0, len(names), _BATCH):
        records, missing_here = _statx_batch(directory, names[start : start + _BATCH])
        parts.append(records)
        missing += (start + index for index in missing_here)
    return b"".join(parts), missing


def _statx_batch(directory: int, names: Sequence[bytes]) -> tuple[bytes, list[int]]:
    scratch = _scratch
    # No bytecode between the calls.  Each returns 0 or -1.
    failed = sum(map(_statx, repeat(directory), names, repeat(_FLAGS), repeat(_STATX_BASIC_STATS), scratch.records))
    missing = _missing(directory, names) if failed else []
    return ctypes.string_at(scratch.buffer, RECORD_BYTES * len(names)), missing


def _missing(directory: int, names: Sequence[bytes]) -> list[int]:
    """The indexes of the names that do not exist.  OSError if statx failed for another reason."""
    missing: list[int] = []
    for index, (name, record) in enumerate(zip(names, _scratch.records, strict=False)):
        if _statx(directory, name, _FLAGS, _STATX_BASIC_STATS, record):
            missing.append(index)
            with contextlib.suppress(FileNotFoundError):
                os.lstat(name, dir_fd=directory)  # raises the other reason
    return missing


def statx_descriptor(descriptor: int) -> bytes:
    """The record of the inode of a descriptor (also an O_PATH one)."""
    if _statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_BASIC_STATS, _scratch.records[0]):
        os.fstat(descriptor)
        raise os_error(errno.EIO)
    return ctypes.string_at(_scratch.buffer, RECORD_BYTES)


def result_at(records: bytes, index: int) -> StatxResult:
    """Decode one record."""
    nlink, uid, gid, mode, inode, size, cs, cn, ms, mn, rmajor, rminor, major, minor = _FIELDS.unpack_from(
        records, index * RECORD_BYTES
    )
    rdev = os.makedev(rmajor, rminor) if rmajor or rminor else 0
    return StatxResult(
        nlink, uid, gid, mode, inode, size, cs * _SECOND + cn, ms * _SECOND + mn, rdev, major << 32 | minor
    )  # fmt: skip


def numbers_and_ctimes(records: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the mode, the inode number and the ctime (ns) of each record."""
    for mode, inode, seconds, nanoseconds in _NUMBERS.iter_unpack(records):
        yield mode, inode, seconds * _SECOND + nanoseconds


def change_key(records: bytes, index: int = 0) -> bytes:
    """The bytes of a record that differ between inodes, and after every change of an inode."""
    record = records[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
    return record[_KEY] + record[_KEY_TIMES]


def is_racy(ctime_ns: int, now_ns: int) -> bool:
    """Whether an inode with this ctime, seen at `now_ns`, may change again without a change of its times."""
    return ctime_ns + (_TICK_NS if ctime_ns % _SECOND else _COARSE_NS) >= now_ns


def link_count(key: bytes) -> int:
    """The link count in a `change_key`."""
    return int.from_bytes(key[:4], "little")


def differing_records(records: bytes, others: bytes) -> list[int]:
    """The indexes at which two runs of equally many records differ.  Bisects, because few of many differ."""
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


_CLOCK_REALTIME_COARSE: Final = 5  # linux/time.h
_TICK_MS: Final = 10  # at its slowest (CONFIG_HZ=100)


def file_clock_ns() -> int:
    """Return the timestamp that a file would get now."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def outlast_tick(ctime_ns: int) -> None:
    """Wait until the clock is past `ctime_ns`, if that lies within its last tick.

    A later change of the file then gets another ctime, even if it keeps the size.  Waits one tick at most: a ctime
    further ahead comes from another machine's clock.
    """
    for _ in range(_TICK_MS):
        if not 0 <= ctime_ns - file_clock_ns() < _TICK_MS * 1_000_000:
            return
        time.sleep(0.001)
