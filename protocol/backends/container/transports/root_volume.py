"""RootVolume: the host backend's volume below a container's root, where programs are executed that the mount wrote.

The host backend keeps a written file open for the next write.  A file that is open for writing cannot be executed
(ETXTBSY), and "write it here, run it inside" is the purpose of a container's workspace.  So a file stays open for
writing only until the serving loop is idle: during consecutive writes and about a millisecond longer, less than it
takes to start anything in the container.  (A program that writes there itself holds its file open longer.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from protocol.backends.host import HostVolume
from protocol.backends.host.attributes import HostAttributes
from protocol.volume import AttributeChanges, Buffer, Caller

__all__ = ["RootVolume", "Soon"]

Soon: TypeAlias = Callable[[], None]


class RootVolume(HostVolume):
    """A HostVolume that closes files opened for writing, by `close_writers`.

    `soon` asks the serving loop to call it; without `soon`, each call that writes closes its file at its end.
    """

    def __init__(self, path: str | bytes, *, read_only: bool = False, soon: Soon | None = None) -> None:
        super().__init__(path, read_only=read_only)
        self._soon = soon
        self._is_due = False

    def _wrote(self) -> None:
        if self._soon is None:
            self.close_writers()
        elif not self._is_due:
            self._is_due = True
            self._soon()

    def close_writers(self) -> None:
        """Close the files that are open for writing."""
        self._is_due = False
        self._descriptors.close_writers()

    def setattr(self, inode: int, changes: AttributeChanges) -> HostAttributes:
        """See `protocol.volume.Volume`, as for all that follow."""
        if changes.size is None:
            return super().setattr(inode, changes)
        try:
            return super().setattr(inode, changes)
        finally:
            self._wrote()

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> HostAttributes:
        try:
            return super().mknod(parent, name, mode, rdev, caller)
        finally:
            self._wrote()

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> HostAttributes:
        try:
            return super().tmpfile(parent, mode, caller)
        finally:
            self._wrote()

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        try:
            return super().write(inode, offset, data, kill_privileges=kill_privileges)
        finally:
            self._wrote()

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        try:
            super().fallocate(inode, mode, offset, length)
        finally:
            self._wrote()

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        try:
            return super().copy_range(source, source_offset, target, target_offset, length)
        finally:
            self._wrote()

    def check_invariants(self) -> None:
        """Check HostVolume's invariants, and that no file stays open for writing."""
        super().check_invariants()
        assert self._is_due or not any(node.writable for node in self._table)
