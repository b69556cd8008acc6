"""The opcodes of extended attributes, and what setting an ACL changes besides."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import cast

from protocol.errors import os_error
from protocol.volume import Attributes, QuietLookupsVolume, Volume
from vfsd.kernel.engines import policy
from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.handler import BODY, Request, then
from vfsd.kernel.engines.native.wire import InitFlag


class ExtendedAttributes:
    """The requests for extended attributes over one volume.  Arguments as for `Operations`."""

    def __init__(self, volume: Volume, flags: InitFlag, invalidate_attributes: Callable[[int], None]) -> None:
        self._volume = volume
        self._invalidate_attributes = invalidate_attributes
        self._quiet = cast("QuietLookupsVolume", volume) if volume.capabilities.quiet_lookups else None
        is_extended = InitFlag.SETXATTR_EXT in flags
        self._set_in = wire.FUSE_SETXATTR_IN if is_extended else wire.FUSE_SETXATTR_IN_COMPAT
        self.set_bytes = self._set_in.size
        self._kernel_knows_acls = InitFlag.POSIX_ACL in flags  # it expects that setting an ACL changes the mode

    def get(self, node: int, message: Request, length: int) -> object:
        size, name = wire.GETXATTR_NAME[length](message, BODY)
        if self._quiet is not None:
            value = self._quiet.find_xattr(node, name)
            return None if value is None else _sized(value, size)
        return then(self._volume.getxattr(node, name), lambda value: _sized(value, size))

    def list(self, node: int, message: Request, _length: int) -> object:
        size, _ = wire.FUSE_GETXATTR_IN.unpack_from(message, BODY)
        uid, _, _ = wire.IN_HEADER_CALLER.unpack_from(message, 0)

        def pack(names: Sequence[bytes]) -> bytes:
            return _sized(b"".join(name + b"\0" for name in policy.visible_xattrs(names, uid)), size)

        return then(self._volume.listxattr(node), pack)

    def set(self, node: int, message: Request, length: int) -> object:
        size, flags, *more = self._set_in.unpack_from(message, BODY)
        start = BODY + self._set_in.size
        end = message.find(b"\0", start, length)
        if end < 0 or end + 1 + size > length:
            raise os_error(errno.EINVAL)
        name, value = bytes(message[start:end]), bytes(message[end + 1 : end + 1 + size])
        answer = self._volume.setxattr(node, name, value, flags)
        if name == policy.ACL_ACCESS and not self._kernel_knows_acls:
            return then(answer, lambda _: self._invalidate_attributes(node))
        if more and more[0] & wire.FUSE_SETXATTR_ACL_KILL_SGID and name == policy.ACL_ACCESS:
            return then(answer, lambda _: self._clear_sgid(node))
        return answer

    def _clear_sgid(self, node: int) -> object:
        def clear(found: Attributes) -> object:
            changes = policy.clear_sgid(found)
            return None if changes is None else self._volume.setattr(node, changes)

        return then(self._volume.getattr(node), clear)

    def remove(self, node: int, message: Request, length: int) -> object:
        (name,) = wire.NAME[length](message, BODY)
        return self._volume.removexattr(node, name)


def _sized(value: bytes, size: int) -> bytes:
    """Pack an extended attribute for a caller whose buffer has `size` bytes; 0 requests the length only."""
    if size == 0:
        return wire.FUSE_GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise os_error(errno.ERANGE)
    return value
