"""InodeCreator: creates inodes on the host that belong to the caller.

An unprivileged daemon creates files of its own user.  A root daemon creates them as root, without suid and sgid bits,
and then changes the owner.  It cannot act as the caller (setfsuid(2)), because a kernel's request does not name the
caller's supplementary groups.

The umask belongs to the process; during a call that creates something, it is the caller's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from protocol.backends.host.descriptors import Descriptors
from protocol.errors import os_error
from protocol.linux.beneath import open_beneath
from protocol.linux.portable import proc_path

if TYPE_CHECKING:
    from protocol.backends.host.inode_table import HostInode
    from protocol.volume import Caller

_O_CREATE: Final = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_O_UNNAMED: Final = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
_PERMISSIONS: Final = 0o1777
_SPECIAL_BITS: Final = 0o6000


class InodeCreator:
    """Creates files of each type in a directory.  Each method returns the stat data of the new inode."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._uid = os.geteuid()
        self._gid = os.getegid()

    def file(self, directory: HostInode, name: bytes | None, mode: int, caller: Caller) -> tuple[int, os.stat_result]:
        """Create a regular file, without a name if `name` is None; also return a descriptor to write it."""
        flags = _O_UNNAMED if name is None else _O_CREATE

        def create() -> int:
            return os.open(name or b".", flags, mode & _PERMISSIONS, dir_fd=self._descriptors.directory(directory))

        with _umask(caller):
            descriptor = self._descriptors.with_room(create)
        try:
            return descriptor, self._give_to_caller(directory, descriptor, mode, caller)
        except BaseException:
            os.close(descriptor)
            raise

    def directory(self, directory: HostInode, name: bytes, mode: int, caller: Caller) -> os.stat_result:
        """Create a directory."""
        at = self._descriptors.directory(directory)
        with _umask(caller):
            os.mkdir(name, mode & _PERMISSIONS, dir_fd=at)
        return self.finish(directory, name, stat.S_IFDIR | mode, caller)

    def special(self, directory: HostInode, name: bytes, mode: int, rdev: int, caller: Caller) -> os.stat_result:
        """Create a FIFO, a socket or a device node; `mode` includes its type."""
        at = self._descriptors.directory(directory)
        with _umask(caller):
            os.mknod(name, stat.S_IFMT(mode) | mode & _PERMISSIONS, rdev, dir_fd=at)
        return self.finish(directory, name, mode, caller)

    def symlink(self, directory: HostInode, name: bytes, target: bytes, caller: Caller) -> os.stat_result:
        """Create a symlink."""
        os.symlink(target, name, dir_fd=self._descriptors.directory(directory))
        return self.finish(directory, name, stat.S_IFLNK, caller)

    def finish(self, directory: HostInode, name: bytes, mode: int, caller: Caller) -> os.stat_result:
        """Give what was just created as `name` to the caller.  ESTALE if another program has replaced it."""
        at = self._descriptors.directory(directory)
        kind = stat.S_IFMT(mode)
        if not self._needs_chown(caller) and not mode & _SPECIAL_BITS:
            seen = os.stat(name, dir_fd=at, follow_symlinks=False)
            self._check_own(seen, kind)
            return seen
        descriptor = self._descriptors.with_room(
            lambda: open_beneath(self._descriptors.directory(directory), name, os.O_PATH, same_mount=True)
        )
        try:
            self._check_own(os.fstat(descriptor), kind)
            return self._give_to_caller(directory, descriptor, mode, caller)
        finally:
            os.close(descriptor)

    def finish_interrupted(self, directory: HostInode, descriptor: int, mode: int, caller: Caller) -> None:
        """Give an inode to the caller, unless the process that made it has done that."""
        if os.fstat(descriptor).st_uid == self._uid:
            self._give_to_caller(directory, descriptor, mode, caller)

    def _needs_chown(self, caller: Caller) -> bool:
        return self._uid == 0 and (caller.uid != 0 or caller.gid != self._gid)

    def _give_to_caller(self, directory: HostInode, descriptor: int, mode: int, caller: Caller) -> os.stat_result:
        """Set the owner and the set-id bits of a new inode."""
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

    def _check_own(self, seen: os.stat_result, kind: int) -> None:
        links = seen.st_nlink if kind != stat.S_IFDIR else 1
        if stat.S_IFMT(seen.st_mode) != kind or seen.st_uid != self._uid or links != 1:
            raise os_error(errno.ESTALE)


@contextmanager
def _umask(caller: Caller) -> Iterator[None]:
    old = os.umask(caller.umask)
    try:
        yield
    finally:
        os.umask(old)
