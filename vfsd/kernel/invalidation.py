"""invalidate_kernel_caches: makes the kernel forget what a change beside the mount (restore, import) has made untrue.

The invariant.  The volume changes in one step on the serving loop, so every request answered from then on is
answered from the new state.  When `invalidate_kernel_caches` returns, each name, attribute and page that the kernel had
cached of the old state has been dropped, and no old answer can still enter a cache:

- a lookup or readdir in flight holds its directory's lock until the answer is in the dcache, and
  FUSE_NOTIFY_INVAL_ENTRY takes the same lock, so it comes after and finds what it has to drop;
- FUSE_NOTIFY_INVAL_INODE raises the inode's attribute version, so that the kernel throws away attributes
  asked for before it; a page being read is locked, and is dropped once it is there.

Until it returns a concurrent reader may see any mixture of both states, name by name, as beside any other
writer; a reader that starts afterwards sees the new state only.  Names go before inodes: once the names
are right, nobody new reaches an inode that is gone, and what is already open has its attributes and pages put
right last.  Names that are gone go before those that are new, so that the dcache, in which a directory has one
place, never holds it at the old place when it is asked for at the new one.

Dirty pages of a shared mapping are written back by the invalidation itself, over the new content; a
caller empties them (syncfs, `Engine.drained`) before it changes the state.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable
from dataclasses import replace
from typing import Final, ParamSpec

import trio

from protocol.volume import CacheInvalidation
from vfsd.kernel.engines.base import Engine

__all__ = ["apart_moved_directories", "invalidate_kernel_caches"]

P = ParamSpec("P")

log = logging.getLogger(__name__)

# The kernel knew nothing of it, which is what is wanted.
_UNKNOWN: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
# The mount is gone: there is nobody left to tell.
_GONE: Final = frozenset({errno.ENOTCONN, errno.ENODEV, errno.EBADF, errno.ECONNABORTED})


class _MountGoneError(Exception):
    """The kernel has closed the connection."""


async def invalidate_kernel_caches(engine: Engine, coherence: CacheInvalidation) -> None:
    """Return when no reader can see the state before the change that `coherence` describes.

    Never raises for what the kernel answers: what it does not know needs no telling, other failures are
    logged, once for each errno.  One worker thread, whatever the number of changes.
    """
    if coherence.entries or coherence.inodes:
        # Abandoned when cancelled: it may wait for a request that a loop on its way out answers no more.
        await trio.to_thread.run_sync(_tell, engine, coherence, abandon_on_cancel=True)


def apart_moved_directories(coherence: CacheInvalidation) -> tuple[CacheInvalidation, CacheInvalidation]:
    """The names that directories have moved to, and all else.

    A program may stand in a directory that had a name before and has one now.  To show watchers its new name, the
    kernel must let go of it for a moment, in which getcwd(2) fails: that may not be after the caller's answer.
    """
    before = {change.old for change in coherence.entries}
    moved = {
        change.new
        for change in coherence.entries
        if change.new in before and change.old != change.new and stat.S_ISDIR(coherence.modes.get(change.new, 0))
    }
    if not moved:
        return CacheInvalidation(), coherence
    names = [change for change in coherence.entries if change.new in moved]
    others = [change for change in coherence.entries if change.new not in moved]
    in_place = [change for change in coherence.inodes if change.inode not in moved]
    return replace(coherence, entries=names, inodes=()), replace(coherence, entries=others, inodes=in_place)


def _tell(engine: Engine, coherence: CacheInvalidation) -> None:
    failed: dict[int, int] = {}
    try:
        _forget_names(engine, coherence, failed)
        _forget_inodes(engine, coherence, failed)
    except _MountGoneError:
        log.info("the mount went away while its kernel was being told of changes")
    for code, count in failed.items():
        log.warning("the kernel refused %d of its notifications: %s", count, errno.errorcode.get(code, code))


def _forget_names(engine: Engine, coherence: CacheInvalidation, failed: dict[int, int]) -> None:
    added = []
    for change in coherence.entries:
        if change.old:
            _send(failed, engine.invalidate_entry, change.parent, change.name)
        else:
            added.append(change)
    for change in added:
        _send(failed, engine.invalidate_entry, change.parent, change.name)


def _forget_inodes(engine: Engine, coherence: CacheInvalidation, failed: dict[int, int]) -> None:
    """Each inode once: directories with their listing, files with their pages if those changed, and the link
    counts of what lost or gained a name."""
    content: dict[int, bool] = {}
    for parent, _, old, new in coherence.entries:
        content[parent] = True
        for inode in (old, new):
            if inode:
                content.setdefault(inode, False)
    for change in coherence.inodes:
        content[change.inode] = change.content or content.get(change.inode, False)
    for inode, with_content in content.items():
        _send(failed, engine.invalidate_inode, inode, content=with_content)


def _send(failed: dict[int, int], notify: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    try:
        notify(*args, **kwargs)
    except OSError as error:
        code = error.errno or errno.EIO
        if code in _GONE:
            raise _MountGoneError from None
        if code not in _UNKNOWN:
            failed[code] = failed.get(code, 0) + 1
