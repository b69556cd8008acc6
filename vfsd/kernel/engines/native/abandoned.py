"""Requests that a process read from /dev/fuse and will never answer, because it died.

FUSE_NOTIFY_RESEND (protocol 7.40, Linux 6.9) queues them again, with bit 63 of their number set, before the new ones.
The reply has to keep the bit.  A FORGET that was read is lost: it has no reply.

A program that waits for the answer to a request that was read cannot be killed.  That holds for the threads of a
daemon, too: if one of them waits for its own daemon, the process does not end when it is killed, and its descriptors
and locks stay.  `answer` releases such threads.

Source: fs/fuse/dev.c (fuse_resend, request_wait_answer, fuse_dev_do_read).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Container

from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.negotiation import MAX_REQUEST_BYTES
from vfsd.kernel.engines.native.wire import Opcode

_WITHOUT_REPLY = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})


def resend(descriptor: int) -> None:
    """Have the kernel send the requests again that were read and not answered.  OSError (EINVAL) before Linux 6.9."""
    os.write(descriptor, wire.notification(wire.FUSE_NOTIFY_RESEND, b""))


def answer(descriptor: int, threads: Container[int]) -> int:
    """Answer the waiting requests of these threads with EIO; return how many.

    No process serves the mount.  Every other request is read and queued again; FORGETs are lost.
    """
    count = 0
    resend(descriptor)
    with mmap.mmap(-1, MAX_REQUEST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
        while _read(descriptor, buffer):
            opcode, unique, _, pid = wire.IN_HEADER_ROUTE.unpack_from(buffer, 0)
            if pid in threads and opcode not in _WITHOUT_REPLY:
                os.write(descriptor, wire.error_reply(unique, errno.EIO))
                count += 1
    resend(descriptor)
    return count


def _read(descriptor: int, buffer: mmap.mmap) -> bool:
    """Read a request; False if there is none."""
    while True:
        try:
            return os.readv(descriptor, [buffer]) > 0
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.ENOENT:  # the request was withdrawn while it was read
                raise
