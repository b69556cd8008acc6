"""Packers of replies: from a volume's answers to the bytes that the kernel expects."""

from __future__ import annotations

import errno
import functools
import os
import struct
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Final

from protocol.stored_attributes import CopiedAttributes, StoredAttributes
from protocol.volume import Attributes, Buffer, PlainEntry, StatFs
from vfsd.kernel.engines.native import wire

# A reply: one buffer, or several for writev(2).
Message = bytes | tuple[Buffer, ...]

# st_blksize, the buffer size of stdio, awk, sort, Python and others: it decides how many requests their output takes.
BLOCK_SIZE: Final = 128 * 1024
_SECOND: Final = 1_000_000_000
_pack_header: Final = wire.FUSE_OUT_HEADER.pack
_HEADER_BYTES: Final = wire.OUT_HEADER_BYTES
_BLKSIZE_AND_FLAGS: Final = struct.pack("=II", BLOCK_SIZE, 0)
_pack_entry: Final = wire.ENTRY_REPLY.pack
_ENTRY_HEADER: Final = struct.pack("=Ii", wire.ENTRY_REPLY.size, 0)
_pack_attributes: Final = wire.ATTR_REPLY.pack
_ATTR_HEADER: Final = struct.pack("=Ii", wire.ATTR_REPLY.size, 0)
_STATX_BASIC_STATS_AND_BTIME: Final = 0xFFF  # linux/stat.h


class Validity:
    """How long the kernel may cache a name or attributes: whole seconds and nanoseconds."""

    __slots__ = ("forever", "nanoseconds", "seconds")

    # 68 years.  The kernel converts seconds to jiffies and clamps them; this is below its limit for every HZ.
    FOREVER_S: Final = 2**31

    def __init__(self, timeout_s: float) -> None:
        self.forever = timeout_s >= self.FOREVER_S
        if self.forever:
            self.seconds, self.nanoseconds = self.FOREVER_S, 0
        else:
            self.seconds = int(timeout_s)
            self.nanoseconds = int((timeout_s - self.seconds) * _SECOND)


NO_CACHE: Final = Validity(0)


