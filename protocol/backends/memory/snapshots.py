"""Snapshots of a memory volume: take, restore, drop, views, and putting another tree in place.

Threading: the serving loop only, and nothing here awaits, so each is atomic to the mount.

A restore is a change like any other: it is recorded in the newest epoch, so that every snapshot stays
what it was.  Whatever can fail half-way runs in a `_transaction`: an epoch of its own, to which the
state goes back when it fails, and from which is read what the kernel must be told when it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from protocol.backends.memory.converge import Converger
from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES
from protocol.backends.memory.undo import Epoch, PreInodes, PreNames, merged
from protocol.backends.memory.view import SnapshotTree
from protocol.volume import Coherence, EntryChange, InodeChange, SnapshotInfo

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import State
    from protocol.tree import Tree

__all__ = ["Changes", "Snapshots", "count_changes", "restore_epoch"]


class Changes:
    """What was changed in a `Snapshots.changes` context: known when that has ended."""

    __slots__ = ("coherence",)

    def __init__(self) -> None:
        self.coherence = Coherence()


class Snapshots:
    """The snapshot half of a memory volume (`protocol.volume.SnapshotableVolume`)."""

    def __init__(self, state: State) -> None:
        self._state = state

    def take_snapshot(
        self, name: str, *, tag: str | None = None, kind: Literal["user", "safety"] = "user"
    ) -> SnapshotInfo:
        """Keep the state as it is now under `name`.  O(1).  SnapshotExistsError."""
        state = self._state
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

    def snapshots(self) -> Sequence[SnapshotInfo]:
        """All snapshots, oldest first."""
        return self._state.log.infos()

    def snapshot(self, name: str) -> SnapshotInfo:
        """One snapshot.  SnapshotNotFoundError."""
        info = self._state.log.find(name).info
        assert info is not None
        return info

    def drop_snapshot(self, name: str) -> None:
        """Forget snapshot `name`: O(what changed until the next one).  SnapshotNotFoundError."""
        self._state.log.close(self._state.log.find(name))

    def restore_snapshot(self, name: str, paths: Sequence[bytes] = ()) -> Coherence:
        """Make the live state (below `paths`, or all) as it was at `name`.  O(what changed since)."""
        return self._restore_epoch(self._state.log.find(name), paths)

    def _restore_epoch(self, target: Epoch, paths: Sequence[bytes]) -> Coherence:
        if paths:
            with self._view(target) as tree:
                return self.import_tree(tree, replace=True, paths=paths)
        with self._transaction() as transaction:
            restore_epoch(self._state, target)
            return _coherence(self._state, transaction)

    def import_tree(self, tree: Tree, *, replace: bool, paths: Sequence[bytes] = ()) -> Coherence:
        """Put `tree` here, all or nothing.  See `protocol.volume.SnapshotableVolume`.  ENOSPC, ENOTDIR, ENOENT."""
        with self._transaction() as transaction:
            Converger(self._state, tree, replace=replace, check_quota=self._check_quota).run(paths or (b"",))
            return _coherence(self._state, transaction)

    @contextmanager
    def changes(self) -> Iterator[Changes]:
        """Make changes beside the mount, all or nothing: when the body raises, what it did is undone.

        After it `coherence` says what it changed, for the kernel to be told.  The body must not await.
        """
        with self._transaction() as transaction:
            made = Changes()
            yield made
            made.coherence = _coherence(self._state, transaction)

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

    def _check_quota(self, pages: int, inodes: int) -> None:
        """ENOSPC where so much in all is over the quota; the volume knows."""

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
            raise
        finally:
            state.revived.clear()
            state.log.close(epoch)


def count_changes(state: State, before: PreInodes, later: PreInodes) -> tuple[int, int, int]:
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


def restore_epoch(state: State, target: Epoch) -> None:
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


def _put_back_inodes(state: State, inodes: PreInodes) -> list[int]:
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
            revived.nlink, revived.links, revived.size = version.nlink, version.links, version.size
            state.count(revived, +1)
        else:
            state.replace(live, version)
    return gone


def _put_back_names(state: State, inodes: PreInodes, names: PreNames) -> None:
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


def _coherence(state: State, epoch: Epoch) -> Coherence:
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
    return Coherence(entries, inodes, paths, modes)
