"""The calls that the harness makes: their arguments, drawn from small alphabets, so that calls collide.

One table, `OPERATIONS`, says which kinds of argument each operation takes; the random generator here and
hypothesis' strategies (in the tests) both draw from it.  A call never depends on what an earlier one
answered: open files go by slot numbers, so any part of a sequence is a sequence, and can be replayed.
"""

from __future__ import annotations

import os
import random
import stat
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

__all__ = ["NOW", "OMIT", "OPERATIONS", "PATTERN", "WORKERS", "Call", "Kind", "Operation", "data", "random_calls"]

# uid, gid, supplementary groups of each worker.
WORKERS: Final = ((0, 0, ()), (1001, 1001, (2000,)), (1002, 1002, (2000, 3000)))
_STAY_SHARE: Final = 0.8  # of calls that the worker of the call before makes; keeps the harness fast


@dataclass(frozen=True, slots=True)
class Call:
    """One call: `worker` (index in WORKERS) does `operation` with `args`.  Paths are bytes, data (start, length)."""

    worker: int
    operation: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of argument.  `values` are what it is drawn from; one that is there twice comes twice as often."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: how often it comes, and what it takes."""

    weight: int
    kinds: tuple[Kind, ...]


# -- data ----------------------------------------------------------------------------------------
# Bytes without a period, so that data in the wrong place is seen.
PATTERN: Final = random.Random(0).randbytes(300_000)


def data(start: int, length: int) -> bytes:
    """The bytes that a (start, length) argument stands for."""
    return PATTERN[start : start + length]


