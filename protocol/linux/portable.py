"""Access to inodes that vfsd and its helper in containers share: system calls that os lacks, numbers, attributes.

The helper runs on any Python from 3.6 on (see `protocol.backends.container.helper`).  So this module uses no newer
syntax, and only the standard library.  If Python was built without ctypes, or the C library is too old, a system call
fails with EOPNOTSUPP or falls back to other calls.

Source: the man pages of section 2; fs/attr.c.
"""

import binascii
import errno
import os
import stat
import struct
import time
from typing import Collection, Container, Iterator, Tuple

try:
    import ctypes

    _LIBC = ctypes.CDLL(None, use_errno=True)
except (ImportError, OSError):  # built without
    _LIBC = None  # type: ignore[assignment]

_AT_EMPTY_PATH = 0x1000
_STATX_BTIME = 0x800
_STATX_BTIME_AT = 80
_COPY_BYTES = 1024 * 1024
_RWF_APPEND = 16  # linux/fs.h; the name in os is of Python 3.10
_KEEP_SIZE_PUNCH_HOLE = 3  # linux/falloc.h
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
_SECOND_NS = 1000000000
_NOW_NS = _SECOND_NS  # a time within one second of the clock counts as the present time
_ROOT_INODE = 1
# Numbers that no file system uses: for inodes of another device, and for inodes whose number is taken.
_FURTHER_DEVICES = 1 << 56
_DEVICE_BITS = 48
_FIRST_SPARE = 1 << 61
# A directory descriptor follows a directory that another program moves out of the tree.  So code that keeps one uses it
# for so long, and then opens or checks its path again.
RECHECK_S = 0.5
HASHED_COOKIES = 1 << 30  # those of `hashed_cookies` begin here


def os_error(code: int) -> OSError:
    """The OSError for an errno."""
    return OSError(code, os.strerror(code))


class Handle:
    """A descriptor that is closed with its last reference, so a cache may drop one that a thread still uses."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def path(self) -> bytes:
        """See `proc_path`."""
        return proc_path(self.fd)

    def close(self) -> None:
        """Close the descriptor now."""
        descriptor, self.fd = self.fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def proc_path(descriptor: int) -> bytes:
    """The path in /proc of the inode that a descriptor is open on, for calls that take no (O_PATH) descriptor."""
    return b"/proc/self/fd/%d" % descriptor


class InodeNumbers:
    """Numbers for the inodes (st_dev, st_ino) below a directory of the file system `device`.

    The number of an inode is its st_ino if that is free, so that the inode has the same number when it is seen again.
    Inodes of other devices, such as subvolumes, have numbers by the order in which their devices were discovered.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._further_devices: "list[int]" = []
        self._next_spare = _FIRST_SPARE

    def usual(self, key: "tuple[int, int]") -> int:
        """The number of an inode unless that is taken."""
        device, inode = key
        if device == self._device and _ROOT_INODE < inode < _FURTHER_DEVICES:
            return inode
        if device not in self._further_devices:
            self._further_devices.append(device)
        position = self._further_devices.index(device)
        return _FURTHER_DEVICES + (position << _DEVICE_BITS) + inode % (1 << _DEVICE_BITS)

    def resume(self, key: "tuple[int, int]", number: int) -> None:
        """Record that the predecessor has given `number` to an inode."""
        device, _ = key
        if number >= _FIRST_SPARE:
            self._next_spare = max(self._next_spare, number + 1)
        elif number >= _FURTHER_DEVICES:
            position = (number - _FURTHER_DEVICES) >> _DEVICE_BITS
            missing = position + 1 - len(self._further_devices)
            self._further_devices += [-1] * missing  # devices of inodes that the kernel does not know any more
            self._further_devices[position] = device

    def free(self, key: "tuple[int, int]", taken: "Container[int]") -> int:
        """The usual number, or another one if that is among `taken`."""
        number = self.usual(key)
        if number in taken:
            number = self._next_spare
            self._next_spare += 1
        return number


# -- attributes ------------------------------------------------------------------------------------
def without_privileges(mode: int) -> int:
    """A file's mode without suid, and without sgid if the group may execute: setattr_should_drop_suidgid, fs/attr.c."""
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


