"""HostAttributes: the stat data of an inode as `protocol.volume.Attributes`; and setting attributes.

The host has no call that sets several attributes at once.  A kernel asks for one at a time, with its times; if it asks
for more, the order is such that no step undoes another, and the first step that can fail comes first.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from protocol.backends.host.descriptors import Descriptors
from protocol.linux.portable import kill_privileges, proc_path, set_times

if TYPE_CHECKING:
    from protocol.backends.host.inode_table import HostInode
    from protocol.volume import AttributeChanges

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