# -- alphabets -----------------------------------------------------------------------------------
_NAMES: Final = (b"a", b"b", b"c", b"d")
_LONG: Final = b"n" * 255
_DOTTED: Final = b"./" * 2046
_ODD_PATHS: Final = (
    b".", b"..", b"/", b"", b"a/", b"b/", b"c/", b"a/.", b"a/..", b"./a", b"a//b", b"../a", b"/a", b"/a/b", b"b/../c",
    b"a/b/", b"a/b/..", b"a/b/c", b"b/c/d", b"a/b/c/d", b"c/c/c", _LONG, _LONG + b"n", b"a/" + _LONG,
    b"a/" + _LONG + b"n", b"\xff\xfe", b"a/\xf0\x28", b"new\nline", _DOTTED + b"abc", _DOTTED + b"abcd",
    b"a/" * 10 + b"a",
)  # fmt: skip
_DIRECTORIES: Final = (b"a", b"b", b"a/b", b"b/a")
_FILES: Final = (b"c", b"d", b"a/c", b"b/d", b"a/b/c", b"b/c")
_ANY: Final = (*_NAMES, *(b"%s/%s" % (x, y) for x in _NAMES[:3] for y in _NAMES))
# Names are mostly of what the operation is for, so that calls succeed, but not always.
PATH: Final = Kind("path", _NAMES * 4 + _ANY * 2 + _DIRECTORIES * 4 + _FILES * 5 + _ODD_PATHS)
FILE: Final = Kind("path", _FILES * 14 + _ANY * 2 + _ODD_PATHS)
DIRECTORY: Final = Kind("path", _DIRECTORIES * 14 + _ANY * 2 + _ODD_PATHS)
TARGET: Final = Kind(
    "target",
    (
        b"a", b"b", b"c", b"d", b"../a", b"../b", b"/a", b"/c/d", b".", b"..", b"/", b"nowhere", b"a/b", b"b/",
        b"a/new", b"t" * 127, b"t" * 128, b"t" * 4095, b"t" * 4096, b"", _LONG + b"n", b"\xff",
    ),
)  # fmt: skip
SLOT: Final = Kind("slot", (0, 0, 0, 1, 1, 1, 2, 2, 3))
MODE: Final = Kind(
    "mode",
    (*(0o777,) * 10, *(0o666,) * 8, 0o644, 0o755, 0o755, 0o1777, 0o2777, 0o2775, 0o4755, 0o6777, 0o6711, 0o4644, 0o2644,
     0o2755, 0o700, 0o600, 0o555, 0o444, 0o222, 0o111, 0, 0o7777, 0o3777),
)  # fmt: skip
UMASK: Final = Kind("mode", (0, 0, 0, 0, 0, 0o2, 0o22, 0o22, 0o77, 0o777))
NODE: Final = Kind(
    "mode",
    (stat.S_IFREG | 0o644, stat.S_IFREG | 0o4755, stat.S_IFIFO | 0o666, stat.S_IFIFO | 0o600, stat.S_IFSOCK | 0o777,
     stat.S_IFCHR | 0o666, stat.S_IFBLK | 0o600, 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777, 0o170000 | 0o644),
)  # fmt: skip
DEVICE: Final = Kind("device", (0, os.makedev(1, 3), os.makedev(259, 300), os.makedev(4095, 1048575)))
_ACCESS: Final = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR, os.O_RDWR)
_EXTRA: Final = (
    0, 0, os.O_APPEND, os.O_NOFOLLOW, os.O_TRUNC, os.O_EXCL, os.O_SYNC, os.O_DSYNC, os.O_DIRECT, os.O_NOATIME,
    os.O_DIRECTORY, os.O_APPEND | os.O_TRUNC, os.O_PATH | os.O_NOFOLLOW, os.O_PATH, os.O_NOFOLLOW | os.O_TRUNC,
    os.O_EXCL | os.O_NOFOLLOW, os.O_APPEND | os.O_DIRECT,
)  # fmt: skip
FLAGS: Final = Kind(
    "flags",
    tuple(access | extra | make for access in _ACCESS for extra in _EXTRA for make in (0, os.O_CREAT, os.O_CREAT))
    + (os.O_RDWR | os.O_CREAT,) * 250
    + (os.O_RDONLY,) * 50
    + (os.O_DIRECTORY | os.O_RDONLY,) * 40
    + (3, 3 | os.O_CREAT, os.O_CREAT | os.O_DIRECTORY),
)
TMPFILE: Final = Kind(
    "flags",
    (os.O_TMPFILE | os.O_RDWR, os.O_TMPFILE | os.O_WRONLY, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, os.O_TMPFILE,
     os.O_TMPFILE | os.O_RDWR | os.O_APPEND, os.O_TMPFILE | os.O_RDWR | os.O_CREAT),
)  # fmt: skip
DIRECTORY_FLAGS: Final = Kind("flags", (os.O_RDONLY, os.O_DIRECTORY, os.O_DIRECTORY | os.O_NOFOLLOW, os.O_PATH))
SIZE: Final = Kind("size", (0, 1, 10, 100, 4096, 5000, 8192, 70_000, 131_082, 200_000))
DATA: Final = Kind(
    "data",
    ((0, 0), (0, 1), (1, 10), (500, 100), (0, 100), (77, 1000), (3, 4096), (9, 5000), (5, 8192), (1000, 70_000),
     (11, 131_082)),
)  # fmt: skip
# Not the last page: there SEEK_DATA of tmpfs finds nothing.
_FAR: Final = (2**31, 2**32 + 5, 2**40, 2**62, 2**63 - 8192, 2**63 - 1)
OFFSET: Final = Kind(
    "offset",
    (0, 0, 0, 0, 1, 10, 100, 1000, 4095, 4096, 4096, 4097, 8192, 10_000, 65_536, 131_071, 131_072, 131_073, 200_000, -1,
     *_FAR),
)  # fmt: skip
LENGTH: Final = Kind("length", (0, 1, 10, 4096, 4096, 5000, 8192, 100_000, 131_072, 300_000, -1, 2**40, 2**63 - 1))
WHERE: Final = Kind("offset or none", (None, None, 0, 1, 100, 4096, 5000, 131_072, -1, 2**40))
WHENCE: Final = Kind("whence", (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END, os.SEEK_DATA, os.SEEK_HOLE, 17))
SPARSE_WHENCE: Final = Kind("whence", (os.SEEK_DATA, os.SEEK_HOLE))
# KEEP_SIZE 1, PUNCH_HOLE 2, COLLAPSE_RANGE 8, ZERO_RANGE 16, INSERT_RANGE 32, UNSHARE_RANGE 64 (linux/falloc.h)
FALLOCATE_MODE: Final = Kind("falloc mode", (0, 0, 0, 1, 1, 3, 3, 3, 2, 8, 16, 17, 32, 64, 128))
RENAME_FLAGS: Final = Kind("rename flags", (0, 1, 1, 2, 2, 2, 3, 4, 5, 6, 8))
BOOL: Final = Kind("flag", (0, 1))
LISTED_CHANGE: Final = Kind("change", ("rename", "copy", "link", "recreate", "replace", "there_and_back"))
ACCESS: Final = Kind("access mode", (0, 1, 2, 3, 4, 5, 6, 7, 8))
UID: Final = Kind("uid", (-1, -1, 0, 1001, 1001, 1002, 1002, 4_000_000_000))
GID: Final = Kind("gid", (-1, -1, 0, 1001, 1002, 2000, 2000, 3000))
NOW: Final = (0, (1 << 30) - 1)  # UTIME_NOW, linux/stat.h
OMIT: Final = (0, (1 << 30) - 2)  # UTIME_OMIT
TIME: Final = Kind(
    "time",
    (NOW, NOW, NOW, NOW, OMIT, OMIT, OMIT, (0, 0), (1, 1), (1_000_000_000, 123_456_789), (-1, 999_999_999),
     (-86_400, 1), (4_400_000_000, 5), (10_000_000_000, 0), (2**33, 999_999_999), (0, 10**9), (5, -1)),
)  # fmt: skip
XATTR: Final = Kind(
    "xattr",
    (*(b"user.a",) * 12, *(b"user.b",) * 4, *(b"trusted.t",) * 4, b"user.\xff", b"user.", b"security.s",
     *(b"security.capability",) * 4,
     b"user." + b"x" * 250, b"user." + b"x" * 251, b"nonsense.x", b"nodot", b"", b"system.nonsense"),
)  # fmt: skip
_CAPABILITY_V2: Final = b"\x01\x00\x00\x02" + b"\x00\x04\x00\x00" + bytes(12)  # vfs_cap_data, linux/capability.h
VALUE: Final = Kind(
    "value", (b"", b"1", b"value", b"\x00\xff", _CAPABILITY_V2, _CAPABILITY_V2, b"v" * 4096, b"v" * 65_000)
)
HUGE_VALUE: Final = Kind("value", (b"v" * 65_536, b"v" * 65_537))
XATTR_FLAGS: Final = Kind("xattr flags", (*(0,) * 10, os.XATTR_CREATE, os.XATTR_REPLACE, 3, 4))


