"""Operations: what each call does, as system calls of the process that it runs in, and what it answers.

Errors leave as OSError.  Answers are values that marshal can write, and say nothing that may differ between
two file systems that behave alike: no inode numbers, no order of names.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import struct
from collections.abc import Callable
from typing import Any, Final

from tests.differential.calls import data

__all__ = ["Process", "digest", "errno_name", "extended_attributes", "sync_file_system"]

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
_libc.linkat.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
_libc.utimensat.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int]
_libc.futimens.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.getxattr.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.lgetxattr.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.fgetxattr.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
for _name in ("setxattr", "lsetxattr"):
    getattr(_libc, _name).argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int,
    ]  # fmt: skip
_libc.fsetxattr.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
for _name in ("getxattr", "lgetxattr", "fgetxattr"):
    getattr(_libc, _name).restype = ctypes.c_ssize_t
_libc.lseek.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
_libc.lseek.restype = ctypes.c_int64
_libc.syncfs.argtypes = [ctypes.c_int]
_libc.fchmodat.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.c_int]

_AT_FDCWD: Final = -100  # fcntl.h
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_SYMLINK_FOLLOW: Final = 0x400
_AT_EMPTY_PATH: Final = 0x1000
_LOCK_NB: Final = 4
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock on 64 bits
_LOCK_TYPES: Final = {"r": fcntl.F_RDLCK, "w": fcntl.F_WRLCK, "u": fcntl.F_UNLCK}
_TIMES: Final = struct.Struct("qqqq")
_COPY_BYTES: Final = 1 << 20  # of a hole of 2**62 bytes as much as both have room for
_HOLE_BYTES: Final = 300_000
_SHORT_BYTES: Final = 64
_LISTED: Final = 40
_FEW_NAMES_BYTES: Final = 200
_DIRENT_NAME_AT: Final = 19  # struct linux_dirent64


def _next_names(directory: int) -> list[bytes] | None:
    """The next few names of a listing without the dots; None at its end."""
    buffer = ctypes.create_string_buffer(_FEW_NAMES_BYTES)
    end = _checked(_libc.getdents64(directory, buffer, len(buffer)))
    names, at = [], 0
    while at < end:
        (length,) = struct.unpack_from("=H", buffer, at + 16)
        names.append(buffer[at + _DIRENT_NAME_AT : at + length].partition(b"\0")[0])
        at += length
    return [name for name in names if name not in {b".", b".."}] if end else None


def _recreate(path: bytes) -> None:
    os.unlink(path)
    os.mknod(path)


def _replace(path: bytes) -> None:
    os.mknod(path + b".new")
    os.rename(path + b".new", path)


def _there_and_back(path: bytes) -> None:
    os.rename(path, path + b".x")
    os.rename(path + b".x", path)


_CHANGES: Final[dict[str, Callable[[bytes], None]]] = {
    "rename": lambda path: os.rename(path, path + b".x"),
    "copy": lambda path: os.mknod(path + b"~"),
    "link": lambda path: os.link(path, path + b".l"),
    "recreate": _recreate,
    "replace": _replace,
    "there_and_back": _there_and_back,
}


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def digest(content: bytes | memoryview) -> bytes | tuple[int, bytes]:
    """Content as it is where it is short, else its length and a digest."""
    if len(content) <= _SHORT_BYTES:
        return bytes(content)
    return len(content), hashlib.blake2b(content, digest_size=8).digest()


def extended_attributes(path: bytes) -> list[tuple[bytes, Any]]:
    """All extended attributes of `path`, which is not followed."""
    names = sorted(os.fsencode(name) for name in os.listxattr(path, follow_symlinks=False))
    return [(name, _extended_attribute(path, name)) for name in names]


def _extended_attribute(path: bytes, name: bytes) -> Any:
    try:
        return digest(os.getxattr(path, name, follow_symlinks=False))
    except OSError as error:
        return errno_name(error)


def sync_file_system(descriptor: int) -> None:
    """Call syncfs(2)."""
    _checked(_libc.syncfs(descriptor))


class Process:
    """What a process has besides its files: slots of open descriptors.  Each method is an operation.

    `write_back`: the kernel holds written data back, so a file's st_blocks counts it only after an fsync(2).
    """

    def __init__(self, *, write_back: bool = False) -> None:
        self.slots: dict[int, int] = {}
        self.write_back = write_back

    def close(self) -> None:
        while self.slots:
            os.close(self.slots.popitem()[1])

    def run(self, operation: str, args: tuple[Any, ...]) -> Any:
        """OSError is an answer too."""
        method: Callable[..., Any] = getattr(self, f"do_{operation}")
        return method(*args)

    def fd(self, slot: int) -> int:
        """The descriptor in `slot`, or one that nobody has, for the kernel to refuse."""
        return self.slots.get(slot, 1_000_000)

    def _put(self, slot: int, descriptor: int) -> None:
        old = self.slots.pop(slot, None)
        self.slots[slot] = descriptor
        if old is not None:
            os.close(old)

    # -- descriptors ---------------------------------------------------------------------------
    def do_open(self, path: bytes, flags: int, mode: int, slot: int) -> None:
        # Without O_NONBLOCK a fifo waits for its other end.
        self._put(slot, os.open(path, flags | os.O_NONBLOCK, mode))

    do_tmpfile = do_open_any = do_open_directory = do_open

    def do_close(self, slot: int) -> None:
        os.close(self.fd(slot))
        del self.slots[slot]

    def do_dup(self, slot: int, other: int) -> None:
        self._put(other, os.dup(self.fd(slot)))

    def do_reopen(self, slot: int) -> int:
        """Set O_APPEND through fcntl, and say what flags the descriptor has."""
        flags = fcntl.fcntl(self.fd(slot), fcntl.F_GETFL)
        fcntl.fcntl(self.fd(slot), fcntl.F_SETFL, flags ^ os.O_APPEND)
        return fcntl.fcntl(self.fd(slot), fcntl.F_GETFL)

    # -- content -------------------------------------------------------------------------------
    def do_read(self, slot: int, size: int) -> Any:
        return digest(os.read(self.fd(slot), size))

    def do_pread(self, slot: int, size: int, offset: int) -> Any:
        return digest(os.pread(self.fd(slot), size, offset))

    def do_write(self, slot: int, piece: tuple[int, int]) -> int:
        return os.write(self.fd(slot), data(*piece))

    def do_pwrite(self, slot: int, piece: tuple[int, int], offset: int) -> int:
        return os.pwrite(self.fd(slot), data(*piece), offset)

    def do_writev(self, slot: int, one: tuple[int, int], two: tuple[int, int]) -> int:
        return os.writev(self.fd(slot), [data(*one), data(*two)])

    def do_lseek(self, slot: int, offset: int, whence: int) -> tuple[int, str]:
        """Where it is now (an errno where it is nowhere), and whether what is passed off as a hole is one."""
        # Not os.lseek, which takes every negative answer for an error.
        answer: int = _libc.lseek(self.fd(slot), offset, whence)
        nowhere = answer == -1 and ctypes.get_errno() == errno.ENXIO
        if answer == -1 and not nowhere:
            _checked(answer)
        if whence == os.SEEK_DATA:
            return answer, self._zeros(slot, offset, _HOLE_BYTES if nowhere else min(answer - offset, _HOLE_BYTES))
        if whence == os.SEEK_HOLE and not nowhere:
            return answer, self._zeros(slot, answer, -answer % mmap.PAGESIZE or mmap.PAGESIZE)
        return answer, ""

    def _zeros(self, slot: int, offset: int, size: int) -> str:
        try:
            return "data" if any(os.pread(self.fd(slot), size, offset)) else "zeros"
        except OSError as error:
            return errno_name(error)

    do_seek_sparse = do_lseek

    def do_truncate(self, path: bytes, size: int) -> None:
        if size == 0 and os.stat(path).st_size == 0:
            # The kernel's FUSE layer sends for this what it sends for O_TRUNC, which sets mtime (known.py).
            raise OSError(errno.EINVAL, "empty files are not truncated here")
        os.truncate(path, size)

    def do_ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self.fd(slot), size)

    def do_fallocate(self, slot: int, mode: int, offset: int, length: int) -> None:
        _checked(_libc.fallocate(self.fd(slot), mode, offset, length))

    def do_copy_file_range(self, source: int, at: int | None, target: int, to: int | None, length: int) -> int:
        return os.copy_file_range(self.fd(source), self.fd(target), max(0, min(length, _COPY_BYTES)), at, to)

    def fill_copied_holes(self, target: int, to: int | None, copied: int) -> None:
        """Give the holes of a copy the pages that they get on tmpfs. A workspace copies holes as holes."""
        descriptor = self.fd(target)
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        stop = copied + (position - copied if to is None else to)
        at = stop - copied
        # Not os.lseek: for data in the last page that a file can have, the answer of tmpfs overflows.
        while at < stop and 0 <= (at := _libc.lseek(descriptor, at, os.SEEK_HOLE)) < stop:
            end = min(stop, at + mmap.PAGESIZE - at % mmap.PAGESIZE)
            os.pwrite(descriptor, bytes(end - at), at)
            at = end
        os.lseek(descriptor, position, os.SEEK_SET)

    def do_sendfile(self, source: int, target: int, size: int) -> int:
        if os.path.samestat(os.fstat(self.fd(source)), os.fstat(self.fd(target))):
            # The pages themselves go through a pipe: which content they have by then is not defined.
            raise OSError(errno.EINVAL, "a file is not sent to itself here")
        return os.sendfile(self.fd(target), self.fd(source), None, size)

    # -- mappings: only within the file, past its end a process dies of SIGBUS ---------------------
    def _map(self, slot: int, offset: int, size: int, share: int, protection: int) -> tuple[mmap.mmap, int, int]:
        """A mapping that has `offset`, where that is in it, and how much of `size` it has."""
        descriptor = self.fd(slot)
        total = os.fstat(descriptor).st_size
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENODEV, "only regular files are mapped here")
        if offset < 0 or offset >= total:
            raise OSError(errno.EINVAL, "nothing to map")
        base = offset & ~(mmap.PAGESIZE - 1)
        size = min(size, total - offset) or 1
        mapped = mmap.mmap(descriptor, offset - base + size, flags=share, prot=protection, offset=base)
        return mapped, offset - base, size

    def _refuse_holes(self, slot: int) -> None:
        """To read a hole through a mapping gives it a page on tmpfs, and on no other file system."""
        descriptor = self.fd(slot)
        if self.write_back and stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)
        found = os.fstat(descriptor)
        whole = stat.S_ISREG(found.st_mode) and found.st_blocks * 512 >= found.st_size
        if whole and found.st_size:
            kept = os.lseek(descriptor, 0, os.SEEK_CUR)
            whole = os.lseek(descriptor, 0, os.SEEK_HOLE) == found.st_size
            os.lseek(descriptor, kept, os.SEEK_SET)
        if not whole:
            raise OSError(errno.EINVAL, "holes are not mapped here")

    def do_map_write(self, slot: int, offset: int, piece: tuple[int, int]) -> int:
        if b"security.capability" in map(os.fsencode, os.listxattr(self.fd(slot))):
            # It goes with what is written through a mapping, on tmpfs it stays: a volume is not told that a write
            # comes from the page cache (FUSE_WRITE_CACHE, linux/fuse.h).
            raise OSError(errno.EINVAL, "no mapping of a file with capabilities is written here")
        content = data(*piece)
        mapped, start, size = self._map(slot, offset, len(content), mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with mapped:
            content = content[:size]
            mapped[start : start + len(content)] = content
            mapped.flush()
        return len(content)

    def do_map_read(self, slot: int, offset: int, size: int) -> Any:
        self._refuse_holes(slot)
        mapped, start, size = self._map(slot, offset, size, mmap.MAP_SHARED, mmap.PROT_READ)
        with mapped:
            return digest(mapped[start : start + size])

    def do_map_private(self, slot: int, offset: int, piece: tuple[int, int]) -> Any:
        self._refuse_holes(slot)
        content = data(*piece)
        mapped, start, size = self._map(slot, offset, len(content), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        with mapped:
            mapped[start : start + len(content[:size])] = content[:size]
            return digest(mapped[:])

    def do_fsync(self, slot: int) -> None:
        os.fsync(self.fd(slot))

    def do_fdatasync(self, slot: int) -> None:
        os.fdatasync(self.fd(slot))

    def do_syncfs(self, slot: int) -> None:
        sync_file_system(self.fd(slot))

    # -- names ---------------------------------------------------------------------------------
    def do_mkdir(self, path: bytes, mode: int) -> None:
        os.mkdir(path, mode)

    def do_rmdir(self, path: bytes) -> None:
        os.rmdir(path)

    def do_mknod(self, path: bytes, mode: int, device: int) -> None:
        os.mknod(path, mode, device)

    def do_symlink(self, target: bytes, path: bytes) -> None:
        os.symlink(target, path)

    def do_link(self, old: bytes, new: bytes, follow: int) -> None:
        _checked(_libc.linkat(_AT_FDCWD, old, _AT_FDCWD, new, _AT_SYMLINK_FOLLOW if follow else 0))

    def do_link_open(self, slot: int, path: bytes) -> None:
        _checked(_libc.linkat(self.fd(slot), b"", _AT_FDCWD, path, _AT_EMPTY_PATH))

    def do_unlink(self, path: bytes) -> None:
        os.unlink(path)

    def do_rename(self, old: bytes, new: bytes) -> None:
        os.rename(old, new)

    do_rename_directory = do_rename_any = do_rename

    def do_renameat2(self, old: bytes, new: bytes, flags: int) -> None:
        _checked(_libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, flags))

    def do_listdir(self, path: bytes) -> list[tuple[bytes, int]]:
        return _listing(path)

    def do_flistdir(self, slot: int) -> list[tuple[bytes, int]]:
        descriptor = self.fd(slot)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return _listing(descriptor)

    def do_list_changing(self, path: bytes, change: str) -> tuple[list[bytes], list[bytes]]:
        """The names that a listing of a new directory has, though each is changed, and those that are left."""
        directory = path + b"/listed"
        os.mkdir(directory)
        listed: list[bytes] = []
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            for at in range(_LISTED):
                os.mknod(b"%s/%d" % (directory, at))
            while names := _next_names(descriptor):
                for name in names:
                    listed.append(name)
                    if len(listed) > 3 * _LISTED:
                        raise OSError(errno.ELOOP, "the listing does not end")
                    _CHANGES[change](directory + b"/" + name)
            return sorted(listed), sorted(os.listdir(directory))
        finally:
            os.close(descriptor)
            for name in os.listdir(directory):
                os.unlink(directory + b"/" + name)
            os.rmdir(directory)

    def do_readlink(self, path: bytes) -> bytes:
        return os.readlink(path)

    def do_chdir(self, path: bytes) -> None:
        os.chdir(path)

    def do_chdir_root(self) -> None:
        os.chdir(b"/")

    def do_fchdir(self, slot: int) -> None:
        os.fchdir(self.fd(slot))

    def do_below(self) -> None:
        """Nothing, where there is nothing below."""

    def do_getcwd(self) -> bytes:
        return os.getcwdb()

    # -- attributes ----------------------------------------------------------------------------
    def do_stat(self, path: bytes) -> int:
        return os.stat(path).st_mode

    def do_fstat(self, slot: int) -> int:
        return os.fstat(self.fd(slot)).st_mode

    def do_statfs(self, path: bytes) -> tuple[int, ...]:
        found = os.statvfs(path)
        return (
            found.f_bsize,
            found.f_frsize,
            found.f_blocks,
            found.f_namemax,
            found.f_flag & (os.ST_RDONLY | os.ST_NOSUID),
        )

    def do_access(self, path: bytes, mode: int) -> bool:
        # Python's own os.access hides the errno.
        _checked(_libc.faccessat(_AT_FDCWD, path, mode, 0))
        return True

    def do_umask(self, mask: int) -> int:
        return os.umask(mask)

    def do_chmod(self, path: bytes, mode: int) -> None:
        os.chmod(path, mode)

    def do_lchmod(self, path: bytes, mode: int) -> None:
        _checked(_libc.fchmodat(_AT_FDCWD, path, mode, _AT_SYMLINK_NOFOLLOW))

    def do_fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self.fd(slot), mode)

    def do_chown(self, path: bytes, uid: int, gid: int) -> None:
        os.chown(path, uid, gid)

    def do_lchown(self, path: bytes, uid: int, gid: int) -> None:
        os.lchown(path, uid, gid)

    def do_fchown(self, slot: int, uid: int, gid: int) -> None:
        os.fchown(self.fd(slot), uid, gid)

    def do_utimens(self, path: bytes, atime: tuple[int, int], mtime: tuple[int, int], follow: int) -> None:
        _checked(_libc.utimensat(_AT_FDCWD, path, _TIMES.pack(*atime, *mtime), 0 if follow else _AT_SYMLINK_NOFOLLOW))

    def do_futimens(self, slot: int, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
        _checked(_libc.futimens(self.fd(slot), _TIMES.pack(*atime, *mtime)))

    def do_utimes_now(self, path: bytes) -> None:
        """With no times at all: what touch(1) does, allowed to every user who may write."""
        _checked(_libc.utimensat(_AT_FDCWD, path, None, 0))

    # -- extended attributes -------------------------------------------------------------------
    def do_setxattr(self, path: bytes, name: bytes, value: bytes, flags: int, follow: int) -> None:
        _checked((_libc.setxattr if follow else _libc.lsetxattr)(path, name, value, len(value), flags))

    def do_setxattr_huge(self, path: bytes, name: bytes, value: bytes) -> None:
        self.do_setxattr(path, name, value, 0, 1)

    def do_fsetxattr(self, slot: int, name: bytes, value: bytes, flags: int) -> None:
        _checked(_libc.fsetxattr(self.fd(slot), name, value, len(value), flags))

    def do_getxattr(self, path: bytes, name: bytes, room: int, follow: int) -> Any:
        buffer = ctypes.create_string_buffer(room or 1)
        length = _checked((_libc.getxattr if follow else _libc.lgetxattr)(path, name, buffer, room))
        return digest(buffer.raw[:length]) if room else length

    def do_fgetxattr(self, slot: int, name: bytes, room: int) -> Any:
        buffer = ctypes.create_string_buffer(room or 1)
        length = _checked(_libc.fgetxattr(self.fd(slot), name, buffer, room))
        return digest(buffer.raw[:length]) if room else length

    def do_listxattr(self, path: bytes, follow: int) -> list[bytes]:
        return sorted(os.fsencode(name) for name in os.listxattr(path, follow_symlinks=bool(follow)))

    def do_removexattr(self, path: bytes, name: bytes, follow: int) -> None:
        os.removexattr(path, name, follow_symlinks=bool(follow))

    def do_fremovexattr(self, slot: int, name: bytes) -> None:
        os.removexattr(self.fd(slot), name)

    def do_set_acl(self, path: bytes, name: bytes, value: bytes, flags: int) -> None:
        self.do_setxattr(path, name, value, flags, 1)

    do_set_directory_acl = do_set_acl

    def do_fset_acl(self, slot: int, name: bytes, value: bytes, flags: int) -> None:
        self.do_fsetxattr(slot, name, value, flags)

    def do_get_acl(self, path: bytes, name: bytes) -> bytes:
        return os.getxattr(path, name)

    def do_remove_acl(self, path: bytes, name: bytes) -> None:
        os.removexattr(path, name)

    # -- locks ---------------------------------------------------------------------------------
    def do_flock(self, slot: int, operation: int) -> None:
        fcntl.flock(self.fd(slot), operation | _LOCK_NB)

    def _lock(self, command: int, slot: int, kind: str, start: int, length: int) -> bytes:
        return fcntl.fcntl(self.fd(slot), command, _FLOCK.pack(_LOCK_TYPES[kind], os.SEEK_SET, start, length, 0))

    def do_lock(self, slot: int, kind: str, start: int, length: int) -> None:
        self._lock(fcntl.F_SETLK, slot, kind, start, length)

    def do_lock_ofd(self, slot: int, kind: str, start: int, length: int) -> None:
        self._lock(_F_OFD_SETLK, slot, kind, start, length)

    def do_lock_test(self, slot: int, kind: str, start: int, length: int) -> tuple[int, ...]:
        found = _FLOCK.unpack(self._lock(fcntl.F_GETLK, slot, kind, start, length))
        return found[:4] if found[0] != fcntl.F_UNLCK else (found[0],)


def _listing(where: bytes | int) -> list[tuple[bytes, int]]:
    """(name, type) of each entry, with what it says of its inode's number checked."""
    with os.scandir(where) as entries:
        return sorted((os.fsencode(entry.name), _type(entry)) for entry in entries)


def _type(entry: os.DirEntry[Any]) -> int:
    if entry.is_symlink():
        return 2
    return 1 if entry.is_dir(follow_symlinks=False) else 0