class Replies:
    """Packs answers.  Each method takes the request's `unique` and the answer, and returns the complete message."""

    def __init__(self, validity: Validity) -> None:
        self._seconds = validity.seconds
        self._nanoseconds = validity.nanoseconds
        # The kernel caches absence only if no one except this daemon can create the name.
        if validity.forever:
            size, error = wire.ENTRY_REPLY.size, 0
            self._absent_body = wire.FUSE_ENTRY_OUT.pack(0, 0, validity.seconds, 0, 0, 0, *([0] * 16))
        else:
            size, error = wire.OUT_HEADER_BYTES, -errno.ENOENT
            self._absent_body = b""
        self._validity = wire.FUSE_ENTRY_OUT.pack(
            0, 0, self._seconds, self._seconds, self._nanoseconds, self._nanoseconds, *([0] * 16)
        )[16:40]
        self._attr_validity = wire.FUSE_ATTR_OUT.pack(self._seconds, self._nanoseconds, 0, *([0] * 16))[:16]
        self._absent_header = functools.partial(wire.FUSE_OUT_HEADER.pack, size, error)

    def found(self, unique: int, a: Attributes | None) -> bytes:
        """Pack the answer to LOOKUP; None stands for absence."""
        return self.absent(unique) if a is None else self.entry(unique, a)

    def entry(self, unique: int, a: Attributes) -> bytes:
        """Pack fuse_entry_out, with which the kernel counts a lookup."""
        s = a if isinstance(a, StoredAttributes) else CopiedAttributes(a)
        mtime, mtime_ns = divmod(s.mtime_ns, _SECOND)
        atime, atime_ns = (mtime, mtime_ns) if s.atime_ns == s.mtime_ns else divmod(s.atime_ns, _SECOND)
        ctime, ctime_ns = (mtime, mtime_ns) if s.ctime_ns == s.mtime_ns else divmod(s.ctime_ns, _SECOND)
        inode = s.inode
        return _pack_entry(
            _ENTRY_HEADER, unique, inode, s.generation, self._validity,
            inode, s.size, s.blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns,
            s.mode, s.nlink, s.uid, s.gid, s.rdev & 0xFFFFFFFF, _BLKSIZE_AND_FLAGS,
        )  # fmt: skip

    def attributes(self, unique: int, a: Attributes) -> bytes:
        """Pack fuse_attr_out."""
        s = a if isinstance(a, StoredAttributes) else CopiedAttributes(a)
        mtime, mtime_ns = divmod(s.mtime_ns, _SECOND)
        atime, atime_ns = (mtime, mtime_ns) if s.atime_ns == s.mtime_ns else divmod(s.atime_ns, _SECOND)
        ctime, ctime_ns = (mtime, mtime_ns) if s.ctime_ns == s.mtime_ns else divmod(s.ctime_ns, _SECOND)
        return _pack_attributes(
            _ATTR_HEADER, unique, self._attr_validity,
            s.inode, s.size, s.blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns,
            s.mode, s.nlink, s.uid, s.gid, s.rdev & 0xFFFFFFFF, _BLKSIZE_AND_FLAGS,
        )  # fmt: skip

    def entry_and_open(self, unique: int, a: Attributes) -> bytes:
        """Pack fuse_entry_out and fuse_open_out, the answer to TMPFILE; the handle is the inode number."""
        body = self.entry(unique, a)[wire.OUT_HEADER_BYTES :] + wire.FUSE_OPEN_OUT.pack(a.inode, 0, 0)
        return wire.body_reply(unique, body)

    @staticmethod
    def opened(unique: int, _: object) -> bytes:
        """Pack fuse_open_out of an OPEN.  The handle is not used: requests have the inode number."""
        return wire.body_reply(unique, wire.FUSE_OPEN_OUT.pack(0, wire.FOPEN_KEEP_CACHE, 0))

    def statx(self, unique: int, a: Attributes) -> bytes:
        """Pack fuse_statx_out, with the birth time."""
        return wire.body_reply(
            unique,
            wire.FUSE_STATX_OUT.pack(
                self._seconds, self._nanoseconds, 0,
                _STATX_BASIC_STATS_AND_BTIME, BLOCK_SIZE, 0, a.nlink, a.uid, a.gid, a.mode,
                a.inode, a.size, a.blocks, 0,
                *divmod(a.atime_ns, _SECOND), *divmod(a.birth_ns, _SECOND),
                *divmod(a.ctime_ns, _SECOND), *divmod(a.mtime_ns, _SECOND),
                os.major(a.rdev), os.minor(a.rdev), 0, 0,
            ),
        )  # fmt: skip

    def absent(self, unique: int) -> bytes:
        """Pack the absence of a name: node 0 if the kernel may cache it, else ENOENT."""
        return self._absent_header(unique) + self._absent_body

    def direntplus(self, a: Attributes, entry: PlainEntry) -> bytes:
        """Pack one entry of READDIRPLUS with attributes; it counts a lookup."""
        s = a if isinstance(a, StoredAttributes) else CopiedAttributes(a)
        mtime, mtime_ns = divmod(s.mtime_ns, _SECOND)
        atime, atime_ns = (mtime, mtime_ns) if s.atime_ns == s.mtime_ns else divmod(s.atime_ns, _SECOND)
        ctime, ctime_ns = (mtime, mtime_ns) if s.ctime_ns == s.mtime_ns else divmod(s.ctime_ns, _SECOND)
        name, inode, mode, cookie = entry
        length = len(name)
        return _DIRENTPLUS[length](
            inode, s.generation, self._validity,
            inode, s.size, s.blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns,
            s.mode, s.nlink, s.uid, s.gid, s.rdev & 0xFFFFFFFF, _BLKSIZE_AND_FLAGS,
            inode, cookie, length, mode >> 12, name,
        )  # fmt: skip

    @staticmethod
    def direntplus_bare(entry: PlainEntry) -> bytes:
        """Pack one entry of READDIRPLUS without attributes (node 0); it counts no lookup."""
        return bytes(wire.FUSE_ENTRY_OUT.size) + dirent(entry)

    # -- answers without a cache timeout -----------------------------------------------------
    @staticmethod
    def attribute(unique: int, value: bytes | None) -> bytes:
        """Pack an extended attribute; None stands for absence."""
        return _pack_header(_HEADER_BYTES, -errno.ENODATA, unique) if value is None else wire.body_reply(unique, value)

    @staticmethod
    def done(unique: int, _: object) -> bytes:
        """Pack success without a body."""
        return _pack_header(_HEADER_BYTES, 0, unique)

    @staticmethod
    def nothing(_unique: int, _: object) -> bytes:
        """Return an empty message, which is not sent: FORGET and INTERRUPT have no reply."""
        return b""

    @staticmethod
    def data(unique: int, data: Buffer) -> Message:
        length = len(data)
        return (wire.FUSE_OUT_HEADER.pack(wire.OUT_HEADER_BYTES + length, 0, unique), data)

    @staticmethod
    def content(unique: int, data: Buffer | list[Buffer]) -> Message:
        """Pack content, one buffer or a list of buffers."""
        if not isinstance(data, list):
            return (wire.FUSE_OUT_HEADER.pack(wire.OUT_HEADER_BYTES + len(data), 0, unique), data)
        length = sum(map(len, data))
        return (wire.FUSE_OUT_HEADER.pack(wire.OUT_HEADER_BYTES + length, 0, unique), *data)

    @staticmethod
    def written(unique: int, count: int) -> bytes:
        return wire.WRITE_REPLY.pack(wire.WRITE_REPLY.size, 0, unique, count, 0)

    @staticmethod
    def copied_64(unique: int, count: int) -> bytes:
        return wire.body_reply(unique, wire.FUSE_COPY_FILE_RANGE_OUT.pack(count))

    @staticmethod
    def position(unique: int, offset: int) -> bytes:
        return wire.body_reply(unique, wire.FUSE_LSEEK_OUT.pack(offset))

    @staticmethod
    def statfs(unique: int, s: StatFs) -> bytes:
        size = s.block_size
        return wire.body_reply(
            unique,
            wire.FUSE_KSTATFS.pack(
                s.blocks, s.blocks_free, s.blocks_free, s.inodes, s.inodes_free, size, s.name_max, size, 0
            ),
        )


