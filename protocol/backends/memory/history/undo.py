"""UndoLog, the records that lead from the live state back to each snapshot, and SnapshotTree, a state as a tree.

An `Epoch` begins with every snapshot.  It holds the pre-images of the inodes and directory entries that changed while
it was the newest: their state at its beginning.  So the state of an inode at epoch E is the first pre-image found in E
and the epochs after it, oldest first, or the live version if there is none.

Threading: only the serving loop changes the log.  A view (`SnapshotTree`) may read it from another thread.  This
is safe because

- the loop stores a pre-image before it replaces the live version, and the reader reads the live version before the
  pre-images;
- single dict operations are atomic (the GIL), and a reader copies a dict before it iterates;
- while a view is open (`pins` > 0) no pre-image is removed and no epoch is merged; `release` does so afterwards.

Invariants (checked by `MemoryVolume.check_invariants`): serials increase; pre-images go to the newest epoch; every name
belongs to one epoch; without epochs there are no pre-images; an epoch with pre-images of the entries of a directory has
one of the directory, and if that did not exist at the beginning of the epoch, no entry did.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from protocol.backends.memory.ledger import NAMES_BYTES, RECORD_BYTES, SNAPSHOT_BYTES, Ledger
from protocol.compiled import mypyc_attr
from protocol.errors import SnapshotExistsError, SnapshotNotFoundError, os_error
from protocol.tree import CHUNK_BYTES, Chunk, Hole, Tree, TreeEntry
from protocol.volume import ROOT_INODE

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import MemoryState
    from protocol.volume_extensions import SnapshotInfo

PreInodes = dict[int, "Inode | None"]  # None: there was none
PreNames = dict[int, dict[bytes, int]]  # directory -> name -> inode it stood for, 0: nothing


class Epoch:
    """The time from one snapshot to the next, with the pre-images of its changes.

    `info` is None for an epoch that is not a snapshot: opened for a view or a transaction, or dropped.
    """

    __slots__ = ("info", "inodes", "names", "next", "previous", "serial")

    def __init__(self, serial: int, info: SnapshotInfo | None) -> None:
        self.serial = serial
        self.info = info
        self.inodes: PreInodes = {}
        self.names: PreNames = {}
        self.next: Epoch | None = None
        self.previous: Epoch | None = None

    @property
    def charge(self) -> int:
        """The memory of the epoch without its pre-images, in bytes; a character takes at most four."""
        info = self.info
        return SNAPSHOT_BYTES + (4 * (len(info.name) + len(info.tag or "")) if info is not None else 0)

    def chain(self) -> Iterator[Epoch]:
        """This epoch and all after it, oldest first."""
        epoch: Epoch | None = self
        while epoch is not None:
            yield epoch
            epoch = epoch.next


class UndoLog:
    """The epochs of one volume, charged to `ledger` as kept."""

    __slots__ = ("_by_name", "_closed", "_epochs", "_ledger", "newest", "on_drop", "pins", "serial")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._epochs: dict[int, Epoch] = {}  # by serial, so in order
        self._by_name: dict[str, Epoch] = {}
        self._closed: list[Epoch] = []
        self.newest: Epoch | None = None
        self.serial = 0  # of the newest epoch ever opened
        self.pins = 0
        self.on_drop: Callable[[int], None] | None = None  # called with the serial of each snapshot that is dropped

    def open(self, info: SnapshotInfo | None) -> Epoch:
        """Begin an epoch, which receives the pre-images of all changes from now on.  O(1).  SnapshotExistsError."""
        if info is not None and info.name in self._by_name:
            raise SnapshotExistsError(info.name)
        self.serial += 1
        epoch = Epoch(self.serial, info)
        self._epochs[epoch.serial] = epoch
        self._ledger.kept += epoch.charge
        if info is not None:
            self._by_name[info.name] = epoch
        if self.newest is not None:
            epoch.previous = self.newest
            self.newest.next = epoch  # before `newest` moves: a reader must find the new pre-images
        self.newest = epoch
        return epoch

    def infos(self) -> Sequence[SnapshotInfo]:
        """Return all snapshots, oldest first."""
        return [epoch.info for epoch in self._epochs.values() if epoch.info is not None]

    def find(self, name: str) -> Epoch:
        """Return the epoch that begins with snapshot `name`.  SnapshotNotFoundError."""
        try:
            return self._by_name[name]
        except KeyError:
            raise SnapshotNotFoundError(name) from None

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def by_serial(self, serial: int) -> Epoch:
        """Return the epoch with this serial.  KeyError."""
        return self._epochs[serial]

    def epochs(self) -> list[Epoch]:
        """Return all epochs, oldest first; a copy."""
        return list(self._epochs.values())

    def close(self, epoch: Epoch) -> None:
        """End an epoch: merge its pre-images into the one before it, as soon as no view is open."""
        if epoch.info is not None:
            if self.on_drop is not None:
                self.on_drop(epoch.serial)
            del self._by_name[epoch.info.name]
            self._ledger.kept -= epoch.charge
            epoch.info = None
            self._ledger.kept += epoch.charge
        self._closed.append(epoch)
        self._merge_closed()

    def pin(self) -> None:
        """Record an open view: keep everything that it may read."""
        self.pins += 1

    def release(self) -> None:
        """Record that a view was closed; after the last one, merge the closed epochs."""
        self.pins -= 1
        self._merge_closed()

    def _merge_closed(self) -> None:
        if self.pins:
            return
        closed, self._closed = self._closed, []
        for epoch in closed:
            self._remove(epoch)

    def _remove(self, epoch: Epoch) -> None:
        older = epoch.previous
        del self._epochs[epoch.serial]
        self._ledger.kept -= epoch.charge
        if epoch.next is not None:
            epoch.next.previous = older
        if older is not None:
            older.next = epoch.next
            self._merge_into(older, epoch)
        else:
            self._free(epoch)
        if self.newest is epoch:
            self.newest = older

    def _merge_into(self, older: Epoch, newer: Epoch) -> None:
        """Move the pre-images of `newer` to `older`, which keeps its own: they are of an earlier state."""
        ledger = self._ledger
        for number, version in newer.inodes.items():
            if number in older.inodes:
                ledger.leave_old(version)
            else:
                older.inodes[number] = version
        for directory, names in newer.names.items():
            version = newer.inodes.get(directory)
            if version is not None and version.born >= older.serial:
                ledger.kept -= _names_charge(names)  # of a directory that did not exist at the beginning of `older`
                continue
            mine = older.names.setdefault(directory, names)
            if mine is not names:
                ledger.kept -= NAMES_BYTES
                for name, inode in names.items():
                    if name in mine:
                        ledger.kept -= RECORD_BYTES + len(name)
                    else:
                        mine[name] = inode

    def _free(self, epoch: Epoch) -> None:
        """Free the pre-images of the oldest epoch: no snapshot needs them."""
        for version in epoch.inodes.values():
            self._ledger.leave_old(version)
        self._ledger.kept -= sum(map(_names_charge, epoch.names.values()))

    def free_names(self, epoch: Epoch, directory: int) -> None:
        """Free the pre-images of the entries of a directory that exists neither before `epoch` nor after it."""
        names = epoch.names.pop(directory, None)
        if names is not None:
            self._ledger.kept -= _names_charge(names)


def _names_charge(names: dict[bytes, int]) -> int:
    return NAMES_BYTES + RECORD_BYTES * len(names) + sum(map(len, names))


def merged(epochs: Iterable[Epoch]) -> tuple[PreInodes, PreNames]:
    """Return the pre-images of several epochs, given oldest first, as one; the older one takes precedence."""
    inodes: PreInodes = {}
    names: PreNames = {}
    for epoch in reversed(list(epochs)):
        inodes.update(epoch.inodes)
        for directory, entries in epoch.names.copy().items():
            names[directory] = {**names.get(directory, {}), **entries}
    return inodes, names


@mypyc_attr(allow_interpreted_subclasses=True)
class SnapshotTree:
    """The state at the beginning of `epoch`.  Implements `Tree` and `tree_diff.Counted`.

    It reads the live inode table through the pre-images of its epoch and of all epochs after it.  A version never
    changes once it is a pre-image, so the values that a view returns stay valid.

    `pinned` was opened with the view; the epochs before it are complete.
    """

    def __init__(self, state: MemoryState, epoch: Epoch, pinned: Epoch) -> None:
        self._state = state
        self.epoch = epoch
        self._pinned = pinned
        closed = []
        for each in epoch.chain():
            if each is pinned:
                break
            closed.append(each)
        self._inodes: PreInodes
        self._names: PreNames
        self._inodes, self._names = merged(closed)
        # The directory of the last path (None: the root), because paths are usually read directory by directory.  A
        # tuple that is replaced as a whole, because threads may share a view.
        self._last_directory: tuple[bytes | None, Inode | None] = (None, None)
        # The last path: a comparison of two states asks for an entry first, and then for its content.
        self._last: tuple[bytes, Inode] | None = None

    def belongs_to(self, state: MemoryState) -> bool:
        """Return whether this is a view of `state`, so that inode numbers are comparable and blocks can be shared."""
        return self._state is state

    def inodes_for(self, state: MemoryState) -> Mapping[int, Inode] | None:
        """Return the inodes if `state` can take them over without copying (see `SnapshotHistory.fill`), else None."""
        return self._state.inodes if self._state.destination is state else None

    @property
    def ledger(self) -> Ledger:
        """The ledger of the state that this is a view of."""
        return self._state.ledger

    # -- versions ------------------------------------------------------------------------------
    def version(self, number: int) -> Inode | None:
        """Return the version of inode `number` in this state, or None if it did not exist."""
        live = self._state.inodes.get(number)  # before the pre-images: see the docstring of the module
        if number in self._inodes:
            return self._inodes[number]
        # Not `chain`: this runs for each part of each path, and a generator takes as long as everything else here.
        epoch: Epoch | None = self._pinned
        while epoch is not None:
            if number in epoch.inodes:
                return epoch.inodes[number]
            epoch = epoch.next
        return live

    def names(self, directory: Inode) -> dict[bytes, int]:
        """Return the entries of a directory in this state: name to inode number."""
        assert directory.children is not None
        entries = {**directory.children}  # before the pre-images
        for names in reversed(list(self._pre_names(directory.inode))):
            entries.update(names.copy())
        return {name: inode for name, inode in entries.items() if inode}

    def name(self, directory: Inode, name: bytes) -> int:
        """Return the inode number of `name` in `directory` in this state; 0: none."""
        assert directory.children is not None
        live = directory.children.get(name, 0)  # before the pre-images
        number = directory.inode
        names = self._names.get(number)
        if names and name in names:
            return names[name]
        epoch: Epoch | None = self._pinned  # not `_pre_names`, as in `version`
        while epoch is not None:
            names = epoch.names.get(number)
            if names and name in names:
                return names[name]
            epoch = epoch.next
        return live

    def _pre_names(self, directory: int) -> Iterator[dict[bytes, int]]:
        """Yield the pre-images of the entries of a directory.  Earlier ones take precedence."""
        for names_by_directory in (self._names, *(epoch.names for epoch in self._pinned.chain())):
            names = names_by_directory.get(directory)
            if names:
                yield names

    def find(self, path: bytes) -> Inode:
        """Return the inode at `path`.  FileNotFoundError, NotADirectoryError."""
        found = self._last
        if found is not None and found[0] == path:
            return found[1]
        inode = self._find(path)
        self._last = path, inode
        return inode

    def _find(self, path: bytes) -> Inode:
        cut = path.rfind(b"/")
        directory = path[:cut] if cut >= 0 else None
        last, inode = self._last_directory
        if inode is None or last != directory:
            rest = directory
            # Continue from the last directory if that is above: a walk down a deep tree must not start at the root.
            if inode is not None and last is not None and directory is not None and directory.startswith(last + b"/"):
                rest = directory[len(last) + 1 :]
            else:
                inode = self.version(ROOT_INODE)
            assert inode is not None
            for part in () if rest is None else rest.split(b"/"):
                inode = self._child(inode, part, path)
            self._last_directory = directory, inode
        return self._child(inode, path[cut + 1 :], path) if path else inode

    def _child(self, inode: Inode, name: bytes, path: bytes) -> Inode:
        if inode.children is None:
            raise os_error(errno.ENOTDIR, os.fsdecode(path))
        found = self.version(self.name(inode, name))
        if found is None:
            raise os_error(errno.ENOENT, os.fsdecode(path))
        return found

    def paths(self, inode: Inode) -> list[bytes]:
        """Return all paths of `inode` in this state: at most one for a directory."""
        if inode.inode == ROOT_INODE:
            return [b""]
        paths = (self._path(*link) for link in inode.links)
        return [path for path in paths if path is not None]

    def _path(self, directory: int, name: bytes) -> bytes | None:
        """Return the path of an entry, or None if its directory had none.  Not recursive: trees may be deep."""
        names = [name]
        while directory != ROOT_INODE:
            parent = self.version(directory)
            if parent is None or not parent.links:
                return None
            directory, name = parent.parent_link
            names.append(name)
        return b"/".join(reversed(names))

    # -- Tree ----------------------------------------------------------------------------------
    def entry(self, path: bytes) -> TreeEntry:
        return self._entry(path, self.find(path))

    def _entry(self, path: bytes, inode: Inode) -> TreeEntry:
        return TreeEntry(
            path=path,
            mode=inode.mode,
            size=0 if inode.is_dir else inode.size,
            mtime_ns=inode.mtime_ns,
            uid=inode.uid,
            gid=inode.gid,
            nlink=inode.nlink,
            inode=inode.inode,
            rdev=inode.rdev,
            target=inode.target or b"",
            xattrs=inode.xattrs or {},
            ctime_ns=inode.ctime_ns,
        )

    def entries(self, path: bytes) -> Iterator[TreeEntry]:
        prefix = path + b"/" if path else b""
        return (self._entry(prefix + name, child) for name, child in self._below(self._directory(path)))

    def children(self, path: bytes) -> list[bytes]:
        """Return the names in directory `path`, sorted: faster than `entries`."""
        return sorted(self.names(self._directory(path)))

    def _directory(self, path: bytes) -> Inode:
        inode = self.find(path)
        if inode.children is None:
            raise os_error(errno.ENOTDIR, os.fsdecode(path))
        return inode

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        stack = [(path, self.find(path))]
        while stack:
            at, inode = stack.pop()
            yield self._entry(at, inode)
            if inode.children is not None:
                prefix = at + b"/" if at else b""
                stack += [(prefix + name, child) for name, child in reversed(self._below(inode))]

    def _below(self, directory: Inode) -> list[tuple[bytes, Inode]]:
        """The names in a directory, sorted, and their versions."""
        live = self._state.inodes.get
        children = [(name, number, live(number)) for name, number in sorted(self.names(directory).items())]
        # As in `version`, all live versions are read before any pre-image.
        layers = [layer for layer in (self._inodes, *(each.inodes for each in self._pinned.chain())) if layer]
        found = []
        for name, number, child in children:
            for layer in layers:
                if number in layer:
                    child = layer[number]  # noqa: PLW2901 -- the pre-image takes its place
                    break
            if child is not None:
                found.append((name, child))
        return found

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return _read(self._file(path), offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        inode = self._file(path)
        if inode.content is not None:
            return inode.content.chunks(inode.size, size)
        return iter([Hole(inode.size)] if inode.size else ())

    def count_below(self, path: bytes) -> int:
        total = 0
        waiting = [self.find(path)]
        while waiting:
            node = waiting.pop()
            total += 1
            if node.children is not None:
                for _, child in self._below(node):
                    if child.children is None:
                        total += 1
                    else:
                        waiting.append(child)
        return total

    def same_content(self, path: bytes, other: Tree, other_path: bytes | None = None) -> bool | None:
        """See `protocol.diff.tree_diff.ComparesContent`."""
        if not isinstance(other, SnapshotTree):
            return None
        return self.find(path).same_content(other.find(path if other_path is None else other_path))

    def touched(self, other: Tree) -> Collection[bytes] | None:
        """Return the paths that changed in the epochs between the two trees.  See `protocol.tree.Tree`."""
        if not isinstance(other, SnapshotTree) or not other.belongs_to(self._state):
            return None
        first, last = sorted((self.epoch, other.epoch), key=lambda epoch: epoch.serial)
        between = []
        for epoch in first.chain():
            if epoch is last:
                break
            between.append(epoch)
        inodes, names = merged(between)
        # An inode made since has a name that changed, or lies below one.
        numbers = [number for number, version in inodes.items() if version is not None]
        self._state.find_links(numbers)
        paths: set[bytes] = set()
        for tree in (self, other):
            for number in numbers:
                paths.update(tree.paths_of(number))
            for directory, entries in names.items():
                for prefix in tree.paths_of(directory):
                    paths.update(prefix + b"/" + name if prefix else name for name in entries)
        return paths

    def paths_of(self, number: int) -> list[bytes]:
        """Return all paths of inode `number` in this state; none if it did not exist."""
        version = self.version(number)
        return [] if version is None else self.paths(version)

    def names_of(self, inode: int) -> list[bytes]:
        """Return all paths of `inode` in this state, also those that an overlay has not read yet."""
        self._state.find_links([inode])
        return self.paths_of(inode)

    def _file(self, path: bytes) -> Inode:
        inode = self.find(path)
        if inode.is_dir:
            raise os_error(errno.EISDIR, os.fsdecode(path))
        if not inode.is_file:
            raise os_error(errno.EINVAL, os.fsdecode(path))
        return inode


def _read(inode: Inode, offset: int, size: int) -> bytes:
    size = min(size, inode.size - offset)
    if size <= 0:
        return b""
    return bytes(inode.content.read(offset, size)) if inode.content is not None else bytes(size)
