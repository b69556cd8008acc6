"""Beside: what a restore does to the directory, beside the mount, as the volume has to take it.

The host shows a change like anybody's, and it would be found out as such when the kernel asks the next time.  But
whoever restores knows what is going to change: so `hold` keeps open what the mount's programs may have open and is
about to lose its name, which also keeps the host from giving its inode number to what takes its place, before
the kernel knows; and `settle` says what the kernel has to be told, so that nobody sees what was there before.  Of many
changes each takes a part at a time, since the mount waits meanwhile.

Threading: the serving loop.  In between, a thread changes the directory while the volume goes on.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from protocol.backends.host.descriptors import Descriptors
from protocol.backends.host.nodes import HostInode, HostInodeTable
from protocol.diff.tree_diff import Change
from protocol.linux.beneath import TEMPORARY_PREFIX
from protocol.volume import CacheInvalidation, EntryChange, InodeChange

__all__ = ["Beside"]

# Numbers that no inode has, for what lost a name of which the kernel knew no inode.
_FIRST_UNKNOWN: Final = 1 << 60

_Places: TypeAlias = Mapping[tuple[HostInode, bytes], list[HostInode]]


class Beside:
    """Takes `changes`, by path and what was there before, into `table`.  `forget_scan` ends a listing."""

    def __init__(
        self, table: HostInodeTable, descriptors: Descriptors, forget_scan: Callable[[HostInode], None]
    ) -> None:
        self._table = table
        self._descriptors = descriptors
        self._forget_scan = forget_scan
        self._held: list[HostInode] = []
        self._loose: set[HostInode] = set()  # what could not be held: the host may have given its number away

    def hold(self, paths: Iterable[bytes]) -> None:
        """Keep open what is known at `paths`, files that are in use first; as many as there may be descriptors."""
        places = self._places()
        known = [node for path in paths for node in self._at(places, path) if node.lookups and node.pin < 0]
        known.sort(key=lambda node: node.fd < 0)
        for node in known:
            if len(self._held) < self._descriptors.most_pins and self._descriptors.pin(node):
                self._held.append(node)
            else:
                self._loose.add(node)

    def settle(self, changes: Iterable[Change]) -> CacheInvalidation:
        """What the kernel must be told of `changes`, in the order of `protocol.diff.tree_diff.changes`.

        What is there now is looked up, not believed.
        """
        found = _Found(self._table, self._descriptors, self._forget_scan, self._places(), self._loose)
        for change in changes:
            found.add(change)
        found.add_temporaries()
        return CacheInvalidation(found.entries, found.inodes, found.paths, found.modes)

    def let_go(self) -> None:
        """All is settled: what is still at its place, or came back to it, need not be held open."""
        held, self._held = self._held, []
        self._loose.clear()
        for node in held:
            if node.parent is not None:
                self._descriptors.unpin(node)

    def _places(self) -> _Places:
        """What the kernel may know by which name: several where one took another's place."""
        places: dict[tuple[HostInode, bytes], list[HostInode]] = {}
        for node in self._table:
            for place in node.places():
                places.setdefault(place, []).append(node)
        return places

    def _at(self, places: _Places, path: bytes) -> list[HostInode]:
        if not path:
            return []  # the root stays
        above, _, name = path.rpartition(b"/")
        parents = _directories_at(self._table, places, above)
        return [node for parent in parents for node in places.get((parent, name), ())]


def _directories_at(table: HostInodeTable, places: _Places, path: bytes) -> list[HostInode]:
    """The directories that the kernel may know as `path`: two where one took the other's place a moment ago."""
    found = [table.root]
    for name in path.split(b"/") if path else ():
        found = [node for at in found for node in places.get((at, name), ()) if node.is_dir]
    return found


