"""OverlayVolume: a memory volume over a lower layer, which is only read: a directory, an archive or a stored snapshot.

Unchanged paths are shown as they are in the lower layer; changes are held in memory, by block.  Snapshots,
restores, views and imports are those of the memory volume.  The first epoch, which users do not see, is the *base*: the
state of the lower layer.

Changes of a lower directory by other programs, while the overlay is mounted:

- A file without changes in the overlay follows.  The read that discovers the change fails with ESTALE, `on_change`
  invalidates the kernel's cache of the file, and the next read returns the new content.  Without `on_change` no read
  fails.  The kernel does not repeat reads that it has cached, so `tidy` checks all files that the kernel has looked up,
  a part of them at a time.
- In a snapshot, the file is lost from then on (see `view`).
- A file with changes in the overlay (content in part, attributes, another name) does not follow: reading content that
  has to come from the lower file fails with ESTALE, until the file is discarded.
- Names that appear or disappear in a directory that was listed already are not noticed; a name that disappeared is
  removed when it is first looked up.

Each change is logged once and counted (`changed_below`).  Archives and stored snapshots do not change; content that is
missing or damaged there cannot be read (EIO).

Threading: as the memory volume.  Views load from their own threads (see `state`), so every call that changes the state
holds the state's lock.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, cast

from msgspec.structs import replace

from protocol.adapters.git_patterns import PathFilter
from protocol.backends.memory import MemoryVolume
from protocol.backends.memory.history.converge import Converger, Extent
from protocol.backends.memory.history.snapshots import restore_epoch
from protocol.backends.memory.history.undo import SnapshotTree
from protocol.backends.memory.inode import Inode
from protocol.backends.memory.invariants import Invariants
from protocol.backends.overlay.apply import Applied, OverlayApply
from protocol.backends.overlay.host_lower import HostLower
from protocol.backends.overlay.inode import LowerContent, OverlayInode, UnfilledChildren
from protocol.backends.overlay.intent_log import is_interrupted
from protocol.backends.overlay.lower import ChangedBelowError, Identity, Lower
from protocol.backends.overlay.state import OverlayState
from protocol.backends.overlay.view import OverlayTree
from protocol.diff.tree_diff import Change, entry_or_none, has_links, outermost
from protocol.volume import RENAME_EXCHANGE, SUPERUSER, Caller
from protocol.volume_extensions import CacheInvalidation, InodeChange, VolumeUsage

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.journaling.replay import Replay
    from protocol.backends.overlay.journaling.recorder import OverlayImage, OverlayRecorder
    from protocol.backends.overlay.journaling.replay import OverlayGiving, OverlayReplay, OverlayTaking
    from protocol.backends.overlay.state import OverlayState
    from protocol.journal.directory import Journal
    from protocol.linux.shared_log import SharedLog
    from protocol.volume import Buffer

P = ParamSpec("P")
T = TypeVar("T")
_logger = logging.getLogger(__name__)
_CHECKED_AT_ONCE: Final = 1000  # files: takes some milliseconds
_CHECKED_BEFORE: Final = 10_000  # files that are checked before states are compared; `tidy` alone checks more


def _locked(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[OverlayVolume, P], T]:
    """Return the method with the lock of the state: the thread of a view may be loading."""

    @functools.wraps(method)
    def call(volume: OverlayVolume, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with volume.lock:
            return method(volume, *args, **kwargs)

    return call


class OverlayVolume(MemoryVolume):
    """A volume over `lower`, or over the directory at that path.  Implements `OverlaidVolume`.

    The caller closes `lower` when the volume is not used any more.  `max_bytes` and `max_inodes` bound the changes.
    `max_memory` bounds the changes, the snapshots, and the records of the lower layer: an eighth beyond it, loading
    further names and inodes fails with ENOMEM.  `include` and `exclude` are the patterns of a `PathFilter`; making a
    hidden name fails with EPERM.
    """

    capabilities = replace(MemoryVolume.capabilities, lower_layer=True, prepared_imports=False, recoverable=True)

    def __init__(
        self,
        lower: Lower | str | bytes,
        max_bytes: int | None = None,
        max_inodes: int | None = None,
        read_only: bool = False,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        clock: Callable[[], int] = time.time_ns,
        max_memory: int | None = None,
    ) -> None:
        self.lower = lower if isinstance(lower, Lower) else HostLower(lower)
        self.path_filter = PathFilter(include, exclude)
        self._overlay = OverlayState(clock, self.lower, self.path_filter)
        self.lock = self._overlay.lock
        super().__init__(max_bytes, max_inodes, read_only, clock=clock, state=self._overlay, max_memory=max_memory)
        self._base = self._overlay.open_epoch(None)
        self.on_change: Callable[[CacheInvalidation], None] | None = None
        self.in_thread: Callable[[Callable[[], object]], Awaitable[object]] | None = None
        self.changed_below = 0
        self.identities: dict[bytes, Identity | None] = {}  # of the files that `apply` wrote, by path
        self.outdated: set[int] = set()  # inodes that changed below, and whose old content the kernel may have
        self._lost: set[int] = set()  # inodes whose lower content is lost, which was logged
        self._unchecked: Iterator[int] = iter(())  # the rest of a round of `tidy`

    def check_invariants(self) -> None:
        with self._lock:
            OverlayInvariants(self._overlay).check()

    @contextmanager
    def forking(self) -> Iterator[None]:
        with super().forking(), self.lower.forking():
            yield

    def forked(self) -> None:
        with self._lock:
            self._overlay.known = None
            super().forked()
        self.lower.forked()
        self.outdated.clear()
        self._unchecked = iter(())

    # -- journal -----------------------------------------------------------------------------------
    def keep_log(self, log: SharedLog, *, is_known: bool) -> None:
        """See `protocol.volume_durability.RecoverableVolume`."""
        from protocol.backends.overlay.known_inodes import KnownInodes  # noqa: PLC0415 (start-up: few mounts)

        with self._lock:
            self._overlay.known = known = KnownInodes(self._overlay, log)
            if is_known:
                known.load()
            else:
                known.rewrite()

    def write_image(self, number: int, progress: Callable[[], None]) -> None:
        self._overlay.known = None  # the log belongs to the process that serves the kernel
        super().write_image(number, progress)

    def handing_over(self) -> OverlayGiving:
        from protocol.backends.overlay.journaling.replay import OverlayGiving  # noqa: PLC0415 (start-up, as below)

        return OverlayGiving(self, self._overlay, self._new_image)

    def taking_over(self) -> OverlayTaking:
        from protocol.backends.overlay.journaling.replay import OverlayTaking  # noqa: PLC0415

        return OverlayTaking(self, self._overlay, self._new_replay(), self._replayed)

    def _new_replay(self) -> OverlayReplay:
        from protocol.backends.overlay.journaling.replay import OverlayReplay  # noqa: PLC0415 (start-up: few mounts)

        return OverlayReplay(self._overlay, self.notes, self._base)

    def _replayed(self, replay: Replay) -> None:
        found = cast("OverlayReplay", replay)
        self._base, self.identities = found.base, found.identities

    def _new_image(self) -> OverlayImage:
        from protocol.backends.overlay.journaling.recorder import OverlayImage  # noqa: PLC0415 (start-up: few mounts)

        return OverlayImage(self._overlay, self.notes, self._base, self.identities)

    def _new_recorder(self, journal: Journal) -> OverlayRecorder:
        from protocol.backends.overlay.journaling.recorder import OverlayRecorder  # noqa: PLC0415 (start-up)

        return OverlayRecorder(self, self._overlay, journal)

    def _new_tree(self, epoch: Epoch, pinned: Epoch) -> OverlayTree:
        return OverlayTree(self.recheck, self.unchanged_from, self._overlay, epoch, pinned)

    # -- calls that change the state and read no content below, under the lock -------------------------
    def forget(self, inode: int, count: int) -> None:
        """See `MemoryVolume.forget`.  Loads no inode that the kernel knows from the predecessor."""
        overlay = self._overlay
        with self._lock:
            if overlay.table.loaded(inode) is not None:
                super().forget(inode, count)
                return
            if self.recorder is not None:
                count = self.recorder.forgotten(inode, count)
            left = overlay.lookups.pop(inode, 0) - count
            if left > 0:
                overlay.lookups[inode] = left
            elif overlay.known is not None:
                overlay.known.drop(inode)

    link = _locked(MemoryVolume.link)
    mkdir = _locked(MemoryVolume.mkdir)
    mknod = _locked(MemoryVolume.mknod)
    removexattr = _locked(MemoryVolume.removexattr)
    rmdir = _locked(MemoryVolume.rmdir)
    setattr = _locked(MemoryVolume.setattr)
    setxattr = _locked(MemoryVolume.setxattr)
    symlink = _locked(MemoryVolume.symlink)
    tmpfile = _locked(MemoryVolume.tmpfile)
    unlink = _locked(MemoryVolume.unlink)

    # -- changes below -----------------------------------------------------------------------------
    def check_below(self) -> None:
        """Look for files that other programs changed, unless very many files were loaded.  Any thread."""
        if not self.lower.can_change:
            return
        overlay, known = self._overlay, self._overlay.known
        with self._lock:
            kept = {number for epoch in overlay.log.epochs() for number in epoch.inodes}
            expected = () if known is None else known.expected_numbers
            numbers = [*{*overlay.table, *kept, *overlay.named_in_journal()}, *expected]
        if len(numbers) > _CHECKED_BEFORE:
            return
        self.directory.close_directories()
        for first in range(0, len(numbers), _CHECKED_AT_ONCE):
            with self._lock:
                for number in numbers[first : first + _CHECKED_AT_ONCE]:
                    self._check_lower(number, is_known=True)

    @contextmanager
    def following_tree(self, name: str) -> Iterator[SnapshotTree]:
        """See `OverlaidVolume`."""
        with self.tree(name) as tree:
            cast("OverlayTree", tree).follow()
            yield tree

    def unchanged_ctime(self, inode: int) -> int | None:
        """See `OverlaidVolume`."""
        node: Inode | None = self._overlay.table.get(inode)
        if node is None or node.content is None or self.unchanged_from(node) is None:
            return None
        return node.ctime_ns

    def unchanged_from(self, version: Inode) -> int | None:
        """Return the mtime below of a version of a file that has no changes over the lower layer, else None.

        A change sets the ctime.  Another mtime alone comes from a discard or a restore that touched the file.
        """
        if isinstance(version, OverlayInode) and version.follows(version.lower.identity):
            below: int = version.lower.identity[3]
            return below
        # A file that an apply wrote keeps its content here, and so does its version in the base.
        of_base = (epoch.inodes[version.inode] for epoch in self._base.chain() if version.inode in epoch.inodes)
        found = next(of_base, None)
        return None if found is None or found.ctime_ns != version.ctime_ns else found.mtime_ns

    def lose_changed(self, name: str) -> None:
        """See `OverlaidVolume`."""
        with self._lock, self.tree(name) as wanted, self.tree() as live:
            lost = [wanted.entry(path) for path in wanted.lost_paths(live)]  # type: ignore[attr-defined]
        with self._lock, self.changes():
            for entry in lost:
                with suppress(FileNotFoundError, NotADirectoryError):
                    self._overlay.lose(self._overlay.inode_at(entry.path).inode, entry)

    # -- the base ----------------------------------------------------------------------------------
    @contextmanager
    def base_tree(self) -> Iterator[SnapshotTree]:
        with self.view(self._base) as tree:
            yield tree

    def discard(self, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        with self._lock:
            return self.restore_epoch(self._base, paths)

    @property
    def directory(self) -> HostLower:
        """The directory below.  OSError (EOPNOTSUPP) if the lower layer is no directory."""
        if not isinstance(self.lower, HostLower):
            raise OSError(
                errno.EOPNOTSUPP,
                "the lower layer is an archive or a stored snapshot, which cannot be written: `vfsd export` the"
                " workspace, or `vfsd diff --patch` it and apply the patch to a directory",
            )
        return self.lower

    @property
    def apply_interrupted(self) -> bool:
        return isinstance(self.lower, HostLower) and is_interrupted(self.lower.fd, self.lower.intent_log)

    def usage(self) -> VolumeUsage:
        return replace(self.lower.usage_of_source(super().usage()), changed_below=self.changed_below)

    @contextmanager
    def applying(self, paths: Sequence[bytes], *, force: bool, dry_run: bool) -> Iterator[OverlayApply]:
        _ = self.directory  # refuses other lower layers
        with self.base_tree() as base, self.tree() as live:
            yield OverlayApply(self, base, live, paths, force=force, dry_run=dry_run)

    def merged(self, tree: SnapshotTree, found: Sequence[Change], pending: Collection[bytes]) -> None:
        """See `OverlaidVolume`."""
        linked = [change.new for change in found if change.new is not None and has_links(change.new)]
        names = {name for new in linked for name in tree.names_of(new.inode) if name not in pending}
        self.applied(tree, Applied(list(found), names=names))
        if not pending:
            self.mark_saved(tree)

    def applied(self, tree: SnapshotTree, done: Applied) -> None:
        """Make the base equal to `tree` at the paths that an apply wrote.  The live state is the same afterwards."""
        state = self._overlay
        recorder = cast("OverlayRecorder | None", self.recorder)
        found = [change for change in done.changes if change.path not in done.parents]  # it makes these itself
        directories = [
            change.path for change in found if change.old and change.old.is_dir and change.new and change.new.is_dir
        ]
        paths = outermost([*done.names, *{change.path for change in found}.difference(directories)])
        with self._lock, nullcontext(None) if recorder is None else recorder.applying() as record:
            self.identities.update(done.identities)
            state.renew(done.renewed)
            if isinstance(self.lower, HostLower):
                self.lower.moving.clear()
            for path, left in self.identities.items():
                if left is not None:
                    self.identities[path] = done.renewed.get(left[:2], left)
            if record is not None:
                record.lower(self.identities, done.renewed)
            if done.error is not None:
                return
            changed_at = state.changed_at
            live = state.open_epoch(None)
            restore_epoch(state, self._base)
            extent = Extent([path for path in paths if entry_or_none(tree, path) or _is_live(state, path)], directories)
            Converger(state, tree, extent, replace=True, check_quota=lambda _pages, _inodes, _memory: None).run()
            if record is not None:
                record.base(live)
            base = state.open_epoch(None)
            restore_epoch(state, live)
            state.undo_revived()  # files that were unlinked while open keep their content
            if record is not None:
                record.changes(base)
            state.changed_at = changed_at
            state.log.close(live)
            state.log.close(self._base)
            self._base = base

    # -- lookups -----------------------------------------------------------------------------------
    def find(self, parent: int, name: bytes) -> Inode | None:
        children = self._overlay.directory(parent).children
        number = children.get(name) if children is not None else None
        if number is not None:
            inode = self._overlay.table.loaded(number)
            # The kernel has no reference to the file, so it can follow without an invalidation.
            if isinstance(inode, OverlayInode) and number not in self._overlay.lookups and inode.content is not None:
                self._overlay.refresh(number)
        return super().find(parent, name)

    # -- content -----------------------------------------------------------------------------------
    def read(self, inode: int, offset: int, size: int) -> Buffer:
        found = self._read_now(inode, offset, size)
        return b"".join(found) if isinstance(found, list) else found

    def read_pieces(  # type: ignore[override]  # may return an awaitable
        self, inode: int, offset: int, size: int
    ) -> Buffer | list[bytes | bytearray] | Awaitable[Buffer | list[bytes | bytearray]]:
        if self.in_thread is not None and not self.lower.can_change:
            node = self._overlay.table.loaded(inode)
            if node is not None and isinstance(node.content, LowerContent) and not node.content.lower.is_ready:
                return self._read_later(self.in_thread(node.content.lower.prepare), inode, offset, size)
        return self._read_now(inode, offset, size)

    async def _read_later(
        self, preparation: Awaitable[object], inode: int, offset: int, size: int
    ) -> Buffer | list[bytes | bytearray]:
        await preparation
        return self._read_now(inode, offset, size)

    def _read_now(self, inode: int, offset: int, size: int) -> Buffer | list[bytes | bytearray]:
        if inode in self.outdated:
            raise ChangedBelowError(b"")
        try:
            return super().read_pieces(inode, offset, size)
        except ChangedBelowError as error:
            self._follow(inode, error)
            return super().read_pieces(inode, offset, size)

    def seek(self, inode: int, offset: int, whence: int) -> int:
        return self._following(inode, super().seek, inode, offset, whence)

    def write(self, inode: int, offset: int, data: Buffer, *, kill_privileges: bool = False) -> int:
        with self._lock:
            return self._following(inode, super().write, inode, offset, data, kill_privileges=kill_privileges)

    def append(self, inode: int, data: Buffer, *, kill_privileges: bool = False) -> tuple[int, int]:
        with self._lock:
            if self.lower.can_change:
                self._check_lower(inode)
            return super().append(inode, data, kill_privileges=kill_privileges)

    def fallocate(self, inode: int, mode: int, offset: int, length: int) -> None:
        with self._lock:
            self._following(inode, super().fallocate, inode, mode, offset, length)

    def copy_range(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
        with self._lock:
            return self._following(source, super().copy_range, source, source_offset, target, target_offset, length)

    def _following(self, inode: int, run: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except ChangedBelowError as error:
            self._follow(inode, error)
            return run(*args, **kwargs)

    def _follow(self, inode: int, error: ChangedBelowError) -> None:
        """Return if the file that changed can be read now; else raise `error`."""
        follows, changed = self.recheck(inode, error.path)
        if not follows or (changed and self.on_change is not None):
            raise error

    def recheck(self, inode: int, path: bytes, *, notices_removal: bool = True) -> tuple[bool, bool]:
        """Check a file that a read found changed at `path`.  Any thread.

        Return whether the file follows, and whether anything changed now, which is then logged and reported.
        """
        follows, changed = self._overlay.refresh(inode, notices_removal=notices_removal)
        if follows:
            self._lost.discard(inode)
        if changed and (follows or inode not in self._lost):
            self.changed_below += 1
            live = self._overlay.table.loaded(inode)
            if follows:
                effect = "the workspace shows the new content"
            elif isinstance(live, OverlayInode) and live.follows(live.lower.identity):
                effect = "it was removed or replaced there, so it cannot be read until it is there again"
            else:
                effect = "the workspace changed it too, so reading its other parts fails until it is discarded"
            if not follows:
                self._lost.add(inode)
            _logger.warning("another program changed a file below the overlay; %s", effect, extra={"path": path})
        if follows and changed and self.on_change is not None:
            self.outdated.add(inode)
            self.on_change(self._invalidation_of(inode))
        return follows, changed

    def tidy(self) -> None:
        """Check some of the lower files that the kernel has looked up.  Call it about once a second."""
        self.lower.check()
        with suppress(OSError):  # the next change reports it
            self.flush_journal()
        with self._lock:
            if self._overlay.known is not None:
                self._overlay.known.tidy()
        if not self.lower.can_change:
            return
        with self._lock:
            numbers = list(itertools.islice(self._unchecked, _CHECKED_AT_ONCE))
            if len(numbers) < _CHECKED_AT_ONCE:
                known = self._overlay.known
                expected = () if known is None else known.expected_numbers
                self._unchecked = iter([*self._overlay.table, *expected])
            for number in numbers:
                self._check_lower(number)

    def _check_lower(self, number: int, *, is_known: bool = False) -> None:
        """Check a file that the kernel has looked up, or, if it `is_known`, that was loaded."""
        overlay, known = self._overlay, self._overlay.known
        with suppress(OSError):  # no memory, or no right to read it any more: the next read reports it
            inode = overlay.table.loaded(number)
            if inode is None and known is not None and known.expected(number) is not None:
                inode = overlay.table.get(number)
            if isinstance(inode, OverlayInode):
                if inode.content is not None and (is_known or number in overlay.lookups):
                    self.recheck(number, inode.lower.path, notices_removal=is_known)
            elif inode is None and is_known:
                overlay.refresh(number)  # only snapshots have it

    def _invalidation_of(self, number: int) -> CacheInvalidation:
        node = self._overlay.inodes[number]
        path = self._state.path(node)
        paths = {} if path is None else {number: path}
        return CacheInvalidation((), [InodeChange(number, content=True)], paths, {number: node.mode})

    def serve_here(self) -> None:
        self.lower.serve_here()
        for number in self.outdated:  # from the predecessor
            if self.on_change is not None:
                with suppress(OSError, KeyError):  # it is gone
                    self.on_change(self._invalidation_of(number))

    def invalidation_done(self, invalidation: CacheInvalidation) -> None:
        self.outdated.difference_update(change.inode for change in invalidation.inodes)

    # -- names ---------------------------------------------------------------------------------------
    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0, caller: Caller = SUPERUSER
    ) -> None:
        with self._lock:
            if self.path_filter:
                self._check_moved(parent, name, new_parent, new_name)
                if flags & RENAME_EXCHANGE:
                    self._check_moved(new_parent, new_name, parent, name)
            super().rename(parent, name, new_parent, new_name, flags, caller)

    def _check_moved(self, parent: int, name: bytes, new_parent: int, new_name: bytes) -> None:
        number = (self._overlay.directory(parent).children or {}).get(name, 0)
        is_directory = bool(number) and stat.S_ISDIR(self._overlay.kind(number))
        target = self._overlay.directory(new_parent)
        self._overlay.hidden_names.check(target, new_name, is_directory=is_directory)
        if new_name not in (target.children or {}):
            self._overlay.hidden_names.check_collision(target, new_name)


def _is_live(state: OverlayState, path: bytes) -> bool:
    try:
        state.inode_at(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class OverlayInvariants(Invariants):
    """See `Invariants`."""

    def __init__(self, state: OverlayState) -> None:
        super().__init__(state)
        self._overlay = state

    def check(self) -> None:
        super().check()
        below = sum(isinstance(inode, OverlayInode) for inode in self._inodes.values()) - 1
        assert self._overlay.table.below == below, "inodes from below"

    def check_inode(self, inode: Inode) -> None:
        """Check also that all versions of an inode without changes of their own have one lower identity.

        They follow the lower file together.  A changed version keeps the identity that the file had when the workspace
        first changed it, which `apply` compares.
        """
        super().check_inode(inode)
        if isinstance(inode, OverlayInode):
            versions = [each for each in self._overlay.versions(inode.inode) if isinstance(each, OverlayInode)]
            unchanged = {each.lower.identity for each in versions if each.follows(each.lower.identity)}
            assert len(unchanged) <= 1, f"inode {inode.inode}: identities below"

    def entries(self, directory: Inode) -> Mapping[bytes, int] | None:
        return None if isinstance(directory.children, UnfilledChildren) else directory.children

    def named(self, directory: Inode) -> Mapping[bytes, int]:
        if isinstance(directory.children, UnfilledChildren):
            return self._overlay.recorded_names(directory.inode)
        return super().named(directory)

    def may_miss_links(self, file: Inode) -> bool:
        return isinstance(file, OverlayInode)

    def unloaded(self) -> set[int]:
        known = self._overlay.known
        return set() if known is None else set(known.expected_numbers)

    def sizes(self, directory: Inode, count: int) -> tuple[int, ...]:
        computed = super().sizes(directory, count)
        return (*computed, directory.lower.size) if isinstance(directory, OverlayInode) else computed
