"""The barrier behind the dirty pages that the kernel is writing back, for mounts with a write-back cache.

syncfs(2) starts to write back all dirty pages of a FUSE mount but does not wait for the replies (wait_sb_inodes,
fs/fs-writeback.c).  Each write-back is a request in the connection's background queue, which is first in, first out.
So the barrier is one more write-back: a thread writes a page of a hidden file of the mount and calls fsync(2), which
waits for the reply.  The loop answers requests in order, so by then the volume has all pages that were queued before.

Polling until the device is empty would do as well, but under a constant load of writes it is never empty.

lseek(2) with SEEK_DATA and SEEK_HOLE needs the barrier too: the kernel sends it to the volume without writing dirty
pages back (fuse_lseek, fs/fuse/file.c), and a program that copies a file would take the data in them for a hole.

The hidden file has an unguessable name, appears in no listing, and does not reach the volume.  Limit: while a program's
ftruncate(2) or fsync(2) of a file is in progress, the kernel holds back the write-backs of that file
(fuse_set_nowrite, fs/fuse/dir.c), so a write to it may miss a snapshot that is taken at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import stat
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from protocol.linux.syscalls import syncfs
from protocol.volume import ROOT_INODE, PlainAttributes
from vfsd.kernel.engines.native import wire
from vfsd.kernel.engines.native.operations import Operations
from vfsd.kernel.engines.native.requests import BODY, Method, Request
from vfsd.kernel.engines.native.wire import Opcode
from vfsd.machine.logs import log_failure

_logger = logging.getLogger(__name__)

BARRIER_INODE: Final = (1 << 62) - 1  # a volume numbers its inodes from 1; `inotify.answers` uses those from 1 << 62
_PAGE: Final = bytes(4096)  # a whole page, so that the kernel does not read the rest


class Barrier:
    """The barrier of one mount.  `add_to` has an engine's operations use it.

    `write_out` writes back one inode's dirty pages, also on a mount that is detached; it runs in a worker thread.
    """

    def __init__(self, mountpoint: str, write_out: Callable[[int], None]) -> None:
        self._write_out = write_out
        self._name = b".vfsd-barrier-" + secrets.token_hex(16).encode()
        self._path = os.path.join(os.fsencode(mountpoint), self._name)
        self._attributes = PlainAttributes(BARRIER_INODE, stat.S_IFREG | 0o600, uid=os.geteuid(), gid=os.getegid())

    async def passed(self) -> bool:
        """Wait until every write-back that the kernel had queued before this call is answered.

        False if the hidden file cannot be opened, for example because the mount is detached.
        """
        try:
            await trio.to_thread.run_sync(self._pass, abandon_on_cancel=True)
        except OSError as error:
            log_failure(_logger, "write-back barrier", error, level=logging.INFO)
            return False
        return True

    async def _write_back(self, inode: int) -> None:
        """Write back all pages that are dirty now, or those of `inode` if the mount is detached."""
        try:
            await trio.to_thread.run_sync(functools.partial(self._pass, sync=True), abandon_on_cancel=True)
        except OSError:
            await trio.to_thread.run_sync(self._write_out, inode, abandon_on_cancel=True)

    def _pass(self, *, sync: bool = False) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if sync:
                with contextlib.suppress(OSError):  # ENOSPC, which fsync(2) and close(2) report to the writer
                    syncfs(descriptor)
            os.pwrite(descriptor, _PAGE, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def add_to(self, operations: Operations) -> None:
        """Have `operations` answer the requests for the hidden file, and seek in what programs wrote."""
        table = operations.table
        table[Opcode.LSEEK].method = self._seek(table[Opcode.LSEEK].method)
        table[Opcode.LOOKUP].method = self._lookup(table[Opcode.LOOKUP].method)
        for opcode, answer in self._answers().items():
            handler = table.get(opcode)
            if handler is not None:
                handler.method = _routed(handler.method, answer)

    def _answers(self) -> dict[Opcode, Callable[[Request], Any]]:
        def attributes(_message: Request) -> PlainAttributes:
            return self._attributes

        def nothing(_message: Request) -> None:
            return None

        return {
            Opcode.GETATTR: attributes,
            Opcode.STATX: attributes,
            Opcode.SETATTR: attributes,
            Opcode.WRITE: lambda message: wire.FUSE_WRITE_IN.unpack_from(message, BODY)[2],
            Opcode.ACCESS: nothing,
            Opcode.FSYNC: nothing,
            Opcode.FLUSH: nothing,
            Opcode.OPEN: nothing,
            Opcode.RELEASE: nothing,
            Opcode.FORGET: nothing,
        }

    def _seek(self, method: Method) -> Method:
        async def seek(node: int, message: Request, length: int) -> object:
            await self._write_back(node)
            found = method(node, message, length)
            return await found if isinstance(found, Awaitable) else found

        # The next request overwrites the buffer.
        return lambda node, message, length: seek(node, bytearray(message[:length]), length)

    def _lookup(self, method: Method) -> Method:
        def lookup(node: int, message: Request, length: int) -> object:
            if node == ROOT_INODE and message[BODY : length - 1] == self._name:
                return self._attributes
            return method(node, message, length)

        return lookup


def _routed(method: Method, answer: Callable[[Request], Any]) -> Method:
    def route(node: int, message: Request, length: int) -> object:
        return answer(message) if node == BARRIER_INODE else method(node, message, length)

    return route
