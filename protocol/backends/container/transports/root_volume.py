"""RootVolume: the host backend's volume below a container's root, with the container's ids.

Ids: the volume shows owners in the container's ids, and takes callers' ids as the container's, so a file that root
creates through the mount belongs to root inside.  One exception lets "edit here, run inside" work if commands inside
run as another user: files that the host's root creates belong to the container's own user, the user of its first
process.

Executables: the host backend keeps a written file open for the next write.  A file that is open for writing cannot be
executed (ETXTBSY), and "write it here, run it inside" is the purpose of a container's workspace.  So a file stays open
for writing only until the serving loop is idle: during consecutive writes and about a millisecond longer, less than it
takes to start anything in the container.  (A program that writes there itself holds its file open longer.)
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Sequence
from typing import Final

from protocol.backends.container.idmap import IdMap
from protocol.backends.host import HostVolume
from protocol.backends.host.attributes import HostAttributes
from protocol.backends.host.inode_table import HostInode
from protocol.errors import os_error
from protocol.linux import posix_acl
from protocol.volume import SUPERUSER, AttributeChanges, Caller

_ACLS: Final = frozenset({posix_acl.ACCESS, posix_acl.DEFAULT})


class RootVolume(HostVolume):
    """A HostVolume with mapped ids.  `user` is the container's own user and group, in its ids.

    It calls `on_writer` when it opened a file for writing; the serving loop then calls `close_writers` when it is idle.
    ACLs contain ids, which are not translated, so there are no ACLs if the map changes ids.
    """

    def __init__(
        self, path: str, ids: IdMap, user: tuple[int, int], on_writer: Callable[[], None], *, read_only: bool = False
    ) -> None:
        super().__init__(path, read_only=read_only)
        self._ids = ids
        self._user = user
        self._is_identity = ids.is_identity
        self._request_close = on_writer
        self._is_close_requested = False
        self._descriptors.on_writer = self._on_writer
        if not self._is_identity:
            self.capabilities = dataclasses.replace(self.capabilities, acls=False)

    # -- executables ---------------------------------------------------------------------------
    def _on_writer(self) -> None:
        if not self._is_close_requested:
            self._is_close_requested = True
            self._request_close()

    def close_writers(self) -> None:
        """Close the files that are open for writing."""
        self._is_close_requested = False
        self._descriptors.close_writers()

    def check_invariants(self) -> None:
        """Check HostVolume's invariants, and that no file stays open for writing."""
        super().check_invariants()
        assert self._is_close_requested or not any(node.writable for node in self._table)

    # -- ids -----------------------------------------------------------------------------------
    def _attributes(self, node: HostInode, seen: os.stat_result) -> HostAttributes:
        shown = super()._attributes(node, seen)
        if self._is_identity:
            return shown
        return shown._replace(uid=self._ids.users.inside(shown.uid), gid=self._ids.groups.inside(shown.gid))

    def _outside(self, caller: Caller) -> Caller:
        uid, gid = (caller.uid, caller.gid) if caller.uid or not any(self._user) else self._user
        return caller._replace(uid=self._ids.users.outside(uid), gid=self._ids.groups.outside(gid))

    def setattr(self, inode: int, changes: AttributeChanges) -> HostAttributes:
        """See `protocol.volume.Volume`, as for all that follow."""
        if changes.uid is not None:
            changes = changes._replace(uid=self._ids.users.outside(changes.uid))
        if changes.gid is not None:
            changes = changes._replace(gid=self._ids.groups.outside(changes.gid))
        return super().setattr(inode, changes)

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> HostAttributes:
        return super().mknod(parent, name, mode, rdev, self._outside(caller))

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> HostAttributes:
        return super().mkdir(parent, name, mode, self._outside(caller))

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> HostAttributes:
        return super().symlink(parent, name, target, self._outside(caller))

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> HostAttributes:
        return super().tmpfile(parent, mode, self._outside(caller))

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = SUPERUSER,
    ) -> None:
        super().rename(parent, name, new_parent, new_name, flags, self._outside(caller))

    def finish(self, parent: int, descriptor: int, mode: int, caller: Caller) -> None:
        super().finish(parent, descriptor, mode, self._outside(caller))

    # -- ACLs ----------------------------------------------------------------------------------
    def getxattr(self, inode: int, name: bytes) -> bytes:
        self._check_attribute(name)
        return super().getxattr(inode, name)

    def setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> None:
        self._check_attribute(name)
        super().setxattr(inode, name, value, flags)

    def listxattr(self, inode: int) -> Sequence[bytes]:
        names = super().listxattr(inode)
        return names if self._is_identity else tuple(name for name in names if name not in _ACLS)

    def _check_attribute(self, name: bytes) -> None:
        if not self._is_identity and name in _ACLS:
            raise os_error(errno.EOPNOTSUPP)
