"""Notifications to the kernel: what it is to drop from its caches.

Threading: any thread but the loop's sends them, except `open` and `close`, which the loop's thread calls.  They wait
for requests that the loop answers (see `vfsd.kernel.engines.base`).
"""

from __future__ import annotations

import errno
import io
import os
import struct
import threading
from collections.abc import Sequence
from typing import Final

from vfsd.kernel.engines.native import wire

_PRUNED_AT_ONCE: Final = 256
# Errors of an invalidation of something that the kernel does not cache.
_NOT_CACHED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENOTCONN, errno.ENODEV})


class Notifications:
    """Sends notifications on the device of one mount, and closes the device when nobody sends any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the others
        self._threads = 0  # that are sending a notification
        self._device: io.FileIO | None = None
        self._is_closed = False

    def open(self, device: io.FileIO) -> None:
        """Send on `device` from now on."""
        self._device = device

    def close(self) -> None:
        """Close the device; if threads are sending notifications, the last of them does."""
        with self._lock:
            self._is_closed = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._threads and self._device:
            self._device.close()
            self._device = None

    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        """See `vfsd.kernel.engines.base.Engine`."""
        # A negative offset means attributes only, length 0 up to the end (fs/fuse/inode.c).
        body = wire.FUSE_NOTIFY_INVAL_INODE_OUT.pack(inode, 0 if content else -1, 0)
        self._send(wire.notification(wire.FUSE_NOTIFY_INVAL_INODE, body))

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """See `vfsd.kernel.engines.base.Engine`."""
        body = wire.FUSE_NOTIFY_INVAL_ENTRY_OUT.pack(parent, len(name), 0) + name + b"\0"
        self._send(wire.notification(wire.FUSE_NOTIFY_INVAL_ENTRY, body))

    def prune(self, inodes: Sequence[int]) -> None:
        """Have the kernel evict the inodes that no program uses."""
        for start in range(0, len(inodes), _PRUNED_AT_ONCE):
            some = inodes[start : start + _PRUNED_AT_ONCE]
            body = wire.FUSE_NOTIFY_PRUNE_OUT.pack(len(some), 0, 0) + struct.pack(f"={len(some)}Q", *some)
            self._send(wire.notification(wire.FUSE_NOTIFY_PRUNE, body))

    def _send(self, message: bytes) -> None:
        with self._lock:
            if self._is_closed or self._device is None:
                return
            descriptor = self._device.fileno()
            self._threads += 1
        try:
            os.write(descriptor, message)
        except OSError as error:
            if error.errno not in _NOT_CACHED:
                raise
        finally:
            with self._lock:
                self._threads -= 1
                self._close_if_unused()
