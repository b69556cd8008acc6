"""Non-blocking reads of /dev/fuse for pyfuse3's loop, which waits until the device is readable, and then reads.

The kernel withdraws a request that nobody has read yet if its caller is killed (request_wait_answer in fs/fuse/dev.c).
If that happens between the wait and the read, a blocking read waits for the next request.  pyfuse3 holds the
interpreter's lock meanwhile, so all threads of the daemon stop, also the one that serves the control socket.

A non-blocking read fails with EAGAIN instead, which pyfuse3 raises from the task that read.  Nothing is lost: the task
has no request at that time, and another task waits for the device as soon as this one reads.

Threading: the tasks run on the trio loop.
"""

from __future__ import annotations

import os
from typing import Any, Final

import pyfuse3

# pyfuse3 looks this name up in its globals for each task that it starts.  The function in C, without the wrapper that
# trio needs around it, so that the replacement costs no further frame.
_NAME: Final = "_session_loop"
_read_and_answer: Final = vars(pyfuse3)[_NAME].__wrapped__


async def _session_loop(*arguments: Any) -> None:
    while True:
        try:
            await _read_and_answer(*arguments)
        except BlockingIOError:
            # The task's buffer is lost: 1 MiB of address space, of which it has used the first pages.
            continue
        return


def read_without_blocking(descriptor: int) -> None:
    """Make `descriptor`, pyfuse3's /dev/fuse, non-blocking.  Call it before `pyfuse3.main`."""
    os.set_blocking(descriptor, False)
    vars(pyfuse3)[_NAME] = _session_loop
