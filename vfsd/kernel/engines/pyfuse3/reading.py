"""Non-blocking reads of /dev/fuse for pyfuse3's loop, which waits until the device is readable, and then reads.

The kernel withdraws a request that nobody has read yet if its caller is killed (request_wait_answer in fs/fuse/dev.c).
If that happens between the wait and the read, a blocking read waits for the next request.  pyfuse3 holds the
interpreter's lock meanwhile, so all threads of the daemon stop, also the one that serves the control socket.

A non-blocking read fails with EAGAIN instead, which pyfuse3 raises from the task that read.  Nothing is lost: the task
has no request at that time, and another task waits for the device as soon as this one reads.  But the task's buffer of
1 MiB leaks.  So a second look precedes the read, which then follows within a microsecond or two.  Without it one in
forty programs that were killed in a request cost a buffer; with it 2,500 of them cost none.

Threading: the tasks run on the trio loop.
"""

from __future__ import annotations

import os
import select
from typing import Any, Final

import pyfuse3

# pyfuse3 looks these names up in its globals, the first one for each task that it starts, without the wrapper that trio
# needs around a coroutine function in C.
_LOOP: Final = "_session_loop"
_WAIT: Final = "_wait_fuse_readable"
_read_and_answer: Final = vars(pyfuse3)[_LOOP].__wrapped__
_wait: Final = vars(pyfuse3)[_WAIT]


async def _session_loop(*arguments: Any) -> None:
    while True:
        try:
            await _read_and_answer(*arguments)
        except BlockingIOError:
            continue
        return


def read_without_blocking(descriptor: int) -> None:
    """Make `descriptor`, pyfuse3's /dev/fuse, non-blocking.  Call it before `pyfuse3.main`."""
    os.set_blocking(descriptor, False)
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)

    async def wait_readable() -> bool:
        while await _wait():
            if readable.poll(0):
                return True
        return False

    vars(pyfuse3).update({_LOOP: _session_loop, _WAIT: wait_readable})
