"""Snapshots of a memory volume: take, restore, drop, views, and putting another tree in place.

Threading: the serving loop only, and nothing here awaits, so each is atomic to the mount.

A restore is a change like any other: it is recorded in the newest epoch, so that every snapshot stays
what it was.  Whatever can fail half-way runs in a `_transaction`: an epoch of its own, to which the
state goes back when it fails, and from which is read what the kernel must be told when it does not.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.history.converge import Converger
from protocol.backends.memory.history.fill import Filler
from protocol.backends.memory.history.prepare import Preparation
from protocol.backends.memory.history.undo import Epoch, PreInodes, PreNames, merged
from protocol.backends.memory.history.view import SnapshotTree
from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES
from protocol.backends.memory.ledger import SNAPSHOT_BYTES, VERSION_BYTES
from protocol.volume import TAG_MAX_BYTES, CacheInvalidation, EntryChange, InodeChange, SnapshotInfo, SnapshotKind

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import MemoryState
    from protocol.tree import Tree

__all__ = ["Changes", "ReservedInodes", "Snapshots", "count_changes", "restore_epoch"]

# Snapshots are refused this long before changes are: a sixteenth of the limit, at most so many bytes.
_SNAPSHOT_MARGIN_BYTES: Final = 8 << 20


class Changes:
    """What was changed in a `Snapshots.changes` context: known when that has ended."""

    __slots__ = ("invalidation",)

    def __init__(self) -> None:
        self.invalidation = CacheInvalidation()


@dataclass(frozen=True, slots=True)
class ReservedInodes:
    """Inode numbers of `state`, from `first` on, that are free for inodes made elsewhere."""

    state: MemoryState
    first: int


class Snapshots:
    """The snapshot half of a memory volume (`protocol.volume.SnapshotableVolume`)."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state
        self.on_pruned: Callable[[SnapshotInfo], None] | None = None  # called for each snapshot dropped to make room
        self.pruned = 0  # how many those were
        self._not_to_prune: frozenset[str] = frozenset()
        self._saved_at = 0  # the moment of the newest state that is known to be kept elsewhere
        self.saved_ns: int | None = None  # the time when that was noted

    def take_snapshot(self, name: str, *, tag: str | None = None, kind: SnapshotKind = "user") -> SnapshotInfo:
        """Keep the state as it is now under `name`.  O(1).  SnapshotExistsError, ENAMETOOLONG (tag), ENOSPC.

        One of kind "safety" is not refused for lack of memory: what it is taken for could not be undone.
        """
        state = self._state
        if tag is not None and len(tag.encode("utf-8", "surrogatepass")) > TAG_MAX_BYTES:
            raise OSError(
                errno.ENAMETOOLONG, f"the tag is longer than {TAG_MAX_BYTES:,} bytes: take a shorter one", name
            )
        if name not in state.log:
            self._require_snapshot(name, len(name) + len(tag or ""), kind)
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
        return info

    def _require_snapshot(self, name: str, characters: int, kind: SnapshotKind) -> None:
        ledger = self._state.ledger
        if ledger.limit is None:
            return
        need = SNAPSHOT_BYTES + 4 * characters + min(ledger.limit // 16, _SNAPSHOT_MARGIN_BYTES)
        if ledger.used + need <= ledger.ceiling or self._make_room(need) or kind == "safety":
            return
        reason = (
            f"No memory left for a snapshot: {ledger.total:,} of {ledger.limit:,} bytes are taken,"
            f" {max(0, ledger.kept):,} of them by snapshots.  Drop snapshots (`vfsd drop NAME`), remove files, or mount"
            " with a larger --max-memory"
        )
        raise OSError(errno.ENOSPC, reason, name)

    def _make_room(self, count: int) -> bool:
        """Whether `count` bytes more fit now: drops automatic snapshots, oldest first, as long as they do not."""
        ledger = self._state.ledger
        if ledger.borrow(ledger.used + count - ledger.ceiling):
            return True
        if not self._state.log.pins:  # else nothing that is dropped goes before the views that are open
            for info in self.snapshots():
                if info.kind == "user" or info.name in self._not_to_prune:
                    continue
                self.drop_snapshot(info.name)
                self.pruned += 1
                if self.on_pruned is not None:
                    self.on_pruned(info)
                if ledger.used + count <= ledger.ceiling:
                    return True
        return ledger.used + count <= ledger.ceiling

    @contextmanager
    def keeping(self, *names: str) -> Iterator[None]:
        """Drop none of these snapshots to make room, in this context."""
        before = self._not_to_prune
        self._not_to_prune = before.union(names)
        try:
            yield
        finally:
            self._not_to_prune = before

    def snapshots(self) -> Sequence[SnapshotInfo]:
        """All snapshots, oldest first."""
        return self._state.log.infos()

    def snapshot(self, name: str) -> SnapshotInfo:
        """One snapshot.  SnapshotNotFoundError."""
        info = self._state.log.find(name).info
        assert info is not None
        return info

    # -- what is kept elsewhere --------------------------------------------------------------------
    def mark(self) -> int:
        """A number for the live state of now, for `changed_since`.  O(1)."""
        return self._state.moment()

    def changed_since(self, mark: int) -> bool:
        """Whether anything that has a name was changed since `mark`, if only to what it was already.  O(1).

        Reading and access times are no changes, nor is what is done to a file without a name.
        """
        return self._state.changed_at >= mark

    def mark_saved(self, tree: Tree | None = None) -> None:
        """Note that the state in `tree`, a view of this volume, is kept elsewhere as a whole; None: the live state."""
        if tree is None:
            at = self.mark()
        elif isinstance(tree, SnapshotTree) and tree.belongs_to(self._state):
            at = tree.epoch.serial
        else:
            return
        if at >= self._saved_at:
            self._saved_at, self.saved_ns = at, self._state.clock()

    @property
    def is_saved(self) -> bool:
        """Whether the live state is one that was noted by `mark_saved`: nothing was changed since."""
        return not self.changed_since(self._saved_at)

    def drop_snapshot(self, name: str) -> None:
        """Forget snapshot `name`: O(what changed until the next one).  SnapshotNotFoundError."""
        self._state.log.close(self._state.log.find(name))

    def restore_snapshot(self, name: str, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        """Make the live state (below `paths`, or all) as it was at `name`.  O(what changed since).

        Works without memory left: what it needs was reserved (see `ledger`).
        """
        target = self._state.log.find(name)
        # What the restore puts into the newest snapshot, and what was put into it before, is not both reserved.
        changed = sum(len(epoch.inodes) for epoch in target.chain())
        ledger = self._state.ledger
        with self.keeping(name, *(info.name for info in self.snapshots()[-1:])):
            if ledger.used + changed * VERSION_BYTES > ledger.ceiling:
                self._make_room(changed * VERSION_BYTES)
        return self._restore_epoch(target, paths)

    def _restore_epoch(self, target: Epoch, paths: Sequence[bytes]) -> CacheInvalidation:
        if paths:
            with self._view(target) as tree:
                return self.import_tree(tree, replace=True, paths=paths)
        with self._transaction() as transaction:
            restore_epoch(self._state, target)
            return _coherence(self._state, transaction)

    def import_tree(self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = ()) -> CacheInvalidation:
        """Put `tree` here, all or nothing.  See `protocol.volume.SnapshotableVolume`.  ENOSPC, ENOTDIR, ENOENT."""
        if isinstance(tree, SnapshotTree) and not tree.belongs_to(self._state):
            tree.ledger.give_back()  # what is put in place is charged here from now on
        newest = (info.name for info in self.snapshots()[-1:])
        with self.keeping(*newest), self._transaction() as transaction:
            Converger(self._state, tree, replace=replace, check_quota=self._check_quota).run(paths or (b"",))
            return _coherence(self._state, transaction)

    def fill(self, tree: Tree, reserved: ReservedInodes | None = None) -> None:
        """Put `tree` into this volume, which is new and has no snapshot.  An error leaves it half filled.

        With numbers that another volume has `reserved` for the entries of `tree`, a `preparation` there takes the
        inodes over as they are, unless there are hard links.  ENOSPC, ENAMETOOLONG.
        """
        filler = Filler(self._state, self._check_quota)
        if reserved is None:
            filler.run(tree)
            return
        self._state.next_inode = reserved.first
        filler.run(tree)
        if not filler.has_links:
            self._state.destination = reserved.state

    def reserve_inodes(self, count: int) -> ReservedInodes:
        """Reserve `count` inode numbers, for another volume to `fill`."""
        first = self._state.next_inode
        self._state.next_inode += count
        return ReservedInodes(self._state, first)

    def preparation(self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = ()) -> Preparation:
        """What makes the new files of an `import_tree` beforehand, in small steps; for `import_prepared`."""
        scopes = paths or (b"",)
        return Preparation(self._state, tree, replace=replace, check_quota=self._check_quota, paths=scopes)

    def import_prepared(self, preparation: Preparation) -> CacheInvalidation:
        """`import_tree` of what was prepared, which `is_valid`.  Errors as there; then nothing is left of it."""
        newest = (info.name for info in self.snapshots()[-1:])
        with self.keeping(*newest), self._transaction() as transaction:
            preparation.run()
            return _coherence(self._state, transaction)

    @contextmanager
    def changes(self) -> Iterator[Changes]:
        """Make changes beside the mount, all or nothing: when the body raises, what it did is undone.

        After it `invalidation` says what it changed, for the kernel to be told.  The body must not await.
        """
        with self._transaction() as transaction:
            made = Changes()
            yield made
            made.invalidation = _coherence(self._state, transaction)

    @contextmanager
    def tree(self, name: str | None = None) -> Iterator[SnapshotTree]:
        """A read-only tree of a snapshot, or of the live state at this moment; another thread may read it."""
        with self._view(self._state.log.find(name) if name is not None else None) as tree:
            yield tree

    @contextmanager
    def _view(self, target: Epoch | None) -> Iterator[SnapshotTree]:
        """The state at the beginning of `target`, or that of this moment."""
        state = self._state
        pinned = state.open_epoch(None)
        state.log.pin()
        try:
            yield self._tree(target or pinned, pinned)
        finally:
            state.log.close(pinned)
            state.log.release()

    def _tree(self, epoch: Epoch, pinned: Epoch) -> SnapshotTree:
        return SnapshotTree(self._state, epoch, pinned)

    def change_counts(self) -> dict[str, tuple[int, int, int]]:
        """For each snapshot, the inodes (added, modified, removed) since the one before it; O(all changes)."""
        counts: dict[str, tuple[int, int, int]] = {}
        state = self._state
        later: PreInodes = {}  # what was changed after the epoch looked at: its state at the end
        epochs = state.log.epochs()
        pending: PreInodes = {}
        following: str | None = None
        for epoch in reversed(epochs):
            pending = {**pending, **epoch.inodes}
            if epoch.info is None:
                continue
            if following is not None:
                counts[following] = count_changes(state, pending, later)
            later.update(pending)
            pending = {}
            following = epoch.info.name
        if following is not None:
            counts[following] = self._first_counts(following, pending, later)
        return counts

    def _first_counts(self, name: str, before: PreInodes, later: PreInodes) -> tuple[int, int, int]:
        """What the oldest snapshot changed; `before` and `later` are the pre-images of before and after it."""
        del before, later
        info = self.snapshot(name)
        return info.files + info.directories, 0, 0

    def _check_quota(self, pages: int, inodes: int, memory: int) -> None:
        """ENOSPC where so much in all is over the quota, or `memory` more bytes are; the volume knows."""

    @contextmanager
    def _transaction(self) -> Iterator[Epoch]:
        """All or nothing: what the body changed is undone when it raises."""
        state = self._state
        epoch = state.open_epoch(None)
        try:
            yield epoch
        except BaseException:
            revived = state.revived.copy()
            restore_epoch(state, epoch)
            for orphan in revived.values():
                state.bury_again(orphan)
            state.revived.clear()
            raise
        finally:
            state.forget_revived()
            state.log.close(epoch)


def count_changes(state: MemoryState, before: PreInodes, later: PreInodes) -> tuple[int, int, int]:
    """The inodes (added, modified, removed) between two states, by the pre-images of between and of after."""
    added = modified = removed = 0
    for number, old in before.items():
        new = later[number] if number in later else state.inodes.get(number)
        if new is not None and new.nlink == 0:
            new = None
        if old is None:
            added += new is not None
        elif new is None:
            removed += 1
        else:
            modified += _differs(old, new)
    return added, modified, removed


def _differs(old: Inode, new: Inode) -> bool:
    """Whether a user would say that it changed: a directory does not by what is in it."""
    if set(old.links) != set(new.links) or old.mode != new.mode or (old.uid, old.gid) != (new.uid, new.gid):
        return True
    if (old.xattrs or {}) != (new.xattrs or {}):
        return True
    return not old.is_dir and (old.mtime_ns != new.mtime_ns or not old.same_content(new))


# -- restore ----------------------------------------------------------------------------------------


def restore_epoch(state: MemoryState, target: Epoch) -> None:
    """Put back what was at the beginning of `target`; recorded in the newest epoch.

    The pre-images hold whole inodes, with links and link counts, so entries are set bare.
    """
    # Setting names and versions adds to the newest epoch's pre-images: work on copies.
    inodes, names = merged(target.chain())
    gone = _put_back_inodes(state, inodes)
    _put_back_names(state, inodes, names)
    for number in gone:
        inode = state.inodes.get(number)
        if inode is not None:
            state.release(inode)


def _put_back_inodes(state: MemoryState, inodes: PreInodes) -> list[int]:
    """Put the old versions back; returns the inodes that did not exist then."""
    gone = []
    for number, version in inodes.items():
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
        if live is None or live.nlink == 0:
            revived = state.revive(version)
            revived.nlink, revived.size = version.nlink, version.size
            state.set_links(revived, version.links)
            state.count(revived, +1)
        else:
            state.replace(live, version)
    return gone


def _put_back_names(state: MemoryState, inodes: PreInodes, names: PreNames) -> None:
    for number, entries in names.items():
        if inodes.get(number, _KNOWN) is None:
            continue  # the directory did not exist then
        directory = state.inodes.get(number)
        if directory is None or directory.children is None or directory.nlink == 0:
            continue  # removed before the snapshot; its entries were undone by an older one
        for name, child in entries.items():
            if directory.children.get(name, 0) != child:
                state.set_name(directory, name, child)


_KNOWN = object()


# -- what the kernel must be told ---------------------------------------------------------------------


def _coherence(state: MemoryState, epoch: Epoch) -> CacheInvalidation:
    """How the live state differs from the beginning of `epoch`, the newest."""
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
    # Whoever has one of these open sees another content than before; no pre-image holds what was unlinked.
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
