"""The last step of a request: which error it fails with, and the reply to the kernel.

Threading: the loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from typing import Final

from protocol.errors import SnapshotNotFoundError, errno_of
from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.operations import Operations
from vfsd.kernel.engines.native.replies import Message
from vfsd.kernel.engines.native.wire import Opcode

_logger = logging.getLogger(__name__)

# Errors of a reply whose request, or whose mount, was aborted.
_ABORTED: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ECONNABORTED})


def send_reply(descriptor: int, unique: int, message: Message) -> None:
    """Send `message`, the reply to the request `unique`; an empty one is not sent."""
    try:
        if isinstance(message, bytes):
            if message:
                os.write(descriptor, message)
        else:
            os.writev(descriptor, message)
    except OSError as error:
        if error.errno in _ABORTED:
            return
        # The caller waits until the kernel accepts a reply.
        _logger.exception("the kernel rejected a reply; answered EIO instead")
        with contextlib.suppress(OSError):
            os.write(descriptor, wire.error_reply(unique, errno.EIO))


def error_answer(operations: Operations, opcode: int, unique: int, error: Exception, *, is_own: bool) -> bytes:
    """Return the reply for `error`.  Logs an unexpected exception.  `is_own`: not of an impersonator's volume."""
    code = errno_of(error)
    if code == errno.ENOENT and opcode == Opcode.LOOKUP and not isinstance(error, SnapshotNotFoundError):
        return operations.replies.absent(unique)
    if code == errno.EEXIST and opcode == Opcode.MKNOD and is_own:
        # The kernel's cached absence is out of date.  On ESTALE it looks the name up again, then opens what it
        # finds or fails by itself with O_EXCL (do_filp_open, fs/namei.c).
        code = errno.ESTALE
    if code is None or not 0 < code <= wire.MAX_ERRNO:
        kind = Opcode(opcode).name
        _logger.error("unexpected error in %s, answered with EIO", kind, exc_info=error)
        code = errno.EIO
    return wire.error_reply(unique, code)
