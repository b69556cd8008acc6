"""MappedVolume: a directory of the host with the ids of a container.

It shows owners in the container's ids, and takes callers' ids as the container's, so a file that root creates through
the mount belongs to root inside.  One exception lets "edit here, run inside" work if commands inside run as another
user: files that the host's root creates belong to the container's own user, the user of its first process.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

from protocol.backends.container.transports.idmap import IdMap
from protocol.backends.container.transports.root_volume import RootVolume, Soon
from protocol.backends.host.attributes import HostAttributes
from protocol.errors import os_error
from protocol.linux import posix_acl
from protocol.volume import AttributeChanges, Caller

__all__ = ["MappedVolume"]

_SUPERUSER: Final = Caller(0, 0)
_ACLS: Final = frozenset({posix_acl.ACCESS, posix_acl.DEFAULT})


class MappedVolume(RootVolume):
    """A RootVolume with mapped ids.  `user` is the container's own user and group, in its ids.

    ACLs contain ids, which are not translated, so there are no ACLs if the map changes ids.
    """

    def __init__(
        self,
        path: str,
        ids: IdMap,
        user: tuple[int, int],
        *,
        read_only: bool = False,
        soon: Soon | None = None,
    ) -> None:
        super().__init__(path, read_only=read_only, soon=soon)
        self._ids = ids
        self._user = user
        self._is_identity = ids.is_identity

    @property
    def keeps_acls(self) -> bool:
        """Whether ACLs mean the same here as inside."""
        return self.capabilities.acls and self._is_identity

    def _inside(self, seen: HostAttributes) -> HostAttributes:
        if self._is_identity:
            return seen
        return seen._replace(uid=self._ids.users.inside(seen.uid), gid=self._ids.groups.inside(seen.gid))

    def _outside(self, caller: Caller) -> Caller:
        uid, gid = (caller.uid, caller.gid) if caller.uid else self._user
        return caller._replace(uid=self._ids.users.outside(uid), gid=self._ids.groups.outside(gid))

    # -- answers -------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> HostAttributes:
        """See `protocol.volume.Volume`, as for all that follow."""
        return self._inside(super().lookup(parent, name))

    def getattr(self, inode: int) -> HostAttributes:
        return self._inside(super().getattr(inode))

    def setattr(self, inode: int, changes: AttributeChanges) -> HostAttributes:
        if changes.uid is not None:
            changes = changes._replace(uid=self._ids.users.outside(changes.uid))
        if changes.gid is not None:
            changes = changes._replace(gid=self._ids.groups.outside(changes.gid))
        return self._inside(super().setattr(inode, changes))

    def link(self, inode: int, parent: int, name: bytes) -> HostAttributes:
        return self._inside(super().link(inode, parent, name))

    # -- what is made --------------------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> HostAttributes:
        return self._inside(super().mknod(parent, name, mode, rdev, self._outside(caller)))

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> HostAttributes:
        return self._inside(super().mkdir(parent, name, mode, self._outside(caller)))

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> HostAttributes:
        return self._inside(super().symlink(parent, name, target, self._outside(caller)))

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> HostAttributes:
        return self._inside(super().tmpfile(parent, mode, self._outside(caller)))

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = _SUPERUSER,
    ) -> None:
        super().rename(parent, name, new_parent, new_name, flags, self._outside(caller))

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
