"""BufferPool: the memory into which the session reads requests.

If a daemon is killed while the kernel copies a request into a page that does not exist yet, or that has to be copied
first because of a fork(2), the kernel ends that request with EIO (fuse_dev_do_read, fs/fuse/dev.c), and no other daemon
gets it.  So the buffers of a daemon that has a keeper are shared mappings, which fork(2) leaves writable, and all their
pages exist.  Others are private mappings, whose pages exist once they are used: most requests use one.

Threading: the serving loop.
"""

from __future__ import annotations

import mmap
from typing import Final

from vfsd.kernel.engines.native.negotiation import MAX_REQUEST_BYTES

_MOST_SPARE: Final = 4


class BufferPool:
    """Buffers for the largest request.  `is_kept`: the daemon has a keeper."""

    def __init__(self, *, is_kept: bool = False) -> None:
        sharing = mmap.MAP_SHARED | mmap.MAP_POPULATE if is_kept else mmap.MAP_PRIVATE
        self._flags = sharing | mmap.MAP_ANONYMOUS
        self._spare: list[mmap.mmap] = []

    def take(self) -> mmap.mmap:
        """Return a buffer that nothing else uses."""
        return self._spare.pop() if self._spare else mmap.mmap(-1, MAX_REQUEST_BYTES, flags=self._flags)

    def give_back(self, buffer: mmap.mmap) -> None:
        """Offer a buffer of `take` again, which nothing uses any more."""
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(buffer)
