"""Snapshots of a memory volume: taking, restoring and dropping them, viewing them, and importing other trees.

A restore is recorded in the newest epoch like any other change, so no snapshot changes.  Operations that
can fail half-way run in a transaction: an epoch of its own.  If the operation fails, the state returns to the beginning
of that epoch; if it succeeds, the epoch tells which of the kernel's caches to invalidate.

Threading: the serving loop only.  Nothing here awaits, so each call is atomic to the mount.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from protocol.backends.memory.entries import DirectoryEntries
from protocol.backends.memory.history.converge import Converger, Extent
from protocol.backends.memory.history.prepare import Filler, Preparation
from protocol.backends.memory.history.undo import Epoch, PreInodes, PreNames, SnapshotTree, merged
from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES, DIRECTORY_ENTRY_BYTES
from protocol.backends.memory.ledger import VERSION_BYTES
from protocol.values import Value
from protocol.volume_extensions import (
    TAG_MAX_BYTES,
    CacheInvalidation,
    EntryChange,
    InodeChange,
    SnapshotInfo,
    SnapshotKind,
)

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode, Links
    from protocol.backends.memory.limits import MemoryLimits
    from protocol.backends.memory.state import MemoryState
    from protocol.tree import Tree


class Changes(msgspec.Struct):
    """The result of a `SnapshotHistory.changes` context; complete when the context has ended."""

    invalidation: CacheInvalidation = msgspec.field(default_factory=CacheInvalidation)


class ReservedInodes(Value):
    """Inode numbers of `state`, from `first` on, that are reserved for inodes made elsewhere."""

    state: MemoryState
    first: int


class SnapshotHistory(DirectoryEntries):
    """The snapshots of `state`, and the changes that are made as one transaction.

    Its methods are those of `SnapshotableVolume`, `ImportStage` and `PreparingVolume` in `protocol.volume_extensions`.

    """

    def __init__(self, state: MemoryState, limits: MemoryLimits) -> None:
        super().__init__(state, limits)
        self._views: set[Epoch] = set()  # the epochs of the open views
        self._saved_at = 0  # the moment of the newest state that is stored elsewhere
        self.saved_ns: int | None = None  # the time at which that was recorded

    # -- snapshots -------------------------------------------------------------------------------
    def take_snapshot(self, name: str, *, tag: str | None = None, kind: SnapshotKind = "user") -> SnapshotInfo:
        """Keep the present state as snapshot `name`.  O(1).  SnapshotExistsError, ENAMETOOLONG (tag), ENOSPC.

        A snapshot of kind "safety" is never refused for lack of memory.
        """
        state = self._state
        if tag is not None and len(tag.encode("utf-8", "surrogatepass")) > TAG_MAX_BYTES:
            raise OSError(
                errno.ENAMETOOLONG, f"the tag is longer than {TAG_MAX_BYTES:,} bytes: take a shorter one", name
            )
        if self.recorder is not None:
            # Before a discard or an apply, which are the ways out of a journal that is full.
            self.recorder.begin(len(os.fsencode(name)) + 4 * len(tag or ""), removes=kind == "safety")
        with self._lock:
            if name not in state.log:
                self._limits.require_snapshot(name, len(name) + len(tag or ""), kind)
            info = SnapshotInfo(
                name=name,
                serial=state.log.serial + 1,
                created_ns=state.clock(),
                files=state.files,
                directories=state.directories,
                size_bytes=state.size_bytes,
                tag=tag,
                kind=kind,
            )
            state.open_epoch(info)
        if self.recorder is not None:
            self.recorder.took(info)
        return info

    def snapshots(self) -> Sequence[SnapshotInfo]:
        return self._state.log.infos()

    def snapshot(self, name: str) -> SnapshotInfo:
        info = self._state.log.find(name).info
        assert info is not None
        return info

    def drop_snapshot(self, name: str) -> None:
        """Forget snapshot `name`: O(changes until the next snapshot).  SnapshotNotFoundError."""
        if self.recorder is not None:
            self.recorder.begin(0, removes=True)
        with self._lock:
            self._state.log.close(self._state.log.find(name))
        if self.recorder is not None:
            self.recorder.commit()

    # -- restoring and importing -----------------------------------------------------------------
    def restore_snapshot(self, name: str, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        """Make the live state (below `paths`, or all of it) equal to snapshot `name`.  O(changes since then).

        Succeeds without free memory: `ledger` reserves what it needs.
        """
        target = self._state.log.find(name)
        # The reserve covers the old versions that either the restore or an earlier change adds to the newest snapshot,
        # not both.
        changed = sum(len(epoch.inodes) for epoch in target.chain())
        ledger = self._state.ledger
        with self._lock, self._limits.keeping(name, *self._newest()):
            if ledger.used + changed * VERSION_BYTES > ledger.ceiling:
                self._limits.make_room(changed * VERSION_BYTES)
        return self.restore_epoch(target, paths)

    def restore_epoch(self, target: Epoch, paths: Sequence[bytes]) -> CacheInvalidation:
        """Make the live state (below `paths`, or all of it) equal to that at the beginning of `target`."""
        self._limits.checked_content = 0
        if paths:
            with self.view(target) as tree:
                return self.import_tree(tree, replace=True, paths=paths)
        with self._transaction() as transaction:
            restore_epoch(self._state, target, is_new_to_kernel=True)
            return _invalidation(self._state, transaction)

    def import_tree(
        self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = (), directories: Sequence[bytes] | None = None
    ) -> CacheInvalidation:
        if isinstance(tree, SnapshotTree) and not tree.belongs_to(self._state):
            tree.ledger.give_back()  # imported content is charged here from now on
        with self._limits.keeping(*self._newest()), self._transaction() as transaction:
            check, extent = self._limits.check_quota, Extent.of(paths, directories)
            Converger(self._state, tree, extent, replace=replace, check_quota=check).run()
            return _invalidation(self._state, transaction)

    def fill(self, tree: Tree, reserved: ReservedInodes | None = None) -> None:
        """Copy `tree` into this volume, which is new and has no snapshot.  After an error it is incomplete.

        With inode numbers that another volume has `reserved` for the entries of `tree`, a `preparation` of that volume
        takes the inodes over without copying them, unless there are hard links.  ENOSPC, ENAMETOOLONG.
        """
        filler = Filler(self._state, self._limits.check_quota)
        if reserved is not None:
            self._state.next_inode = reserved.first
        filler.run(tree)
        if reserved is not None and not filler.has_links:
            self._state.destination = reserved.state

    def reserve_inodes(self, count: int) -> ReservedInodes:
        first = self._state.next_inode
        self._state.next_inode += count
        return ReservedInodes(self._state, first)

    def preparation(
        self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = (), directories: Sequence[bytes] | None = None
    ) -> Preparation:
        check, extent = self._limits.check_quota, Extent.of(paths, directories)
        return Preparation(self._state, tree, extent, replace=replace, check_quota=check, recorder=self.recorder)

    def import_prepared(self, preparation: Preparation) -> CacheInvalidation:
        try:
            with self._limits.keeping(*self._newest()), self._transaction() as transaction:
                preparation.run()
                return _invalidation(self._state, transaction)
        finally:
            if self.recorder is not None:
                self.recorder.ahead.clear()

    @contextmanager
    def changes(self) -> Iterator[Changes]:
        """Make changes that do not come through the mount, all or nothing; an exception undoes them.

        The body must not await.  After the context, `invalidation` lists the changes for the kernel's caches.
        """
        with self._transaction() as transaction:
            made = Changes()
            yield made
            made.invalidation = _invalidation(self._state, transaction)

    # -- views -----------------------------------------------------------------------------------
    @contextmanager
    def tree(self, name: str | None = None) -> Iterator[SnapshotTree]:
        with self.view(self._state.log.find(name) if name is not None else None) as tree:
            yield tree

    @contextmanager
    def view(self, target: Epoch | None) -> Iterator[SnapshotTree]:
        """Yield a tree of the state at the beginning of `target`, or of the present state."""
        state = self._state
        with self._lock:
            pinned = state.open_epoch(None)
            state.log.pin()
            self._views.add(pinned)
        try:
            with self._lock:
                tree = self._new_tree(target or pinned, pinned)
            yield tree
        finally:
            with self._lock:
                if pinned in self._views:  # else `close_views` closed it
                    self._close_view(pinned)

    def _new_tree(self, epoch: Epoch, pinned: Epoch) -> SnapshotTree:
        """Return the tree of a view."""
        return SnapshotTree(self._state, epoch, pinned)

    def _close_view(self, pinned: Epoch) -> None:
        self._views.remove(pinned)
        self._state.log.close(pinned)
        self._state.log.release()

    def close_views(self) -> None:
        """Close all views, in a process that does not have the threads that read them."""
        for pinned in list(self._views):
            self._close_view(pinned)

    # -- states that are stored elsewhere --------------------------------------------------------
    def mark(self) -> int:
        with self._lock:
            return self._state.moment()

    def changed_since(self, mark: int) -> bool:
        """Access times, and changes of a file without a name, do not count."""
        return self._state.changed_at >= mark

    def mark_saved(self, tree: Tree | None = None) -> None:
        if tree is None:
            at = self.mark()
        elif isinstance(tree, SnapshotTree) and tree.belongs_to(self._state):
            at = tree.epoch.serial
        else:
            return
        if at >= self._saved_at:
            self._saved_at, self.saved_ns = at, self._state.clock()

    def restore_saved(self, saved_ns: int | None, *, is_saved: bool) -> None:
        """Take over from the predecessor whether, and when, the present state was stored elsewhere."""
        self._saved_at = self.mark() if is_saved else 0
        self.saved_ns = saved_ns

    @property
    def is_saved(self) -> bool:
        return not self.changed_since(self._saved_at)

    def _newest(self) -> Sequence[str]:
        return [info.name for info in self.snapshots()[-1:]]

    @contextmanager
    def _transaction(self) -> Iterator[Epoch]:
        """Undo all changes of the body if it raises."""
        state = self._state
        with self._lock:
            epoch = state.open_epoch(None)
            recorder = self.recorder
            try:
                if recorder is None:
                    yield epoch
                else:
                    with recorder.recording(epoch):
                        yield epoch
            except BaseException:
                restore_epoch(state, epoch)
                state.undo_revived()
                raise
            finally:
                state.end_revived()
                state.log.close(epoch)


# -- restore ----------------------------------------------------------------------------------------


def restore_epoch(state: MemoryState, target: Epoch, *, is_new_to_kernel: bool = False) -> None:
    """Restore the state at the beginning of `target`; recorded in the newest epoch.

    The pre-images hold complete inodes with links and link counts, so only the entries' numbers have to be set.
    `is_new_to_kernel`: the kernel sees this state, so directories that it holds as dead come back with new numbers.
    """
    # Setting names and versions adds pre-images to the newest epoch, so this works on copies.
    inodes, names = merged(target.chain())
    copies = _copies(state, inodes) if is_new_to_kernel else {}
    gone = _put_back_inodes(state, inodes, copies)
    _put_back_names(state, inodes, names, copies)
    for number in gone:
        inode = state.inodes.get(number)
        if inode is not None:
            state.release(inode)


def _copies(state: MemoryState, inodes: PreInodes) -> dict[int, int]:
    """Return the directories that come back with another number: a new one, or that of a copy which an earlier restore
    made, and which is still in its place.  So a program that works in the copy goes on.
    """
    copies: dict[int, int] = {}
    todo = [number for number, version in inodes.items() if version is not None and version.is_dir]
    decided = set()
    while todo:
        number = todo[-1]
        version, live = inodes[number], state.inodes.get(number)
        if number in decided or version is None or not version.is_dir or (live is not None and live.nlink):
            todo.pop()
            continue
        above, name = version.parent_link
        if inodes.get(above) is not None and above not in decided and not _is_linked(state, above):
            todo.append(above)  # first
            continue
        todo.pop()
        decided.add(number)
        parent = state.inodes.get(copies.get(above, above))
        found = parent.children.get(name, 0) if parent is not None and parent.children else 0
        copy = state.inodes.get(found) if inodes.get(found, _UNCHANGED) is None else None
        if copy is not None and copy.is_dir and copy.birth_ns == version.birth_ns:
            copies[number] = found
        elif state.is_dead(number):
            copies[number] = state.copy_directory(version).inode
    return copies


def _is_linked(state: MemoryState, number: int) -> bool:
    live = state.inodes.get(number)
    return live is not None and live.nlink > 0


def _put_back_inodes(state: MemoryState, inodes: PreInodes, copies: Mapping[int, int]) -> list[int]:
    """Put the old versions back; return the inodes that did not exist then.

    `copies`: the new numbers of directories.  All that was in such a directory was removed or moved since, so it is
    among `inodes`.
    """
    gone = []
    kept = set(copies.values())
    for number, version in inodes.items():
        if number in kept:
            continue
        live = state.inodes.get(number)
        if version is None:
            if live is not None and live.nlink:
                live = state.orphan(live)
                if live.children is not None:
                    for name in list(live.children):
                        state.set_name(live, name, 0)
                    live.size = DIRECTORY_BASE_BYTES
                gone.append(number)
            continue
        links = version.links
        if copies and any(directory in copies for directory, _ in links):
            moved = [(copies.get(directory, directory), name) for directory, name in links]
            links = tuple(moved) if isinstance(links, tuple) else dict.fromkeys(moved)
        if number in copies:
            _become(state, state.inodes[copies[number]], version, links)
        elif live is None or live.nlink == 0:
            revived = state.revive(version)
            revived.nlink, revived.size = version.nlink, version.size
            state.orphans.discard(number)
            state.set_links(revived, links)
            state.count(revived, +1)
        else:
            replaced = state.replace(live, version)
            if links is not version.links:
                state.set_links(replaced, links)
    return gone


def _become(state: MemoryState, copy: Inode, version: Inode, links: Links) -> None:
    """Give a directory the attributes and links of `version`, which has another number."""
    copy = state.own(copy)
    if not copy.nlink:
        state.count(copy, +1)
    copy.mode, copy.uid, copy.gid, copy.nlink = version.mode, version.uid, version.gid, version.nlink
    copy.mtime_ns, copy.ctime_ns = version.mtime_ns, version.ctime_ns
    if (copy.xattrs or {}) != (version.xattrs or {}):
        state.ledger.set_xattrs(copy, dict(version.xattrs or {}) or None)
    state.set_links(copy, links)


def _put_back_names(state: MemoryState, inodes: PreInodes, names: PreNames, copies: Mapping[int, int]) -> None:
    for number, entries in {**dict.fromkeys(copies, _NO_NAMES), **names}.items():
        if inodes.get(number, _UNCHANGED) is None:
            continue  # the directory did not exist then
        directory = state.inodes.get(copies.get(number, number))
        if directory is None or directory.children is None or directory.nlink == 0:
            continue  # removed before the snapshot; an older epoch has its entries
        wanted = {name: copies.get(before, before) for name, before in entries.items()}
        if number in copies:  # what the copy has got since
            wanted = {**dict.fromkeys(directory.children.keys() - wanted.keys(), 0), **wanted}
        for name, child in wanted.items():
            if directory.children.get(name, 0) != child:
                state.set_name(directory, name, child)
        if number in copies:  # that of a directory below an overlay has another size
            directory.size = DIRECTORY_BASE_BYTES + DIRECTORY_ENTRY_BYTES * len(directory.children)


_UNCHANGED = object()
_NO_NAMES: Mapping[bytes, int] = {}


# -- cache invalidation -----------------------------------------------------------------------------


def _invalidation(state: MemoryState, epoch: Epoch) -> CacheInvalidation:
    """Return how the live state differs from the beginning of `epoch`, the newest."""
    entries = []
    inodes = []
    for number, names in epoch.names.items():
        directory = state.inodes.get(number)
        children = directory.children if directory is not None and directory.children is not None else {}
        for name, old in names.items():
            new = children.get(name, 0)
            if new != old:
                entries.append(EntryChange(number, name, old, new))
    for number, version in epoch.inodes.items():
        live = state.inodes.get(number)
        if version is None or live is None:
            continue
        if not version.same_content(live):
            inodes.append(InodeChange(number, content=True))
        elif not version.same_metadata(live):
            inodes.append(InodeChange(number, content=False))
    # An open file that was revived has other content than before; no pre-image holds an unlinked inode.
    inodes += [InodeChange(number, content=True) for number in state.revived]
    numbers = {number for change in entries for number in (change.parent, change.old, change.new)}
    numbers.update(change.inode for change in inodes)
    numbers.discard(0)
    paths = {}
    modes = {}
    for number in numbers:
        live = state.inodes.get(number)
        shown = live if live is not None else epoch.inodes.get(number)
        if shown is not None:
            modes[number] = shown.mode
        path = state.path(live) if live is not None else None
        if path is not None:
            paths[number] = path
    return CacheInvalidation(entries, inodes, paths, modes)
