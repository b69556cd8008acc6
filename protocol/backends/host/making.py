"""Maker: makes inodes on the host, and gives them to the caller.

An unprivileged daemon makes what is its own.  A root daemon makes what is root's for a moment, without suid and sgid
bits, and then hands it over: acting as the caller (setfsuid(2)) would lack the caller's supplementary
groups, which a kernel's request does not tell.

The umask is the process's: while a call creates something, it is the caller's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from protocol.backends.host.descriptors import Descriptors
from protocol.errors import os_error
from protocol.linux.beneath import open_beneath, proc_path

if TYPE_CHECKING:
    from protocol.backends.host.nodes import HostInode
    from protocol.volume import Caller

__all__ = ["Maker"]

T = TypeVar("T")

_O_CREATE: Final = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_O_UNNAMED: Final = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
_PERMISSIONS: Final = 0o1777
_SPECIAL_BITS: Final = 0o6000


class Maker:
    """What mknod, mkdir, symlink and tmpfile do.  Each answers with what the host shows of the new inode."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._uid = os.geteuid()
        self._gid = os.getegid()

    def file(self, directory: HostInode, name: bytes, mode: int, caller: Caller) -> tuple[int, os.stat_result]:
        """A regular file, and a descriptor to write it."""
        return self._opened(directory, name, _O_CREATE, mode, caller)

    def tmpfile(self, directory: HostInode, mode: int, caller: Caller) -> tuple[int, os.stat_result]:
        """A file without a name, and a descriptor to write it."""
        return self._opened(directory, b".", _O_UNNAMED, mode, caller)

    def _opened(
        self, directory: HostInode, name: bytes, flags: int, mode: int, caller: Caller
    ) -> tuple[int, os.stat_result]:
        at = self._descriptors.directory(directory)
        old = os.umask(caller.umask)
        try:
            descriptor = os.open(name, flags, mode & _PERMISSIONS, dir_fd=at)
        finally:
            os.umask(old)
        try:
            return descriptor, self._hand_over(directory, descriptor, mode, caller)
        except BaseException:
            os.close(descriptor)
            raise

    def directory(self, directory: HostInode, name: bytes, mode: int, caller: Caller) -> os.stat_result:
        """A directory."""
        at = self._descriptors.directory(directory)
        _with_umask(caller, lambda: os.mkdir(name, mode & _PERMISSIONS, dir_fd=at))
        return self._own(directory, name, stat.S_IFDIR, mode, caller)

    def special(
        self, directory: HostInode, name: bytes, kind: int, mode: int, rdev: int, caller: Caller
    ) -> os.stat_result:
        """A fifo, a socket or a device node."""
        at = self._descriptors.directory(directory)
        _with_umask(caller, lambda: os.mknod(name, kind | mode & _PERMISSIONS, rdev, dir_fd=at))
        return self._own(directory, name, kind, mode, caller)

    def symlink(self, directory: HostInode, name: bytes, target: bytes, caller: Caller) -> os.stat_result:
        """A symlink."""
        os.symlink(target, name, dir_fd=self._descriptors.directory(directory))
        return self._own(directory, name, stat.S_IFLNK, 0, caller)

    def own(self, directory: HostInode, name: bytes, kind: int, caller: Caller) -> None:
        """Hand over what the host's kernel has just made itself."""
        self._own(directory, name, kind, 0, caller)

    def _own(self, directory: HostInode, name: bytes, kind: int, mode: int, caller: Caller) -> os.stat_result:
        """Hand over what was just made as `name`: provided that it is still that, and not what others put there."""
        at = self._descriptors.directory(directory)
        if not self._needs_chown(caller) and not mode & _SPECIAL_BITS:
            seen = os.stat(name, dir_fd=at, follow_symlinks=False)
            _check_ours(seen, kind, self._uid)
            return seen
        descriptor = open_beneath(at, name, os.O_PATH, same_mount=True)
        try:
            _check_ours(os.fstat(descriptor), kind, self._uid)
            return self._hand_over(directory, descriptor, mode, caller)
        finally:
            os.close(descriptor)

    def _needs_chown(self, caller: Caller) -> bool:
        return self._uid == 0 and (caller.uid != 0 or caller.gid != self._gid)

    def _hand_over(self, directory: HostInode, descriptor: int, mode: int, caller: Caller) -> os.stat_result:
        """Give a new inode to the caller, with its set-id bits."""
        seen = os.fstat(descriptor)
        path = proc_path(descriptor)
        changed = False
        if self._needs_chown(caller):
            inherits = os.fstat(self._descriptors.directory(directory)).st_mode & stat.S_ISGID
            gid = seen.st_gid if inherits or seen.st_gid != self._gid else caller.gid
            if (caller.uid, gid) != (seen.st_uid, seen.st_gid):
                os.chown(path, caller.uid, gid)
                changed = True
        bits = mode & _SPECIAL_BITS
        if bits and stat.S_IMODE(seen.st_mode) & bits != bits:
            os.chmod(path, stat.S_IMODE(seen.st_mode) | bits)
            changed = True
        return os.fstat(descriptor) if changed else seen


def _with_umask(caller: Caller, make: Callable[[], T]) -> T:
    old = os.umask(caller.umask)
    try:
        return make()
    finally:
        os.umask(old)


def _check_ours(seen: os.stat_result, kind: int, uid: int) -> None:
    """ESTALE where somebody has replaced what was just made."""
    links = seen.st_nlink if kind != stat.S_IFDIR else 1
    if stat.S_IFMT(seen.st_mode) != kind or seen.st_uid != uid or links != 1:
        raise os_error(errno.ESTALE)
