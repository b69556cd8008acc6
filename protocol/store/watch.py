"""Watch: hears of changes below a directory, so that a walk looks only where something has happened.

For a process that lives long and takes many snapshots of one directory, as a daemon does: even looking at each of
10,000 files costs more than everything else.  inotify(7) tells of a change before the call that made it returns, so
what was changed before a walk begins is known to it.

What inotify does not tell: writes by a mapping that is still open, by a hard link from outside the directory made since
the last look, and by other machines.  So directories with files of several names are always looked at, only local
file systems are watched, and every FULL_WALK_S the walk looks everywhere again.

Threading: any thread; one walk at a time uses it, another one then looks everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from protocol.backends.beneath import proc_path

if TYPE_CHECKING:
    from protocol.store.statcache import CachedDirectory

__all__ = ["FULL_WALK_S", "Watch", "Where"]

FULL_WALK_S: Final = 30.0
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
# sys/inotify.h
_IN_MODIFY, _IN_ATTRIB, _IN_CLOSE_WRITE = 0x2, 0x4, 0x8
_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF = 0x400, 0x800
_IN_UNMOUNT, _IN_Q_OVERFLOW, _IN_IGNORED = 0x2000, 0x4000, 0x8000
_IN_ONLYDIR = 0x1000000
_MASK: Final = (
    _IN_MODIFY | _IN_ATTRIB | _IN_CLOSE_WRITE | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
    | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR
)  # fmt: skip
_EVENT: Final = struct.Struct("=iIII")  # wd, mask, cookie, length of the name
_READ_BYTES: Final = 1 << 16
# linux/magic.h: ext2 to ext4, XFS, btrfs, tmpfs, F2FS
_LOCAL: Final = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010})
_STATFS_BYTES: Final = 256
_MOST_WATCHES: Final = 1 << 16
_PART_OF_LIMIT: Final = 8  # of what the user may have: his editors want some too
_LIMIT: Final = "/proc/sys/fs/inotify/max_user_watches"


class Where:
    """What one walk has to look at."""

    __slots__ = ("_above", "_at", "everywhere")

    def __init__(self, at: set[bytes], *, everywhere: bool) -> None:
        self.everywhere = everywhere
        self._at = at
        self._above: set[bytes] = set()
        for path in at:
            above = path
            while above:
                above = above.rpartition(b"/")[0]
                if above in self._above:
                    break
                self._above.add(above)

    def is_quiet(self, path: bytes) -> bool:
        """Whether nothing has happened in a directory, nor below."""
        return not self.everywhere and path not in self._at and path not in self._above


class Watch:
    """What has happened below one directory since a walk looked there."""

    def __init__(self) -> None:
        self._fd = -1
        self._paths: dict[int, bytes] = {}
        self._happened: set[bytes] = set()
        self._always: set[bytes] = set()
        self._seen: CachedDirectory | None = None
        self._full_walk_s = 0.0
        self._is_off = False
        self._in_use = threading.Lock()
        self._most = _most_watches()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Hear no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._seen = None

    # -- a walk --------------------------------------------------------------------------------
    @contextlib.contextmanager
    def walking(self, root: int, known: CachedDirectory | None) -> Iterator[Where | None]:
        """For the length of a walk from `root`, that knows `known` from before; None: it is no help to this one."""
        if self._is_off or not self._in_use.acquire(blocking=False):
            yield None
            return
        try:
            yield self._begin(root, known)
        finally:
            self._in_use.release()

    def _begin(self, root: int, known: CachedDirectory | None) -> Where | None:
        if self._fd < 0:
            if not _is_local(root):
                self._is_off = True
                return None
            self._fd = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd < 0:
                self._is_off = True
                return None
            self._seen = None
        missed = self._hear()
        is_full = missed or known is None or known is not self._seen
        if is_full or time.monotonic() - self._full_walk_s > FULL_WALK_S:
            self._full_walk_s = time.monotonic()
            is_full = True
        # Not again before a walk has come to its end.
        self._seen = None
        return Where(self._happened | self._always, everywhere=is_full)

    def entered(self, descriptor: int, path: bytes) -> None:
        """The walk is about to look at a directory; what happens in it from now on is heard."""
        if self._fd < 0:
            return
        number = _LIBC.inotify_add_watch(self._fd, proc_path(descriptor), _MASK)
        if number < 0 or len(self._paths) >= self._most:
            self._give_up()
            return
        self._paths[number] = path

    def looked_at(self, path: bytes, directory: CachedDirectory) -> None:
        """What the walk has found there."""
        if directory.links or directory.racy or directory.listed_racy:
            self._always.add(path)
        else:
            self._always.discard(path)

    def finished(self, root: CachedDirectory) -> None:
        """The walk has come to its end; what happened meanwhile is heard at the next one's begin."""
        if self._fd >= 0:
            self._happened.clear()
            self._seen = root

    def _give_up(self) -> None:
        self._is_off = True
        self._paths.clear()
        self.close()

    # -- what happens --------------------------------------------------------------------------
    def _hear(self) -> bool:
        """Take in all that was told; whether something was missed."""
        missed = False
        while True:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return missed
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if mask & (_IN_Q_OVERFLOW | _IN_UNMOUNT):
                    missed = True
                    continue
                path = self._paths.get(number)
                if mask & _IN_IGNORED:
                    self._paths.pop(number, None)
                elif path is not None:
                    self._happened.add(path)


def _is_local(descriptor: int) -> bool:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _LIBC.fstatfs(descriptor, buffer):
        return False
    kind: int = ctypes.c_long.from_buffer(buffer).value
    return kind & 0xFFFFFFFF in _LOCAL


def _most_watches() -> int:
    try:
        with open(_LIMIT, encoding="ascii") as file:
            return min(_MOST_WATCHES, int(file.read()) // _PART_OF_LIMIT)
    except (OSError, ValueError):
        return 0
