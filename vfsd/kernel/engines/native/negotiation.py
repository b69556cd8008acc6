"""The answer to INIT: the features that the engine accepts of those that the kernel offers."""

from __future__ import annotations

import errno
import math
import mmap
import os
from typing import Final

from protocol.values import Value
from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.wire import InitFlag, Opcode

MAX_PAGES: Final = 256  # FUSE_MAX_MAX_PAGES of every kernel since 4.20
MAX_WRITE_BYTES: Final = MAX_PAGES * 4096
# The largest request: a WRITE of MAX_WRITE_BYTES with its headers.
MAX_REQUEST_BYTES: Final = MAX_WRITE_BYTES + 4096
# The limit of background requests (readahead) that the kernel may have outstanding; its default is 12.
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
    # Without this flag the kernel requests security.capability before every write.
    | InitFlag.HANDLE_KILLPRIV_V2
    | InitFlag.INIT_EXT
    | InitFlag.HAS_EXPIRE_ONLY
    | InitFlag.HAS_RESEND
)
# This engine has no handlers of OPEN and OPENDIR.
_REQUIRED: Final = InitFlag.NO_OPEN_SUPPORT | InitFlag.NO_OPENDIR_SUPPORT | InitFlag.MAX_PAGES


# For tests: set in the environment, this kernel is treated as one before Linux 6.9.
NO_RESEND: Final = "VFSD_TEST_NO_RESEND"


class Agreement(Value):
    """The negotiated protocol."""

    minor: int
    flags: InitFlag
    reply: bytes


def negotiate(
    message: bytes | bytearray | mmap.mmap,
    length: int,
    *,
    cache_timeout_s: float,
    acl: bool,
    checked: bool = True,
    write_back: bool = False,
) -> Agreement:
    """Answer the INIT request in `message[:length]`.  OSError (EPROTONOSUPPORT) if the kernel lacks a required feature.

    `acl`: the volume stores POSIX ACLs, and applies them and the umask to new entries.  `checked`: the kernel checks
    permissions, ACLs included.  `write_back`: the kernel keeps written pages, and the sizes and times of files.
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
    required = _REQUIRED | InitFlag.WRITEBACK_CACHE if write_back else _REQUIRED
    missing = required & ~offered
    if missing:
        raise OSError(errno.EPROTONOSUPPORT, f"the kernel's FUSE {major}.{minor} lacks {missing!r}")
    taken = offered & (_wanted(cache_timeout_s, acl, checked) | required)
    minor = min(minor, wire.FUSE_KERNEL_MINOR_VERSION)
    body = wire.FUSE_INIT_OUT.pack(
        major, minor, max(readahead, MAX_WRITE_BYTES), taken & 0xFFFFFFFF,
        MAX_BACKGROUND, MAX_BACKGROUND * 3 // 4, MAX_WRITE_BYTES, 1, MAX_PAGES, 0, taken >> 32,
    )  # fmt: skip
    return Agreement(minor, taken, wire.body_reply(unique, body))


def _wanted(cache_timeout_s: float, acl: bool, checked: bool) -> InitFlag:
    wanted = _WANTED
    if NO_RESEND in os.environ:
        wanted &= ~InitFlag.HAS_RESEND
    if math.isinf(cache_timeout_s):
        # The kernel drops pages only on request, even if attributes change.
        wanted |= InitFlag.EXPLICIT_INVAL_DATA
    else:
        wanted |= InitFlag.AUTO_INVAL_DATA
    if acl:
        # A default ACL replaces the umask, so the volume must apply the umask, not the kernel.
        wanted |= InitFlag.DONT_MASK | InitFlag.SETXATTR_EXT
        if checked:  # the flag implies permission checks; without it, ACLs are ordinary extended attributes
            wanted |= InitFlag.POSIX_ACL
    return wanted
