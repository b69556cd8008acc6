"""Invalidation of the kernel's caches after a change that did not come through the mount (restore, import).

The invariant.  The volume changes in one step on the serving loop, so the answer to every later request shows the new
state.  When `invalidate_kernel_caches` returns, the kernel has dropped each name, attribute and page that it had cached
of the old state, and no old answer can still enter a cache:

- A lookup or readdir in flight holds its directory's lock until the answer is in the dcache.
  FUSE_NOTIFY_INVAL_ENTRY takes the same lock, so it runs after that and finds the entry to drop.
- FUSE_NOTIFY_INVAL_INODE increments the inode's attribute version, so the kernel discards attributes that it requested
  before.  A page that is being read is locked, and is dropped when the read ends.

Until it returns, a concurrent reader may see any mixture of both states, name by name, as with any other concurrent
writer.  A reader that starts afterwards sees only the new state.

Names are invalidated before inodes: once the names are right, no further process can reach an inode that was removed,
and the attributes and pages of open inodes are corrected last.  Removed names are invalidated before added ones: the
dcache has one place for a directory, so it must not hold the old place when the new one is looked up.

The kernel holds an inode as long as its lookup count is above zero, and a name, a cached absence or a listing only
together with the directory.  The volume counts a lookup before the kernel has the answer, and a forget after the kernel
has dropped the inode.  So an inode without lookups, and each name in such a directory, is not cached and needs no
notification: see `known_inodes`.

The invalidation itself writes back the dirty pages of a shared mapping, over the new content.  So a caller writes them
out (syncfs, `Engine.drained`) before it changes the state.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Container
from typing import Final, ParamSpec

import trio
from msgspec.structs import replace

from protocol.volume import Volume
from protocol.volume_extensions import CacheInvalidation, snapshotable
from vfsd.kernel.engines.base import Engine

P = ParamSpec("P")

_logger = logging.getLogger(__name__)

# The kernel had not cached the name or the inode.
_NOT_CACHED: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
# The mount is gone.
_GONE: Final = frozenset({errno.ENOTCONN, errno.ENODEV, errno.EBADF, errno.ECONNABORTED})


class _MountGoneError(Exception):
    """The kernel has closed the connection."""


class _All(Container[int]):
    def __contains__(self, _inode: object) -> bool:
        return True


_ALL: Final = _All()


def known_inodes(volume: Volume, invalidation: CacheInvalidation) -> Container[int]:
    """Return the inodes of `invalidation` that the kernel may cache.  Call it on the loop, after the change.

    A volume without snapshots does not say which inodes the kernel has looked up: it may cache all of them.
    """
    counting = snapshotable(volume)
    if counting is None:
        return _ALL
    numbers = {number for parent, _, old, new in invalidation.entries for number in (parent, old, new)}
    numbers.update(change.inode for change in invalidation.inodes)
    return frozenset(filter(counting.has_lookups, numbers))


async def invalidate_kernel_caches(
    engine: Engine, invalidation: CacheInvalidation, known: Container[int] = _ALL
) -> None:
    """Invalidate the kernel's caches; return when no reader can see the state before the change.

    `known` has every inode that the kernel may cache; the others are left out.

    Raises no OSError: an error that means "not cached" is ignored, others are logged, one line for each errno.  Uses
    one worker thread for any number of changes.
    """
    if invalidation.entries or invalidation.inodes:
        # Abandoned on cancellation: the thread may wait for a request that a loop that is ending does not answer.
        await trio.to_thread.run_sync(_invalidate, engine, invalidation, known, abandon_on_cancel=True)


def split_moved_directories(invalidation: CacheInvalidation) -> tuple[CacheInvalidation, CacheInvalidation]:
    """Split `invalidation` into the names that directories have moved to, and the rest.

    A moved directory may be the current directory of a program.  To show its new name to inotify watchers, the kernel
    has to drop the directory for a moment, in which getcwd(2) fails.  This must not happen after the caller's answer.
    """
    before = {change.old for change in invalidation.entries}
    moved = {
        change.new
        for change in invalidation.entries
        if change.new in before and change.old != change.new and stat.S_ISDIR(invalidation.modes.get(change.new, 0))
    }
    if not moved:
        return CacheInvalidation(), invalidation
    names = [change for change in invalidation.entries if change.new in moved]
    others = [change for change in invalidation.entries if change.new not in moved]
    in_place = [change for change in invalidation.inodes if change.inode not in moved]
    return replace(invalidation, entries=names, inodes=()), replace(invalidation, entries=others, inodes=in_place)


def invalidate_from_thread(engine: Engine, invalidation: CacheInvalidation) -> None:
    """Do as `invalidate_kernel_caches` in the calling thread, which must not be the one that serves the mount."""
    _invalidate(engine, invalidation, _ALL)


def _invalidate(engine: Engine, invalidation: CacheInvalidation, known: Container[int]) -> None:
    failed: dict[int, int] = {}  # the number of failures by errno
    try:
        for change in sorted(invalidation.entries, key=lambda change: not change.old):  # added names last
            if change.parent in known:
                _send(failed, engine.invalidate_entry, change.parent, change.name)
        _invalidate_inodes(engine, invalidation, known, failed)
    except _MountGoneError:
        _logger.info("the mount was removed while the kernel's caches were being invalidated")
    for code, count in failed.items():
        _logger.warning("the kernel refused %d invalidations: %s", count, errno.errorcode.get(code, code))


def _invalidate_inodes(
    engine: Engine, invalidation: CacheInvalidation, known: Container[int], failed: dict[int, int]
) -> None:
    """Invalidate each inode in `known` once.

    Directories with their cached listing, files with their pages if the content changed, and the link counts of inodes
    that lost or gained a name.
    """
    content: dict[int, bool] = {}
    for parent, _, old, new in invalidation.entries:
        content[parent] = True
        for inode in (old, new):
            if inode:
                content.setdefault(inode, False)
    for change in invalidation.inodes:
        content[change.inode] = change.content or content.get(change.inode, False)
    for inode, with_content in content.items():
        if inode in known:
            _send(failed, engine.invalidate_inode, inode, content=with_content)


def _send(failed: dict[int, int], notify: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    try:
        notify(*args, **kwargs)
    except OSError as error:
        code = error.errno or errno.EIO
        if code in _GONE:
            raise _MountGoneError from None
        if code not in _NOT_CACHED:
            failed[code] = failed.get(code, 0) + 1
