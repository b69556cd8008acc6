"""Requests that a process read from /dev/fuse and will never answer, because it died.

FUSE_NOTIFY_RESEND (protocol 7.40, Linux 6.9) queues them again, with bit 63 of their number set, before the new ones.
The reply has to keep the bit.  A FORGET that was read is lost: it has no reply.

A program that waits for the answer to a request that was read cannot be killed.  That holds for the threads of a
daemon, too: if one of them waits for its own daemon, the process does not end when it is killed, and its descriptors
and locks stay.  `answer` releases such threads.

Older kernels do not send requests again.  There a daemon reads requests into memory that it shares with its keeper, and
notes there which of them wait for an answer, so the next daemon can answer them with EIO.

Source: fs/fuse/dev.c (fuse_resend, request_wait_answer, fuse_dev_do_read).
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Container
from typing import Final

from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.negotiation import MAX_REQUEST_BYTES
from vfsd.kernel.engines.native.wire import Opcode

RING_AT: Final = 4096  # in the shared memory: the numbers of requests that were not answered at once
RING_WORDS: Final = 4096
BUFFER_AT: Final = RING_AT + 8 * RING_WORDS  # ... and the request that was read last
SHARED_BYTES: Final = BUFFER_AT + MAX_REQUEST_BYTES
_NUMBER: Final = struct.Struct("=Q")

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


def fail(descriptor: int, memory_fd: int) -> int:
    """Answer the requests that the memory `memory_fd` has with EIO; return how many waited."""
    ring = os.pread(memory_fd, 8 * RING_WORDS, RING_AT)
    last = os.pread(memory_fd, 8, BUFFER_AT + 8)  # fuse_in_header.unique
    numbers = {number for (number,) in _NUMBER.iter_unpack(ring + last)} - {0}
    count = 0
    for number in numbers:
        try:
            os.write(descriptor, wire.error_reply(number, errno.EIO))
        except FileNotFoundError:  # it was answered
            continue
        count += 1
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
