"""The attributes of inodes: showing and setting them, and creating inodes that belong to the caller.

The host has no call that sets several attributes at once.  A kernel asks for one at a time, with its times; if it asks
for more, the order is such that no step undoes another, and the first step that can fail comes first.

An unprivileged daemon creates files of its own user.  A root daemon creates them as root, without suid and sgid bits,
and then changes the owner.  It cannot act as the caller (setfsuid(2)), because a kernel's request does not name the
caller's supplementary groups.  The umask belongs to the process; during a call that creates something, it is the
caller's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from protocol.backends.host.descriptors import Descriptors
from protocol.errors import os_error
from protocol.linux.beneath import open_beneath
from protocol.linux.portable import kill_privileges, proc_path, set_times

if TYPE_CHECKING:
    from protocol.backends.host.inode_table import HostInode
    from protocol.volume import AttributeChanges, Caller

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
_SET_ID_BITS: Final = stat.S_ISUID | stat.S_ISGID


class HostAttributes(NamedTuple):
    """The attributes of `node` at one moment.  `birth` looks its birth time up, which few callers need."""

    inode: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    node: HostInode
    birth: Callable[[HostInode], int]
    generation: int = 0

    @property
    def birth_ns(self) -> int:
        return self.birth(self.node)


def set_attributes(descriptors: Descriptors, node: HostInode, changes: AttributeChanges) -> None:
    """Apply `changes` to `node`."""
    if changes.size is not None:
        _truncate(descriptors, node, changes.size)
    with descriptors.of(node) as descriptor:
        path = proc_path(descriptor)
        if changes.uid is not None or changes.gid is not None or _is_touch(changes, descriptor):
            os.chown(path, -1 if changes.uid is None else changes.uid, -1 if changes.gid is None else changes.gid)
        if changes.kill_privileges and not node.is_dir:
            kill_privileges(descriptor)
        if changes.mode is not None:
            os.chmod(path, changes.mode & 0o7777)
        if changes.atime_ns is not None or changes.mtime_ns is not None:
            set_times(descriptor, changes.atime_ns, changes.mtime_ns)


def _is_touch(changes: AttributeChanges, descriptor: int) -> bool:
    """Whether only ctime changes: chown(2) to (-1, -1) does that, but also clears set-id bits."""
    if any(value is not None for value in changes[:-1]):
        return False
    return changes.kill_privileges or not os.fstat(descriptor).st_mode & _SET_ID_BITS


def _truncate(descriptors: Descriptors, node: HostInode, size: int) -> None:
    """Truncate with truncate(2); ftruncate(2) would set mtime even if the size stays the same."""
    try:
        with descriptors.of(node) as descriptor:
            os.truncate(proc_path(descriptor), size)
    except OSError as error:
        if error.errno not in _DENIED:
            raise
        # The program opened the file before its mode denied that.
        os.ftruncate(descriptors.file(node, write=True), size)


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
