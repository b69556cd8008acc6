"""The kernel's FUSE protocol: opcodes, flags and structs, named as in linux/fuse.h.

All numbers are in the machine's byte order, and explicit padding fields align everything to 8 bytes, so each struct
is "=" (native order, no implicit padding).

Source: include/uapi/linux/fuse.h, protocol 7.45.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, IntFlag
from struct import Struct
from typing import Any, Final

FUSE_KERNEL_VERSION: Final = 7
FUSE_KERNEL_MINOR_VERSION: Final = 45


class Opcode(IntEnum):
    """enum fuse_opcode."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53


class InitFlag(IntFlag):
    """FUSE_* flags of INIT; bits 32 and up are in `flags2`."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    DONT_MASK = 1 << 6
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    WRITEBACK_CACHE = 1 << 16
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    POSIX_ACL = 1 << 20
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    EXPLICIT_INVAL_DATA = 1 << 25
    HANDLE_KILLPRIV_V2 = 1 << 28
    SETXATTR_EXT = 1 << 29
    INIT_EXT = 1 << 30
    HAS_EXPIRE_ONLY = 1 << 35
    HAS_RESEND = 1 << 39


# -- requests ----------------------------------------------------------------------------------
# len, opcode, unique, nodeid, uid, gid, pid, total_extlen (units of 8 bytes), padding
FUSE_IN_HEADER: Final = Struct("=IIQQIIIHH")
IN_HEADER_BYTES: Final = FUSE_IN_HEADER.size
# The fields that the loop needs: opcode, unique, nodeid, pid.
IN_HEADER_ROUTE: Final = Struct("=4xIQQ8xI4x")
IN_HEADER_UNIQUE: Final = Struct("=8xQ")
IN_HEADER_CALLER: Final = Struct("=24xIII")  # uid, gid, pid

FUSE_FORGET_IN: Final = Struct("=Q")  # nlookup
FUSE_BATCH_FORGET_IN: Final = Struct("=II")  # count, dummy
FUSE_FORGET_ONE: Final = Struct("=QQ")  # nodeid, nlookup
FUSE_MKNOD_IN: Final = Struct("=IIII")  # mode, rdev, umask, padding
FUSE_MKDIR_IN: Final = Struct("=II")  # mode, umask
FUSE_RENAME_IN: Final = Struct("=Q")  # newdir
FUSE_RENAME2_IN: Final = Struct("=QII")  # newdir, flags, padding
FUSE_LINK_IN: Final = Struct("=Q")  # oldnodeid
# valid, padding, fh, size, lock_owner, atime, mtime, ctime, their nanoseconds, mode, unused4, uid, gid, unused5
FUSE_SETATTR_IN: Final = Struct("=IIQqQqqqIIIIIIII")
FUSE_CREATE_IN: Final = Struct("=IIII")  # flags, mode, umask, open_flags
FUSE_READ_IN: Final = Struct("=QqIIQII")  # fh, offset, size, read_flags, lock_owner, flags, padding
FUSE_READDIR_IN: Final = Struct("=QQIIQII")  # the same struct; the offset is a cookie
FUSE_WRITE_IN: Final = Struct("=QqIIQII")  # fh, offset, size, write_flags, lock_owner, flags, padding
FUSE_FSYNC_IN: Final = Struct("=QII")  # fh, fsync_flags, padding
FUSE_SETXATTR_IN_COMPAT: Final = Struct("=II")  # size, flags
FUSE_SETXATTR_IN: Final = Struct("=IIII")  # size, flags, setxattr_flags, padding (SETXATTR_EXT)
FUSE_GETXATTR_IN: Final = Struct("=II")  # size, padding
FUSE_INIT_IN: Final = Struct("=IIII")  # major, minor, max_readahead, flags
FUSE_INIT_IN_FLAGS2: Final = Struct("=I")  # follows if INIT_EXT is set
FUSE_ACCESS_IN: Final = Struct("=II")  # mask, padding
FUSE_INTERRUPT_IN: Final = Struct("=Q")  # unique
FUSE_FALLOCATE_IN: Final = Struct("=QqqII")  # fh, offset, length, mode, padding
FUSE_OPEN_IN: Final = Struct("=II")  # flags, open_flags
FUSE_RELEASE_IN: Final = Struct("=QIIQ")  # fh, flags, release_flags, lock_owner
FUSE_LSEEK_IN: Final = Struct("=QqII")  # fh, offset, whence, padding
FUSE_COPY_FILE_RANGE_IN: Final = Struct("=QqQQqQQ")  # fh_in, off_in, nodeid_out, fh_out, off_out, len, flags
FUSE_STATX_IN: Final = Struct("=IIQII")  # getattr_flags, reserved, fh, sx_flags, sx_mask


class TailUnpackers(dict[int, Callable[..., tuple[Any, ...]]]):
    """Unpackers of the fields `fixed` and the bytes after them, by the length of the message.

    The NUL at the end of the message is left out.  Unpacking the bytes together with the fields takes less time than
    slicing the bytearray and copying the slice.
    """

    def __init__(self, fixed: str) -> None:
        self._fixed = fixed
        self._other_bytes = IN_HEADER_BYTES + Struct(fixed).size + 1

    def __missing__(self, length: int) -> Callable[..., tuple[Any, ...]]:
        unpack = self[length] = Struct(f"{self._fixed}{length - self._other_bytes}s").unpack_from
        return unpack


NAME: Final = TailUnpackers("=")  # without its NUL, like all names below
MKNOD_NAME: Final = TailUnpackers("=III4x")  # mode, rdev, umask, name
MKDIR_NAME: Final = TailUnpackers("=II")  # mode, umask, name
LINK_NAME: Final = TailUnpackers("=Q")  # oldnodeid, name
RENAME_NAMES: Final = TailUnpackers("=Q")  # newdir, both names with a NUL between
RENAME2_NAMES: Final = TailUnpackers("=QI4x")  # newdir, flags, both names
GETXATTR_NAME: Final = TailUnpackers("=I4x")  # size, name
WRITE_DATA_AT: Final = IN_HEADER_BYTES + FUSE_WRITE_IN.size

# fuse_setattr_in.valid
FATTR_MODE: Final = 1 << 0
FATTR_UID: Final = 1 << 1
FATTR_GID: Final = 1 << 2
FATTR_SIZE: Final = 1 << 3
FATTR_ATIME: Final = 1 << 4
FATTR_MTIME: Final = 1 << 5
FATTR_FH: Final = 1 << 6
FATTR_ATIME_NOW: Final = 1 << 7
FATTR_MTIME_NOW: Final = 1 << 8
FATTR_CTIME: Final = 1 << 10
FATTR_KILL_SUIDGID: Final = 1 << 11

FUSE_WRITE_CACHE: Final = 1 << 0  # write_flags: dirty pages, not write(2)
FUSE_WRITE_KILL_SUIDGID: Final = 1 << 2
FUSE_FSYNC_FDATASYNC: Final = 1 << 0
FUSE_SETXATTR_ACL_KILL_SGID: Final = 1 << 0

# -- replies -----------------------------------------------------------------------------------
FUSE_OUT_HEADER: Final = Struct("=IiQ")  # len, error (negative errno), unique
OUT_HEADER_BYTES: Final = FUSE_OUT_HEADER.size
# ino, size, blocks, atime, mtime, ctime, their nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags
FUSE_ATTR: Final = Struct("=QQQqqq10I")
# nodeid, generation, entry_valid, attr_valid, entry_valid_nsec, attr_valid_nsec; then a fuse_attr
FUSE_ENTRY_OUT: Final = Struct("=QQQQII" + FUSE_ATTR.format[1:])
FUSE_ATTR_OUT: Final = Struct("=QII" + FUSE_ATTR.format[1:])  # attr_valid, attr_valid_nsec, dummy; a fuse_attr
# The most frequent replies, header included.  Fields that are equal in all replies are packed once, as bytes.
# size, blocks, times, their nanoseconds, mode, nlink, uid, gid, rdev; then blksize and flags
_ATTR_IN_PIECES: Final = "QQQqqq8I8s"
# len and error; unique, nodeid, generation; the validities
ENTRY_REPLY: Final = Struct("=8sQQQ24s" + _ATTR_IN_PIECES)
# len and error; unique; the validity
ATTR_REPLY: Final = Struct("=8sQ16s" + _ATTR_IN_PIECES)
FUSE_OPEN_OUT: Final = Struct("=QII")  # fh, open_flags, padding
FOPEN_KEEP_CACHE: Final = 1 << 1  # the pages of earlier opens stay
FUSE_WRITE_OUT: Final = Struct("=II")  # size, padding
WRITE_REPLY: Final = Struct(FUSE_OUT_HEADER.format + FUSE_WRITE_OUT.format[1:])
FUSE_GETXATTR_OUT: Final = Struct("=II")  # size, padding
FUSE_LSEEK_OUT: Final = Struct("=Q")  # offset
FUSE_COPY_FILE_RANGE_OUT: Final = Struct("=Q")  # bytes_copied
FUSE_KSTATFS: Final = Struct("=QQQQQIIII24x")  # blocks, bfree, bavail, files, ffree, bsize, namelen, frsize, padding
# major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
# map_alignment, flags2, unused
FUSE_INIT_OUT: Final = Struct("=IIIIHHIIHHI28x")
# attr_valid, attr_valid_nsec, flags, spare; then a fuse_statx: mask, blksize, attributes, nlink, uid, gid, mode,
# spare, ino, size, blocks, attributes_mask, four fuse_sx_time (atime, btime, ctime, mtime: sec, nsec, reserved),
# rdev_major, rdev_minor, dev_major, dev_minor, spare
FUSE_STATX_OUT: Final = Struct("=QII16x" + "IIQIIIH2xQQQQ" + "qI4x" * 4 + "IIII112x")
FUSE_DIRENT: Final = Struct("=QQII")  # ino, off, namelen, type; then the name, padded to 8 bytes
# nodeid, generation; the validities; a fuse_attr in pieces; ino, off, namelen, type; then the name
FUSE_DIRENTPLUS: Final = Struct("=QQ24s" + _ATTR_IN_PIECES + FUSE_DIRENT.format[1:])

# -- notifications: `unique` is 0, the code stands in the field of the error -----------------------
FUSE_NOTIFY_INVAL_INODE: Final = 2
FUSE_NOTIFY_INVAL_ENTRY: Final = 3
FUSE_NOTIFY_RESEND: Final = 7  # protocol 7.40; no body
FUSE_NOTIFY_PRUNE: Final = 9  # protocol 7.45
FUSE_NOTIFY_PRUNE_OUT: Final = Struct("=IIQ")  # count, padding, spare; then `count` node ids
FUSE_NOTIFY_INVAL_INODE_OUT: Final = Struct("=Qqq")  # ino, off, len
FUSE_NOTIFY_INVAL_ENTRY_OUT: Final = Struct("=QII")  # parent, namelen, flags; then the name and a NUL

# The kernel rejects a reply with a larger errno (fs/fuse/dev.c), and the request would never end.
MAX_ERRNO: Final = 511


def error_reply(unique: int, code: int) -> bytes:
    """Pack the reply that fails request `unique` with errno `code` (0: success without a body)."""
    return FUSE_OUT_HEADER.pack(OUT_HEADER_BYTES, -code, unique)


def body_reply(unique: int, body: bytes) -> bytes:
    """Pack the reply to request `unique` with `body` after the header."""
    return FUSE_OUT_HEADER.pack(OUT_HEADER_BYTES + len(body), 0, unique) + body


def notification(code: int, body: bytes) -> bytes:
    """Pack a message to the kernel that answers no request."""
    return FUSE_OUT_HEADER.pack(OUT_HEADER_BYTES + len(body), code, 0) + body


def aligned(length: int) -> int:
    """Round `length` up to 8 bytes (FUSE_REC_ALIGN)."""
    return (length + 7) & ~7
