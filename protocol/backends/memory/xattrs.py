"""Rules of extended attributes, POSIX ACLs included, for setting, removing, creating and chmod.

The functions compute a new mode and new attributes; the caller stores them in an inode that it owns.  A dict of
attributes is replaced and never changed, because versions of an inode share it.

Source: xattr(7), fs/xattr.c; for ACLs simple_set_acl and posix_acl_create (fs/posix_acl.c), as tmpfs uses them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from typing import Final, TypeAlias

from protocol.errors import os_error
from protocol.linux import posix_acl
from protocol.volume import NAME_MAX

Xattrs: TypeAlias = dict[bytes, bytes]

# Names and values of one inode; a value may have 64 KiB (XATTR_SIZE_MAX).  tmpfs bounds only the sum of all inodes.
XATTRS_MAX_BYTES: Final = 1024 * 1024
_NAMESPACES: Final = frozenset({b"user", b"trusted", b"security"})
_ACLS: Final = frozenset({posix_acl.ACCESS, posix_acl.DEFAULT})
_CAPABILITY: Final = b"security.capability"


class CountedXattrs(dict[bytes, bytes]):
    """Attributes that know the sum of their names and values, so that a change need not add up all of them."""

    __slots__ = ("content_bytes",)
    content_bytes: int


def content_bytes(xattrs: Xattrs | None) -> int:
    """Return the bytes of all names and values."""
    if isinstance(xattrs, CountedXattrs):
        return xattrs.content_bytes
    return sum(map(len, xattrs)) + sum(map(len, xattrs.values())) if xattrs else 0


def check_name(name: bytes) -> None:
    """Check a name as xattr_resolve_name (fs/xattr.c) does with these namespaces.  EOPNOTSUPP, EINVAL, ERANGE."""
    if name in _ACLS:
        return
    namespace, _, rest = name.partition(b".")
    if namespace not in _NAMESPACES or len(namespace) == len(name):
        raise os_error(errno.EOPNOTSUPP)
    if not rest:
        raise os_error(errno.EINVAL)
    if len(name) > NAME_MAX:
        raise os_error(errno.ERANGE)


def after_set(mode: int, xattrs: Xattrs | None, name: bytes, value: bytes, flags: int) -> tuple[int, Xattrs | None]:
    """Return mode and attributes after setxattr(2).  EEXIST, ENODATA, ENOSPC; for ACLs EACCES, EINVAL, EOPNOTSUPP."""
    check_name(name)
    present = xattrs is not None and name in xattrs
    if flags & os.XATTR_CREATE and present:
        raise os_error(errno.EEXIST)
    if flags & os.XATTR_REPLACE and not present:
        raise os_error(errno.ENODATA)
    kept: bytes | None = value
    if name in _ACLS:
        mode, kept = _acl_to_keep(mode, name, value)
    if kept is None:
        return mode, without(xattrs, name)
    changed = with_value(xattrs, name, kept)
    if changed.content_bytes > XATTRS_MAX_BYTES:
        raise os_error(errno.ENOSPC)
    return mode, changed


def with_value(xattrs: Xattrs | None, name: bytes, value: bytes) -> CountedXattrs:
    """Return the attributes with one set.  One that is replaced keeps its place in the list."""
    changed = CountedXattrs(xattrs or {})
    old = changed.get(name)
    changed[name] = value
    changed.content_bytes = content_bytes(xattrs) + len(value) - (-len(name) if old is None else len(old))
    return changed


def without(xattrs: Xattrs | None, name: bytes) -> Xattrs | None:
    """Return the attributes without one."""
    if xattrs is None or name not in xattrs or len(xattrs) == 1:
        return None if xattrs is None or name in xattrs else xattrs
    changed = CountedXattrs(xattrs)
    changed.content_bytes = content_bytes(xattrs) - len(name) - len(changed.pop(name))
    return changed


def _acl_to_keep(mode: int, name: bytes, value: bytes) -> tuple[int, bytes | None]:
    if stat.S_ISLNK(mode):
        raise os_error(errno.EOPNOTSUPP)
    if name == posix_acl.ACCESS:
        return posix_acl.access_acl(mode, value)
    empty = not posix_acl.parse(value)
    if not stat.S_ISDIR(mode) and not empty:
        raise os_error(errno.EACCES)
    return mode, None if empty else value


def after_remove(xattrs: Xattrs | None, name: bytes) -> Xattrs | None:
    """Return the attributes after removexattr(2).  ENODATA if there is none; removing a missing ACL succeeds."""
    check_name(name)
    if xattrs is None or name not in xattrs:
        if name in _ACLS:
            return xattrs
        raise os_error(errno.ENODATA)
    return without(xattrs, name)


def after_chmod(xattrs: Xattrs, mode: int) -> Xattrs:
    """Return the attributes after chmod(2) to `mode`, which also changes an access ACL."""
    acl = xattrs.get(posix_acl.ACCESS)
    return xattrs if acl is None else {**xattrs, posix_acl.ACCESS: posix_acl.chmod(acl, mode)}


def inherited(directory: Xattrs, mode: int, umask: int) -> tuple[int, Xattrs | None]:
    """Return mode and attributes of a new inode in a directory with the attributes `directory`."""
    new = posix_acl.inherit(directory.get(posix_acl.DEFAULT), mode, umask)
    acls = {posix_acl.ACCESS: new.access, posix_acl.DEFAULT: new.default}
    return new.mode, {name: value for name, value in acls.items() if value is not None} or None


def without_capability(xattrs: Xattrs | None) -> Xattrs | None:
    """Return the attributes after a change of content or owner, which removes file capabilities.

    With FUSE_HANDLE_KILLPRIV_V2 the kernel leaves this to the file system.  An empty value grants nothing and stays:
    cap_inode_need_killpriv, security/commoncap.c.
    """
    if xattrs is None or not xattrs.get(_CAPABILITY):
        return xattrs
    return {name: value for name, value in xattrs.items() if name != _CAPABILITY} or None


def check_imported(xattrs: Mapping[bytes, bytes]) -> None:
    """Raise EINVAL or EOPNOTSUPP for ACLs that setxattr(2) would refuse."""
    for name in _ACLS.intersection(xattrs):
        posix_acl.parse(xattrs[name])
