"""ExternalChanges: updates the volume for the changes that a restore makes to the directory outside the mount.

The volume would notice such changes at the kernel's next request, like those of other programs.  A restore can do
better, because it knows in advance what it will change:

- `hold` keeps the inodes open that are about to lose their name.  Programs that have them open can continue, and the
  host cannot reuse their inode numbers before the kernel knows of the change.
- `invalidation_of` computes what the kernel must invalidate, so that no program sees the old state.

Both take a part of the changes at a time, because the mount waits meanwhile.

The last close of a file without a name frees its blocks.  On ext4 this was measured to take a millisecond for each of
thousands of files, and almost no time if the file that was unlinked last is closed first.  So `BackgroundCloser`
collects the descriptors of such files and closes them in that order.

Threading: the serving loop.  Between the calls, a thread changes the directory while the volume serves requests.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from protocol.backends.host.descriptors import Descriptors
from protocol.backends.host.inode_table import HostDentry, HostInode, HostInodeTable
from protocol.diff.tree_diff import Change
from protocol.linux.beneath import TEMPORARY_PREFIX
from protocol.linux.portable import Handle
from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange

# Numbers that no inode has, for entries that are gone and whose inode the kernel did not know.
_FIRST_UNKNOWN: Final = 1 << 60
_QUIET_S: Final = 0.1  # the thread starts to close when no descriptor was added for this long

_Dentries: TypeAlias = Mapping[HostDentry, list[HostInode]]


class ExternalChanges:
    """The changes of one restore at a time.  `end_listing` ends the reading of a directory."""

    def __init__(
        self, table: HostInodeTable, descriptors: Descriptors, end_listing: Callable[[HostInode], None]
    ) -> None:
        self.table = table
        self.descriptors = descriptors
        self.end_listing = end_listing
        self._closer = BackgroundCloser()
        descriptors.close_later = self._closer.add
        self.not_held: set[HostInode] = set()  # the host may have reused their inode numbers
        self._held: list[HostInode] = []

    def hold(self, paths: Iterable[bytes]) -> None:
        """Keep the nodes at `paths` open, files in use first; as many as the limit of descriptors allows."""
        dentries = self.dentries()
        nodes = [node for path in paths for node in self._at(dentries, path) if node.lookups and node.pin is None]
        nodes.sort(key=lambda node: node.handle is None)
        for node in nodes:
            if len(self._held) < self.descriptors.most_pins and self.descriptors.pin(node):
                self._held.append(node)
            else:
                self.not_held.add(node)

    def invalidation_of(self, changes: Iterable[Change]) -> CacheInvalidation:
        """Return the names and inodes that the kernel must invalidate after `changes`.

        `changes` are in the order of `protocol.diff.tree_diff.changes`.

        The present state is looked up, because a change may not have been made.
        """
        collector = _Collector(self)
        for change in changes:
            collector.add(change)
        collector.add_temporaries()
        return CacheInvalidation(collector.entries, collector.inodes, collector.paths, collector.modes)

    def release(self) -> None:
        """Close what `hold` opened, except inodes that lost their name."""
        held, self._held = self._held, []
        self.not_held.clear()
        for node in held:
            if node.parent is not None:
                self.descriptors.unpin(node)

    def close(self) -> None:
        """Close the descriptors that are to be closed later."""
        self._closer.stop()

    def dentries(self) -> _Dentries:
        """The nodes that the kernel may know by each name; several if one replaced another."""
        dentries: dict[HostDentry, list[HostInode]] = {}
        for node in self.table:
            for dentry in node.dentries():
                dentries.setdefault(dentry, []).append(node)
        return dentries

    def _at(self, dentries: _Dentries, path: bytes) -> list[HostInode]:
        if not path:
            return []  # the root stays
        above, _, name = path.rpartition(b"/")
        return [node for parent in self.directories_at(dentries, above) for node in dentries.get((parent, name), ())]

    def directories_at(self, dentries: _Dentries, path: bytes) -> list[HostInode]:
        """The directories that the kernel may know as `path`; two if one replaced the other."""
        found = [self.table.root]
        for name in path.split(b"/") if path else ():
            found = [node for at in found for node in dentries.get((at, name), ()) if node.is_dir]
        return found


class _Collector:
    """A `CacheInvalidation` under construction."""

    def __init__(self, owner: ExternalChanges) -> None:
        self.entries: list[EntryChange] = []
        self.inodes: list[InodeChange] = []
        self.paths: dict[int, bytes] = {}
        self.modes: dict[int, int] = {}
        self._owner = owner
        self._table = owner.table
        self._descriptors = owner.descriptors
        self._dentries = owner.dentries()
        self._gone: set[HostInode] = set()
        self._done: set[bytes] = set()
        self._directories: dict[bytes, list[HostInode]] = {}
        self._unknown = _FIRST_UNKNOWN

    def add(self, change: Change) -> None:
        """Add one changed path."""
        path = change.path
        if path in self._done:
            return
        self._done.add(path)
        if not path:
            self._add_inode(self._table.root, path, content=False)
            return
        above, _, name = path.rpartition(b"/")
        if above not in self._directories:
            self._directories[above] = self._owner.directories_at(self._dentries, above)
        for parent in self._directories[above]:
            self._add_name(parent, above, name, change)

    def add_temporaries(self) -> None:
        """Add the temporary files of the restore that a program saw in a changed directory."""
        paths = {parent: path for path, parents in self._directories.items() for parent in parents}
        for (parent, name), nodes in self._dentries.items():
            if name.startswith(TEMPORARY_PREFIX) and parent in paths and nodes:
                path = b"/".join(filter(None, (paths[parent], name)))
                self._add_name(parent, paths[parent], name, Change(path, "removed", None, None))

    def _add_name(self, parent: HostInode, above: bytes, name: bytes, change: Change) -> None:
        seen = self._stat(parent, name)
        nodes = self._dentries.get((parent, name), [])
        same = next((node for node in nodes if seen is not None and node.is_shown(seen)), None)
        stale = [node for node in nodes if node is not same]
        if same is not None and not stale:
            self._add_inode(same, change.path, content=change.kind != "metadata")
            return
        old = 0
        if stale:
            old = max(stale, key=lambda node: node.lookups).number
            self.modes[old] = stale[0].kind
        elif change.old is not None:
            old = self._unknown = self._unknown + 1
            self.modes[old] = change.old.mode
        for node in stale:
            self._remove_dentry(node, parent, name)
        self._add_entry(parent, above, name, old, seen)

    def _stat(self, parent: HostInode, name: bytes) -> os.stat_result | None:
        if parent in self._gone:
            return None
        try:
            return os.stat(name, dir_fd=self._descriptors.directory(parent).fd, follow_symlinks=False)
        except OSError:
            return None

    def _has_a_name(self, node: HostInode) -> bool:
        """Whether one of the names of `node` still leads to its inode."""
        for parent, name in node.dentries():
            seen = self._stat(parent, name)
            if seen is not None and node.is_shown(seen):
                return True
        return False

    def _remove_dentry(self, node: HostInode, parent: HostInode, name: bytes) -> None:
        """Record that `node` lost a name; programs that have it open can continue."""
        if node.is_dir:
            self._gone.add(node)
            self._owner.end_listing(node)
        if node.lookups and not self._descriptors.pin(node):
            self._table.lose(node)
        if node.lookups and not node.more_dentries:
            self._descriptors.nameless.add(node)
        self._table.remove_dentry(node, parent, name)
        if node.parent is not None:
            self._descriptors.unpin(node)

    def _add_entry(self, parent: HostInode, above: bytes, name: bytes, old: int, seen: os.stat_result | None) -> None:
        new = 0
        if seen is not None:
            key = (seen.st_dev, seen.st_ino)
            new = self._table.number_of(key)
            holder = self._table.get(new)
            if holder is not None and holder.key != key:
                new = self._table.enter(parent, name, seen).number
            elif holder is not None:
                if holder in self._owner.not_held and not self._has_a_name(holder):
                    self._table.lose(holder)  # the host reused the number of an inode that is gone
                # Else the node was known by another name, such as a temporary one.
                node = self._table.enter(parent, name, seen)
                new = node.number
                if node is holder and not node.is_dir:
                    self._add_inode(node, b"/".join(filter(None, (above, name))), content=True)
            self.modes[new] = seen.st_mode
        if parent.entries is not None:
            if seen is None:
                parent.entries.remove(name)
            else:
                parent.entries.add(name, seen)
        self.entries.append(EntryChange(parent.number, name, old, new))
        if parent not in self._gone:
            self.paths[parent.number] = above
            self.modes.setdefault(parent.number, stat.S_IFDIR)

    def _add_inode(self, node: HostInode, path: bytes, *, content: bool) -> None:
        self.inodes.append(InodeChange(node.number, content and node.kind == stat.S_IFREG))
        self.paths[node.number] = path
        self.modes[node.number] = node.kind


class BackgroundCloser:
    """Closes the descriptors that it is given, soon.  Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._handles: list[Handle] = []
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def add(self, handle: Handle) -> None:
        """Close `handle` soon."""
        with self._changed:
            self._handles.append(handle)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="vfsd closing", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Close all descriptors and return when that is done."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            for handle in reversed(taken):
                handle.close()

    def _take(self) -> list[Handle] | None:
        """Wait until no more descriptors come and return them; None, which ends the thread, if there are none."""
        with self._changed:
            while not self._is_stopping and self._changed.wait(_QUIET_S):
                pass
            taken, self._handles = self._handles, []
            if not taken:
                self._thread = None
                return None
            return taken
