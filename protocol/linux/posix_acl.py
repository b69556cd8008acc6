"""POSIX ACLs in the format of their xattrs: what a file system does on setxattr, chmod and creation.

The kernel checks permissions by ACLs.  The file system computes the mode that belongs to an access ACL, and what a
new inode inherits from the default ACL of its directory.

Source: include/uapi/linux/posix_acl_xattr.h (the format), fs/posix_acl.c (posix_acl_equiv_mode,
posix_acl_create_masq, posix_acl_chmod), acl(5).
"""

from __future__ import annotations

import errno
import stat
import struct
from typing import Final, NamedTuple

from protocol.errors import os_error

ACCESS: Final = b"system.posix_acl_access"
DEFAULT: Final = b"system.posix_acl_default"

_VERSION: Final = struct.pack("<I", 2)  # POSIX_ACL_XATTR_VERSION
_ENTRY: Final = struct.Struct("<HHI")  # e_tag, e_perm, e_id

_USER_OBJ: Final = 0x01
_GROUP_OBJ: Final = 0x04
_MASK: Final = 0x10
_OTHER: Final = 0x20
_TAGS: Final = frozenset({_USER_OBJ, 0x02, _GROUP_OBJ, 0x08, _MASK, _OTHER})
_REQUIRED: Final = frozenset({_USER_OBJ, _GROUP_OBJ, _OTHER})
_RWX: Final = 0o777


class AclEntry(NamedTuple):
    """One entry of an ACL: `tag` is its type, `permission` has three bits, `owner` is a uid or gid for some tags."""

    tag: int
    permission: int
    owner: int


class Inherited(NamedTuple):
    """The mode of a new inode, and its ACLs as xattr values (None: none)."""

    mode: int
    access: bytes | None
    default: bytes | None


def parse(value: bytes) -> list[AclEntry]:
    """Decode an xattr value; no entries mean that there is no ACL.  EINVAL; EOPNOTSUPP for another version."""
    if not value:
        return []  # setxattr(2) with an empty value removes an ACL
    if len(value) < len(_VERSION) or (len(value) - len(_VERSION)) % _ENTRY.size:
        raise os_error(errno.EINVAL)
    if not value.startswith(_VERSION):
        raise os_error(errno.EOPNOTSUPP)
    entries = [AclEntry(*fields) for fields in _ENTRY.iter_unpack(value[len(_VERSION) :])]
    tags = {entry.tag for entry in entries}
    if entries and (tags - _TAGS or _REQUIRED - tags):
        raise os_error(errno.EINVAL)
    return entries


def _pack(entries: list[AclEntry]) -> bytes:
    return _VERSION + b"".join(_ENTRY.pack(*entry) for entry in entries)


def _shifts(entries: list[AclEntry]) -> dict[int, int]:
    """The positions in the mode of the permissions of tags.  The mask, if there is one, has the group bits."""
    group_tag = _MASK if any(entry.tag == _MASK for entry in entries) else _GROUP_OBJ
    return {_USER_OBJ: 6, group_tag: 3, _OTHER: 0}


def access_acl(mode: int, value: bytes) -> tuple[int, bytes | None]:
    """The mode after an access ACL was set, and the value to store: None if the mode is equivalent.  EINVAL."""
    entries = parse(value)
    if not entries:
        return mode, None
    shifts = _shifts(entries)
    bits = 0
    for entry in entries:
        shift = shifts.get(entry.tag)
        if shift is not None:
            bits |= (entry.permission & 7) << shift
    is_plain = {entry.tag for entry in entries} == _REQUIRED
    return (mode & ~_RWX) | bits, None if is_plain else value


def chmod(value: bytes, mode: int) -> bytes:
    """The access ACL after a chmod to `mode`."""
    entries = parse(value)
    shifts = _shifts(entries)
    changed = []
    for entry in entries:
        shift = shifts.get(entry.tag)
        changed.append(entry if shift is None else entry._replace(permission=mode >> shift & 7))
    return _pack(changed)


def inherit(default: bytes | None, mode: int, umask: int) -> Inherited:
    """The mode and ACLs of a new inode in a directory with the ACL `default`, which replaces the umask."""
    if stat.S_ISLNK(mode):
        return Inherited(mode, None, None)
    if default is None:
        return Inherited(mode & ~(umask & _RWX), None, None)
    entries = parse(default)
    shifts = _shifts(entries)
    masked = []
    bits = 0
    for entry in entries:
        shift = shifts.get(entry.tag)
        if shift is not None:
            entry = entry._replace(permission=entry.permission & mode >> shift & 7)  # noqa: PLW2901
            bits |= entry.permission << shift
        masked.append(entry)
    is_plain = {entry.tag for entry in entries} == _REQUIRED
    return Inherited(
        (mode & ~_RWX) | bits, None if is_plain else _pack(masked), default if stat.S_ISDIR(mode) else None
    )