def _acl(*entries: tuple[int, int, int]) -> bytes:
    """POSIX ACL entries (tag, permissions, id) as an attribute's value; linux/posix_acl_xattr.h, version 2."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


_ANY_ID: Final = 2**32 - 1
# Tags: USER_OBJ 1, USER 2, GROUP_OBJ 4, GROUP 8, MASK 16, OTHER 32 (linux/posix_acl.h)
_PLAIN: Final = ((1, 6, _ANY_ID), (4, 4, _ANY_ID), (32, 4, _ANY_ID))
ACL_NAME: Final = Kind(
    "acl name", (b"system.posix_acl_access", b"system.posix_acl_access", b"system.posix_acl_default")
)
ACL: Final = Kind(
    "acl",
    (
        _acl(*_PLAIN),
        _acl((1, 7, _ANY_ID), (4, 7, _ANY_ID), (32, 7, _ANY_ID)),
        _acl((1, 7, _ANY_ID), (2, 7, 1001), (4, 5, _ANY_ID), (16, 7, _ANY_ID), (32, 0, _ANY_ID)),
        _acl((1, 7, _ANY_ID), (2, 4, 1002), (4, 7, _ANY_ID), (8, 7, 2000), (16, 5, _ANY_ID), (32, 5, _ANY_ID)),
        _acl((1, 7, _ANY_ID), (2, 0, 1001), (2, 7, 1002), (4, 7, _ANY_ID), (16, 7, _ANY_ID), (32, 7, _ANY_ID)),
        _acl((1, 6, _ANY_ID), (4, 4, _ANY_ID), (8, 6, 2000), (8, 0, 3000), (16, 4, _ANY_ID), (32, 0, _ANY_ID)),
        _acl((1, 6, _ANY_ID), (2, 6, 1001), (4, 4, _ANY_ID), (32, 0, _ANY_ID)),  # no mask
        _acl(*_PLAIN[:2]),
        _acl(*reversed(_PLAIN)),
        _acl(),
        b"",
        b"short",
    ),
)  # fmt: skip
XATTR_ROOM: Final = Kind("room", (65_536, 65_536, 65_536, 0, 1, 5, 100, 70_000))
LOCK: Final = Kind("lock", ("r", "w", "u"))
LOCK_START: Final = Kind("lock start", (0, 0, 10, 100, 2**62))
LOCK_LENGTH: Final = Kind("lock length", (0, 1, 10, 50, 1000))
FLOCK: Final = Kind("flock", (1, 1, 1, 2, 2, 2, 8, 8, 0))  # LOCK_SH, LOCK_EX, LOCK_UN, sys/file.h

_P, _S = PATH, SLOT
OPERATIONS: Final[dict[str, Operation]] = {
    "open": Operation(12, (FILE, FLAGS, MODE, _S)),
    "open_directory": Operation(5, (DIRECTORY, DIRECTORY_FLAGS, MODE, _S)),
    "open_any": Operation(12, (_P, FLAGS, MODE, _S)),
    "tmpfile": Operation(5, (DIRECTORY, TMPFILE, MODE, _S)),
    "close": Operation(2, (_S,)),
    "dup": Operation(2, (_S, _S)),
    "reopen": Operation(1, (_S,)),
    "read": Operation(8, (_S, SIZE)),
    "pread": Operation(8, (_S, SIZE, OFFSET)),
    "write": Operation(10, (_S, DATA)),
    "pwrite": Operation(10, (_S, DATA, OFFSET)),
    "writev": Operation(3, (_S, DATA, DATA)),
    "lseek": Operation(5, (_S, OFFSET, WHENCE)),
    "seek_sparse": Operation(5, (_S, OFFSET, SPARSE_WHENCE)),
    "truncate": Operation(8, (FILE, OFFSET)),
    "ftruncate": Operation(6, (_S, OFFSET)),
    "fallocate": Operation(8, (_S, FALLOCATE_MODE, OFFSET, LENGTH)),
    "copy_file_range": Operation(10, (_S, WHERE, _S, WHERE, LENGTH)),
    "sendfile": Operation(2, (_S, _S, SIZE)),
    "mkdir": Operation(14, (DIRECTORY, MODE)),
    "rmdir": Operation(7, (DIRECTORY,)),
    "mknod": Operation(7, (FILE, NODE, DEVICE)),
    "symlink": Operation(9, (TARGET, _P)),
    "link": Operation(14, (FILE, _P, BOOL)),
    "link_open": Operation(4, (_S, _P)),
    "unlink": Operation(9, (FILE,)),
    "rename": Operation(10, (FILE, FILE)),
    "rename_directory": Operation(5, (DIRECTORY, DIRECTORY)),
    "rename_any": Operation(7, (_P, _P)),
    "renameat2": Operation(10, (_P, _P, RENAME_FLAGS)),
    "listdir": Operation(6, (DIRECTORY,)),
    "flistdir": Operation(4, (_S,)),
    "list_changing": Operation(2, (DIRECTORY, LISTED_CHANGE)),
    "stat": Operation(4, (_P,)),
    "fstat": Operation(2, (_S,)),
    "statfs": Operation(1, (_P,)),
    "access": Operation(4, (_P, ACCESS)),
    "readlink": Operation(5, (_P,)),
    "chmod": Operation(12, (_P, MODE)),
    "fchmod": Operation(5, (_S, MODE)),
    "lchmod": Operation(1, (_P, MODE)),
    "chown": Operation(8, (_P, UID, GID)),
    "lchown": Operation(4, (_P, UID, GID)),
    "fchown": Operation(4, (_S, UID, GID)),
    "utimens": Operation(8, (_P, TIME, TIME, BOOL)),
    "futimens": Operation(4, (_S, TIME, TIME)),
    "utimes_now": Operation(2, (_P,)),
    "setxattr": Operation(8, (FILE, XATTR, VALUE, XATTR_FLAGS, BOOL)),
    "setxattr_huge": Operation(1, (_P, XATTR, HUGE_VALUE)),
    "fsetxattr": Operation(4, (_S, XATTR, VALUE, XATTR_FLAGS)),
    "getxattr": Operation(5, (FILE, XATTR, XATTR_ROOM, BOOL)),
    "fgetxattr": Operation(2, (_S, XATTR, XATTR_ROOM)),
    "listxattr": Operation(4, (_P, BOOL)),
    "removexattr": Operation(5, (FILE, XATTR, BOOL)),
    "fremovexattr": Operation(2, (_S, XATTR)),
    "set_acl": Operation(9, (_P, ACL_NAME, ACL, XATTR_FLAGS)),
    "set_directory_acl": Operation(5, (DIRECTORY, ACL_NAME, ACL, XATTR_FLAGS)),
    "fset_acl": Operation(3, (_S, ACL_NAME, ACL, XATTR_FLAGS)),
    "get_acl": Operation(3, (_P, ACL_NAME)),
    "remove_acl": Operation(3, (_P, ACL_NAME)),
    "map_write": Operation(6, (_S, OFFSET, DATA)),
    "map_read": Operation(4, (_S, OFFSET, SIZE)),
    "map_private": Operation(2, (_S, OFFSET, DATA)),
    "fsync": Operation(2, (_S,)),
    "fdatasync": Operation(1, (_S,)),
    "syncfs": Operation(1, (_S,)),
    "flock": Operation(5, (_S, FLOCK)),
    "lock": Operation(6, (_S, LOCK, LOCK_START, LOCK_LENGTH)),
    "lock_ofd": Operation(3, (_S, LOCK, LOCK_START, LOCK_LENGTH)),
    "lock_test": Operation(3, (_S, LOCK, LOCK_START, LOCK_LENGTH)),
    "umask": Operation(2, (UMASK,)),
    "chdir": Operation(4, (DIRECTORY,)),
    "chdir_root": Operation(8, ()),
    "fchdir": Operation(1, (_S,)),
    "getcwd": Operation(1, ()),
    # Never drawn: what comes before it was made in the directory below an overlay, before anybody looked there.
    "below": Operation(0, ()),
}  # fmt: skip


def _prologue(chance: random.Random) -> Iterator[Call]:
    """Something to begin with: directories, and for each worker open files."""
    yield Call(0, "mkdir", (b"a", chance.choice((0o777, 0o777, 0o2777, 0o1777))))
    yield Call(1, "mkdir", (b"b", chance.choice((0o777, 0o2775, 0o1777))))
    for worker in range(len(WORKERS)):
        yield Call(worker, "umask", (chance.choice((0, 0, 0o22)),))
        for slot in range(3):
            yield Call(worker, "open", (chance.choice(_FILES), os.O_RDWR | os.O_CREAT, 0o666, slot))
            yield Call(worker, "pwrite", (slot, chance.choice(DATA.values), 0))


def random_calls(chance: random.Random, count: int, without: Collection[str] = ()) -> Iterator[Call]:
    """`count` calls at random, after some to begin with; the same `chance` gives the same calls.

    `without` names operations to leave out.
    """
    names = [name for name in OPERATIONS if name not in without]
    weights = list(accumulate(OPERATIONS[name].weight for name in names))
    choose, draw, pick = chance.choices, chance.random, chance.choice
    worker = 0
    yield from _prologue(chance)
    for name in choose(names, cum_weights=weights, k=count):
        if draw() > _STAY_SHARE:
            worker = pick(range(len(WORKERS)))
        yield Call(worker, name, tuple(pick(kind.values) for kind in OPERATIONS[name].kinds))
