"""InodeAttributes: the calls that read and change the attributes of one inode, extended attributes included.

See `protocol.volume.Volume` for each method.  The kernel checks permissions; this part does what the kernel leaves to
the file system.  Source: mm/shmem.c, fs/attr.c.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from protocol.backends.memory import xattrs
from protocol.backends.memory.files import FileContents, check_size
from protocol.errors import os_error
from protocol.linux.portable import without_privileges
from protocol.tree import TYPE_MASK
from protocol.volume import AttributeChanges

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode

_XATTR_ROOM_BYTES: Final = 1024  # more than one attribute takes beyond its name and value
_XATTR_EFFECT_BYTES: Final = 64  # the same, in the journal


class InodeAttributes(FileContents):
    """The calls that read and change the attributes of one inode, on top of those for content."""

    def setattr(self, inode: int, changes: AttributeChanges) -> Inode:
        recorder = self.recorder
        if recorder is not None and self.repeats and (done := self._repeated()) is not None:
            return self.getattr(done)
        state, ledger = self._state, self._ledger
        if state.read_only:
            raise os_error(errno.EROFS)
        node = self.getattr(inode)
        mode, uid, gid, size, atime_ns, mtime_ns, ctime_ns, kill_privileges = changes
        if size is not None:
            check_size(node, size)
        if recorder is not None:
            recorder.begin(0, node, removes=size is not None and size < node.size)
        if node.epoch != state.epoch:
            # Shortening a file is never refused for lack of memory.
            node = state.own(node) if size is not None and size < node.size else self._limits.changeable(node)
        now = self._clock() if size is None else self._set_size(node, size, changes)
        if kill_privileges or uid is not None or gid is not None:
            self._set_owner(node, uid, gid, kill_privileges)
        if mode is not None:
            node.mode = node.mode & TYPE_MASK | mode & 0o7777
            if node.xattrs is not None:
                ledger.set_xattrs(node, xattrs.after_chmod(node.xattrs, node.mode))
        if atime_ns is not None:
            node.atime_ns = atime_ns
        if mtime_ns is not None:
            node.mtime_ns = mtime_ns
        node.ctime_ns = now if ctime_ns is None else ctime_ns
        if recorder is not None:
            recorder.changed(node, size)
        return node

    def _set_size(self, node: Inode, size: int, changes: AttributeChanges) -> int:
        """Set the size of a file (owned), and its mtime.  Return its new ctime."""
        now = self._clock()
        if size != node.size or node.blocks:
            node.mtime_ns = now
        elif changes._replace(mode=None) == AttributeChanges(size=size, kill_privileges=changes.kill_privileges):
            # truncate(2) to the same size of an empty file leaves the times alone (shmem_setattr, mm/shmem.c).  The
            # kernel adds a mode only when it clears set-id bits.
            now = node.ctime_ns
        self._resize(node, size)
        self._ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
        return now

    def _set_owner(self, node: Inode, uid: int | None, gid: int | None, kill_privileges: bool) -> None:
        if node.children is None:
            self._ledger.set_xattrs(node, xattrs.without_capability(node.xattrs))
            if kill_privileges:
                node.mode = without_privileges(node.mode)
        if uid is not None:
            node.uid = uid
        if gid is not None:
            node.gid = gid

    def readlink(self, inode: int) -> bytes:
        node = self.getattr(inode)
        if node.target is None:
            raise os_error(errno.EINVAL)
        self._state.update_atime(node)
        return node.target

    def find_xattr(self, inode: int, name: bytes) -> bytes | None:
        """Return the value of an attribute, or None if it does not exist.

        The kernel asks for `security.capability` before the first write to each file, so absence costs no exception.
        """
        stored = (self._inodes.get(inode) or self.getattr(inode)).xattrs
        if stored is None and name == b"security.capability":
            return None
        xattrs.check_name(name)
        return None if stored is None else stored.get(name)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        if self.repeats and self._repeated() is not None:
            return
        node = self._changing(inode)
        mode, stored = xattrs.after_set(node.mode, node.xattrs, name, bytes(value), flags)
        if self.recorder is not None:
            self.recorder.begin(len(name) + len(value) + _XATTR_EFFECT_BYTES, node)
        node = self._limits.changeable(node, _XATTR_ROOM_BYTES + len(name) + len(value))
        node.mode = mode
        self._ledger.set_xattrs(node, stored)
        node.ctime_ns = self._clock()
        if self.recorder is not None:
            self.recorder.changed_xattr(node, name)

    def listxattr(self, inode: int) -> Sequence[bytes]:
        return tuple(self.getattr(inode).xattrs or ())

    def removexattr(self, inode: int, name: bytes) -> None:
        if self.repeats and self._repeated() is not None:
            return
        node = self._changing(inode)
        stored = xattrs.after_remove(node.xattrs, name)
        if self.recorder is not None:
            self.recorder.begin(len(name) + _XATTR_EFFECT_BYTES, node, removes=True)
        node = self._state.own(node)
        self._ledger.set_xattrs(node, stored)
        node.ctime_ns = self._clock()
        if self.recorder is not None:
            self.recorder.changed_xattr(node, name)

    def _changing(self, inode: int) -> Inode:
        if self._state.read_only:
            raise os_error(errno.EROFS)
        return self.getattr(inode)