def dirent(entry: PlainEntry) -> bytes:
    """Pack one entry of READDIR."""
    name, inode, mode, cookie = entry
    length = len(name)
    return _DIRENT[length](inode, cookie, length, mode >> 12, name)


def dirents(entries: Iterable[PlainEntry], size: int) -> tuple[bytes, int]:
    """Pack the entries that fit into `size` bytes, the answer to READDIR; return it and the cookie of the last one."""
    parts: list[bytes] = []
    end = 0
    for name, inode, mode, cookie in entries:
        length = len(name)
        packed = _DIRENT[length](inode, cookie, length, mode >> 12, name)
        size -= len(packed)
        if size < 0:
            break
        parts.append(packed)
        end = cookie
    return b"".join(parts), end


class _Packers(dict[int, Callable[..., bytes]]):
    """Packers of `header` and a name after it, padded with zeros to a multiple of 8 bytes, by the name's length."""

    def __init__(self, header: Struct) -> None:
        self._header = header

    def __missing__(self, length: int) -> Callable[..., bytes]:
        header = self._header
        pack = self[length] = Struct(f"{header.format}{wire.aligned(header.size + length) - header.size}s").pack
        return pack


_DIRENT: Final = _Packers(wire.FUSE_DIRENT)
_DIRENTPLUS: Final = _Packers(wire.FUSE_DIRENTPLUS)
