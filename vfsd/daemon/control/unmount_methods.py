"""`unsaved` and `unmount`: what a workspace would lose, and its end.

What only a daemon's memory holds ends with it: the changes of a memory workspace that no archive has, and those of an
overlay that were not applied.  Without `discard` an unmount is refused (ENOTEMPTY) where there are any, unless it gives
the token of an answer of `unsaved`, and nothing was changed since that answer.  That is checked directly before
umount(2).  A program that changes something between that check and umount(2), and has left the mount by then, loses
that change: the answer says so (`changed_late`).
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from dataclasses import dataclass
from itertools import islice
from typing import Final

import trio

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.diff.tree_diff import Change, DiffCounts, changes, count
from protocol.tree import Tree
from vfsd.daemon.control.call_context import CallContext
from vfsd.daemon.control.changes import time_text
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.machine import holders, mounts
from vfsd.machine.logs import log_failure
from vfsd.wire.messages import ChangeCounts, Empty, UnmountParams, UnmountResult, UnsavedResult, wire_path
from vfsd.wire.options import WorkspaceOptions

__all__ = ["UnmountMethods"]

_logger = logging.getLogger(__name__)
_COUNTED: Final = 10_000  # changes of an overlay: the answer says "at least" beyond it
_ATTEMPTS: Final = 5  # to find nothing unsaved while programs change the workspace and change it back


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """What would be lost, at the state `mark`: of a memory workspace `files` and so on, of an overlay `counts`."""

    mark: int
    snapshots: tuple[int, ...]  # serials of those that a user named
    counts: DiffCounts | None = None
    truncated: bool = False
    is_any: bool = False

    @property
    def token(self) -> str:
        """What the client gives back, so that it is this state that it discards."""
        return "-".join(map(str, (self.mark, len(self.snapshots), max(self.snapshots, default=0))))


class UnmountMethods:
    """The end of one workspace."""

    def __init__(self, served: MountedVolume, options: WorkspaceOptions, commands: Commands) -> None:
        self._served = served
        self._options = options
        self._commands = commands
        self.answering = 0  # unmounts that were made and whose answers are on their way

    # -- what would be lost ------------------------------------------------------------------------
    async def unsaved(self, _params: Empty, call: CallContext) -> UnsavedResult:
        """What an unmount would lose now; its token lets exactly that be discarded."""
        volume = self._served.volume
        if not isinstance(volume, MemoryVolume):
            return UnsavedResult(unsaved=False, token="")
        await self._served.settle()
        found = await self._find(volume, call)
        overlay = isinstance(volume, OverlayVolume)
        return UnsavedResult(
            unsaved=found.is_any,
            token=found.token,
            files=None if overlay else volume.files,
            size_bytes=None if overlay else volume.size_bytes,
            changes=None if found.counts is None else ChangeCounts(*_figures(found.counts)),
            truncated=found.truncated,
            snapshots=len(found.snapshots),
            saved_at=None if volume.saved_ns is None else time_text(volume.saved_ns),
        )

    async def _find(self, volume: MemoryVolume, call: CallContext, at_most: int = _COUNTED) -> _Unsaved:
        """What the live state would lose; of an overlay so many changes are counted.  Shared mappings are settled."""
        mark, named = volume.mark(), _named(volume)
        if volume.is_saved:
            return _Unsaved(mark, named)
        if not isinstance(volume, OverlayVolume):
            is_empty = not volume.files and volume.directories <= 1 and not named
            return _Unsaved(mark, named, is_any=not is_empty)
        with volume.base_tree() as base, volume.tree() as live:
            try:
                found = await trio.to_thread.run_sync(_changes, base, live, call, at_most + 1)
            except OSError as error:  # below, say; that is no reason to lose what is above
                log_failure(_logger, "comparing with the directory below", error, level=logging.WARNING)
                return _Unsaved(mark, named, is_any=True)
        return _Unsaved(mark, named, count(found[:at_most]), len(found) > at_most, is_any=bool(found or named))

    async def _check(self, params: UnmountParams, call: CallContext) -> int | None:
        """OSError (ENOTEMPTY) where something would be lost; else the mark of the state of which that is true."""
        volume = self._served.volume
        if params.discard or not isinstance(volume, MemoryVolume):
            return None
        await self._served.settle()
        if params.token is not None:
            mark = _mark_of(params.token, volume)
            if mark is not None and not volume.changed_since(mark):
                return mark
        found = await self._find(volume, call, at_most=1)
        if found.is_any:
            if not params.lazy and await self._holders():
                raise await trio.to_thread.run_sync(mounts.busy_error, self._options.mountpoint)
            changed = "changed meanwhile, and " if params.token is not None else ""
            what = "unapplied" if isinstance(volume, OverlayVolume) else "unexported"
            reason = f"{self._options.name} {changed}holds {what} changes: save them, or discard them explicitly"
            raise OSError(errno.ENOTEMPTY, reason)
        return found.mark

    # -- the end -----------------------------------------------------------------------------------
    async def unmount(self, params: UnmountParams, call: CallContext) -> UnmountResult:
        """Unmount, and end the daemon."""
        mountpoint = self._options.mountpoint
        volume = self._served.volume
        mark = await self._check(params, call)
        await self._served.left()
        call.commit()
        held = await self._holders()
        if not params.lazy:
            self._commands.check_idle()
        # The daemon ends as soon as the mount has gone; it waits for this answer (see `vfsd.daemon.daemon`).
        self.answering += 1
        call.after_answer(self._answered)
        if params.lazy or not held:  # else the kernel refuses it, and nothing shall have changed
            await self._commands.leave()
        if mark is not None and isinstance(volume, MemoryVolume):
            mark = await self._check_again(volume, mark, params, call)
        named = _named(volume) if isinstance(volume, MemoryVolume) else ()
        await trio.to_thread.run_sync(functools.partial(mounts.unmount, mountpoint, lazy=params.lazy))
        late = mark is not None and isinstance(volume, MemoryVolume) and volume.changed_since(mark)
        gone = [] if not params.lazy else held  # the kernel refuses to unmount what is held
        return UnmountResult(wire_path(os.fsencode(mountpoint)), params.lazy, gone, len(named), late)

    async def _holders(self) -> list[str]:
        """Who holds the mount, apart from this process."""
        found = await trio.to_thread.run_sync(holders.holders, self._options.mountpoint)
        return [holder.describe() for holder in found if holder.pid != os.getpid()]

    async def _check_again(self, volume: MemoryVolume, mark: int, params: UnmountParams, call: CallContext) -> int:
        """Raise as `_check` where the state is not that of `mark` any more, and the new one would lose something.

        Else the mark of the state that is there when this returns.
        """
        for _ in range(_ATTEMPTS):
            await self._served.settle()
            if not volume.changed_since(mark):
                return mark
            mark = await self._check(params, call) or mark
        raise OSError(errno.EAGAIN, f"{self._options.name} is being changed all the time: end what writes to it")

    def _answered(self) -> None:
        self.answering -= 1


def _changes(base: Tree, live: Tree, call: CallContext, at_most: int) -> list[Change]:
    """What differs, so many at most.  Any thread."""
    found = []
    for change in islice(changes(base, live), at_most):
        call.raise_if_cancelled()
        found.append(change)
    return found


def _figures(counts: DiffCounts) -> tuple[int, int, int]:
    return counts.added, counts.modified, counts.removed


def _named(volume: MemoryVolume) -> tuple[int, ...]:
    """The serials of the snapshots that a user named."""
    return tuple(info.serial for info in volume.snapshots() if info.kind == "user")


def _mark_of(token: str, volume: MemoryVolume) -> int | None:
    """The mark of a token; None where the snapshots are not those that it was given for."""
    mark = token.partition("-")[0]
    if not mark.isdecimal() or _Unsaved(int(mark), _named(volume)).token != token:
        return None
    return int(mark)
