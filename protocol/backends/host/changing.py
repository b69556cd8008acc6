"""change: what setattr does to an inode of the host, step by step.

The host has no call that sets several attributes at once.  A kernel asks for one at a time, with its times; where
it asks for more, the order is such that no step undoes another, and what fails is the first step that can.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import TYPE_CHECKING, Final

from protocol.backends.host.descriptors import Descriptors
from protocol.linux.beneath import proc_path

if TYPE_CHECKING:
    from protocol.backends.host.nodes import HostInode
    from protocol.volume import AttributeChanges

__all__ = ["change", "without_privileges"]

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
_SET_ID_BITS: Final = stat.S_ISUID | stat.S_ISGID
_NOW_NS: Final = 1_000_000_000  # a time that is no further from now means now


def change(descriptors: Descriptors, node: HostInode, changes: AttributeChanges) -> None:
    """Apply `changes` to `node`."""
    if changes.size is not None:
        _truncate(descriptors, node, changes.size)
    with descriptors.of(node) as descriptor:
        path = proc_path(descriptor)
        if changes.uid is not None or changes.gid is not None or _is_touch(changes, descriptor):
            os.chown(path, -1 if changes.uid is None else changes.uid, -1 if changes.gid is None else changes.gid)
        if changes.kill_privileges and not node.is_dir:
            _kill_privileges(path, descriptor)
        if changes.mode is not None:
            os.chmod(path, changes.mode & 0o7777)
        if changes.atime_ns is not None or changes.mtime_ns is not None:
            _set_times(path, descriptor, changes.atime_ns, changes.mtime_ns)


def _is_touch(changes: AttributeChanges, descriptor: int) -> bool:
    """Whether ctime is all that changes: chown(2) to (-1, -1) does that, but takes set-id bits away too."""
    if any(value is not None for value in changes[:-1]):
        return False
    return changes.kill_privileges or not os.fstat(descriptor).st_mode & _SET_ID_BITS


def _truncate(descriptors: Descriptors, node: HostInode, size: int) -> None:
    """truncate(2), not ftruncate: that would set mtime also where the size stays."""
    try:
        with descriptors.of(node) as descriptor:
            os.truncate(proc_path(descriptor), size)
    except OSError as error:
        if error.errno not in _DENIED:
            raise
        # Opened before its mode denied it.
        os.ftruncate(descriptors.file(node, write=True), size)


def _kill_privileges(path: bytes, descriptor: int) -> None:
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode != without_privileges(mode):
        os.chmod(path, without_privileges(mode))


def without_privileges(mode: int) -> int:
    """Without suid, and without sgid where it is one (with group execute): setattr_should_drop_suidgid, fs/attr.c."""
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


def _set_times(path: bytes, descriptor: int, atime_ns: int | None, mtime_ns: int | None) -> None:
    if atime_ns is None or mtime_ns is None:
        seen = os.fstat(descriptor)
        atime_ns = seen.st_atime_ns if atime_ns is None else atime_ns
        mtime_ns = seen.st_mtime_ns if mtime_ns is None else mtime_ns
    try:
        os.utime(path, ns=(atime_ns, mtime_ns))
    except PermissionError:
        # Whoever may write to a file that is not his own may set its times to now, and to nothing else.
        now = time.time_ns()
        if abs(now - atime_ns) > _NOW_NS or abs(now - mtime_ns) > _NOW_NS:
            raise
        os.utime(path)
