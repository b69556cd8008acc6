"""INIT: what the kernel offers, and what of it we take."""

from __future__ import annotations

import errno
import math
from dataclasses import dataclass
from typing import Final

from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.wire import InitFlag, Opcode

__all__ = ["MAX_REQUEST_BYTES", "MAX_WRITE_BYTES", "Agreement", "negotiate"]

MAX_PAGES: Final = 256  # FUSE_MAX_MAX_PAGES of every kernel since 4.20
MAX_WRITE_BYTES: Final = MAX_PAGES * 4096
# The largest request: a WRITE of MAX_WRITE_BYTES with its headers.
MAX_REQUEST_BYTES: Final = MAX_WRITE_BYTES + 4096
# Requests that the kernel may have under way in the background (readahead); default 12.
MAX_BACKGROUND: Final = 64

_WANTED: Final = (
    InitFlag.ASYNC_READ
    | InitFlag.ASYNC_DIO
    | InitFlag.BIG_WRITES
    | InitFlag.MAX_PAGES
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.CACHE_SYMLINKS
    | InitFlag.DO_READDIRPLUS
    | InitFlag.READDIRPLUS_AUTO
    | InitFlag.NO_OPEN_SUPPORT
    | InitFlag.NO_OPENDIR_SUPPORT
    # Without it the kernel asks for security.capability before every single write.
    | InitFlag.HANDLE_KILLPRIV_V2
    | InitFlag.INIT_EXT
    | InitFlag.HAS_EXPIRE_ONLY
)
# Opens without a message are what this engine is built on.
_REQUIRED: Final = InitFlag.NO_OPEN_SUPPORT | InitFlag.NO_OPENDIR_SUPPORT | InitFlag.MAX_PAGES


@dataclass(frozen=True, slots=True)
class Agreement:
    """What kernel and engine agreed upon."""

    minor: int
    flags: InitFlag
    reply: bytes


def negotiate(
    message: bytes | bytearray, length: int, *, cache_timeout_s: float, acl: bool, checked: bool = True
) -> Agreement:
    """Answer the INIT request in `message[:length]`.  OSError (EPROTONOSUPPORT) where the kernel lacks what we need.

    `acl`: whether the volume keeps POSIX ACLs, their inheritance and the umask's part in it.  `checked`: whether the
    kernel is to check permissions by them.
    """
    _, opcode, unique, _, _, _, _, _, _ = wire.FUSE_IN_HEADER.unpack_from(message, 0)
    if opcode != Opcode.INIT or length < wire.IN_HEADER_BYTES + wire.FUSE_INIT_IN.size:
        raise OSError(errno.EPROTO, "the kernel's first request is not INIT")
    major, minor, readahead, flags = wire.FUSE_INIT_IN.unpack_from(message, wire.IN_HEADER_BYTES)
    if major != wire.FUSE_KERNEL_VERSION:
        raise OSError(errno.EPROTONOSUPPORT, f"the kernel speaks FUSE {major}.{minor}")
    extra = wire.IN_HEADER_BYTES + wire.FUSE_INIT_IN.size
    if flags & InitFlag.INIT_EXT and length >= extra + wire.FUSE_INIT_IN_FLAGS2.size:
        flags |= wire.FUSE_INIT_IN_FLAGS2.unpack_from(message, extra)[0] << 32
    offered = InitFlag(flags)
    missing = _REQUIRED & ~offered
    if missing:
        raise OSError(errno.EPROTONOSUPPORT, f"the kernel's FUSE {major}.{minor} lacks {missing!r}")
    taken = offered & _wanted(cache_timeout_s, acl, checked)
    minor = min(minor, wire.FUSE_KERNEL_MINOR_VERSION)
    body = wire.FUSE_INIT_OUT.pack(
        major, minor, max(readahead, MAX_WRITE_BYTES), taken & 0xFFFFFFFF,
        MAX_BACKGROUND, MAX_BACKGROUND * 3 // 4, MAX_WRITE_BYTES, 1, MAX_PAGES, 0, taken >> 32,
    )  # fmt: skip
    return Agreement(minor, taken, wire.body_reply(unique, body))


def _wanted(cache_timeout_s: float, acl: bool, checked: bool) -> InitFlag:
    wanted = _WANTED
    if math.isinf(cache_timeout_s):
        # Pages go only when we say so, whatever happens to attributes.
        wanted |= InitFlag.EXPLICIT_INVAL_DATA
    else:
        wanted |= InitFlag.AUTO_INVAL_DATA
    if acl:
        # With ACLs a default ACL takes the umask's place, so the kernel must leave the mask to the volume.
        wanted |= InitFlag.DONT_MASK | InitFlag.SETXATTR_EXT
        if checked:  # it brings the checks with it; without, ACLs are extended attributes like others
            wanted |= InitFlag.POSIX_ACL
    return wanted
