"""RootVolume: the host backend's volume where others run what is written: beneath a container's root.

The host backend keeps a file open that was written, for the next write.  Nobody can execute such a file (ETXTBSY),
and "write it here, run it inside" is what a container's workspace is for: so here a file is open for writing only
while a call writes to it.
"""

from __future__ import annotations

from protocol.backends.host import HostVolume
from protocol.backends.host.attributes import Seen
from protocol.volume import AttributeChanges, Buffer, Caller

__all__ = ["RootVolume"]


class RootVolume(HostVolume):
    """As HostVolume, but no writer stays open between two calls."""

    def _close_writer(self, inode: int) -> None:
        node = self._table.get(inode)
        if node is not None and node.writable:
            self._descriptors.release_file(node)

    def setattr(self, inode: int, changes: AttributeChanges) -> Seen:
        """See `protocol.volume.Volume`, as for all that follow."""
        seen = super().setattr(inode, changes)
        self._close_writer(inode)
        return seen

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Seen:
        seen = super().mknod(parent, name, mode, rdev, caller)
        self._close_writer(seen.inode)
        return seen

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> Seen:
        seen = super().tmpfile(parent, mode, caller)
        self._close_writer(seen.inode)
        return seen

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        try:
            return super().write(inode, offset, data, kill_privileges=kill_privileges)
        finally:
            self._close_writer(inode)

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        try:
            super().fallocate(inode, mode, offset, length)
        finally:
            self._close_writer(inode)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        try:
            return super().copy_range(source, source_offset, target, target_offset, length)
        finally:
            self._close_writer(target)
            self._close_writer(source)

    def check_invariants(self) -> None:
        """As HostVolume's; and that nothing is open for writing."""
        super().check_invariants()
        assert not any(node.writable for node in self._table)
