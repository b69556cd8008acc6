"""VolumeSnapshots: those that the volume itself holds, in memory: each is one step on the serving loop.

So the mount sees a change whole or not at all, and a call that is cancelled before that step has changed nothing.
What a change did is listed in a worker thread, between two states that are kept for that: the one before it, and the
one that it made, of the same moment on the loop.  What programs write after that is in neither.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import trio

from protocol.backends.memory import MemoryVolume, ReservedInodes
from protocol.backends.overlay import OverlayVolume
from protocol.diff.tree_diff import DiffCounts, changes, summary
from protocol.errors import SnapshotNotFoundError
from protocol.tree import Tree, TreeEntry
from protocol.volume import TAG_MAX_BYTES, CacheInvalidation, SnapshotInfo, SnapshotKind, Volume
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.archives import Origin, read_origin
from vfsd.daemon.snapshots.base import (
    BASE,
    SAFETY_PREFIX,
    SNAPSHOT_PREFIX,
    UNOBSERVED,
    CallObserver,
    Dropped,
    Interrupted,
    Outcome,
    Staged,
    check_names,
    free_name,
    in_bytes,
    log_expired,
    name_at,
    nothing_below,
)
from vfsd.daemon.snapshots.history import UndoHistory, expired
from vfsd.daemon.snapshots.listed import NOTHING, Listed
from vfsd.daemon.snapshots.prepared import Prepared
from vfsd.machine.logs import log_failure
from vfsd.wire.messages import CHANGES_LISTED

__all__ = ["Applying", "VolumeSnapshots", "overlay_of"]

_logger = logging.getLogger(__name__)
_TAG_CHARACTERS = TAG_MAX_BYTES // 4
_PRUNED_NAMED = 1000  # in one answer at most: the newest of them


def overlay_of(volume: Volume) -> OverlayVolume:
    """The volume, as an overlay.  OSError (EOPNOTSUPP) where it is none."""
    if isinstance(volume, OverlayVolume):
        return volume
    raise nothing_below()


class Applying:
    """An apply under way; its caller sets `wrote` once something is written.  `safety` then names the state written."""

    def __init__(self) -> None:
        self.wrote = False
        self.safety: str | None = None
        self.expired: Sequence[SnapshotInfo] = ()


class VolumeSnapshots:
    """Implements `vfsd.daemon.snapshots.base.SnapshotService` over `volume`, which `served` serves."""

    def __init__(self, served: MountedVolume, volume: MemoryVolume) -> None:
        self._served = served
        self._volume = volume
        volume.on_pruned = self._note_pruned
        self._history = UndoHistory()  # as it was left; `_known` is without what was dropped since
        self._pruned: deque[SnapshotInfo] = deque(maxlen=_PRUNED_NAMED)  # since the last answer that named them
        self._lost: set[int] = set()  # the serials of pruned safety snapshots, since `_history` was last cut

    @property
    def has_base(self) -> bool:
        """See `Snapshots`, as for all that follow."""
        return isinstance(self._volume, OverlayVolume)

    async def interrupted(self) -> Interrupted | None:
        return None

    async def take(
        self,
        name: str | None,
        tag: str | None,
        watch: CallObserver,  # noqa: ARG002
        *,
        kind: SnapshotKind = "user",
    ) -> SnapshotInfo:
        async with self._served.changing:
            await self._served.settle()
            name = name or free_name(SNAPSHOT_PREFIX, self._volume.snapshots())
            return self._volume.take_snapshot(name, tag=tag, kind=kind)

    async def infos(self) -> Sequence[SnapshotInfo]:
        return self._volume.snapshots()

    async def change_counts(self) -> Mapping[str, DiffCounts]:
        return {name: DiffCounts(*counts) for name, counts in self._volume.change_counts().items()}

    async def drop(self, names: Sequence[str]) -> Dropped:
        async with self._served.changing:
            infos = self._volume.snapshots()
            check_names(names, infos)
            steps = self._known().steps_to(info for info in infos if info.name in names)
            for name in names:
                self._volume.drop_snapshot(name)
            return Dropped(steps, self._known())

    async def history(self) -> UndoHistory:
        return self._known()

    def collect_pruned(self) -> Sequence[SnapshotInfo]:
        pruned = list(self._pruned)
        self._pruned.clear()
        return pruned

    def _note_pruned(self, info: SnapshotInfo) -> None:
        _logger.info("dropped %s: memory was needed (--max-memory)", info.name)
        self._pruned.append(info)
        if info.kind == "safety":
            self._lost.add(info.serial)

    def _known(self) -> UndoHistory:
        return self._history.cut(self._lost).among({info.serial for info in self._volume.snapshots()})

    # -- what changes the live state -----------------------------------------------------------------
    async def restore(self, name: str, paths: Sequence[bytes], watch: CallObserver) -> Outcome:
        volume = self._volume
        if name == BASE:
            return await self._step(lambda: overlay_of(volume).discard(paths), "discard", name, watch)
        volume.snapshot(name)  # there is one, or it raises
        return await self._step(lambda: volume.restore_snapshot(name, paths), f"restore {name}", name, watch)

    @asynccontextmanager
    async def staged(self, origin: Origin, watch: CallObserver) -> AsyncIterator[Staged]:
        # The loop waits for the end of its thread even when this is cancelled: that reads what must stay.
        read = functools.partial(read_origin, origin, self._volume, in_bytes(watch), self._reserve_inodes)
        staged = await trio.to_thread.run_sync(read)
        try:
            with staged.tree() as tree:
                yield Staged(origin.name, tree, staged.files, staged.size_bytes)
        finally:
            staged.give_back()

    def _reserve_inodes(self, count: int) -> ReservedInodes:
        """`MemoryVolume.reserve_inodes`, from a thread of `trio.to_thread`."""
        return trio.from_thread.run_sync(self._volume.reserve_inodes, count)

    async def put(self, staged: Staged, paths: Sequence[bytes], watch: CallObserver, *, replace: bool) -> Outcome:
        volume, step = self._volume, staged.step(replace=replace)
        if isinstance(volume, OverlayVolume):  # whose directories are read from below while they are converged
            change = functools.partial(volume.import_tree, staged.tree, replace=replace, paths=paths)
            return await self._step(change, step, staged.name, watch)
        prepared = Prepared(volume, staged, paths, replace=replace)
        try:
            prepare = functools.partial(prepared.prepare, watch)
            return await self._step(prepared.put, step, staged.name, watch, prepare)
        finally:
            await prepared.discard()

    async def _step(
        self,
        change: Callable[[], CacheInvalidation],
        step: str,
        source: str,
        watch: CallObserver,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> Outcome:
        """Make `change`, as a step of the history unless it changes nothing."""
        async with self._served.changing:
            if prepare is not None:
                await prepare()
            await self._served.settle()
            watch.commit()
            before = self._known()
            with self._volume.keeping(source):
                safety = self._take_safety(f"before {step}")
                with self._undone_unless_done(safety):
                    coherence = change()
            if not coherence.entries and not coherence.inodes:
                self._forget(safety.name)
                return self._outcome(source, None)
            self._history = before.stepped(safety.serial, step)
            found, is_kept = await self._made(coherence, safety, before, watch)
            if not (found or coherence.entries):
                # Times of directories, or ctimes: no change by `protocol.diff.tree_diff`, and nothing that undo is for.
                self._history = before
                self._forget(safety.name)
                return self._outcome(source, None)
            kept = safety
            if is_kept is not None:
                self._history = before.stepped(is_kept.serial, step)
                self._forget(safety.name)
                kept = is_kept
            return self._outcome(source, kept.name, found, keep={source, kept.name})

    async def undo(self, watch: CallObserver) -> Outcome:
        return await self._move(-1, watch)

    async def redo(self, watch: CallObserver) -> Outcome:
        return await self._move(+1, watch)

    async def _move(self, by: int, watch: CallObserver) -> Outcome:
        async with self._served.changing:
            await self._served.settle()
            before = self._known()
            to = before.position + by
            source = name_at(before, self._volume.snapshots(), to)
            step = before.step_between(to)
            watch.commit()
            with self._volume.keeping(source):
                safety = self._take_safety(f"after {step}" if by < 0 else f"before {step}")
                with self._undone_unless_done(safety):
                    coherence = self._volume.restore_snapshot(source)
            self._history = before.moved(to, safety.serial)
            found, is_kept = await self._made(coherence, safety, before, watch)
            kept = safety
            if is_kept is not None:
                self._history = before.moved(to, None)
                self._forget(safety.name)
                kept = is_kept
            return self._outcome(source, kept.name, found, step, keep={source, kept.name})

    async def _made(
        self, coherence: CacheInvalidation, safety: SnapshotInfo, before: UndoHistory, watch: CallObserver
    ) -> tuple[Listed, SnapshotInfo | None]:
        """What the change did that was just made; and the snapshot that had the state before it already, if one had.

        To be called right after the change: the loop has served nobody since.
        """
        volume = self._volume
        infos = [info for info in volume.snapshots() if info.serial == before.here.serial]
        with contextlib.ExitStack() as stack:
            after = stack.enter_context(volume.tree())
            try:
                old = stack.enter_context(volume.tree(safety.name))
            except SnapshotNotFoundError:  # dropped for lack of memory, by the change itself
                await self._served.changed(coherence)
                return _roughly(coherence), None
            await self._served.changed(coherence)
            found = await trio.to_thread.run_sync(_find, old, after, watch)
            if found is None:
                found = _roughly(coherence)
            for info in infos:
                with volume.tree(info.name) as here:
                    if await trio.to_thread.run_sync(_is_same, here, old):
                        return found, info
        return found, None

    def _outcome(
        self,
        source: str,
        safety: str | None,
        found: Listed = NOTHING,
        step: str | None = None,
        keep: Collection[str] = (),
    ) -> Outcome:
        """The answer; safety snapshots that have expired are dropped."""
        history = self._history = self._known()
        self._lost.clear()
        gone = expired(self._volume.snapshots(), history, time.time_ns(), keep) if safety is not None else []
        for info in gone:
            self._forget(info.name)
        log_expired(gone)
        return Outcome(
            source, safety, found, {}, step, gone, history.undo_steps, history.redo_steps
        )  # fmt: skip

    def _take_safety(self, tag: str) -> SnapshotInfo:
        """Keep the present state under a name of its own."""
        name = free_name(SAFETY_PREFIX, self._volume.snapshots())
        return self._volume.take_snapshot(name, tag=tag[:_TAG_CHARACTERS], kind="safety")

    def _forget(self, name: str) -> None:
        """Drop a safety snapshot, unless lack of memory has done so already."""
        with contextlib.suppress(SnapshotNotFoundError):
            self._volume.drop_snapshot(name)

    @contextmanager
    def _undone_unless_done(self, safety: SnapshotInfo) -> Iterator[None]:
        """A change that fails leaves the state as it was, and no safety snapshot for what did not happen."""
        try:
            yield
        except BaseException:
            self._forget(safety.name)
            raise

    @contextmanager
    def applying(self, step: str) -> Iterator[Applying]:
        """A block that writes the state of this moment elsewhere: a step of the history, if it has written anything.

        The caller holds `MountedVolume.changing`.  The live state stays what it is, so undoing the step goes back to
        the state that was written, and leaves what was written where it is.
        """
        run = Applying()
        before = self._known()
        safety = self._take_safety(f"before {step}")
        try:
            yield run
        finally:
            if run.wrote:
                self._history = before.stepped(safety.serial, step)
                outcome = self._outcome("", safety.name, keep={safety.name})
                run.safety, run.expired = safety.name, outcome.expired
            else:
                self._forget(safety.name)

    # -- states --------------------------------------------------------------------------------------
    @asynccontextmanager
    async def tree(self, name: str | None, watch: CallObserver = UNOBSERVED) -> AsyncIterator[Tree]:  # noqa: ARG002
        volume = self._volume
        with overlay_of(volume).base_tree() if name == BASE else volume.tree(name) as tree:
            yield tree

    @asynccontextmanager
    async def frozen(self, watch: CallObserver) -> AsyncIterator[Tree]:  # noqa: ARG002
        await self._served.settle()
        with self._volume.tree() as tree:
            yield tree


def _find(old: Tree, new: Tree, watch: CallObserver) -> Listed | None:
    """What leads from `old` to `new`; None where that cannot be read.  Any thread.

    Raises only what `watch` raises when nobody waits for the answer any more.
    """
    for contents in (True, False):
        try:
            counts, first = summary(old, new, CHANGES_LISTED, contents=contents, tell=watch.raise_if_cancelled)
            return Listed(counts, first, counts.total > len(first))
        except Exception as error:  # noqa: BLE001 -- the change is made, and is not to be reported as failed
            watch.raise_if_cancelled()
            # A file below an overlay that others change, say: then by sizes and times.
            log_failure(_logger, "listing what a restore changed", error, level=logging.WARNING)
    return None


def _roughly(coherence: CacheInvalidation) -> Listed:
    """The counts of what the kernel was told: without what is below directories that are new or gone, and no list."""
    added = sum(not change.old for change in coherence.entries)
    removed = sum(not change.new for change in coherence.entries)
    modified = len(coherence.entries) - added - removed + len(coherence.inodes)
    return Listed(DiffCounts(added, modified, removed), truncated=True)


def _is_same(old: Tree, new: Tree) -> bool:
    """Whether two states of one volume do not differ at all: neither by a change nor in links, inodes or any time."""
    try:
        touched = new.touched(old)
        if touched is None or any(_entry(old, path) != _entry(new, path) for path in touched):
            return False
        return next(changes(old, new), None) is None
    except OSError as error:
        log_failure(_logger, "comparing two states", error, level=logging.WARNING)
        return False


def _entry(tree: Tree, path: bytes) -> TreeEntry | None:
    try:
        return tree.entry(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