def kill_privileges(descriptor: int) -> None:
    """Clear the set-id bits of a file, as `without_privileges` does."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    kept = without_privileges(mode)
    if kept != mode:
        os.chmod(proc_path(descriptor), kept)


def set_times(descriptor: int, atime_ns: "int | None", mtime_ns: "int | None") -> None:
    """Set the times of an inode; None keeps one."""
    if atime_ns is None or mtime_ns is None:
        seen = os.fstat(descriptor)
        atime_ns = seen.st_atime_ns if atime_ns is None else atime_ns
        mtime_ns = seen.st_mtime_ns if mtime_ns is None else mtime_ns
    try:
        os.utime(proc_path(descriptor), ns=(atime_ns, mtime_ns))
    except PermissionError:
        # A process that may write to a file, but does not own it, may set its times to now, and to nothing else.
        now = int(time.time() * _SECOND_NS)
        if abs(now - atime_ns) > _NOW_NS or abs(now - mtime_ns) > _NOW_NS:
            raise
        os.utime(proc_path(descriptor))


# -- system calls ----------------------------------------------------------------------------------
def _call(name: str, *arguments: object) -> None:
    call = getattr(_LIBC, name, None)
    if call is None:
        raise os_error(errno.EOPNOTSUPP)
    if call(*arguments):
        raise os_error(ctypes.get_errno())


def renameat2(source: int, name: bytes, target: int, new_name: bytes, flags: int) -> None:
    """renameat2(2).  EINVAL if the flags are not supported."""
    try:
        _call("renameat2", source, name, target, new_name, ctypes.c_uint(flags) if _LIBC else flags)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise os_error(errno.EINVAL) from None
        raise


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2).  (os.posix_fallocate has no mode, and writes zeros if the file system lacks the call.)"""
    if _LIBC is None:
        raise os_error(errno.EOPNOTSUPP)
    name = "fallocate64" if hasattr(_LIBC, "fallocate64") else "fallocate"
    _call(name, descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length))


def append(descriptor: int, data: "bytes | bytearray | memoryview") -> int:
    """Write `data` at the end of a file that is open for writing, in one step; return the count written."""
    try:
        return os.pwritev(descriptor, [data], 0, _RWF_APPEND)
    # Python 3.6, or a C library without pwritev2(2); a kernel without the flag (gVisor).
    except (AttributeError, NotImplementedError):
        pass
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    opened = Handle(os.open(proc_path(descriptor), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    return os.write(opened.fd, data)


def birth_ns(descriptor: int) -> int:
    """When the inode of a descriptor (also an O_PATH one) was made, in nanoseconds since the epoch; 0: unknown."""
    if not hasattr(_LIBC, "statx"):
        return 0
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_BTIME, buffer):
        return 0
    if not struct.unpack_from("=I", buffer)[0] & _STATX_BTIME:
        return 0
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, _STATX_BTIME_AT)
    return int(seconds * _SECOND_NS + nanoseconds)


def hole_bytes(descriptor: int, offset: int) -> int:
    """The length of the hole of a file at `offset`; 0 for data, and where the file system knows no holes."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) - offset
    except OSError as error:
        return max(0, os.fstat(descriptor).st_size - offset) if error.errno == errno.ENXIO else 0


def _hole_and_data(source: int, offset: int, length: int) -> "tuple[int, int]":
    """The lengths of the hole and of the data that follow at `offset`, up to `length` together."""
    length = max(0, min(length, os.fstat(source).st_size - offset))
    hole = min(hole_bytes(source, offset), length)
    if hole == length:
        return hole, 0
    try:
        return hole, min(os.lseek(source, offset + hole, os.SEEK_HOLE) - offset, length) - hole
    except OSError:
        return hole, length - hole


def _copied_hole(target: int, offset: int, length: int) -> bool:
    """Make a hole; False, without a change, if the file system cannot."""
    size = os.fstat(target).st_size
    try:
        if offset < size:
            fallocate(target, _KEEP_SIZE_PUNCH_HOLE, offset, min(length, size - offset))
    except OSError:
        return False
    if offset + length > size:
        os.ftruncate(target, offset + length)
    return True


def copy_range(source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
    """copy_file_range(2) until `length` bytes or the end of the source; pread and pwrite if the kernel cannot.

    Unlike the kernel, which writes zeros on most file systems, it leaves holes where the source has them.
    """
    kernel = getattr(os, "copy_file_range", None)  # since Python 3.8
    copied = run = 0
    while copied < length:
        if copied >= run:
            hole, run = _hole_and_data(source, source_offset + copied, length - copied)
            run += copied + hole
            if hole and _copied_hole(target, target_offset + copied, hole):
                copied += hole
                continue
        if kernel is not None:
            try:
                count = kernel(source, target, run - copied, source_offset + copied, target_offset + copied)
            except OSError as error:
                if copied or error.errno not in _CANNOT_COPY:
                    raise
                kernel = None
                continue
        else:
            data = os.pread(source, min(_COPY_BYTES, run - copied), source_offset + copied)
            count = os.pwrite(target, data, target_offset + copied) if data else 0
        if not count:
            break
        copied += count
    return copied


def hashed_cookies(names: "Collection[bytes]", taken: "Collection[int]") -> "Iterator[Tuple[bytes, int]]":
    """Give each of `names` a cookie that depends on its bytes, below 2**31, and that is not one of `taken`.

    Names whose hashes are equal get successive cookies, in the order of the names.  So a listing that goes on after
    its directory was forgotten finds the names that it has not listed yet, whatever was added and removed meanwhile.
    """
    used = set(taken)
    last = 0
    for cookie, name in sorted((HASHED_COOKIES + (binascii.crc32(name) >> 2), name) for name in names):
        last = max(cookie, last + 1)
        while last in used:
            last += 1
        yield name, last