class _Found:
    """The coherence of a change while it is put together."""

    def __init__(
        self,
        table: HostInodeTable,
        descriptors: Descriptors,
        forget_scan: Callable[[HostInode], None],
        places: _Places,
        loose: set[HostInode],
    ) -> None:
        self.entries: list[EntryChange] = []
        self.inodes: list[InodeChange] = []
        self.paths: dict[int, bytes] = {}
        self.modes: dict[int, int] = {}
        self._table = table
        self._descriptors = descriptors
        self._forget_scan = forget_scan
        self._places = places
        self._loose = loose
        self._gone: set[HostInode] = set()
        self._done: set[bytes] = set()
        self._directories: dict[bytes, list[HostInode]] = {}
        self._unknown = _FIRST_UNKNOWN

    def add(self, change: Change) -> None:
        path = change.path
        if path in self._done:
            return
        self._done.add(path)
        if not path:
            self._in_place(self._table.root, path, content=False)
            return
        above, _, name = path.rpartition(b"/")
        if above not in self._directories:
            self._directories[above] = _directories_at(self._table, self._places, above)
        for parent in self._directories[above]:
            self._look(parent, above, name, change)

    def add_temporaries(self) -> None:
        """The names that somebody who listed a directory meanwhile has seen, and that are gone by now."""
        paths = {parent: path for path, parents in self._directories.items() for parent in parents}
        for (parent, name), known in self._places.items():
            if name.startswith(TEMPORARY_PREFIX) and parent in paths and known:
                path = b"/".join(filter(None, (paths[parent], name)))
                self._look(parent, paths[parent], name, Change(path, "removed", None, None))

    def _look(self, parent: HostInode, above: bytes, name: bytes, change: Change) -> None:
        seen = self._seen(parent, name)
        known = self._places.get((parent, name), [])
        same = next((node for node in known if seen is not None and node.is_shown(seen)), None)
        stale = [node for node in known if node is not same]
        if same is not None and not stale:
            self._in_place(same, change.path, content=change.kind != "metadata")
            return
        old = 0
        if stale:
            old = max(stale, key=lambda node: node.lookups).number
            self.modes[old] = stale[0].kind
        elif change.old is not None:
            old = self._unknown = self._unknown + 1
            self.modes[old] = change.old.mode
        for node in stale:
            self._lost(node, parent, name)
        self._entry(parent, above, name, old, seen)

    def _seen(self, parent: HostInode, name: bytes) -> os.stat_result | None:
        if parent in self._gone:
            return None
        try:
            return os.stat(name, dir_fd=self._descriptors.directory(parent), follow_symlinks=False)
        except OSError:
            return None

    def _is_at_a_place(self, node: HostInode) -> bool:
        """Whether a name that it was known by still stands for its inode."""
        for parent, name in node.places():
            seen = self._seen(parent, name)
            if seen is not None and node.is_shown(seen):
                return True
        return False

    def _lost(self, node: HostInode, parent: HostInode, name: bytes) -> None:
        """`node` is not at that place any more; whoever has it open goes on."""
        if node.is_dir:
            self._gone.add(node)
            self._forget_scan(node)
        if node.lookups and not self._descriptors.pin(node):
            self._table.lose(node)
        if node.lookups and not node.more:
            self._descriptors.nameless.add(node)
        self._table.remove_place(node, parent, name)
        if node.parent is not None:
            self._descriptors.unpin(node)

    def _entry(self, parent: HostInode, above: bytes, name: bytes, old: int, seen: os.stat_result | None) -> None:
        new = 0
        if seen is not None:
            key = (seen.st_dev, seen.st_ino)
            new = self._table.number_of(key)
            holder = self._table.get(new)
            if holder is not None and holder.key != key:
                new = self._table.enter(parent, name, seen).number
            elif holder is not None:
                if holder in self._loose and not self._is_at_a_place(holder):
                    self._table.lose(holder)  # the host gave the number of what is gone to what is new
                # Else known by another name, such as a temporary one.
                node = self._table.enter(parent, name, seen)
                new = node.number
                if node is holder and not node.is_dir:
                    self._in_place(node, b"/".join(filter(None, (above, name))), content=True)
            self.modes[new] = seen.st_mode
        if parent.scan is not None:
            if seen is None:
                parent.scan.remove(name)
            else:
                parent.scan.add(name, seen)
        self.entries.append(EntryChange(parent.number, name, old, new))
        if parent not in self._gone:
            self.paths[parent.number] = above
            self.modes.setdefault(parent.number, stat.S_IFDIR)

    def _in_place(self, node: HostInode, path: bytes, *, content: bool) -> None:
        self.inodes.append(InodeChange(node.number, content and node.kind == stat.S_IFREG))
        self.paths[node.number] = path
        self.modes[node.number] = node.kind
